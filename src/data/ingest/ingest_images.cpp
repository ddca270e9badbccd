#include "data/ingest/ingest_images.h"

#include <omp.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <exception>
#include <filesystem>
#include <optional>

#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/json.h"
#include "core/log.h"
#include "data/clip_store.h"
#include "data/images/image_store.h"
#include "data/ingest/image_list.h"
#include "data/ingest/progress.h"
#include "media/image_file.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t piece_images = 32;

struct Decoded {
  ImageFile rgb, labels;
  std::string broken;  // why it is left out
};

Decoded decode(const ImagePair& pair, std::int64_t num_classes, const MediaDeck& limits) {
  Decoded d;
  try {
    d.rgb = read_image_file(pair.image, limits);
    const ImageSize size{d.rgb.height, d.rgb.width};
    WEFT_CHECK((pair.size.height == 0 || pair.size.height == size.height) &&
                   (pair.size.width == 0 || pair.size.width == size.width),
               Exit::data, "", "{} has {}x{} pixels (height x width), the list says {}x{}",
               pair.image, size.height, size.width, pair.size.height, pair.size.width);
    d.labels = read_label_file(pair.labels, limits);
    WEFT_CHECK(d.labels.height == size.height && d.labels.width == size.width, Exit::data, "",
               "{} has {}x{} labels (height x width), its image {} has {}x{} pixels", pair.labels,
               d.labels.height, d.labels.width, pair.image, size.height, size.width);
    const std::uint8_t most = *std::max_element(d.labels.values.begin(), d.labels.values.end());
    WEFT_CHECK(num_classes == 0 || most <= num_classes, Exit::data, "",
               "{} has the value {}, ingest.num_classes = {} (0 is unlabelled, v is class v - 1)",
               pair.labels, most, num_classes);
  } catch (const Error& e) {
    d = {};
    d.broken = e.what();
    if (!pair.where.empty()) d.broken += fmt::format(" ({})", pair.where);
  }
  return d;
}

// What makes a piece: it is decoded again if any of this changes.
std::string identity(std::span<const ImagePair> pairs, std::int64_t num_classes) {
  std::string all = fmt::format("1 {}\n", num_classes);
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

void make_piece(const fs::path& path, std::span<const ImagePair> pairs, std::int64_t num_classes,
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
          decoded[i] = decode(pairs[first + i], num_classes, limits);
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

struct Joined {
  std::int64_t images = 0, broken = 0;
  std::uint64_t pixels = 0;
};

Joined join(const IngestDeck& deck, std::size_t pieces, std::size_t pairs,
            const std::vector<std::string>& names) {
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
  WEFT_CHECK(!entries.empty(), Exit::data, "check the paths in the list, and ingest.root",
             "no image came out of {}; the first fault: {}", pairs, first_fault);
  joined.images = std::ssize(entries);
  const std::int64_t classes =
      names.empty() ? deck.num_classes : static_cast<std::int64_t>(names.size());
  ImageStoreWriter writer(deck.output, std::move(entries), classes, names);
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
  writer.commit();
  return joined;
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
  const std::vector<ImagePair> pairs = list_images(d, deck.media);
  const std::size_t pieces = (pairs.size() + piece_images - 1) / piece_images;
  log::info("ingest: {} over {} into {}", counted(std::ssize(pairs), "labelled image"),
            counted(size, "rank"), d.output);
  warn_of_replacing(d.output);
  const auto lock = lock_store(d.output, "ingest.output");

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
    const std::string id = identity(part, classes);
    const fs::path path = piece_path(d.output, k);
    if (const auto there = read_header(path); there && there->identity == id) {
      kept += std::ssize(part);
      progress.add(0, std::ssize(there->images), std::ssize(part));
      continue;
    }
    make_piece(path, part, classes, deck.media, id, progress);
  }
  progress.finish();
  MPI_Allreduce(MPI_IN_PLACE, &kept, 1, MPI_INT64_T, MPI_SUM, comm);
  if (kept > 0) log::info("ingest: {} decoded by an earlier attempt", counted(kept, "image"));

  // 3. Join them on rank 0.
  std::array<std::int64_t, 2> end{};  // exit code; broken images
  std::exception_ptr failure;
  if (rank == 0) {
    try {
      const Joined joined = join(d, pieces, pairs.size(), names);
      fs::remove_all(d.output + ".parts", failed);
      end[1] = joined.broken;
      const double seconds =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      log::info("{}, {:.1f} MB of pixels and {:.1f} of labels in {}",
                counted(joined.images, "image"), 3e-6 * static_cast<double>(joined.pixels),
                1e-6 * static_cast<double>(joined.pixels), d.output);
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
