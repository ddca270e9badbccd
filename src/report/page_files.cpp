// The style and the script of pages, which lie beside this file, as bytes of the program.
#include "core/embed.h"
#include "report/page.h"

// WEFT_PAGES: their folder (CMakeLists.txt).
WEFT_EMBED(weft_page_style, WEFT_PAGES "/page.css")
WEFT_EMBED(weft_chart_script, WEFT_PAGES "/chart.js")
WEFT_EMBED(weft_page_script, WEFT_PAGES "/page.js")

namespace weft::report_page {

std::string page_style() { return {weft_page_style, weft_page_style_end}; }
std::string page_script() {
  return std::string(weft_chart_script, weft_chart_script_end) +
         std::string(weft_page_script, weft_page_script_end);
}

}  // namespace weft::report_page
