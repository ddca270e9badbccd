#include "data/ingest/ingest_images.h"

#include <omp.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <exception>
#include <filesystem>
#include <optional>

#include "config/keep_inputs.h"
#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/json.h"
#include "core/log.h"
#include "data/clip_store.h"
#include "data/images/image_store.h"
#include "data/ingest/image_list.h"
#include "data/ingest/progress.h"
#include "data/lists/lists.h"
#include "media/image_file.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t piece_images = 32;

struct Decoded {
  ImageFile rgb, labels;
  std::string broken;  // why it is left out
};

// Where one of two sizes is the other one turned: what to try.
std::string turned_hint(ImageSize a, ImageSize b, const MediaDeck& limits) {
  if (a.height != b.width || a.width != b.height) return "";
  return fmt::format("; if its EXIF turned the image, set media.orientation = \"{}\"",
                     limits.orientation == "upright" ? "stored" : "upright");
}

// Label values as the store has them: 0 is unlabelled, v is class v - 1.
class LabelValues {
 public:
  LabelValues(const IngestDeck& deck, std::int64_t num_classes)
      : first_(deck.first_label), ignored_(deck.ignore_label), classes_(num_classes) {}

  std::string identity() const { return fmt::format("{} {} {}", classes_, first_, ignored_); }
  // Of a value of a file; may be above the number of classes.
  std::int64_t stored(std::int64_t value) const {
    return value == ignored_ || value < first_ ? 0 : value - first_ + 1;
  }
  // Exit::data for a class that there is not.
  void convert(const std::string& path, std::vector<std::uint8_t>& values) const {
    std::array<bool, 256> there{};
    for (const std::uint8_t v : values) there[v] = true;
    const std::int64_t most = classes_ > 0 ? classes_ : 255;
    for (std::int64_t v = 255; v >= 0; --v)
      WEFT_CHECK(!there[static_cast<std::size_t>(v)] || stored(v) <= most, Exit::data,
                 v == 255 ? "ingest.ignore_label = 255 leaves such pixels unlabelled"
                          : "give all classes, or see ingest.first_label and ignore_label",
                 "{} has the value {}, ingest.num_classes = {} (value {} is class 0{})", path, v,
                 most, first_, first_ > 0 ? ", lower ones are unlabelled" : "");
    for (std::uint8_t& v : values) v = static_cast<std::uint8_t>(stored(v));
  }
  // A palette of file values as one of stored labels.
  std::vector<std::uint8_t> convert_palette(const std::vector<std::uint8_t>& rgb) const {
    std::vector<std::uint8_t> converted;
    for (std::size_t v = 0; v < rgb.size() / 3; ++v) {
      const auto at = 3 * static_cast<std::size_t>(stored(static_cast<std::int64_t>(v)));
      if (at == 0 || at > 3 * 255) continue;
      converted.resize(std::max(converted.size(), at + 3));
      std::copy_n(rgb.begin() + static_cast<std::ptrdiff_t>(3 * v), 3,
                  converted.begin() + static_cast<std::ptrdiff_t>(at));
    }
    return converted;
  }

 private:
  std::int64_t first_, ignored_, classes_;
};

Decoded decode(const ImagePair& pair, const LabelValues& values, const MediaDeck& limits) {
  Decoded d;
  try {
    d.rgb = read_image_file(pair.image, limits);
    const ImageSize size{d.rgb.height, d.rgb.width};
    WEFT_CHECK((pair.size.height == 0 || pair.size.height == size.height) &&
                   (pair.size.width == 0 || pair.size.width == size.width),
               Exit::data, "", "{} has {}x{} pixels (height x width), the list says {}x{}{}",
               pair.image, size.height, size.width, pair.size.height, pair.size.width,
               turned_hint(size, pair.size, limits));
    d.labels = read_label_file(pair.labels, limits);
    WEFT_CHECK(d.labels.height == size.height && d.labels.width == size.width, Exit::data, "",
               "{} has {}x{} labels (height x width), its image {} has {}x{} pixels{}", pair.labels,
               d.labels.height, d.labels.width, pair.image, size.height, size.width,
               turned_hint(size, {d.labels.height, d.labels.width}, limits));
    values.convert(pair.labels, d.labels.values);
  } catch (const Error& e) {
    d = {};
    d.broken = e.what();
    if (!e.hint().empty()) d.broken += "; " + e.hint();
    if (!pair.where.empty()) d.broken += fmt::format(" ({})", pair.where);
  }
  return d;
}

// What makes a piece: it is decoded again if any of this changes.
std::string identity(std::span<const ImagePair> pairs, const LabelValues& values,
                     const MediaDeck& limits) {
  std::string all = fmt::format("2 {} {}\n", values.identity(), limits.orientation);
  for (const ImagePair& p : pairs)
    all += fmt::format("{}\n{} {}\n{} {}\n{}x{}\n", p.name, p.image, file_identity(p.image),
                       p.labels, file_identity(p.labels), p.size.height, p.size.width);
  return to_hex(hash128(all));
}

// A piece: u64 length of a JSON header, the header, and of each whole image its pixels and labels.
struct Piece {
  struct Image {
    ImageSize size;
    std::string name;
  };
  std::string identity;
  std::vector<Image> images;
  std::vector<std::string> broken;
  Hash128 hash;             // of the images' bytes
  std::uint64_t begin = 0;  // where they begin in the file
};

fs::path piece_path(const std::string& output, std::size_t piece) {
  return fs::path(output + ".parts") / fmt::format("piece_{:06}", piece);
}

// Nothing where there is no such piece, or no whole one.
std::optional<Piece> read_header(const fs::path& path) {
  std::error_code none;
  if (!fs::is_regular_file(path, none)) return std::nullopt;
  const File file = File::open(path, Exit::data);
  std::uint64_t length = 0;
  if (file.size() < 8) return std::nullopt;
  file.read(std::as_writable_bytes(std::span(&length, 1)), 0);
  if (length > file.size() - 8) return std::nullopt;
  std::string text(length, '\0');
  file.read(std::as_writable_bytes(std::span(text)), 8);
  Piece p;
  p.begin = 8 + length;
  std::uint64_t bytes = 0;
  try {
    const auto header = parse_json(text);
    p.identity = header.at("identity").get<std::string>();
    p.broken = header.at("broken").get<std::vector<std::string>>();
    p.hash = hash_from_hex(header.at("hash").get<std::string>()).value_or(Hash128{});
    for (const auto& image : header.at("images")) {
      p.images.push_back(
          {{whole_number<std::int64_t>(image.at(1)), whole_number<std::int64_t>(image.at(2))},
           image.at(0).get<std::string>()});
      const ImageSize size = p.images.back().size;
      if (size.height <= 0 || size.width <= 0) return std::nullopt;
      bytes += static_cast<std::uint64_t>(4 * size.height * size.width);
    }
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
  if (file.size() != p.begin + bytes) return std::nullopt;
  return p;
}

void make_piece(const fs::path& path, std::span<const ImagePair> pairs, const LabelValues& values,
                const MediaDeck& limits, const std::string& id, IngestProgress& progress) {
  // The header has sizes and hash, which are known at the end: the bytes go to a file of their own
  // first.
  const fs::path data_path = path.string() + ".data", temporary = path.string() + ".tmp";
  std::error_code none;
  fs::remove(data_path, none);
  fs::remove(temporary, none);
  nlohmann::json images = nlohmann::json::array(), broken = nlohmann::json::array();
  Hasher hasher;
  std::uint64_t bytes = 0;
  {
    File data = File::create(data_path, Exit::data);
    // As many at once as there are threads, so that memory does not grow with the piece.
    const auto threads = static_cast<std::size_t>(std::max(1, omp_get_max_threads()));
    std::vector<Decoded> decoded(threads);
    for (std::size_t first = 0; first < pairs.size(); first += threads) {
      const std::size_t count = std::min(threads, pairs.size() - first);
      std::exception_ptr failure;
#pragma omp parallel for schedule(dynamic) num_threads(static_cast <int>(threads))
      for (std::size_t i = 0; i < count; ++i) {
        try {
          decoded[i] = decode(pairs[first + i], values, limits);
        } catch (...) {  // out of memory
#pragma omp critical
          failure = std::current_exception();
        }
      }
      if (failure) std::rethrow_exception(failure);
      for (std::size_t i = 0; i < count; ++i) {
        const Decoded& d = decoded[i];
        progress.add(0, d.broken.empty() ? 1 : 0, 1);
        if (!d.broken.empty()) {
          broken.push_back(d.broken);
          continue;
        }
        images.push_back({pairs[first + i].name, d.rgb.height, d.rgb.width});
        for (const auto* values : {&d.rgb.values, &d.labels.values}) {
          const auto part = std::as_bytes(std::span(*values));
          hasher.add(part);
          data.write(part, bytes);
          bytes += part.size();
        }
      }
    }
    data.close();
  }
  const std::string header = nlohmann::json{
      {"identity", id},
      {"images", std::move(images)},
      {"broken", std::move(broken)},
      {"hash",
       to_hex(hasher.value())}}.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  const std::uint64_t length = header.size();
  {
    const File data = File::open(data_path, Exit::data);
    File out = File::create(temporary, Exit::data);
    out.write(std::as_bytes(std::span(&length, 1)), 0);
    out.write(std::as_bytes(std::span(header)), 8);
    std::vector<std::byte> buffer(std::size_t{4} << 20);
    for (std::uint64_t at = 0; at < bytes;) {
      const auto part = std::span(buffer).first(std::min<std::uint64_t>(buffer.size(), bytes - at));
      data.read(part, at);
      out.write(part, 8 + length + at);
      at += part.size();
    }
    out.close();
  }
  rename_file(temporary, path, Exit::data);
  fs::remove(data_path, none);
}

void report_missing_pairs(const std::vector<ImagePair>& pairs) {
  std::vector<std::string> missing;
  std::size_t incomplete = 0;
  for (const ImagePair& p : pairs) {
    const std::size_t before = missing.size();
    for (const std::string* file : {&p.image, &p.labels})
      if (std::string why = missing_file(*file); !why.empty()) missing.push_back(std::move(why));
    incomplete += missing.size() > before ? 1 : 0;
  }
  report_missing(missing, 2 * pairs.size(), "file",
                 "paths in a list begin in ingest.root, by default the list's folder",
                 incomplete == pairs.size());
}

struct Joined {
  std::int64_t images = 0, broken = 0;
  std::uint64_t pixels = 0;
  std::vector<std::uint64_t> label_images;
};

// The palette of the first labels: all of a data set have the same.
std::vector<std::uint8_t> palette_of(std::span<const ImagePair> pairs, const LabelValues& values,
                                     const MediaDeck& limits) {
  for (const ImagePair& pair : pairs) try {
      return values.convert_palette(read_label_file(pair.labels, limits).palette);
    } catch (const Error&) {  // left out
    }
  return {};
}

Joined join(const IngestDeck& deck, std::size_t pieces, std::size_t pairs,
            const std::vector<std::string>& names, std::vector<std::uint8_t> palette) {
  std::vector<Piece> all;
  std::vector<ImageStoreWriter::Entry> entries;
  Joined joined;
  std::string first_fault;
  for (std::size_t k = 0; k < pieces; ++k) {
    std::optional<Piece> p = read_header(piece_path(deck.output, k));
    WEFT_CHECK(p.has_value(), Exit::data, "every rank must see the folder of ingest.output",
               "rank 0 does not find {}, which another rank wrote",
               piece_path(deck.output, k).string());
    for (const auto& image : p->images) entries.push_back({image.size, image.name});
    joined.broken += std::ssize(p->broken);
    for (const std::string& why : p->broken) {
      log::warn("left out: {}", why);
      if (first_fault.empty()) first_fault = why;
    }
    all.push_back(std::move(*p));
  }
  WEFT_CHECK(!entries.empty(), Exit::data, "mend the fault; paths of a list begin in ingest.root",
             "no image came out of {}; the first fault: {}", pairs, first_fault);
  joined.images = std::ssize(entries);
  const std::int64_t classes =
      names.empty() ? deck.num_classes : static_cast<std::int64_t>(names.size());
  ImageStoreWriter writer(deck.output, std::move(entries), classes, names, std::move(palette));
  std::vector<std::uint8_t> rgb, labels;
  for (std::size_t k = 0; k < pieces; ++k) {
    const fs::path path = piece_path(deck.output, k);
    const File file = File::open(path, Exit::data);
    std::uint64_t at = all[k].begin;
    Hasher hasher;
    for (const auto& image : all[k].images) {
      const auto pixels = static_cast<std::size_t>(image.size.height * image.size.width);
      rgb.resize(3 * pixels);
      labels.resize(pixels);
      for (auto* values : {&rgb, &labels}) {
        const auto part = std::as_writable_bytes(std::span(*values));
        file.read(part, at);
        hasher.add(part);
        at += part.size();
      }
      writer.append(rgb, labels);
      joined.pixels += pixels;
    }
    WEFT_CHECK(hasher.value() == all[k].hash, Exit::data,
               fmt::format("remove {} and run the same command again", path.string()),
               "{} was damaged after it was written", path.string());
  }
  joined.label_images = writer.label_images();
  writer.commit();
  return joined;
}

// In how many images each class occurs, and a warning of classes that occur in none.
void print_classes(const IngestDeck& deck, std::int64_t classes,
                   const std::vector<std::string>& names,
                   const std::vector<std::uint64_t>& label_images) {
  constexpr std::size_t most = 20;
  std::string list;
  std::size_t listed = 0;
  for (std::size_t v = 1; v < label_images.size(); ++v) {
    if (label_images[v] == 0) continue;
    if (++listed > most) continue;
    list += fmt::format("{}{}{} in {}", list.empty() ? "" : ", ", v - 1,
                        v <= names.size() ? " " + names[v - 1] : "", label_images[v]);
  }
  if (listed > most) list += ", ... (weft inspect lists all)";
  log::info("images by class: {}; unlabelled pixels in {}", list.empty() ? "none" : list,
            label_images[0]);
  const std::string missing = missing_classes(label_images, classes, names);
  if (!missing.empty())
    log::warn(
        "{}; {}", missing,
        deck.first_label == 1 && label_images[0] > 0
            ? "0 is taken as unlabelled and v as class v - 1: where 0 is the first class, set "
              "ingest.first_label = 0"
            : fmt::format("value {} is class 0 (ingest.first_label)", deck.first_label));
  if (label_images[255] > 0)
    log::warn("labels have class 254, often a value to ignore: ingest.ignore_label = {}",
              254 + deck.first_label);
}

}  // namespace

int ingest_images(const Deck& deck, MPI_Comm comm) {
  const auto begin = std::chrono::steady_clock::now();
  const IngestDeck& d = deck.get<IngestDeck>();
  int rank = 0, size = 1;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);

  WEFT_CHECK(!d.output.empty(), Exit::usage, "set ingest.output = \"images.h5\"",
             "ingest.output is empty");

  // 1. List the images; every rank does so itself.
  std::vector<std::string> names;
  if (!d.class_names.empty()) {
    names = read_class_names(d.class_names, deck.media);
    WEFT_CHECK(d.num_classes == 0 || d.num_classes == std::ssize(names), Exit::data,
               "leave ingest.num_classes out, or give as many names",
               "{} has {} names of classes, ingest.num_classes = {}", d.class_names, names.size(),
               d.num_classes);
  }
  const std::int64_t classes = names.empty() ? d.num_classes : std::ssize(names);
  const LabelValues values(d, classes);
  const std::vector<ImagePair> pairs = list_images(d, deck.media);
  if (rank == 0) report_missing_pairs(pairs);
  const std::size_t pieces = (pairs.size() + piece_images - 1) / piece_images;
  log::info("ingest: {} over {} into {}", counted(std::ssize(pairs), "labelled image"),
            counted(size, "rank"), d.output);
  if (rank == 0) {
    std::vector<std::string> files = {d.images, d.labels, d.class_names};
    for (const ImagePair& p : pairs) files.insert(files.end(), {p.image, p.labels});
    const fs::path store = absolute_path(d.output);
    keep_files(deck, "ingest.output", files, [&](const fs::path& path) { return path == store; });
  }
  warn_of_replacing(d.output);
  const auto lock = lock_store(d.output, "ingest.output");
  MPI_Barrier(comm);  // nobody touches files beside the store before rank 0 has it

  // 2. Decode this rank's pieces, those that are not there from an earlier attempt.
  std::error_code failed;
  fs::create_directories(d.output + ".parts", failed);
  WEFT_CHECK(!failed, Exit::data, "check the directory's permissions", "cannot make {}.parts: {}",
             d.output, failed.message());
  IngestProgress progress(comm, d.output, std::ssize(pairs), "image");
  std::int64_t kept = 0;
  for (std::size_t k = static_cast<std::size_t>(rank); k < pieces;
       k += static_cast<std::size_t>(size)) {
    const auto part = std::span(pairs).subspan(
        k * piece_images, std::min(piece_images, pairs.size() - k * piece_images));
    const std::string id = identity(part, values, deck.media);
    const fs::path path = piece_path(d.output, k);
    if (const auto there = read_header(path); there && there->identity == id) {
      kept += std::ssize(part);
      progress.add(0, std::ssize(there->images), std::ssize(part));
      continue;
    }
    make_piece(path, part, values, deck.media, id, progress);
  }
  progress.finish();
  MPI_Allreduce(MPI_IN_PLACE, &kept, 1, MPI_INT64_T, MPI_SUM, comm);
  if (kept > 0) log::info("ingest: {} decoded by an earlier attempt", counted(kept, "image"));

  // 3. Join them on rank 0.
  std::array<std::int64_t, 2> end{};  // exit code; broken images
  std::exception_ptr failure;
  if (rank == 0) {
    try {
      const Joined joined =
          join(d, pieces, pairs.size(), names, palette_of(pairs, values, deck.media));
      fs::remove_all(d.output + ".parts", failed);
      end[1] = joined.broken;
      const double seconds =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      log::info("{}, {:.1f} MB of pixels and {:.1f} of labels in {}",
                counted(joined.images, "image"), 3e-6 * static_cast<double>(joined.pixels),
                1e-6 * static_cast<double>(joined.pixels), d.output);
      print_classes(d, classes, names, joined.label_images);
      log::info("{} of {} left out; {:.1f} s, {:.0f} images/s", joined.broken,
                counted(std::ssize(pairs), "image"), seconds,
                static_cast<double>(joined.images) / std::max(seconds, 1e-3));
    } catch (const Error& e) {
      failure = std::current_exception();
      end[0] = static_cast<int>(e.code());
    }
  }
  MPI_Bcast(end.data(), 2, MPI_INT64_T, 0, comm);
  if (failure) std::rethrow_exception(failure);
  if (end[0] != 0) return static_cast<int>(end[0]);  // rank 0 reports the reason
  if (d.strict && end[1] > 0) {
    const std::string broken =
        fmt::format("{} of {} images are broken, and ingest.strict is set", end[1], pairs.size());
    if (rank == 0) log::error("{}", broken);
    progress.end(static_cast<int>(Exit::data), broken);
    return static_cast<int>(Exit::data);
  }
  progress.end(0);
  return 0;
}

}  // namespace weft
