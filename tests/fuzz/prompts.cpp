// A file of prompts with options: texts stay UTF-8, and names made of them stay names.
#include "jobs/generate/prompts.h"

#include "fuzz.h"
#include "text/utf8.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  GenerateDeck deck;
  deck.loop = 4;
  deck.prompt_file = fuzz::put("prompts.txt", fuzz::text_of(data, size)).string();
  std::vector<Prompt> prompts;
  fuzz::accepts([&] { prompts = read_prompts(deck); });
  for (const Prompt& p : prompts) {
    for (std::int64_t loop = 0; loop < deck.loop; ++loop)
      check_utf8(p.text_of_loop(loop), "a text");
    const std::string name = file_name_of(p.text);
    check_utf8(name, "a name");
    fuzz::require(name.size() <= 180 && !name.starts_with('.') && name.find('/') == name.npos,
                  "no name of a file: " + name);
    fuzz::accepts([&] { parse_mask_strategy(p.mask_strategy, "mask"); });
  }
  return 0;
}
