#include "data/mixed_source.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "core/hash.h"
#include "core/log.h"
#include "data/step_plan.h"

namespace weft {
namespace {

// What must be equal for clips to be in one bucket, for the message too.
std::string shape_of(const Bucket& b) {
  std::string text =
      fmt::format("{} {}x{}x{}x{}", name_of(b.dtype), b.frames, b.height, b.width, b.channels);
  if (b.dtype != DType::u8)
    text += fmt::format(" ({} of {}x{}x{} footage)", b.moments ? "moments" : "latents",
                        b.pixel_frames, b.pixel_height, b.pixel_width);
  if (b.text_channels > 0) text += fmt::format(" with text features of {}", b.text_channels);
  return text;
}

class MixedSource : public ClipSource {
 public:
  MixedSource(std::vector<MixedStore> stores, bool weighted, const DataDeck& data)
      : stores_(std::move(stores)) {
    for (std::size_t s = 0; s < stores_.size(); ++s) check_store(s);
    std::int64_t first = 0;  // id
    for (std::size_t s = 0; s < stores_.size(); ++s) add_buckets(s, first);
    share_out_samples(weighted, kept_shares(data, buckets_));
  }

  const std::vector<Bucket>& buckets() const override { return buckets_; }

  ClipInfo info(int bucket, std::int64_t index) const override {
    const Place at = place(bucket, index);
    ClipInfo info = at.source.info(at.bucket, at.index);
    if (!info.text.empty()) info.text = at.prefix + info.text;
    return info;
  }
  std::string content_id() const override {
    if (stores_.size() == 1) return stores_.front().source->content_id();
    std::string all;
    for (const MixedStore& s : stores_) {
      const std::string id = s.source->content_id();
      if (id.empty()) return {};
      all += id + "\n";
    }
    return to_hex(hash128(all));
  }
  void read(int bucket, std::int64_t index, std::span<std::byte> out) const override {
    const Place at = place(bucket, index);
    at.source.read(at.bucket, at.index, out);
  }
  std::int64_t text_tokens(int bucket, std::int64_t index) const override {
    const Place at = place(bucket, index);
    return at.source.text_tokens(at.bucket, at.index);
  }
  std::vector<float> read_text(int bucket, std::int64_t index) const override {
    const Place at = place(bucket, index);
    return at.source.read_text(at.bucket, at.index);
  }
  std::vector<std::string> store_names() const override {
    std::vector<std::string> names;
    if (stores_.size() > 1)
      for (const MixedStore& s : stores_) names.push_back(s.name);
    return names;
  }

 private:
  struct Place {
    const ClipSource& source;
    const std::string& prefix;
    int bucket;  // in the store
    std::int64_t index;
  };
  Place place(int bucket, std::int64_t index) const {
    const Bucket& b = buckets_[bucket];
    WEFT_ASSERT(index >= 0 && index < b.clips);
    const Bucket::Part& part = b.part_of(index);
    const MixedStore& s = stores_[part.store];
    const std::int64_t p = &part - b.parts.data();
    return {*s.source, s.prefix, in_store_[bucket][p], index - part.begin};
  }

  void check_store(std::size_t s) const {
    const MixedStore& store = stores_[s];
    for (const Bucket& b : store.source->buckets()) {
      WEFT_CHECK(b.label_rate == 0, Exit::usage,
                 "name one store of images in data.path, without data.keep and prompt_prefixes",
                 "{} holds labelled images: lists of stores, data.keep and data.prompt_prefixes "
                 "are for clips",
                 store.name);
      WEFT_CHECK(store.prefix.empty() || b.text_channels == 0, Exit::usage,
                 "give the prefix to the weft encode that makes the store, and \"\" here",
                 "data.prompt_prefixes has \"{}\" for {}, whose captions are stored as features: "
                 "nothing can be put before them",
                 printable(store.prefix), store.name);
      // The first store with latents decides the scale: a model sees all through one.
      for (std::size_t before = 0; before < s; ++before)
        for (const Bucket& o : stores_[before].source->buckets())
          WEFT_CHECK(
              b.scale.empty() || o.scale.empty() || (b.scale == o.scale && b.shift == o.shift),
              Exit::data, "encode all stores with one VAE, vae.scale and vae.shift",
              "latents of {} and {} have different scales or shifts", stores_[before].name,
              store.name);
    }
  }

  void add_buckets(std::size_t s, std::int64_t& first) {
    const std::vector<Bucket>& own = stores_[s].source->buckets();
    for (std::size_t i = 0; i < own.size(); ++i) {
      const auto same = std::ranges::find(buckets_, own[i].name, &Bucket::name);
      const auto b = static_cast<std::size_t>(same - buckets_.begin());
      if (same == buckets_.end()) {
        buckets_.push_back(own[i]);
        buckets_.back().clips = 0;
        in_store_.emplace_back();
      } else {
        const std::string& other = stores_[same->parts.front().store].name;
        WEFT_CHECK(shape_of(*same) == shape_of(own[i]), Exit::data,
                   "make the clips of both stores alike, or give their buckets other names",
                   "bucket {} holds clips of {} in {}, and of {} in {}", own[i].name,
                   shape_of(*same), other, shape_of(own[i]), stores_[s].name);
      }
      Bucket& merged = buckets_[b];
      merged.parts.push_back({static_cast<int>(s), merged.clips, own[i].clips, first, 0});
      in_store_[b].push_back(static_cast<int>(i));
      merged.clips += own[i].clips;
      merged.longest_text = std::max(merged.longest_text, own[i].longest_text);
      first += own[i].clips;
    }
  }

  void share_out_samples(bool weighted, const std::vector<double>& keep) {
    std::vector<double> kept(stores_.size());  // clips
    for (std::size_t b = 0; b < buckets_.size(); ++b)
      for (const Bucket::Part& p : buckets_[b].parts)
        kept[p.store] += keep[b] * static_cast<double>(p.clips);
    double samples = 0, weights = 0;
    for (std::size_t s = 0; s < stores_.size(); ++s) {
      MixedStore& store = stores_[s];
      if (!weighted) store.weight = store.times * kept[s];
      WEFT_CHECK(store.weight == 0 || kept[s] > 0, Exit::usage,
                 "raise data.keep, or set the store's data.weights to 0",
                 "data.keep leaves no clip of {}, whose weight is {:g}", store.name, store.weight);
      if (store.weight > 0) samples += store.times * kept[s];
      weights += store.weight;
    }
    WEFT_CHECK(weights > 0, Exit::usage, "raise a share of data.keep",
               "data.keep leaves no clip to train on");
    for (std::size_t b = 0; b < buckets_.size(); ++b)
      for (Bucket::Part& p : buckets_[b].parts)
        if (stores_[p.store].weight > 0)
          p.samples = samples * (stores_[p.store].weight / weights) *
                      (keep[b] * static_cast<double>(p.clips) / kept[p.store]);
  }

  std::vector<MixedStore> stores_;
  std::vector<Bucket> buckets_;
  std::vector<std::vector<int>> in_store_;  // [bucket, part] its number in the store
};

}  // namespace

std::unique_ptr<ClipSource> mix_stores(std::vector<MixedStore> stores, bool weighted,
                                       const DataDeck& data) {
  return std::make_unique<MixedSource>(std::move(stores), weighted, data);
}

}  // namespace weft
