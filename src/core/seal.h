// Texts that carry a hash of themselves (XXH3-64), so that a flipped bit is detected: JSON objects
// as their last member "xxh3", other texts as a last line "# xxh3 ...". A text without a seal comes
// from an older weft, or from a person.
#pragma once

#include <string>
#include <string_view>

namespace weft {

// `object` ends with "}" and has a member.
std::string seal_json(std::string object);
// `text` ends with a line's end.
std::string seal_text(std::string text);

// False if the text carries a hash that does not match. One newline may follow.
bool seal_holds(std::string_view text);
// Whether an unparsable line may be a sealed one that a killed job left unfinished: it is the
// file's last, and ends before its seal.
bool is_cut_off(std::string_view line, bool last);

}  // namespace weft
