// page.css and page.js, which lie beside this file, as bytes of the program.
#include "core/embed.h"
#include "report/html.h"

// WEFT_PAGES: their folder (CMakeLists.txt).
WEFT_EMBED(weft_page_style, WEFT_PAGES "/page.css")
WEFT_EMBED(weft_page_script, WEFT_PAGES "/page.js")

namespace weft::report_page {
namespace {

std::string_view text_between(const unsigned char* begin, const unsigned char* end) {
  return {reinterpret_cast<const char*>(begin), static_cast<std::size_t>(end - begin)};
}

}  // namespace

std::string_view page_style() { return text_between(weft_page_style, weft_page_style_end); }
std::string_view page_script() { return text_between(weft_page_script, weft_page_script_end); }

}  // namespace weft::report_page
