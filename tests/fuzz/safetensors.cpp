// A safetensors file, or its JSON header alone: ranges match shapes, and lie in the file.
#include "checkpoint/safetensors.h"

#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  const std::string_view text = fuzz::text_of(data, size);
  const auto check = [&](const std::vector<SafetensorEntry>& entries) {
    for (const SafetensorEntry& e : entries) {
      std::uint64_t bytes = size_of(e.dtype);
      for (const std::int64_t n : e.shape) bytes *= static_cast<std::uint64_t>(n);
      fuzz::require(e.begin <= e.end && e.end - e.begin == bytes, "a range is not its shape's");
    }
  };
  if (text.starts_with('{')) {
    fuzz::accepts([&] { check(detail::parse_safetensors_header(text, "file").entries); });
    return 0;
  }
  const auto path = fuzz::put("a.safetensors", text);
  fuzz::accepts([&] {
    const SafetensorsFile file = SafetensorsFile::open(path);
    check(file.entries());
    for (const SafetensorEntry& e : file.entries()) {
      fuzz::require(e.end <= size, "a tensor ends behind the file");
      std::vector<std::byte> bytes(e.end - e.begin);
      file.read(e, bytes);
      fuzz::require(file.find(e.name) != nullptr, "a name is not found");
    }
  });
  return 0;
}
