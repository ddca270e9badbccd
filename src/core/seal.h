// Texts that carry a hash of themselves (XXH3-64), so that a flipped bit does not pass for a value:
// JSON objects as their last member "xxh3", other texts as a last line "# xxh3 ...". A text without
// one is of an older weft, or a person's.
#pragma once

#include <string>
#include <string_view>

namespace weft {

// `object` ends with "}" and has a member.
std::string seal_json(std::string object);
// `text` ends with a line's end.
std::string seal_text(std::string text);

// False where the text has a hash, and it is of another text. One line's end may follow.
bool seal_holds(std::string_view text);
// Whether a line that is no JSON may be what a killed job wrote of a sealed one: it is the file's
// last, and ends before its seal.
bool is_cut_off(std::string_view line, bool last);

}  // namespace weft
