// Captions as Open-Sora cleans them before the tokenizer (specs/t5.md 6): lower case, no addresses, no HTML, no file names ...
#pragma once

#include <string>

namespace weft {

// The original's text_preprocessing: two passes of its clean_caption, expression by expression. `text` must be UTF-8.
// The same as the original but where its libraries decide: HTML is read as Python 3.11's html.parser does, and of
// ftfy.fix_text there is what text/fix_text.h says.
std::string clean_text(const std::string& text);

}  // namespace weft
