// What a page tells its script.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "core/json.h"
#include "report/page.h"

namespace weft::report_page {

// Fails where any text of the data could have become markup.
inline Json data_of(const std::string& page) {
  const std::string begin = "<script type=\"application/json\" id=\"data\">";
  const std::size_t at = page.find(begin) + begin.size();
  const std::string data = page.substr(at, page.find("</script>", at) - at);
  EXPECT_EQ(data.find('<'), std::string::npos);
  return parse_json<Json>(data);
}

}  // namespace weft::report_page
