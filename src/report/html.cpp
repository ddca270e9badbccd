#include "report/html.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>

#include "core/clock.h"
#include "core/log.h"
#include "report/plot.h"
#include "report/style.h"

namespace weft::report_page {

std::string color_of(std::size_t run) { return run_colors[run % std::size(run_colors)]; }

// Text from files is data, never HTML; a page must be UTF-8 without control characters.
std::string escape(const std::string& text) {
  std::string out;
  for (const char c : printable(text, text.size(), "\n\t")) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else
      out += c;
  }
  return out;
}

// Fields may be absent and losses NaN: statistics cover the finite values.
std::vector<double> finite(const std::vector<double>& values) {
  std::vector<double> v;
  std::copy_if(values.begin(), values.end(), std::back_inserter(v),
               [](double x) { return std::isfinite(x); });
  return v;
}
double median(const std::vector<double>& values) {
  std::vector<double> v = finite(values);
  if (v.empty()) return NAN;
  return upper_median(v);
}
double total(const std::vector<double>& values) {
  const std::vector<double> v = finite(values);
  return std::accumulate(v.begin(), v.end(), 0.0);
}
double greatest(const std::vector<double>& values) {
  const std::vector<double> v = finite(values);
  return v.empty() ? NAN : *std::max_element(v.begin(), v.end());
}

std::string seconds_text(double s) {
  if (!std::isfinite(s)) return "-";
  if (s < 1e-3) return fmt::format("{:.0f} µs", s * 1e6);
  if (s < 1) return fmt::format("{:.{}f} ms", s * 1e3, s < 0.1 ? 1 : 0);
  if (s < 120) return fmt::format("{:.{}f} s", s, s < 10 ? 2 : 1);
  if (s < 7200) return fmt::format("{:.0f} min {:02.0f} s", std::floor(s / 60), std::fmod(s, 60));
  return fmt::format("{:.0f} h {:02.0f} min", std::floor(s / 3600), std::fmod(s / 60, 60));
}
std::string rate_text(double rate) {
  return rate < 100 || !std::isfinite(rate) ? fmt::format("{:.3g}", rate)
                                            : short_number(std::round(rate));
}
std::string bytes_text(double b) {
  if (!std::isfinite(b)) return "-";
  if (b >= 1e9) return fmt::format("{:.2f} GB", b / 1e9);
  return fmt::format("{:.{}f} MB", b / 1e6, b < 1e7 ? 1 : 0);
}
std::string percent(double part, double whole) {
  if (!(whole > 0)) return "-";
  const double p = 100 * part / whole;
  return fmt::format("{:.{}f} %", p, p < 10 ? 1 : 0);
}

std::string open_page(const std::string& title, const std::string& note) {
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">"
      "<title>{0} - weft</title><style>{1}</style></head>\n<body><main>\n"
      "<header><h1>{0}</h1><p>{2}</p></header>\n",
      title, page_style, note);
}
std::string close_page() {
  return fmt::format("</main><script>{}</script></body></html>\n", page_script);
}

std::string tile(const std::string& value, const std::string& label) {
  return fmt::format("<div class=\"tile\"><b>{}</b><span>{}</span></div>\n", value, label);
}
std::string section(const std::string& title, const std::string& note, const std::string& body) {
  return fmt::format("<section><h2>{}</h2>{}{}</section>\n", title,
                     note.empty() ? "" : "<p class=\"note\">" + note + "</p>", body);
}
std::string warning_section(const std::string& title, const std::vector<std::string>& warnings) {
  if (warnings.empty()) return "";
  std::string rows = "<div class=\"scroll\"><table>";
  for (const std::string& w : warnings) rows += "<tr><td>" + escape(w) + "</td></tr>\n";
  return section(title, "Of rank 0's last start; the newest come last.", rows + "</table></div>");
}
std::string swatch(const std::string& color, const std::string& text, bool box) {
  return fmt::format("<span><i {}style=\"background:{}\"></i>{}</span>",
                     box ? "class=\"box\" " : "", color, text);
}

std::string meter(double share, const std::string& color) {
  return fmt::format("<span class=\"meter\"><i style=\"width:{:.1f}%;background:{}\"></i></span>",
                     100 * std::clamp(share, 0.0, 1.0), color);
}

std::string bar(const std::string& name, const std::vector<BarPiece>& pieces, double whole,
                const std::string& text) {
  std::string s =
      "<span>" + escape(name) + "</span><div class=\"track\"><div class=\"bar\" style=\"width:";
  double sum = 0;
  for (const BarPiece& p : pieces) sum += std::max(0.0, p.value);
  s += fmt::format("{:.2f}%\">", whole > 0 ? 100 * sum / whole : 0);
  for (const BarPiece& p : pieces)
    if (p.value > 0 && sum > 0)
      s += fmt::format("<div title=\"{}\" style=\"width:{:.3f}%;background:{}\"></div>",
                       escape(p.title), 100 * p.value / sum, p.color);
  return s + "</div></div><span>" + text + "</span>\n";
}

}  // namespace weft::report_page
