#include "checkpoint/safetensors_header.h"

#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "core/error.h"
#include "core/log.h"

namespace weft::detail {
namespace {

using nlohmann::json;

// More axes than any tensor has; a header of 100 MB of numbers must not fill the memory.
constexpr std::size_t most_axes = 32;

struct KnownType {
  const char* name;
  DType dtype;
};
constexpr KnownType known_types[] = {
    {"F32", DType::f32}, {"F16", DType::f16}, {"BF16", DType::bf16},   {"I64", DType::i64},
    {"I32", DType::i32}, {"U8", DType::u8},   {"BOOL", DType::boolean}};

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
    refuse(fmt::format("{}: {} in \"{}\" is no whole number, or too large", tensor(),
                       printable(text), field_));
  }
  bool boolean(bool) override { unexpected("true or false"); }
  bool null() override { unexpected("null"); }
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

  DType dtype() const {
    for (const KnownType& t : known_types)
      if (*tensor_.dtype == t.name) return t.dtype;
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
    e.dtype = dtype();
    e.begin = (*tensor_.offsets)[0];
    e.end = (*tensor_.offsets)[1];
    if (e.begin > e.end)
      refuse(fmt::format("{}: data_offsets [{}, {}] run backwards", tensor(), e.begin, e.end));
    std::uint64_t bytes = size_of(e.dtype);
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

SafetensorsHeader parse_safetensors_header(std::string_view text, const std::string& file) {
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

const char* format_name(DType t) {
  for (const KnownType& known : known_types)
    if (known.dtype == t) return known.name;
  throw Error(Exit::internal, "a type that safetensors files do not have", "", __FILE__, __LINE__);
}

}  // namespace weft::detail
