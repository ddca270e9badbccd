#include "train/checkpoint_manifest.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/error.h"

namespace weft::checkpoint {
namespace {

using nlohmann::ordered_json;

constexpr const char* schema = "weft-checkpoint-1";
constexpr const char* tail_begin = ",\n \"manifest_hash\": \"";
constexpr const char* tail_end = "\"\n}\n";

std::string shard_name(std::size_t rank) { return fmt::format("shard_{:04d}.bin", rank); }

std::string tail(const std::string& hex) { return tail_begin + hex + tail_end; }

std::uint64_t block_count(std::uint64_t bytes) { return (bytes + block_bytes - 1) / block_bytes; }

[[noreturn]] void refuse(const std::string& where, const std::string& what) {
  throw Error(Exit::checkpoint, fmt::format("{}: {}", where, what),
              "an older checkpoint of the run may still be usable", __FILE__, __LINE__);
}

// len * part / parts without overflow.
std::int64_t cut_point(std::int64_t len, std::int64_t part, std::int64_t parts) {
  return len / parts * part + len % parts * part / parts;
}

// A shard has to be exactly what its place in the list makes it: anything else was not written by
// a save, and reading by it could go wrong in ways that nobody has tried.
void check_shards(const Manifest& m, const std::string& where) {
  if (m.shards.empty()) refuse(where, "lists no shards");
  for (std::size_t r = 0; r < m.shards.size(); ++r) {
    const ShardTable& s = m.shards[r];
    const ShardTable expected =
        shard_layout(m.arrays, static_cast<int>(r), static_cast<int>(m.shards.size()));
    bool same = s.file == expected.file && s.bytes == expected.bytes &&
                s.blocks.size() == block_count(s.bytes) &&
                s.ranges.size() == expected.ranges.size();
    for (std::size_t i = 0; same && i < s.ranges.size(); ++i) {
      const Range &a = s.ranges[i], &b = expected.ranges[i];
      same = a.array == b.array && a.begin == b.begin && a.end == b.end && a.offset == b.offset;
    }
    if (!same) refuse(where, fmt::format("the entry of {} contradicts the arrays", expected.file));
  }
}

// Any member that is missing or of another type throws the JSON library's exception, which the
// caller turns into an Error.
Manifest from_json(const ordered_json& j, const std::string& where) {
  Manifest m;
  m.info.step = j.at("step").get<std::int64_t>();
  m.info.build = j.at("build").get<std::string>();
  m.info.deck = j.at("deck").get<std::string>();
  m.info.notes = j.at("notes").get<std::map<std::string, std::string>>();
  for (const auto& a : j.at("arrays")) {
    m.arrays.push_back({a.at("name").get<std::string>(), a.at("elements").get<std::int64_t>()});
    const std::int64_t n = m.arrays.back().elements;
    if (n < 0 || n > (std::int64_t{1} << 50)) refuse(where, "an array has no believable length");
  }
  for (const auto& t : j.at("tensors"))
    m.info.tensors.push_back({t.at("name").get<std::string>(),
                              t.at("shape").get<std::vector<std::int64_t>>(),
                              t.at("offset").get<std::int64_t>()});
  for (const TensorRange& t : m.info.tensors) {
    std::int64_t end = 1;
    bool sound = t.offset >= 0;
    for (const std::int64_t d : t.shape)
      sound = sound && d >= 0 && !__builtin_mul_overflow(end, d, &end);
    if (!sound || __builtin_add_overflow(end, t.offset, &end))
      refuse(where, fmt::format("tensor {} has no believable shape or offset", t.name));
  }
  for (const auto& s : j.at("shards")) {
    ShardTable shard;
    shard.file = s.at("file").get<std::string>();
    shard.bytes = s.at("bytes").get<std::uint64_t>();
    for (const auto& r : s.at("ranges"))
      shard.ranges.push_back({r.at("array").get<std::string>(), r.at("begin").get<std::int64_t>(),
                              r.at("end").get<std::int64_t>(),
                              r.at("offset").get<std::uint64_t>()});
    for (const auto& b : s.at("blocks")) {
      const auto hash = hash_from_hex(b.get<std::string>());
      if (!hash) refuse(where, "a block's hash is not 32 hexadecimal digits");
      shard.blocks.push_back(*hash);
    }
    m.shards.push_back(std::move(shard));
  }
  const auto hash = hash_from_hex(j.at("state_hash").get<std::string>());
  if (!hash || *hash != state_hash(m.shards)) refuse(where, "the state's hash is wrong");
  m.state_hash = *hash;
  check_shards(m, where);
  return m;
}

}  // namespace

ShardTable shard_layout(std::span<const ArrayLength> arrays, int rank, int ranks) {
  ShardTable shard;
  shard.file = shard_name(static_cast<std::size_t>(rank));
  for (const ArrayLength& a : arrays) {
    const Range r{a.name, cut_point(a.elements, rank, ranks),
                  cut_point(a.elements, rank + 1, ranks), shard.bytes};
    shard.bytes += static_cast<std::uint64_t>(r.end - r.begin) * sizeof(float);
    shard.ranges.push_back(r);
  }
  return shard;
}

Hash128 state_hash(std::span<const ShardTable> shards) {
  Hasher hasher;
  for (const ShardTable& s : shards) hasher.add(std::as_bytes(std::span(s.blocks)));
  return hasher.value();
}

// One space of indent: a person can read it and the size stays near the data's.
std::string to_text(const Manifest& m) {
  ordered_json j;
  j["schema"] = schema;
  j["step"] = m.info.step;
  j["build"] = m.info.build;
  j["deck"] = m.info.deck;
  j["notes"] = m.info.notes;
  j["dtype"] = "f32, little-endian";
  j["block_bytes"] = block_bytes;
  j["hash"] = "XXH3-128";
  j["arrays"] = ordered_json::array();
  for (const ArrayLength& a : m.arrays)
    j["arrays"].push_back({{"name", a.name}, {"elements", a.elements}});
  j["tensors"] = ordered_json::array();
  for (const TensorRange& t : m.info.tensors)
    j["tensors"].push_back({{"name", t.name}, {"shape", t.shape}, {"offset", t.offset}});
  j["shards"] = ordered_json::array();
  for (const ShardTable& s : m.shards) {
    ordered_json shard = {{"file", s.file}, {"bytes", s.bytes}};
    shard["ranges"] = ordered_json::array();
    for (const Range& r : s.ranges)
      shard["ranges"].push_back(
          {{"array", r.array}, {"begin", r.begin}, {"end", r.end}, {"offset", r.offset}});
    shard["blocks"] = ordered_json::array();
    for (const Hash128& h : s.blocks) shard["blocks"].push_back(to_hex(h));
    j["shards"].push_back(std::move(shard));
  }
  j["state_hash"] = to_hex(m.state_hash);
  // Names of hosts and paths may hold any bytes: what is not UTF-8 is replaced, not refused.
  std::string text = j.dump(1, ' ', false, ordered_json::error_handler_t::replace);
  text.resize(text.size() - 2);  // the last "\n}"
  return text + tail(to_hex(hash128(text)));
}

std::string manifest_hash(const std::string& text) {
  const std::size_t length = tail(std::string(32, '0')).size();
  if (text.size() < length) return "";
  return text.substr(text.size() - length + std::string_view(tail_begin).size(), 32);
}

Manifest manifest_from_text(const std::string& text, const std::string& where) {
  const std::size_t length = tail(std::string(32, '0')).size();
  if (text.size() <= length) refuse(where, fmt::format("cut off at {} bytes", text.size()));
  const std::string body = text.substr(0, text.size() - length);
  if (text.substr(body.size()) != tail(to_hex(hash128(body))))
    refuse(where, text.ends_with(tail_end) ? "damaged: it does not match its own hash"
                                           : "cut off or damaged: its end is missing");
  try {
    const ordered_json j = ordered_json::parse(text);
    const std::string found = j.at("schema").get<std::string>();
    if (found != schema)
      throw Error(Exit::checkpoint,
                  fmt::format("{}: written in format {}, this weft reads {}", where, found, schema),
                  "use the version of weft that wrote it", __FILE__, __LINE__);
    if (j.at("block_bytes").get<std::uint64_t>() != block_bytes)
      refuse(where, "blocks of another size than this weft's");
    return from_json(j, where);
  } catch (const ordered_json::exception& e) {
    refuse(where, fmt::format("not a manifest: {}", e.what()));
  }
}

std::string tensors_in(const Manifest& m, const ShardTable& shard, std::uint64_t begin,
                       std::uint64_t end) {
  std::vector<std::string> parts;
  for (const Range& r : shard.ranges) {
    const std::uint64_t stop = r.offset + static_cast<std::uint64_t>(r.end - r.begin) * 4;
    if (stop <= begin || r.offset >= end) continue;
    // In elements of the array, which is what the tensor table counts in.
    const std::int64_t first =
        r.begin + static_cast<std::int64_t>((std::max(begin, r.offset) - r.offset) / 4);
    const std::int64_t last =
        r.begin + static_cast<std::int64_t>((std::min(end, stop) - r.offset + 3) / 4);
    std::vector<std::string> names;
    std::size_t more = 0;
    for (const TensorRange& t : m.info.tensors) {
      std::int64_t n = 1;
      for (const std::int64_t d : t.shape) n *= d;
      if (t.offset >= last || t.offset + n <= first) continue;
      if (names.size() < 3)
        names.push_back(t.name);
      else
        ++more;
    }
    if (more > 0) names.push_back(fmt::format("{} more", more));
    parts.push_back(names.empty() ? fmt::format("{} {}..{}", r.array, first, last)
                                  : fmt::format("{}: {}", r.array, fmt::join(names, ", ")));
  }
  return fmt::format("{}", fmt::join(parts, "; "));
}

}  // namespace weft::checkpoint
