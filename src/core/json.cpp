#include "core/json.h"

namespace weft {

template <class Json>
Json parse_json(std::string_view text) {
  if (!is_shallow_json(text)) throw JsonTooDeep();
  return Json::parse(text);
}

template <class Json>
Json try_parse_json(std::string_view text) {
  if (!is_shallow_json(text)) return Json(Json::value_t::discarded);
  return Json::parse(text, nullptr, false);
}

template <class Json>
std::string dump_json(const Json& j, int indent, char blank, bool ascii,
                      nlohmann::json::error_handler_t errors) {
  return j.dump(indent, blank, ascii, errors);
}

template nlohmann::json parse_json(std::string_view);
template nlohmann::ordered_json parse_json(std::string_view);
template nlohmann::json try_parse_json(std::string_view);
template nlohmann::ordered_json try_parse_json(std::string_view);
template std::string dump_json(const nlohmann::json&, int, char, bool,
                               nlohmann::json::error_handler_t);
template std::string dump_json(const nlohmann::ordered_json&, int, char, bool,
                               nlohmann::json::error_handler_t);

}  // namespace weft
