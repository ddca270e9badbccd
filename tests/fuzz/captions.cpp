// The cleaning of captions: UTF-8 in, UTF-8 out.
#include "fuzz.h"
#include "text/cleaning.h"
#include "text/utf8.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  const std::string text(fuzz::text_of(data, size));
  if (!fuzz::accepts([&] { check_utf8(text, "caption"); })) return 0;
  std::string clean;
  if (fuzz::accepts([&] { clean = clean_text(text); })) check_utf8(clean, "a clean caption");
  return 0;
}
