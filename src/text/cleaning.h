// Captions as Open-Sora cleans them before the tokenizer (docs/models/t5.md, Cleaning): lower case,
// no addresses, no HTML, no file names ...
#pragma once

#include <string>

namespace weft {

// The original's text_preprocessing: two passes of its clean_caption, expression by expression.
// `text` must be UTF-8. The result is the same as the original's except where its libraries decide:
// HTML is parsed as by Python 3.11's html.parser, and ftfy.fix_text is covered as far as fix_text
// goes.
std::string clean_text(const std::string& text);

// What of ftfy.fix_text matters to captions that clean_caption has gone over already.
// Covered, in ftfy's order, repeated until nothing changes:
//   UTF-8 that was read as Latin-1 or Windows-1252 is decoded, the whole text or the sequences in
//     it, where it looks wrong (a letter with an accent beside a sign, C1 controls ...), a lost
//     no-break space inside such a sequence restored;
//   C1 controls as Windows-1252; ligatures of Latin letters taken apart; full- and half-width forms
//     to usual ones;
//   curly quotes straight; line breaks \n; terminal escapes and control characters removed; NFC.
// Not covered: repair of text read as other encodings (Windows-1250, 1251, 1253, 1254, 1257, ISO
// 8859-2, Mac Roman, cp437), lossy sequences with U+FFFD or a question mark in them, CESU-8, box
// drawings. Of 10,000 texts made of words in many languages, read wrongly once or twice or damaged,
// 21 differ from ftfy 6.3.1, all for these reasons.
std::string fix_text(const std::string& text);

// The text of `page` as BeautifulSoup(page, "html.parser").text gives it with Python 3.11: tags,
// comments, scripts and styles go, references become characters, and what is no markup stays,
// however broken.
std::string html_text(const std::string& page);

// Python's html.unescape.
std::string html_unescape(const std::string& text);

// The characters of the reference &name; or "" where there is none of that name.
std::string named_character(const std::string& name);

}  // namespace weft
