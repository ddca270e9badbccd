// Cleans captions before the tokenizer: as Open-Sora does (docs/models/t5.md, Cleaning), lower
// case, no addresses, no HTML, no file names ..., or only what is broken, as Wan does (umT5 there).
#pragma once

#include <string>

namespace weft {

// The original's text_preprocessing: two passes of its clean_caption, expression by expression.
// `text` must be UTF-8. The result is the same as the original's except where its libraries decide:
// HTML is parsed as by Python 3.11's html.parser, and ftfy.fix_text is covered as far as fix_text
// goes.
std::string clean_text(const std::string& text);

// fix_text, HTML references twice, white space: runs become one space, none at the ends. Case is
// kept. What Wan and CLIP do to texts.
std::string clean_basic(const std::string& text);

// The text of `page` as BeautifulSoup(page, "html.parser").text gives it with Python 3.11: tags,
// comments, scripts and styles go, references become characters, and what is no markup stays,
// however broken.
std::string html_text(const std::string& page);

// Python's str.lower().
std::string lower_case(const std::string& text);

// Python's html.unescape.
std::string html_unescape(const std::string& text);

// The characters of the reference &name; or "" where there is none of that name.
std::string named_character(const std::string& name);

}  // namespace weft
