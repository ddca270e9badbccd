#include "core/progress/job_status.h"

#include <fmt/format.h>

#include <cmath>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "core/json.h"
#include "core/printable.h"
#include "core/seal.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr std::size_t longest_text = 1000, largest_file = 1 << 20;

std::string shortened(const std::string& text) {
  return text.size() <= longest_text ? text : text.substr(0, longest_text) + "...";
}

}  // namespace

std::string to_text(const JobStatus& s) {
  Json j = {{"command", s.command}, {"noun", s.noun},        {"state", s.state},
            {"code", s.code},       {"done", s.done},        {"total", s.total},
            {"before", s.before},   {"rate", s.rate},        {"left", s.left},
            {"ranks", s.ranks},     {"host", s.host},        {"started", s.started},
            {"updated", s.updated}, {"advanced", s.advanced}};
  j["values"] = Json::object();
  for (const auto& [name, value] : s.values) j["values"][name] = value;
  j["warnings"] = Json::array();
  for (const std::string& w : s.warnings) j["warnings"].push_back(shortened(w));
  if (!s.error.empty()) j["error"] = shortened(s.error);
  return seal_json(j.dump(-1, ' ', false, Json::error_handler_t::replace)) + "\n";
}

std::optional<JobStatus> read_status(const fs::path& file) {
  std::error_code none;
  if (!fs::is_regular_file(file, none) || fs::file_size(file, none) > largest_file)
    return std::nullopt;
  std::ifstream in(file, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  const Json j = try_parse_json<Json>(text);
  if (!j.is_object() || !seal_holds(text)) return std::nullopt;
  try {
    JobStatus s;
    // Whoever wrote the file: what it says is shown on terminals and pages.
    const auto text_of = [](const Json& value) {
      return printable(value.get<std::string>(), longest_text + 3);
    };
    s.command = text_of(j.at("command"));
    s.noun = text_of(j.at("noun"));
    s.state = text_of(j.at("state"));
    s.code = j.at("code");
    s.done = j.at("done");
    s.total = j.at("total");
    s.before = j.at("before");
    s.rate = j.at("rate");
    s.left = j.at("left");
    s.ranks = j.at("ranks");
    s.host = text_of(j.at("host"));
    s.started = j.at("started");
    s.updated = j.at("updated");
    s.advanced = j.at("advanced");
    for (const auto& [name, value] : j.at("values").items())
      // A loss that is not finite is null in JSON.
      s.values.emplace_back(name, value.is_number() ? value.get<double>() : NAN);
    for (const Json& w : j.at("warnings")) s.warnings.push_back(text_of(w));
    if (j.contains("error")) s.error = text_of(j.at("error"));
    return s;
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

std::string duration_text(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e10) return "-";
  const auto s = static_cast<std::int64_t>(std::llround(seconds));
  if (s < 60) return fmt::format("{} s", s);
  if (s < 3600) return fmt::format("{} min {:02} s", s / 60, s % 60);
  if (s < 86400) return fmt::format("{} h {:02} min", s / 3600, s % 3600 / 60);
  return fmt::format("{} d {} h", s / 86400, s % 86400 / 3600);
}

}  // namespace weft
