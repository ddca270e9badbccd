// The table of `weft score`, CSV and JSON lines: what is written reads back to the same rows.
#include "data/lists/table.h"
#include "fuzz.h"

namespace {

using namespace weft;

struct Copy {
  std::vector<std::string> paths;
  std::string text;
};

Copy copy_of(const std::filesystem::path& path) {
  Copy copy;
  TableReader table(path);
  TableWriter writer(table, {"ocr"}, [&](std::string_view text) { copy.text += text; });
  for (TableRow row; table.next(row);) {
    copy.paths.push_back(row.path);
    writer.add(row, {3});
  }
  return copy;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  for (const char* name : {"table.csv", "table.jsonl"}) {
    const std::string_view text = fuzz::text_of(data, size);
    fuzz::accepts([&] {
      const Copy first = copy_of(fuzz::put(name, text));
      // With its column in place, a copy is the same to the byte.
      const Copy second = copy_of(fuzz::put(name, first.text));
      fuzz::require(second.paths == first.paths, "a copy has other rows");
      fuzz::require(second.text == first.text, "a copy of a copy is another one");
    });
  }
  return 0;
}
