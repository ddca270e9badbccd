#include "report/html.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <fstream>
#include <iterator>
#include <numeric>
#include <span>
#include <string_view>

#include "core/clock.h"
#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "data/lists/folders.h"
#include "report/plot.h"
#include "report/status.h"

namespace weft::report_page {

namespace fs = std::filesystem;

// ---- Text, numbers, frames ----

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

std::string breakable(const std::string& text) {
  std::string out;
  for (const char c : text) {
    out += c;
    if (c == '/' || c == '_') out += "<wbr>";
  }
  return out;
}

std::vector<double> finite(std::span<const double> values) {
  std::vector<double> v;
  std::ranges::copy_if(values, std::back_inserter(v), [](double x) { return std::isfinite(x); });
  return v;
}
double median(std::span<const double> values) {
  const std::vector<double> v = finite(values);
  return v.empty() ? NAN : upper_median(v);
}
double total(std::span<const double> values) {
  const std::vector<double> v = finite(values);
  return std::accumulate(v.begin(), v.end(), 0.0);
}
double greatest(std::span<const double> values) {
  const std::vector<double> v = finite(values);
  return v.empty() ? NAN : std::ranges::max(v);
}

std::string seconds_text(double s) {
  if (!std::isfinite(s)) return "-";
  if (s < 1e-3) return fmt::format("{:.0f} µs", s * 1e6);
  if (s < 1) return fmt::format("{:.{}f} ms", s * 1e3, s < 0.1 ? 1 : 0);
  if (s < 120) return fmt::format("{:.{}f} s", s, s < 10 ? 2 : 1);
  // Rounded before it is divided: never "3 min 60 s".
  const bool hours = s >= 7200;
  const double all = std::round(hours ? s / 60 : s);
  return fmt::format("{:.0f} {} {:02.0f} {}", std::floor(all / 60), hours ? "h" : "min",
                     std::fmod(all, 60), hours ? "min" : "s");
}
std::string rate_text(double rate) {
  return rate < 100 ? fmt::format("{:.3g}", rate) : short_number(std::round(rate));
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

namespace {

constexpr std::string_view mark_of_one = "<meta name=\"generator\" content=\"weft\">";
constexpr std::string_view mark_of_several =
    "<meta name=\"generator\" content=\"weft, several jobs\">";
// How the head of a page went on before pages were marked.
constexpr std::string_view older_mark = " - weft</title><style>";

}  // namespace

std::string open_page(const std::string& title, const std::string& note, bool several) {
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">{3}"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">"
      "<title>{0} - weft</title><style>{1}</style></head>\n<body><main>\n"
      "<header><h1>{4}</h1><p>{2}</p></header>\n",
      title, page_style(), note, several ? mark_of_several : mark_of_one, breakable(title));
}
std::string close_page() {
  return fmt::format("</main><script>{}</script></body></html>\n", page_script());
}

PageOwner owner_of(const fs::path& page) {
  std::error_code none;
  const fs::file_type type = fs::symlink_status(page, none).type();
  if (type == fs::file_type::not_found) return PageOwner::nobody;
  // A link is another's too: what it points at is kept, but so is the link.
  if (type != fs::file_type::regular) return PageOwner::other;
  std::string head(64 << 10, '\0');
  std::ifstream in(page, std::ios::binary);
  in.read(head.data(), static_cast<std::streamsize>(head.size()));
  head.resize(static_cast<std::size_t>(std::max<std::streamsize>(0, in.gcount())));
  const auto holds = [&](std::string_view mark) { return head.find(mark) != std::string::npos; };
  if (holds(mark_of_several)) return PageOwner::weft_for_several_jobs;
  return holds(mark_of_one) || holds(older_mark) ? PageOwner::weft : PageOwner::other;
}

void check_owner(const fs::path& page) {
  WEFT_CHECK(owner_of(page) != PageOwner::other, Exit::data,
             "rename it or remove it, then run the same command again",
             "{} is not a page of weft: it is left as it is", page.string());
}

void write_page(const fs::path& page, const std::string& html) {
  check_owner(page);
  replace_file(page, html, Exit::data, Durable::no);
}

std::string section(const std::string& title, const std::string& note, const std::string& body) {
  return fmt::format("<section><h2>{}</h2>{}{}</section>\n", title,
                     note.empty() ? "" : "<p class=\"note\">" + note + "</p>", body);
}
std::string tiles(std::span<const Named> values) {
  std::string s = "<div class=\"tiles\">\n";
  for (const auto& [value, label] : values)
    s += fmt::format("<div class=\"tile\"><b>{}</b><span>{}</span></div>\n", value, label);
  return s + "</div>\n";
}

std::string table(const std::vector<std::string>& head, const Rows& rows, bool names) {
  std::string s = "<div class=\"scroll\"><table>";
  if (!head.empty())
    s += fmt::format("<thead><tr><th>{}</th></tr></thead>", fmt::join(head, "</th><th>"));
  s += "<tbody>\n";
  for (const auto& row : rows) {
    s += "<tr>";
    for (const std::string& cell : row)
      s += fmt::format(fmt::runtime(names && &cell == &row.front() ? "<th>{}</th>" : "<td>{}</td>"),
                       cell);
    s += "</tr>\n";
  }
  return s + "</tbody></table></div>";
}

std::string facts_section(const std::string& title, std::span<const Named> facts) {
  Rows rows;
  for (const auto& [name, value] : facts) rows.push_back({escape(name), escape(value)});
  return section(title, "", table({}, rows, true));
}

std::string list_section(const std::string& title, const std::string& note,
                         std::span<const std::string> lines, std::size_t most,
                         const std::string& more) {
  if (lines.empty()) return "";
  Rows rows;
  for (const std::string& line : lines.first(std::min(most, lines.size())))
    rows.push_back({escape(line)});
  std::string rest;
  if (lines.size() > most)
    rest =
        fmt::format("<p class=\"note\">and {} more in {}</p>", lines.size() - most, escape(more));
  return section(title, note, table({}, rows) + rest);
}

std::string status_sections(const JobStatus& s, const std::string& of) {
  std::string html;
  if (s.state == "failed" || s.state == "stopped" || !s.error.empty())
    html = section("State" + of, "",
                   swatch("var(--part4)", escape(state_text(s)), true) +
                       (s.error.empty() ? "" : "<p class=\"note\">" + escape(s.error) + "</p>"));
  return html +
         list_section("Warnings" + of, "From rank 0's last start, oldest first.", s.warnings) +
         list_section("Warnings of earlier starts" + of, "The last of each kind, of rank 0.",
                      warnings_of_before(s));
}
std::string swatch(const std::string& color, const std::string& text, bool box) {
  return fmt::format("<span><i {}style=\"background:{}\"></i>{}</span>",
                     box ? "class=\"box\" " : "", color, text);
}

std::string legend(const std::string& swatches) {
  return swatches.empty() ? "" : "<div class=\"legend\">" + swatches + "</div>\n";
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

std::string bars(const std::string& list, bool many) {
  return fmt::format("<div class=\"bars{}\">\n{}</div>\n", many ? " many" : "", list);
}

// ---- Files within a page ----

namespace {

constexpr std::uint64_t largest_file = 16u << 20;
constexpr std::uint64_t largest_page = 64u << 20;  // of all files together

// "": a kind that no browser shows.
std::string kind_of(const std::string& file) {
  const std::string extension = ending_of(file);
  if (extension == ".png") return "image/png";
  if (extension == ".jpg" || extension == ".jpeg") return "image/jpeg";
  return extension == ".mp4" ? "video/mp4" : "";
}

// The header of a PNG begins with its size, big-endian, at byte 16.
bool is_wide_png(const std::string& bytes) {
  if (bytes.size() < 24 || !bytes.starts_with("\x89PNG")) return false;
  const auto word = [&](std::size_t at) {
    std::uint64_t v = 0;
    for (std::size_t i = 0; i < 4; ++i) v = v << 8 | static_cast<unsigned char>(bytes[at + i]);
    return v;
  };
  return word(16) > 2 * word(20);
}

}  // namespace

std::string Embedder::content(const fs::path& base, const Shown& shown, bool& wide) {
  const std::string kind = kind_of(shown.file);
  const fs::path path = shown.folder / shown.file;
  const std::string name =
      fs::absolute(path).lexically_relative(fs::absolute(base)).generic_string();
  std::uint64_t size = 0;
  try {
    // No links: the page may be passed on, and with it what they point at.
    const File file = File::open(path, Exit::data, false);
    size = file.size();
    if (!kind.empty() && size <= largest_file && total_ + size <= largest_page) {
      std::string bytes(size, '\0');
      file.read(std::as_writable_bytes(std::span(bytes)), 0);
      total_ += size;
      wide = wide || is_wide_png(bytes);
      const std::string data = base64(bytes);
      if (kind != "video/mp4")
        return fmt::format("<img alt=\"{}\" src=\"data:{};base64,{}\">", escape(shown.alt), kind,
                           data);
      return fmt::format(
          "<video controls{} playsinline preload=\"auto\" "
          "src=\"data:video/mp4;base64,{}\"></video>",
          shown.sound ? "" : " loop muted", data);
    }
  } catch (const Error&) {
    return fmt::format("<div class=\"linked\">{} cannot be read</div>", escape(name));
  }
  ++linked_;
  return fmt::format(
      "<div class=\"linked\"><span>{:.1f} MB, not in this page:<br>"
      "<a href=\"{}\">{}</a></span></div>",
      static_cast<double>(size) / 1e6, url_of(name), escape(name));
}

std::string Embedder::figure(const fs::path& base, const Shown& shown) {
  bool wide = shown.wide;
  const std::string inner = content(base, shown, wide);
  // Wide pictures want the width of the page.
  return fmt::format("<figure{}>{}<figcaption>{}</figcaption></figure>\n",
                     wide ? " class=\"wide\"" : "", inner, shown.caption);
}

std::string picture_section(const fs::path& folder, std::span<const Named> pictures,
                            const std::string& note, bool wide, const std::string& legend) {
  if (pictures.empty()) return "";
  Embedder embedder;
  std::string body = legend + "<div class=\"media\">";
  for (const auto& [name, file] : pictures)
    body += embedder.figure(
        folder,
        {folder, file, name, fmt::format("{} ({})", escape(name), escape(file)), false, wide});
  return section("Pictures", note, body + "</div>");
}

bool stays_inside(const std::string& file) {
  const fs::path path = file;
  if (file.empty() || path.is_absolute()) return false;
  return std::none_of(path.begin(), path.end(), [](const fs::path& p) { return p == ".."; });
}

std::string percent_encoded(const std::string& path) {
  std::string url;
  for (const char c : path) {
    const auto u = static_cast<unsigned char>(c);
    const bool plain =
        std::isalnum(u) != 0 || std::string_view("-._~/").find(c) != std::string::npos;
    url += plain ? std::string(1, c) : fmt::format("%{:02X}", u);
  }
  return url;
}

bool is_plain_word(const std::string& text) {
  return std::ranges::all_of(text, [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
           std::string_view("@%+=:,./_-").find(c) != std::string_view::npos;
  });
}

std::string name_of(const fs::path& path) {
  const fs::path plain = fs::absolute(path).lexically_normal();
  return (plain.has_filename() ? plain : plain.parent_path()).filename().string();
}

// A name such as "a:b" would be another protocol.
std::string url_of(const std::string& path) { return "./" + percent_encoded(path); }

std::ifstream open_regular(const fs::path& path) {
  std::ifstream in;
  std::error_code none;
  if (fs::is_regular_file(fs::symlink_status(path, none))) in.open(path, std::ios::binary);
  return in;
}

std::string read_text(const fs::path& path) {
  std::ifstream in = open_regular(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::string base64(const std::string& bytes) {
  constexpr const char* digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  out.reserve((bytes.size() + 2) / 3 * 4);
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    std::uint32_t group = 0;
    for (std::size_t k = i; k < i + 3; ++k)
      group = group << 8 | (k < bytes.size() ? static_cast<unsigned char>(bytes[k]) : 0u);
    for (std::size_t k = 0; k < 4; ++k)
      out += i + k <= bytes.size() ? digits[group >> (18 - 6 * k) & 63] : '=';
  }
  return out;
}

}  // namespace weft::report_page
