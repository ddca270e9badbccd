#include "data/ingest/ingest_images.h"

#include <fmt/ranges.h>
#include <omp.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <exception>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <sstream>

#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/json.h"
#include "core/log.h"
#include "data/images/image_store.h"
#include "data/ingest/progress.h"
#include "data/lists/folders.h"
#include "data/lists/lists.h"
#include "data/lists/table.h"
#include "media/image_file.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

struct ImagePair {
  std::string image, labels;  // paths
  std::string name;           // the image's path as the list or the folder has it
  std::string where;          // "train.odgt, line 3", or "" of a folder: for messages
  ImageSize size;             // as the list says; 0 where it says nothing
};

constexpr const char* image_list_hint =
    "a line is {\"fpath_img\": \"a.jpg\", \"fpath_segm\": \"a.png\", \"width\": 640, \"height\": "
    "480}";

std::vector<ImagePair> read_image_list(const IngestDeck& deck, const MediaDeck& limits) {
  const std::string& list = deck.images;
  const fs::path root = deck.root.empty() ? fs::path(list).parent_path() : fs::path(deck.root);
  check_list_size(list, limits);
  TableReader table(list, "fpath_img", TableForm::json_lines);
  std::vector<ImagePair> pairs;
  for (TableRow row; table.next(row);) {
    const auto labels = table.value(row, "fpath_segm");
    WEFT_CHECK(!row.path.empty() && labels.is_string() &&
                   labels.get_ref<const std::string&>().find('\0') == std::string::npos,
               Exit::data, image_list_hint, "{}: no texts fpath_img and fpath_segm",
               table.where(row));
    // 0 where the list does not say.
    const auto side = [facts = facts_of(table, row)](Fact fact) {
      return facts[fact] > 0 ? static_cast<std::int64_t>(std::min(facts[fact], 1e9)) : 0;
    };
    pairs.push_back({(root / row.path).string(),
                     (root / labels.get<std::string>()).string(),
                     row.path,
                     table.where(row),
                     {side(Fact::height), side(Fact::width)}});
  }
  return pairs;
}

// Files of a folder whose names end with `suffix`, by their paths from there without it and the
// ending, sorted.
std::map<std::string, std::string> files_of(const std::string& folder, const std::string& other,
                                            const std::string& suffix,
                                            const std::function<bool(const std::string&)>& wanted) {
  const auto stem = [](const fs::path& path) {
    return fs::path(path).replace_extension().string();
  };
  const FolderFiles found = files_below(
      folder, [&](const std::string& name) { return wanted(name) && stem(name).ends_with(suffix); },
      other);
  tell_left_out(folder, found.left_out, found.only_hidden);
  std::map<std::string, std::string> files;
  for (const std::string& path : found.files) {
    const fs::path below = fs::path(path).lexically_relative(folder);
    std::string key = stem(below);
    key.resize(key.size() - suffix.size());
    const auto [known, added] = files.emplace(key, below.string());
    WEFT_CHECK(added, Exit::data, "rename one of them, and its labels",
               "folder {} has {} and {}, which have the same labels", folder, known->second,
               below.string());
  }
  WEFT_CHECK(suffix.empty() || !files.empty(), Exit::data,
             "ingest.image_suffix and label_suffix are what names end with, before their ending",
             "folder {} has no file whose name ends with \"{}\"", folder, suffix);
  return files;
}

std::vector<ImagePair> read_folders(const IngestDeck& deck) {
  std::error_code none;
  WEFT_CHECK(!deck.labels.empty() && fs::is_directory(deck.labels, none), Exit::data,
             "set ingest.labels to the folder of the label maps",
             "ingest.images is the folder {}, and ingest.labels = \"{}\" is none", deck.images,
             deck.labels);
  auto labels = files_of(deck.labels, deck.images, deck.label_suffix,
                         [](const std::string& name) { return ending_of(name) == ".png"; });
  std::vector<ImagePair> pairs;
  for (const auto& [stem, file] :
       files_of(deck.images, deck.labels, deck.image_suffix, is_picture_name)) {
    const auto found = labels.extract(stem);
    pairs.push_back({(fs::path(deck.images) / file).string(),
                     (fs::path(deck.labels) /
                      (found.empty() ? stem + deck.label_suffix + ".png" : found.mapped()))
                         .string(),
                     file,
                     "",
                     {}});
  }
  if (!labels.empty())
    tell_left_out(deck.labels, counted(std::ssize(labels), "label map") + " without a picture");
  return pairs;
}

// ingest.images is a folder, then ingest.labels is one too: files in them and below are matched by
// their paths from there without ingest.image_suffix, label_suffix and ending, sorted; a picture
// without labels has a path there that does not exist, labels without a picture are left out and
// counted. Or it is a list, JSON lines or CSV, with fpath_img, fpath_segm and perhaps width and
// height (.odgt): paths count from ingest.root, by default the list's folder. Throws Exit::data,
// naming the line, for a list that cannot be read.
std::vector<ImagePair> list_images(const IngestDeck& deck, const MediaDeck& limits) {
  std::error_code none;
  const bool folder = fs::is_directory(deck.images, none);
  WEFT_CHECK(folder || deck.labels.empty(), Exit::data,
             "leave ingest.labels out with a list, which names the labels too",
             "ingest.labels = \"{}\", but ingest.images = \"{}\" is not a folder", deck.labels,
             deck.images);
  std::vector<ImagePair> pairs = folder ? read_folders(deck) : read_image_list(deck, limits);
  WEFT_CHECK(!pairs.empty(), Exit::data, "give a list (.odgt) or a folder of JPEG or PNG files",
             "{} names no image", deck.images);
  return pairs;
}

}  // namespace

std::vector<std::string> read_class_names(const std::string& path, const MediaDeck& limits) {
  std::vector<std::string> names;
  check_list_size(path, limits);
  if (form_of_name(path) == TableForm::csv) {
    TableReader table(path, "Name");
    for (TableRow row; table.next(row);) {
      WEFT_CHECK(!row.path.empty(), Exit::data, "give every row a name",
                 "{}, column Name: no value", table.where(row));
      names.push_back(row.path.substr(0, row.path.find(';')));
    }
  } else {
    std::istringstream lines(read_text_file(path, longest_text, ""));
    for (std::string line; std::getline(lines, line);)
      if (const std::string_view name = trimmed(line); !name.empty()) names.emplace_back(name);
  }
  WEFT_CHECK(!names.empty() && names.size() <= 255, Exit::data, "give 1 to 255 names",
             "{} has {} names of classes", path, names.size());
  return names;
}

namespace {

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
      : first_(deck.first_label), classes_(num_classes), listed_(deck.label_values) {
    for (const std::int64_t value : deck.ignore_label)
      if (value >= 0) ignored_.insert(value);
    std::set<std::int64_t> all = ignored_;
    all.insert(listed_.begin(), listed_.end());
    WEFT_CHECK(listed_.empty() || (first_ == 1 && std::ssize(listed_) == classes_ &&
                                   all.size() == ignored_.size() + listed_.size()),
               Exit::usage,
               "one value for each class, none of ingest.ignore_label, and no ingest.first_label",
               "ingest.label_values = [{}] for {}", fmt::join(listed_, ", "),
               counted(classes_, "class", "classes"));
  }

  std::string identity() const {
    return fmt::format("{} {} {}{}", classes_, first_,
                       ignored_.empty() ? "-1" : fmt::format("{}", fmt::join(ignored_, " ")),
                       listed_.empty() ? "" : fmt::format(" of {}", fmt::join(listed_, " ")));
  }
  // The stored label of a file's value; it may be above the number of classes.
  std::int64_t stored(std::int64_t value) const {
    if (ignored_.contains(value)) return 0;
    if (listed_.empty()) return value < first_ ? 0 : value - first_ + 1;
    const auto found = std::ranges::find(listed_, value);
    return found == listed_.end() ? 256 : found - listed_.begin() + 1;
  }
  // Exit::data for a class that there is not.
  void convert(const std::string& path, std::vector<std::uint8_t>& values) const {
    std::array<bool, 256> there{};
    for (const std::uint8_t v : values) there[v] = true;
    const std::int64_t most = classes_ > 0 ? classes_ : 255;
    const std::string rule =
        listed_.empty() ? fmt::format("ingest.num_classes = {} (value {} is class 0{})", most,
                                      first_, first_ > 0 ? ", lower ones are unlabelled" : "")
                        : fmt::format("ingest.label_values = [{}]", fmt::join(listed_, ", "));
    for (std::int64_t v = 255; v >= 0; --v)
      WEFT_CHECK(!there[v] || stored(v) <= most, Exit::data,
                 v == 255 ? "ingest.ignore_label = 255 leaves such pixels unlabelled"
                          : "give all classes, or see ingest.first_label and ignore_label",
                 "{} has the value {}, {}", path, v, rule);
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
  std::int64_t first_, classes_;
  std::set<std::int64_t> ignored_;
  std::vector<std::int64_t> listed_;  // of class 0, 1, ...; empty: all from first_ on
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
  std::string all = fmt::format("3 {} {}\n", values.identity(), limits.orientation);
  for (const ImagePair& p : pairs)
    all += fmt::format("{}\n{} {}\n{} {}\n{}x{}\n", p.name, p.image, file_identity(p.image),
                       p.labels, file_identity(p.labels), p.size.height, p.size.width);
  return to_hex(hash128(all));
}

// A piece: of each whole image its pixels and labels, then what they are, in JSON, and its length,
// a u64: sizes and hash are known at the end.
struct Piece {
  struct Image {
    ImageSize size;
    std::string name;
  };
  std::string identity;
  std::vector<Image> images;
  std::vector<std::string> broken;
  Hash128 hash;  // of the images' bytes
};

fs::path piece_path(const std::string& output, std::size_t piece) {
  return fs::path(output + ".parts") / fmt::format("piece_{:06}", piece);
}

// Nothing where there is no such piece, or no whole one.
std::optional<Piece> read_contents(const fs::path& path) {
  std::error_code none;
  if (!fs::is_regular_file(path, none)) return std::nullopt;
  const File file = File::open(path, Exit::data);
  std::uint64_t length = 0;
  if (file.size() < sizeof length) return std::nullopt;
  const std::uint64_t end = file.size() - sizeof length;
  file.read(std::as_writable_bytes(std::span(&length, 1)), end);
  if (length > end) return std::nullopt;
  std::string text(length, '\0');
  file.read(std::as_writable_bytes(std::span(text)), end - length);
  Piece p;
  std::uint64_t bytes = 0;
  try {
    const auto contents = parse_json(text);
    p.identity = contents.at("identity").get<std::string>();
    p.broken = contents.at("broken").get<std::vector<std::string>>();
    p.hash = hash_from_hex(contents.at("hash").get<std::string>()).value_or(Hash128{});
    for (const auto& image : contents.at("images")) {
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
  if (end - length != bytes) return std::nullopt;
  return p;
}

void make_piece(const fs::path& path, std::span<const ImagePair> pairs, const LabelValues& values,
                const MediaDeck& limits, const std::string& id, IngestProgress& progress) {
  const fs::path temporary = path.string() + ".tmp";
  std::error_code none;
  fs::remove(temporary, none);
  nlohmann::json images = nlohmann::json::array(), broken = nlohmann::json::array();
  Hasher hasher;
  std::uint64_t bytes = 0;
  File out = File::create(temporary, Exit::data);
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
      for (const auto* plane : {&d.rgb.values, &d.labels.values}) {
        const auto part = std::as_bytes(std::span(*plane));
        hasher.add(part);
        out.write(part, bytes);
        bytes += part.size();
      }
    }
  }
  const std::string contents = dump_json(nlohmann::json{{"identity", id},
                                                        {"images", std::move(images)},
                                                        {"broken", std::move(broken)},
                                                        {"hash", to_hex(hasher.value())}},
                                         -1, ' ', false, nlohmann::json::error_handler_t::replace);
  const std::uint64_t length = contents.size();
  out.write(std::as_bytes(std::span(contents)), bytes);
  out.write(std::as_bytes(std::span(&length, 1)), bytes + length);
  out.close();
  rename_file(temporary, path, Exit::data);
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
  LabelCounts labels;
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
    std::optional<Piece> p = read_contents(piece_path(deck.output, k));
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
    std::uint64_t at = 0;
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
  joined.labels = writer.label_counts();
  writer.commit();
  return joined;
}

// A table of the classes' pixels, and a warning of classes that occur in no image.
void print_classes(const IngestDeck& deck, std::int64_t classes,
                   const std::vector<std::string>& names, const LabelCounts& labels) {
  constexpr std::size_t most = 40;
  const std::vector<std::uint64_t>& label_images = labels.images;
  double all = 0;
  for (const std::uint64_t pixels : labels.pixels) all += static_cast<double>(pixels);
  const auto row = [&](const std::string& name, std::size_t v) {
    log::info("  {:<32} {:>14} {:>9.4f} % {:>9}", name, labels.pixels[v],
              100 * static_cast<double>(labels.pixels[v]) / all, label_images[v]);
  };
  log::info("  {:<32} {:>14} {:>11} {:>9}", "class", "pixels", "share", "images");
  row("unlabelled", 0);
  std::size_t listed = 0;
  for (std::size_t v = 1; v < label_images.size(); ++v) {
    if (label_images[v] == 0 && std::cmp_greater(v, classes)) continue;
    if (++listed > most) continue;
    row(printable(fmt::format("{}{}", v - 1, v <= names.size() ? " " + names[v - 1] : ""), 32), v);
  }
  if (listed > most) log::info("  ... and {} more (weft inspect lists all)", listed - most);
  const std::string missing = missing_classes(label_images, classes, names);
  if (!missing.empty())
    log::warn(
        "{}; {}", missing,
        !deck.label_values.empty() ? "ingest.label_values says which value is which class"
        : deck.first_label == 1 && label_images[0] > 0
            ? "0 is taken as unlabelled and v as class v - 1: where 0 is the first class, set "
              "ingest.first_label = 0"
            : fmt::format("value {} is class 0 (ingest.first_label)", deck.first_label));
  if (label_images[255] > 0)
    log::warn("labels have class 254, often a value to ignore: ingest.ignore_label = {}",
              254 + deck.first_label);
}

// ingest.class_names, which go with ingest.num_classes; none where no file is named.
std::vector<std::string> class_names_of(const IngestDeck& deck, const MediaDeck& limits) {
  if (deck.class_names.empty()) return {};
  std::vector<std::string> names = read_class_names(deck.class_names, limits);
  WEFT_CHECK(deck.num_classes == 0 || deck.num_classes == std::ssize(names), Exit::data,
             "leave ingest.num_classes out, or give as many names",
             "{} has {} names of classes, ingest.num_classes = {}", deck.class_names, names.size(),
             deck.num_classes);
  return names;
}

// Decodes this rank's pieces, except those that are there from an earlier attempt: returns how many
// images these have.
std::int64_t decode_pieces(const IngestDeck& deck, const MediaDeck& limits,
                           std::span<const ImagePair> pairs, const LabelValues& values, int rank,
                           int size, IngestProgress& progress) {
  std::int64_t kept = 0;
  const std::size_t pieces = (pairs.size() + piece_images - 1) / piece_images;
  for (std::size_t k = static_cast<std::size_t>(rank); k < pieces;
       k += static_cast<std::size_t>(size)) {
    const auto part =
        pairs.subspan(k * piece_images, std::min(piece_images, pairs.size() - k * piece_images));
    const std::string id = identity(part, values, limits);
    const fs::path path = piece_path(deck.output, k);
    if (const auto there = read_contents(path); there && there->identity == id) {
      kept += std::ssize(part);
      progress.add(0, std::ssize(there->images), std::ssize(part));
      continue;
    }
    make_piece(path, part, values, limits, id, progress);
  }
  return kept;
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
  const std::vector<std::string> names = class_names_of(d, deck.media);
  const std::int64_t classes = !names.empty()      ? std::ssize(names)
                               : d.num_classes > 0 ? d.num_classes
                                                   : std::ssize(d.label_values);
  const LabelValues values(d, classes);
  const std::vector<ImagePair> pairs = list_images(d, deck.media);
  if (rank == 0) report_missing_pairs(pairs);
  const std::size_t pieces = (pairs.size() + piece_images - 1) / piece_images;
  log::info("ingest: {} over {} into {}", counted(std::ssize(pairs), "labelled image"),
            counted(size, "rank"), d.output);
  std::vector<std::string> files = {d.images, d.labels, d.class_names};
  for (const ImagePair& p : pairs) files.insert(files.end(), {p.image, p.labels});
  const auto lock = lock_output(deck, d.output, files, comm);

  // 2. Decode this rank's pieces, those that are not there from an earlier attempt.
  make_own_folder(d.output + ".parts", Exit::data);
  IngestProgress progress(comm, d.output, std::ssize(pairs), "image");
  std::int64_t kept = decode_pieces(d, deck.media, pairs, values, rank, size, progress);
  progress.finish();
  MPI_Allreduce(MPI_IN_PLACE, &kept, 1, MPI_INT64_T, MPI_SUM, comm);
  if (kept > 0) log::info("ingest: {} decoded by an earlier attempt", counted(kept, "image"));

  // 3. Join them on rank 0.
  std::int64_t left_out = 0;
  const int code = on_first_rank(comm, [&] {
    const Joined joined =
        join(d, pieces, pairs.size(), names, palette_of(pairs, values, deck.media));
    std::error_code none;
    fs::remove_all(d.output + ".parts", none);
    left_out = joined.broken;
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    log::info("{}, {:.1f} MB of pixels and {:.1f} of labels in {}", counted(joined.images, "image"),
              3e-6 * static_cast<double>(joined.pixels), 1e-6 * static_cast<double>(joined.pixels),
              d.output);
    print_classes(d, classes, names, joined.labels);
    if (joined.labels.blank > 0)
      log::warn("no labelled pixel in {} of {}", joined.labels.blank,
                counted(joined.images, "image"));
    log::info("{} of {} left out; {:.1f} s, {:.0f} images/s", joined.broken,
              counted(std::ssize(pairs), "image"), seconds,
              static_cast<double>(joined.images) / std::max(seconds, 1e-3));
  });
  if (code != 0) return code;  // rank 0 reports the reason
  MPI_Bcast(&left_out, 1, MPI_INT64_T, 0, comm);
  return progress.end(left_out, d.strict,
                      fmt::format("{} of {} images are broken", left_out, pairs.size()));
}

}  // namespace weft
