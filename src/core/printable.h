// Text of others (names of files, values of lists, reasons that a library gives) as one line that a
// terminal, a log or a page shows and does not obey.
#pragma once

#include <string>
#include <string_view>

namespace weft {

// Escapes line breaks, all other control characters, bytes that are not UTF-8 and characters that
// turn the order of writing: \n, \x1b, \xff, \u202e. Of more than `longest` bytes the middle is
// left out, since the reason of a fault comes last. `kept`: control characters that may stay.
std::string printable(std::string_view text, std::size_t longest = 200, std::string_view kept = {});

}  // namespace weft
