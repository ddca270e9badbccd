// Many warnings of one kind, such as one for each picture of a data set: the first are shown, then
// each time their number has doubled; the others are counted.
#pragma once

#include <string>
#include <string_view>

namespace weft::log {

// A warning without what differs from one to the next: numbers, names of files, quoted words.
std::string kind_of_warning(std::string_view text);
// A WARN line for each kind with warnings that were not shown: how many. Then counting begins anew.
// For the end of a job; the program calls it too.
void sum_up_warnings();

}  // namespace weft::log
