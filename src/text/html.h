// Of HTML the two things that cleaning needs: the text of a page, and character references.
#pragma once

#include <string>

namespace weft {

// The text of `page` as BeautifulSoup(page, "html.parser").text gives it with Python 3.11: tags, comments, scripts and styles
// go, references become characters, and what is no markup stays, however broken.
std::string html_text(const std::string& page);

// Python's html.unescape.
std::string html_unescape(const std::string& text);

// The characters of the reference &name; or "" where there is none of that name.
std::string named_character(const std::string& name);

}  // namespace weft
