#include "checkpoint/safetensors.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <set>

#include "config/deck.h"
#include "core/error.h"
#include "core/file_kind.h"
#include "core/json.h"
#include "core/log.h"

namespace weft {
namespace {

using detail::SafetensorsHeader;
using nlohmann::json;

// Bytes: the limit of the format's own implementation; more is an attack or an accident.
constexpr std::uint64_t longest_header = 100'000'000;

// Metadata keys of hashes begin so: "xxh3" of the header, "xxh3:NAME" of tensor NAME.
constexpr std::string_view hash_key = "xxh3";
// The header's hash as it stands in the JSON that weft writes.
std::string header_hash_json(const std::string& digits) {
  return "\"" + std::string(hash_key) + "\":\"" + digits + "\"";
}

// More axes than any tensor has; a header of 100 MB of numbers must not fill the memory.
constexpr std::size_t most_axes = 32;

struct KnownType {
  std::string_view name;
  DType dtype;
};
constexpr KnownType known_types[] = {
    {"F32", DType::f32}, {"F16", DType::f16}, {"BF16", DType::bf16},   {"I64", DType::i64},
    {"I32", DType::i32}, {"U8", DType::u8},   {"BOOL", DType::boolean}};
// Types of which only the bytes an element are known: a file may hold such tensors, unread.
constexpr std::pair<std::string_view, std::uint64_t> other_types[] = {
    {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"I8", 1},  {"I16", 2}, {"U16", 2},
    {"U32", 4},     {"U64", 8},     {"F64", 8}, {"C64", 8}};
// The format's own spelling of a type.
std::string_view format_name(DType t) {
  for (const KnownType& known : known_types)
    if (known.dtype == t) return known.name;
  throw Error(Exit::internal, "a type that safetensors files do not have", "", __FILE__, __LINE__);
}

// Follows the parser's events instead of building a document: it keeps only what is used, and
// rejects nesting deeper than the format's at once.
//   { "__metadata__": {text: text}, NAME: {"dtype": text, "shape": [n], "data_offsets": [n, n]} }
class HeaderReader : public json::json_sax_t {
 public:
  explicit HeaderReader(const std::string& file) : file_(file) {}

  SafetensorsHeader take() { return std::move(header_); }

  bool start_object(std::size_t) override {
    if (place_ == Place::start) {
      place_ = Place::root;
    } else if (place_ == Place::root && name_ == "__metadata__") {
      if (metadata_seen_) refuse("\"__metadata__\" occurs twice");
      metadata_seen_ = true;
      place_ = Place::metadata;
    } else if (place_ == Place::root) {
      place_ = Place::tensor;
      tensor_ = {};
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool key(std::string& k) override {
    if (place_ == Place::root)
      name_ = k;
    else
      field_ = k;
    return true;
  }

  bool end_object() override {
    if (place_ == Place::tensor) finish_tensor();
    place_ = place_ == Place::root ? Place::start : Place::root;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ != Place::tensor) unexpected("a list");
    auto& list = field_ == "shape" ? tensor_.shape : tensor_.offsets;
    if (field_ != "shape" && field_ != "data_offsets") unknown_or("a list");
    if (list) refuse(fmt::format("{}: \"{}\" occurs twice", tensor(), field_));
    list.emplace();
    place_ = Place::list;
    return true;
  }
  bool end_array() override {
    place_ = Place::tensor;
    return true;
  }

  bool string(std::string& text) override {
    if (place_ == Place::metadata) {
      if (!header_.metadata.emplace(field_, text).second)
        refuse(fmt::format("metadata \"{}\" occurs twice", printable(field_)));
      return true;
    }
    if (place_ != Place::tensor) unexpected("a text");
    if (field_ != "dtype") unknown_or("a text");
    if (tensor_.dtype) refuse(fmt::format("{}: \"dtype\" occurs twice", tensor()));
    tensor_.dtype = text;
    return true;
  }

  bool number_unsigned(std::uint64_t value) override {
    if (place_ != Place::list) unexpected("a number");
    auto& list = field_ == "shape" ? *tensor_.shape : *tensor_.offsets;
    if (list.size() == most_axes)
      refuse(fmt::format("{}: \"{}\" has more than {} numbers", tensor(), field_, most_axes));
    if (value > std::uint64_t(std::numeric_limits<std::int64_t>::max()))
      refuse(fmt::format("{}: {} in \"{}\" is too large", tensor(), value, field_));
    list.push_back(value);
    return true;
  }
  bool number_integer(std::int64_t value) override {
    if (place_ != Place::list) unexpected("a number");
    refuse(fmt::format("{}: \"{}\" has a negative number, {}", tensor(), field_, value));
  }
  bool number_float(double, const std::string& text) override {
    if (place_ != Place::list) unexpected("a number");
    refuse(fmt::format("{}: {} in \"{}\" is not a whole number, or is too large", tensor(),
                       printable(text), field_));
  }
  bool boolean(bool) override { unexpected("true or false"); }
  // Some programs write "__metadata__": null for none.
  bool null() override {
    if (place_ != Place::root || name_ != "__metadata__") unexpected("null");
    return true;
  }
  bool binary(json::binary_t&) override { unexpected("binary data"); }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& e) override {
    refuse(fmt::format("the header is not JSON at byte {}: {}", position, printable(e.what())));
  }

 private:
  enum class Place { start, root, metadata, tensor, list };
  struct Raw {
    std::optional<std::string> dtype;
    std::optional<std::vector<std::uint64_t>> shape, offsets;
  };

  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(Exit::data, fmt::format("{}: {}", file_, what),
                "not a safetensors file, or a damaged one: copy or export it again", __FILE__,
                __LINE__);
  }
  std::string tensor() const { return fmt::format("tensor {}", printable(name_)); }

  [[noreturn]] void unexpected(const char* what) const {
    switch (place_) {
      case Place::start:
        refuse(fmt::format("the header is {}, not an object of tensors", what));
      case Place::root:
        refuse(fmt::format("entry {} is {}, not an object", printable(name_), what));
      case Place::metadata:
        refuse(fmt::format("metadata \"{}\" is {}, not a text", printable(field_), what));
      case Place::tensor:
        unknown_or(what);
      case Place::list:
        break;
    }
    refuse(fmt::format("{}: \"{}\" holds {}, not whole numbers", tensor(), field_, what));
  }
  [[noreturn]] void unknown_or(const char* what) const {
    if (field_ == "dtype" || field_ == "shape" || field_ == "data_offsets")
      refuse(fmt::format("{}: \"{}\" is {}", tensor(), field_, what));
    refuse(fmt::format("{}: unknown field \"{}\"", tensor(), printable(field_)));
  }

  // Takes the type, and returns its bytes an element.
  std::uint64_t set_type(SafetensorEntry& e) const {
    for (const auto& [name, dtype] : known_types)
      if (*tensor_.dtype == name) {
        e.type = name;
        e.dtype = dtype;
        return size_of(dtype);
      }
    for (const auto& [name, bytes] : other_types)
      if (*tensor_.dtype == name) {
        e.type = name;
        return bytes;
      }
    throw Error(Exit::data,
                fmt::format("{}: {} has dtype {}, which weft does not read", file_, tensor(),
                            printable(*tensor_.dtype)),
                "convert it to one of F32, F16, BF16, I64, I32, U8, BOOL", __FILE__, __LINE__);
  }

  void finish_tensor() {
    if (!tensor_.dtype) refuse(fmt::format("{} has no \"dtype\"", tensor()));
    if (!tensor_.shape) refuse(fmt::format("{} has no \"shape\"", tensor()));
    if (!tensor_.offsets) refuse(fmt::format("{} has no \"data_offsets\"", tensor()));
    if (tensor_.offsets->size() != 2)
      refuse(fmt::format("{}: \"data_offsets\" has {} numbers, not 2", tensor(),
                         tensor_.offsets->size()));
    SafetensorEntry e;
    e.name = name_;
    e.begin = (*tensor_.offsets)[0];
    e.end = (*tensor_.offsets)[1];
    if (e.begin > e.end)
      refuse(fmt::format("{}: data_offsets [{}, {}] run backwards", tensor(), e.begin, e.end));
    std::uint64_t bytes = set_type(e);
    // A zero makes the tensor empty, but must not hide an overflow of the other axes.
    bool empty = false;
    for (const std::uint64_t n : *tensor_.shape) {
      e.shape.push_back(static_cast<std::int64_t>(n));
      empty = empty || n == 0;
      if (n != 0 && __builtin_mul_overflow(bytes, n, &bytes))
        refuse(fmt::format("{}: shape [{}] has more bytes than 64 bits count", tensor(),
                           fmt::join(*tensor_.shape, ", ")));
    }
    if (empty) bytes = 0;
    if (e.end - e.begin != bytes)
      refuse(fmt::format("{}: shape [{}] of {} takes {} bytes, but data_offsets [{}, {}] span {}",
                         tensor(), fmt::join(e.shape, ", "), *tensor_.dtype, bytes, e.begin, e.end,
                         e.end - e.begin));
    header_.entries.push_back(std::move(e));
  }

  const std::string& file_;
  SafetensorsHeader header_;
  Place place_ = Place::start;
  std::string name_, field_;  // of the entry at hand, and the key within it
  Raw tensor_;
  bool metadata_seen_ = false;
};

}  // namespace

SafetensorsHeader detail::parse_safetensors_header(std::string_view text, const std::string& file) {
  // The JSON library takes a zero byte as the end of the text and would ignore the rest.
  const std::size_t zero = text.find('\0');
  WEFT_CHECK(zero == text.npos, Exit::data,
             "not a safetensors file, or a damaged one: copy or export it again",
             "{}: the header is not JSON at byte {}: a zero byte", file, zero);
  HeaderReader reader(file);
  // Strict: nothing but white space may follow the object, which is how headers are padded.
  json::sax_parse(text, &reader, json::input_format_t::json, true);
  return reader.take();
}

namespace {

constexpr const char* damaged = "not a safetensors file, or a damaged one: copy or export it again";

constexpr const char* other_format =
    "weft reads safetensors here; convert_weights.py (docs/checkpoints.md) makes them of PyTorch's "
    "files";

constexpr const char* rewritten =
    "copy or export it again; a program that changed it must leave out the metadata \"xxh3...\"";

static_assert(std::endian::native == std::endian::little, "the format's numbers are little-endian");

// Every byte of the data belongs to exactly one tensor. `entries` are sorted by range.
void check_tiling(std::span<const SafetensorEntry> entries, std::uint64_t data_bytes,
                  const std::string& file) {
  std::uint64_t cursor = 0;
  const SafetensorEntry* before = nullptr;
  for (const SafetensorEntry& e : entries) {
    const std::string name = printable(e.name);
    WEFT_CHECK(e.begin >= cursor, Exit::data, damaged, "{}: tensors {} and {} overlap at byte {}",
               file, printable(before->name), name, e.begin);
    WEFT_CHECK(e.begin == cursor, Exit::data, damaged,
               "{}: {} bytes before tensor {} belong to no tensor", file, e.begin - cursor, name);
    WEFT_CHECK(e.end <= data_bytes, Exit::data, damaged,
               "{}: tensor {} ends at byte {} of the data, but the file has {}", file, name, e.end,
               data_bytes);
    cursor = e.end;
    before = &e;
  }
  WEFT_CHECK(cursor == data_bytes, Exit::data, damaged, "{}: the last {} bytes belong to no tensor",
             file, data_bytes - cursor);
}

}  // namespace

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  SafetensorsFile f;
  f.path_ = path;
  f.pieces_ = std::make_shared<Pieces>();
  f.file_ = std::make_shared<const File>(File::open(path, Exit::data));
  const std::string name = path.string();
  const std::uint64_t size = f.file_->size();
  if (size < 8) refuse_other_kind(path, Exit::data, other_format);
  WEFT_CHECK(size >= 8, Exit::data, damaged, "{} has {} bytes: too short for safetensors", name,
             size);
  std::uint64_t length = 0;
  f.file_->read(std::as_writable_bytes(std::span(&length, 1)), 0);
  if (length > size - 8) {
    refuse_other_kind(path, Exit::data, other_format);
    const std::string_view begin(reinterpret_cast<const char*>(&length), 8);
    WEFT_CHECK(
        !std::ranges::all_of(begin, [](char c) { return c == '\n' || std::isprint(c) != 0; }),
        Exit::data, other_format, "{} is text, which begins with \"{}\"", name, printable(begin));
  }
  WEFT_CHECK(length <= longest_header, Exit::data, damaged,
             "{}: a header of {} bytes; the format allows {}", name, length, longest_header);
  WEFT_CHECK(length <= size - 8, Exit::data, damaged,
             "{}: a header of {} bytes in a file of {} bytes", name, length, size);
  f.data_offset_ = 8 + length;

  std::string json(length, '\0');
  f.file_->read(std::as_writable_bytes(std::span(json)), 8);
  if (!json.starts_with('{')) refuse_other_kind(path, Exit::data, other_format);
  WEFT_CHECK(json.starts_with('{'), Exit::data, damaged,
             "{}: the header does not begin with a brace", name);
  detail::SafetensorsHeader header = detail::parse_safetensors_header(json, name);
  f.entries_ = std::move(header.entries);
  f.metadata_ = std::move(header.metadata);

  // By place in the file: the tiling check needs one pass, and readers move forward through it.
  std::stable_sort(f.entries_.begin(), f.entries_.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  f.by_name_.resize(f.entries_.size());
  std::iota(f.by_name_.begin(), f.by_name_.end(), 0u);
  const auto name_at = [&](std::uint32_t i) -> const std::string& { return f.entries_[i].name; };
  std::sort(f.by_name_.begin(), f.by_name_.end(),
            [&](auto a, auto b) { return name_at(a) < name_at(b); });
  // Keys that differ as JSON text may be the same name ("\\u0061" is "a"): compare parsed names.
  const auto twin = std::adjacent_find(f.by_name_.begin(), f.by_name_.end(),
                                       [&](auto a, auto b) { return name_at(a) == name_at(b); });
  WEFT_CHECK(twin == f.by_name_.end(), Exit::data, damaged, "{}: tensor {} occurs twice", name,
             printable(name_at(*twin)));
  check_tiling(f.entries_, size - f.data_offset_, name);
  f.take_hashes(json);
  return f;
}

// Moves the hashes from the metadata to the entries and checks the header's own.
void SafetensorsFile::take_hashes(const std::string& json) {
  const std::string name = path_.string();
  std::size_t tensors = 0;
  std::optional<std::string> of_header;
  for (auto it = metadata_.begin(); it != metadata_.end();) {
    if (!it->first.starts_with(hash_key)) {
      ++it;
      continue;
    }
    const std::string tensor = it->first.substr(hash_key.size());
    const std::optional<Hash128> hash = hash_from_hex(it->second);
    WEFT_CHECK(hash, Exit::data, damaged, "{}: the metadata {} is no XXH3-128: {}", name,
               printable(it->first), printable(it->second));
    if (tensor.empty()) {
      of_header = it->second;
    } else if (tensor[0] == ':') {
      const SafetensorEntry* entry = find(tensor.substr(1));
      WEFT_CHECK(entry != nullptr, Exit::data, damaged, "{}: a hash of tensor {}, which it has not",
                 name, printable(tensor.substr(1)));
      entries_[entry - entries_.data()].hash = hash;
      ++tensors;
    } else {
      ++it;
      continue;
    }
    it = metadata_.erase(it);
  }
  hashed_ = of_header.has_value();
  if (!hashed_ && tensors == 0) return;
  WEFT_CHECK(hashed_ && tensors == entries_.size(), Exit::data, rewritten,
             "{}: the header is damaged: {} tensors, hashes of {}{}", name, entries_.size(),
             tensors, hashed_ ? "" : ", none of the header");
  // The header was hashed with zeros in place of its own hash.
  std::string zeros = json;
  const std::string here = header_hash_json(*of_header);
  const std::size_t at = zeros.find(here);
  if (at != zeros.npos) zeros.replace(at, here.size(), header_hash_json(std::string(32, '0')));
  const std::string found = to_hex(hash128(zeros));
  WEFT_CHECK(at != zeros.npos && found == *of_header, Exit::data, rewritten,
             "{}: the header is damaged: its XXH3-128 is {}, expected {}", name, found, *of_header);
}

void SafetensorsFile::compare(const SafetensorEntry& entry, const Hash128& found) const {
  WEFT_CHECK(found == *entry.hash, Exit::data, rewritten,
             "{}: tensor {} is damaged: its XXH3-128 is {}, expected {}", path_.string(),
             printable(entry.name), to_hex(found), to_hex(*entry.hash));
}

const SafetensorEntry* SafetensorsFile::find(const std::string& name) const {
  const auto it =
      std::lower_bound(by_name_.begin(), by_name_.end(), name,
                       [&](std::uint32_t i, const std::string& n) { return entries_[i].name < n; });
  return it != by_name_.end() && entries_[*it].name == name ? &entries_[*it] : nullptr;
}

const SafetensorEntry& SafetensorsFile::at(const std::string& name) const {
  if (const SafetensorEntry* e = find(name)) return *e;
  std::vector<std::string> known;
  for (const SafetensorEntry& e : entries_) known.push_back(e.name);
  const std::string near = nearest_name(name, known);
  throw Error(Exit::data, fmt::format("{} has no tensor {}", path_.string(), name),
              near.empty() ? fmt::format("it has {} tensors: weft inspect lists them", known.size())
                           : fmt::format("the nearest it has is {}", printable(near)),
              __FILE__, __LINE__);
}

void SafetensorsFile::read(const SafetensorEntry& entry, std::span<std::byte> out) const {
  WEFT_ASSERT(out.size() == entry.end - entry.begin);
  file_->read(out, data_offset_ + entry.begin);
  if (entry.hash) compare(entry, hash128(out));
}

std::vector<float> SafetensorsFile::read_f32(const SafetensorEntry& entry) const {
  check_floating(entry, path_);
  std::vector<float> values((entry.end - entry.begin) / size_of(*entry.dtype));
  read_f32(entry, 0, values);
  return values;
}

void SafetensorsFile::read_part(const SafetensorEntry& entry, std::int64_t first,
                                std::span<std::byte> out) const {
  const std::uint64_t begin =
      entry.begin + static_cast<std::uint64_t>(first) * size_of(*entry.dtype);
  WEFT_ASSERT(first >= 0 && begin + out.size() <= entry.end);
  if (out.size() == entry.end - entry.begin) return read(entry, out);
  file_->read(out, data_offset_ + begin);
  if (!entry.hash) return;
  // The first piece starts the hash. A piece out of order, or of another tensor, cannot continue
  // it: such a tensor is not compared.
  if (begin == entry.begin) {
    pieces_->begin = pieces_->next = begin;
    pieces_->hasher.reset();
  }
  if (pieces_->begin != entry.begin || pieces_->next != begin) return;
  pieces_->hasher.add(out);
  pieces_->next += out.size();
  if (pieces_->next == entry.end) compare(entry, pieces_->hasher.value());
}

void SafetensorsFile::read_f32(const SafetensorEntry& entry, std::int64_t first,
                               std::span<float> out) const {
  check_floating(entry, path_);
  if (entry.dtype == DType::f32) return read_part(entry, first, std::as_writable_bytes(out));
  std::vector<std::uint16_t> raw(out.size());
  read_part(entry, first, std::as_writable_bytes(std::span(raw)));
  const bool half = entry.dtype == DType::f16;
  for (std::size_t i = 0; i < raw.size(); ++i)
    out[i] = half ? static_cast<float>(std::bit_cast<f16>(raw[i]))
                  : static_cast<float>(std::bit_cast<bf16>(raw[i]));
}

void SafetensorsFile::read_bf16(const SafetensorEntry& entry, std::int64_t first,
                                std::span<bf16> out) const {
  if (entry.dtype == DType::bf16) return read_part(entry, first, std::as_writable_bytes(out));
  std::vector<float> wide(out.size());
  read_f32(entry, first, wide);
  for (std::size_t i = 0; i < wide.size(); ++i) out[i] = bf16(wide[i]);
}

std::vector<std::int64_t> SafetensorsFile::read_i64(const SafetensorEntry& entry) const {
  const bool whole = entry.dtype == DType::i64 || entry.dtype == DType::i32 ||
                     entry.dtype == DType::u8 || entry.dtype == DType::boolean;
  WEFT_CHECK(whole, Exit::data, "I64, I32, U8 or BOOL is wanted here", "{}: tensor {} is {}",
             path_.string(), printable(entry.name), entry.type);
  const std::size_t width = size_of(*entry.dtype), n = (entry.end - entry.begin) / width;
  std::vector<std::byte> raw(n * width);
  read(entry, raw);
  std::vector<std::int64_t> values(n);
  for (std::size_t i = 0; i < n; ++i) {
    const std::byte* p = raw.data() + i * width;
    if (entry.dtype == DType::i64) {
      std::memcpy(&values[i], p, 8);
    } else if (entry.dtype == DType::i32) {
      std::int32_t v = 0;
      std::memcpy(&v, p, 4);
      values[i] = v;
    } else {
      values[i] = std::to_integer<std::int64_t>(*p);
      WEFT_CHECK(entry.dtype == DType::u8 || values[i] <= 1, Exit::data, damaged,
                 "{}: element {} of the BOOL tensor {} is {}", path_.string(), i,
                 printable(entry.name), values[i]);
    }
  }
  return values;
}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path,
                                     std::span<const SafetensorWrite> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : path_(path), temporary_(path.string() + ".tmp"), tensors_(tensors.size()) {
  // Wide elements first, so that every tensor is aligned for whoever maps the file.
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return size_of(tensors[a].dtype) > size_of(tensors[b].dtype);
  });
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  // Reserves room for the hashes, which are known only at the end. The file's own metadata comes
  // first, as before.
  const std::string zeros(32, '0'), key(hash_key);
  nlohmann::ordered_json& texts = header["__metadata__"] = metadata;
  texts[key] = zeros;
  for (const std::size_t i : order) texts[key + ":" + tensors[i].name] = zeros;
  std::uint64_t offset = 0;
  for (const std::size_t i : order) {
    const SafetensorWrite& t = tensors[i];
    std::uint64_t bytes = size_of(t.dtype);
    for (const std::int64_t n : t.shape) bytes *= static_cast<std::uint64_t>(n);
    WEFT_ASSERT(t.name != "__metadata__" && !header.contains(t.name));
    header[t.name] = {{"dtype", format_name(t.dtype)},
                      {"shape", t.shape},
                      {"data_offsets", {offset, offset + bytes}}};
    tensors_[i].begin = offset;
    tensors_[i].bytes = bytes;
    offset += bytes;
  }
  missing_ = offset;
  // Padded with spaces to eight bytes, as the format's own writer does.
  std::string json =
      dump_json(header, -1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  json.resize((json.size() + 7) / 8 * 8, ' ');
  WEFT_CHECK(
      json.size() <= longest_header, Exit::data,
      "write fewer tensors to a file (some hundred thousand fit)",
      "{}: the names and shapes of {} tensors take {} bytes, a safetensors file has room for {}",
      path_.string(), tensors.size(), json.size(), longest_header);
  const std::uint64_t length = json.size();
  for (Written& t : tensors_) t.begin += 8 + length;
  // Finds where the digits go: the keys keep the order of their insertion. The first match after
  // the header's key is the header's own value, so the first tensor skips it.
  std::size_t at = json.find(header_hash_json(zeros));
  WEFT_ASSERT(at != json.npos);
  for (const std::size_t i : order) {
    at = json.find("\":\"" + zeros + "\"", at + 1);
    if (i == order.front()) at = json.find("\":\"" + zeros + "\"", at + 1);
    WEFT_ASSERT(at != json.npos);
    tensors_[i].digits = at + 3;
  }

  ::unlink(temporary_.c_str());  // left over from a crash; no other process writes this name
  try {
    file_.emplace(File::create(temporary_, Exit::data));
    file_->write(std::as_bytes(std::span(&length, 1)), 0);
    file_->write(std::as_bytes(std::span(json)), 8);
    header_ = std::move(json);
  } catch (...) {
    ::unlink(temporary_.c_str());
    throw;
  }
}

SafetensorsWriter::~SafetensorsWriter() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void SafetensorsWriter::write(std::size_t i, std::span<const std::byte> bytes,
                              std::uint64_t first) {
  Written& t = tensors_.at(i);
  WEFT_ASSERT(missing_ >= bytes.size() && first == t.next);
  file_->write(bytes, t.begin + first);
  missing_ -= bytes.size();
  t.next += bytes.size();
  if (bytes.size() == t.bytes) {
    t.hash = hash128(bytes);
    return;
  }
  if (!t.hasher) t.hasher = std::make_unique<Hasher>();
  t.hasher->add(bytes);
  if (t.next < t.bytes) return;
  t.hash = t.hasher->value();
  t.hasher.reset();
}

void SafetensorsWriter::finish() {
  WEFT_ASSERT(missing_ == 0);
  for (const Written& t : tensors_) header_.replace(t.digits, 32, to_hex(t.hash));
  // The header's hash covers the tensors' hashes, so it comes last.
  const std::string zeros = header_hash_json(std::string(32, '0'));
  const std::string digits = header_hash_json(to_hex(hash128(header_)));
  header_.replace(header_.find(zeros), zeros.size(), digits);
  file_->write(std::as_bytes(std::span(header_)), 8);
  file_->sync();
  file_->close();
  rename_file(temporary_, path_, Exit::data);
  temporary_.clear();
  sync_directory(path_.parent_path(), Exit::data);
}

namespace {

template <class T>
std::vector<std::byte> rounded(std::span<const float> values, const std::filesystem::path& file,
                               const std::string& tensor) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  auto* to = reinterpret_cast<T*>(bytes.data());
  for (std::size_t i = 0; i < values.size(); ++i) {
    to[i] = T(values[i]);
    WEFT_CHECK(std::isfinite(static_cast<float>(to[i])) || !std::isfinite(values[i]), Exit::data,
               "take bf16, which has the range of f32, or f32",
               "{}: tensor {} has the value {:g}, which is beyond the range of {}", file.string(),
               tensor, values[i], name_of(dtype_of<T>::value));
  }
  return bytes;
}

}  // namespace

std::vector<std::byte> floats_as(std::span<const float> values, DType dtype,
                                 const std::filesystem::path& file, const std::string& tensor) {
  if (dtype == DType::bf16) return rounded<bf16>(values, file, tensor);
  if (dtype == DType::f16) return rounded<f16>(values, file, tensor);
  return rounded<float>(values, file, tensor);
}

bool is_floating(const SafetensorEntry& entry) {
  return entry.dtype == DType::f32 || entry.dtype == DType::f16 || entry.dtype == DType::bf16;
}

void check_floating(const SafetensorEntry& entry, const std::filesystem::path& file) {
  const bool other = entry.type.starts_with("F");  // fp8 or F64
  WEFT_CHECK(is_floating(entry), Exit::data,
             other ? "convert_weights.py (docs/checkpoints.md) makes BF16 or F32 of it"
                   : "F32, F16 or BF16 is wanted here",
             "{}: tensor {} is {}", file.string(), printable(entry.name), entry.type);
}

void write_safetensors(const std::filesystem::path& path, std::span<const SafetensorWrite> tensors,
                       const std::map<std::string, std::string>& metadata) {
  SafetensorsWriter writer(path, tensors, metadata);
  for (std::size_t i = 0; i < tensors.size(); ++i) writer.write(i, tensors[i].bytes);
  writer.finish();
}

}  // namespace weft
