#include "data/text_images/drawn/drawn_text.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <mutex>

#include "core/error.h"
#include "core/hash.h"
#include "data/key_values.h"
#include "data/text_images/drawn/grounds.h"
#include "data/text_images/drawn/lettering.h"
#include "data/text_images/drawn/typesetter.h"
#include "data/text_images/opencv.h"
#include "data/text_images/picture_files.h"
#include "media/image_file.h"

namespace weft {
namespace {

constexpr const char* hint =
    "write for example data.path=\"text:images=10000,height=640,width=640,words=0..24\"";

class DrawnText : public TextImages {
 public:
  DrawnText(const std::string& spec, const MediaDeck& limits) : limits_(limits) {
    std::string fonts, pictures;
    lettering_.words = {0, 24};
    lettering_.letters = {8, 72};
    const std::array numbers = {NumberKey{"images", &images_, 1, 10'000'000, false},
                                NumberKey{"height", &height_, 32, 8192, true},
                                NumberKey{"width", &width_, 32, 8192, true},
                                NumberKey{"words", &lettering_.words, 0, 1000, true},
                                NumberKey{"letters", &lettering_.letters, 4, 1000, true},
                                NumberKey{"seed", &seed_, 0, INT64_MAX, false}};
    const std::array texts = {TextKey{"fonts", &fonts}, TextKey{"pictures", &pictures}};
    std::string id = read_keys(spec, "text", hint, numbers, texts);
    fonts_ = find_fonts(fonts);
    lettering_.fonts = fonts_.size();
    if (!pictures.empty()) grounds_ = list_pictures(pictures);
    const auto add = [&](const std::string& file) {
      id += std::filesystem::path(file).filename().string() + "\n";
    };
    for (const FontFile& f : fonts_) add(f.path);
    for (const std::string& g : grounds_) add(g);
    id_ = to_hex(hash128(id));
  }

  std::int64_t count() const override { return images_.low; }
  std::string name(std::int64_t i) const override {
    return fmt::format("text:seed={} picture {}", seed_.low, i);
  }
  std::string content_id() const override { return id_; }
  ImageSize size(std::int64_t i) const override {
    Draws draws = draws_of(i);
    return size_of_picture(draws);
  }

  void read(std::int64_t i, TextImage& out) const override {
    with_opencv([&] { draw(i, out); });
  }

 private:
  void draw(std::int64_t i, TextImage& out) const {
    Draws draws = draws_of(i);
    Picture picture;
    picture.size = size_of_picture(draws);
    picture.rgb = std::move(out.rgb);  // memory of the picture before
    const Lease lease(*this);
    if (grounds_.empty()) {
      paint_ground(draws, picture);
    } else {
      const auto which = draws.from(0, std::ssize(grounds_) - 1);
      ImageFile file = read_image_file(grounds_[static_cast<std::size_t>(which)], limits_);
      take_ground(draws, {{file.height, file.width}, std::move(file.values)}, picture);
    }
    out.regions = write_words(draws, lettering_, *lease.typesetter, picture);
    photograph(draws, picture);
    out.size = picture.size;
    out.rgb = std::move(picture.rgb);
  }

  // Each thread that draws borrows a typesetter.
  struct Lease {
    explicit Lease(const DrawnText& owner_) : owner(owner_) {
      std::lock_guard lock(owner.mutex_);
      if (owner.idle_.empty()) {
        typesetter = std::make_unique<Typesetter>(owner.fonts_);
      } else {
        typesetter = std::move(owner.idle_.back());
        owner.idle_.pop_back();
      }
    }
    ~Lease() {
      std::lock_guard lock(owner.mutex_);
      owner.idle_.push_back(std::move(typesetter));
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    const DrawnText& owner;
    std::unique_ptr<Typesetter> typesetter;
  };

  Draws draws_of(std::int64_t i) const {
    WEFT_ASSERT(i >= 0 && i < count());
    // 0 to 2 are streams of data/synthetic and data/images/shapes.
    return Draws(Philox(static_cast<std::uint64_t>(seed_.low), Purpose::synthetic, 3,
                        static_cast<std::uint64_t>(i)));
  }
  ImageSize size_of_picture(Draws& draws) const {
    const std::int64_t height = draws.from(height_.low, height_.high);
    return {height, draws.from(width_.low, width_.high)};
  }

  NumberRange images_{10'000, 10'000}, height_{640, 640}, width_{640, 640}, seed_{1, 1};
  std::string id_;
  Lettering lettering_;
  MediaDeck limits_;
  std::vector<FontFile> fonts_;
  std::vector<std::string> grounds_;  // paths of pictures to draw on
  mutable std::mutex mutex_;          // guards the list below
  mutable std::vector<std::unique_ptr<Typesetter>> idle_;
};

}  // namespace

std::unique_ptr<TextImages> make_drawn_text(const std::string& path, const MediaDeck& limits) {
  return std::make_unique<DrawnText>(path.substr(std::string_view(drawn_text_prefix).size()),
                                     limits);
}

}  // namespace weft
