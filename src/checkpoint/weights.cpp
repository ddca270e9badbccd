#include "checkpoint/weights.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "config/deck.h"
#include "core/error.h"
#include "core/log.h"

namespace weft {
namespace {

// Elements per read: 16 MiB of floats.
constexpr std::int64_t piece = std::int64_t{1} << 22;

// The name of a parameter in files.
std::string name_in_files(const Parameter& p, const WeightNames& names) {
  return p.name.substr(names.prefix.size());
}

const WeightFiles::Tensor* find(const WeightFiles& files, const Parameter& p,
                                const WeightNames& names) {
  const std::string name = name_in_files(p, names);
  if (const WeightFiles::Tensor* t = files.find(name)) return t;
  if (names.others)
    for (const std::string& other : names.others(name))
      if (const WeightFiles::Tensor* t = files.find(other)) return t;
  return nullptr;
}

// A hint that names the nearest of `known`.
std::string nearest(const std::string& name, const std::vector<std::string>& known,
                    const char* whose, const std::string& section) {
  const std::string near = nearest_name(name, known);
  if (!near.empty()) return fmt::format("{} nearest name is \"{}\"", whose, near);
  return fmt::format("check that the deck's [{}] is the one these weights belong to", section);
}

void read_parameter(const WeightFiles& files, const WeightFiles::Tensor& from, Parameter& p) {
  for (std::int64_t first = 0; first < p.shape.numel(); first += piece) {
    const std::int64_t n = std::min(piece, p.shape.numel() - first);
    if (p.value.defined()) {
      std::vector<float> values(static_cast<std::size_t>(n));
      files.read_f32(from, first, values);
      p.set(first, values);
    } else {  // bf16_only: no f32 copy is made
      std::vector<bf16> values(static_cast<std::size_t>(n));
      files.read_bf16(from, first, values);
      p.working.view({p.shape.numel()}).slice(first, first + n).set(std::span<const bf16>(values));
    }
  }
}

}  // namespace

void check_weights(const WeightFiles& files, const ParameterTable& whole,
                   const WeightNames& names) {
  const std::string path = files.path().string();
  std::vector<std::string> known, others, held;
  for (const auto& p : whole.all()) {
    if (!p->name.starts_with(names.prefix)) continue;
    known.push_back(name_in_files(*p, names));
    if (names.others)
      for (std::string& other : names.others(known.back())) others.push_back(std::move(other));
  }
  std::sort(others.begin(), others.end());
  for (const WeightFiles::Tensor& t : files.tensors()) {
    const std::string& name = t.entry.name;
    held.push_back(name);
    const bool ours = whole.find(names.prefix + name) != nullptr ||
                      (names.spare && names.spare(name)) ||
                      std::binary_search(others.begin(), others.end(), name);
    WEFT_CHECK(ours, Exit::data, nearest(name, known, "the model's", names.section),
               "{}: tensor \"{}\" is no parameter of this model", path, name);
  }
  for (const auto& p : whole.all()) {
    if (!p->name.starts_with(names.prefix)) continue;
    const std::string name = name_in_files(*p, names);
    const WeightFiles::Tensor* t = find(files, *p, names);
    if (t == nullptr && names.may_lack && names.may_lack(name)) continue;
    WEFT_CHECK(t != nullptr, Exit::data, nearest(name, held, "the file's", names.section),
               "{} has no tensor {}", path, name);
    WEFT_CHECK(std::ranges::equal(t->entry.shape, p->shape.dims()), Exit::data,
               fmt::format("check the sizes in the deck's [{}]", names.section),
               "{}: tensor \"{}\" has shape [{}], the model wants {}", path, t->entry.name,
               fmt::join(t->entry.shape, ", "), p->shape.str());
  }
}

void read_weights(const WeightFiles& files, ParameterTable& part, const WeightNames& names,
                  const std::function<bool(const Parameter&)>& skip) {
  // In the order of the files, so that disks are read forwards.
  std::vector<std::pair<const WeightFiles::Tensor*, Parameter*>> reads;
  for (const auto& p : part.all()) {
    if (!p->name.starts_with(names.prefix) || (skip && skip(*p))) continue;
    if (const WeightFiles::Tensor* t = find(files, *p, names)) {
      reads.emplace_back(t, p.get());
    } else {  // one that files may lack
      WEFT_ASSERT(p->init.kind == Init::Kind::constant);
      p->set(0, std::vector<float>(static_cast<std::size_t>(p->shape.numel()), p->init.a));
    }
  }
  std::sort(reads.begin(), reads.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first->shard, a.first->entry.begin) <
           std::pair(b.first->shard, b.first->entry.begin);
  });
  for (const auto& [from, to] : reads) read_parameter(files, *from, *to);
}

std::string describe(const WeightFiles& files) {
  return fmt::format("{}, {}", files.path().string(),
                     counted(std::ssize(files.tensors()), "tensor"));
}

std::string load_weights(const std::filesystem::path& path, ParameterTable& table,
                         const WeightNames& names) {
  const WeightFiles files = WeightFiles::open(path);
  check_weights(files, table, names);
  read_weights(files, table, names);
  return describe(files);
}

}  // namespace weft
