#include "report/html.h"

#include <fmt/format.h>

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
namespace {

namespace fs = std::filesystem;

// ---- The look, in light and dark, and the script that shows values under the pointer and plays
// the clips in view ----

constexpr const char* page_style = R"css(
:root { color-scheme:light dark;
  --ink:#1d2530; --text:#3a4452; --soft:#5b6675; --line:#e3e7ec; --axis:#9aa4b1;
  --paper:#fff; --ground:#f5f6f8; --link:#1f5fa8; --shade:#0002;
  --run0:#2f6db5; --run1:#cf6a1c; --run2:#2f8469; --run3:#b8456b;
  --run4:#7a5fa8; --run5:#86752a; --run6:#2f8fb8; --run7:#6b6f76;
  --part0:#3f74b8; --part1:#7a2f55; --part2:#d9772b; --part3:#5f9c88;
  --part4:#c8474b; --part5:#8b6db0; --part6:#8b94a1; }
@media (prefers-color-scheme: dark) { :root {
  --ink:#e6eaf0; --text:#c3ccd8; --soft:#9fabba; --line:#2a323d; --axis:#5d6877;
  --paper:#171c23; --ground:#0e1217; --link:#7db4f5; --shade:#0008;
  --run0:#6ea8ee; --run1:#f0954d; --run2:#5cc3a3; --run3:#e87fa1;
  --run4:#b39ae0; --run5:#c9b653; --run6:#6cc4e6; --run7:#a3a9b2;
  --part0:#5b93dc; --part1:#c26a94; --part2:#f0a35c; --part3:#8ccbb7;
  --part4:#ef6b6e; --part5:#ab8fd6; --part6:#78828f; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--ground); color:var(--ink); line-height:1.45;
  font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","DejaVu Sans",sans-serif; }
main { max-width:1120px; margin:0 auto; padding:28px 24px 60px; }
header h1 { font-size:26px; margin:0 0 2px; letter-spacing:-.01em; overflow-wrap:anywhere; }
header p { margin:0; color:var(--soft); overflow-wrap:anywhere; }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(122px,1fr)); gap:12px; margin:22px 0; }
.tile, section { background:var(--paper); border:1px solid var(--line); border-radius:10px; }
.tile { padding:12px 14px; }
.tile b { display:block; font-size:23px; font-weight:600; letter-spacing:-.01em;
  font-variant-numeric:tabular-nums; overflow-wrap:anywhere; }
.tile span { color:var(--soft); font-size:13px; }
section { padding:16px 20px 14px; margin:0 0 16px; min-width:0; }
h2 { font-size:16px; margin:0 0 2px; font-weight:600; }
.note { color:var(--soft); font-size:13px; margin:0 0 8px; }
.small { display:grid; grid-template-columns:repeat(auto-fill,minmax(min(310px,100%),1fr)); gap:16px; margin:0 0 16px; }
.small section { margin:0; display:flex; flex-direction:column; padding:14px 14px 10px; }
.small section svg { margin-top:auto; }
svg { display:block; width:100%; height:auto; overflow:visible; }
.grid { stroke:var(--line); stroke-width:1; }
.restart { stroke:var(--ink); stroke-width:1.5; stroke-dasharray:2 4; }
.narrow { display:none; }
.axis { stroke:var(--axis); stroke-width:1; }
.tick { font-size:12px; fill:var(--soft); font-variant-numeric:tabular-nums; }
.label { font-size:12.5px; fill:var(--text); }
.legend { display:flex; flex-wrap:wrap; gap:4px 18px; margin:6px 0 8px; font-size:13px; color:var(--text); }
.legend i { display:inline-block; width:18px; height:4px; border-radius:2px; margin-right:7px;
  vertical-align:middle; }
.box, .legend .box { display:inline-block; width:11px; height:11px; border-radius:3px; margin-right:7px; }
.legend em { color:var(--soft); font-style:normal; font-variant-numeric:tabular-nums; }
.bar { display:flex; height:22px; border-radius:5px; overflow:hidden; background:var(--line); }
.track { min-width:0; }
.many .bar { height:12px; border-radius:3px; }
.bars.many { gap:3px 14px; font-size:12px; }
h3 { font-size:13.5px; font-weight:600; margin:16px 0 4px; }
.bars span { font-variant-numeric:tabular-nums; }
.bars { display:grid; grid-template-columns:max-content 1fr max-content; gap:8px 14px; align-items:center;
  font-size:13px; }
.scroll { overflow-x:auto; }
table { border-collapse:collapse; width:100%; font-size:14px; }
th, td { text-align:left; padding:6px 14px 6px 0; vertical-align:top; border-top:1px solid var(--line); }
tr:first-child th, tr:first-child td { border-top:0; }
th { font-weight:500; color:var(--soft); white-space:nowrap; }
td { font-variant-numeric:tabular-nums; overflow-wrap:anywhere; }
thead th { color:var(--ink); font-weight:600; white-space:normal; vertical-align:bottom; }
thead + tbody td { overflow-wrap:break-word; }
.beside td { min-width:150px; overflow-wrap:anywhere; }
details summary { cursor:pointer; font-weight:600; padding:2px 0; }
pre { font:12.5px/1.5 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;
  background:var(--ground); border-radius:8px; padding:12px 14px; overflow:auto; max-height:520px; }
.media { display:grid; grid-template-columns:repeat(auto-fill,minmax(min(300px,100%),1fr)); gap:16px; margin-top:8px; }
.sources { grid-column:1/-1; display:grid; grid-template-columns:repeat(auto-fill,minmax(min(300px,100%),1fr)); gap:16px; }
figure { margin:0; min-width:0; }
figure img, figure video { width:100%; border-radius:6px; display:block; background:#000; }
figure.wide { grid-column:1/-1; }
figcaption b { color:var(--ink); font-weight:500; display:block; }
a { color:var(--link); }
.linked { display:flex; align-items:center; justify-content:center; text-align:center; min-height:120px;
  padding:12px; border:1px dashed var(--axis); border-radius:6px; font-size:13px; overflow-wrap:anywhere; }
.meter { display:inline-block; width:130px; height:9px; margin-right:6px; border-radius:3px;
  background:var(--line); overflow:hidden; vertical-align:middle; }
.meter i { display:block; height:100%; }
figcaption { color:var(--soft); font-size:12.5px; margin-top:4px; overflow-wrap:anywhere; }
footer { color:var(--soft); font-size:12.5px; }
main:has(.jobs) { max-width:1500px; }
.jobs td, .jobs th { padding:6px 10px 6px 0; white-space:nowrap; }
.jobs .when { display:block; width:86px; white-space:normal; }
.jobs button { font:inherit; color:inherit; background:none; border:0; padding:0; cursor:pointer; }
.jobs [aria-sort=ascending] button::after { content:" \25B2"; }
.jobs [aria-sort=descending] button::after { content:" \25BC"; }
.jobs .note { display:block; margin:0; white-space:normal; max-width:260px; }
.jobs .spark, .jobs .meter { width:96px; margin:0; }
.jobs ul { margin:4px 0 0; padding-left:16px; white-space:normal; min-width:240px; }
.jobs summary { font-weight:inherit; padding:0; }
.jobs img { height:36px; border-radius:4px; margin-right:6px; }
.jobs .shots { white-space:normal; }
.jobs tr > :first-child { position:sticky; left:0; background:var(--paper); white-space:normal; min-width:130px; }
#value { position:absolute; pointer-events:none; display:none; background:var(--paper); border:1px solid var(--axis);
  border-radius:7px; padding:6px 10px; font-size:12.5px; box-shadow:0 2px 8px var(--shade); white-space:nowrap;
  font-variant-numeric:tabular-nums; }
#value i { display:inline-block; width:9px; height:9px; border-radius:2px; margin-right:6px; }
@media (max-width:700px) { .broad { display:none; } .narrow { display:block; max-width:520px; } }
@media (max-width:560px) { main { padding:16px 10px; } section { padding:12px 12px 10px; }
  .tiles { gap:8px; } .tile { padding:10px 12px; } .tile b { font-size:20px; } .meter { width:70px; }
  /* A bar's name and text share the line above it. */
  .bars { grid-template-columns:auto minmax(0,1fr); grid-auto-flow:row dense; gap:2px 10px; }
  .bars > span:nth-of-type(odd) { grid-column:1; }
  .bars > span:nth-of-type(even) { grid-column:2; text-align:right; }
  .bars > .track { grid-column:1/-1; margin-bottom:6px; } .bars .bar { height:14px; }
  .sources, h3 + .media { grid-template-columns:repeat(auto-fill,minmax(150px,1fr)); gap:8px; } }
@media print { body { background:#fff; color:#000; } section, .tile { break-inside:avoid; } }
)css";

constexpr const char* page_script = R"js(
const box = document.body.appendChild(document.createElement('div'));
box.id = 'value';
for (const svg of document.querySelectorAll('svg[data-plot]')) {
  const p = JSON.parse(svg.dataset.plot);
  const rule = svg.appendChild(document.createElementNS('http://www.w3.org/2000/svg', 'line'));
  rule.setAttribute('class', 'axis');
  rule.setAttribute('stroke-dasharray', '3 3');
  rule.setAttribute('y1', 10);
  rule.setAttribute('y2', p.base);
  const hide = () => { box.style.display = 'none'; rule.style.display = 'none'; };
  hide();
  svg.addEventListener('pointerleave', hide);
  const show = e => {
    const r = svg.getBoundingClientRect();
    const px = (e.clientX - r.left) * svg.viewBox.baseVal.width / r.width;
    const x = p.low + (px - p.from) / (p.to - p.from) * (p.high - p.low);
    const rows = [];
    let at = null;
    for (const c of p.curves) {
      // None of a run that ended earlier.
      const edge = Math.max((p.high - p.low) / 50, (c.x[1] - c.x[0]) / 2 || 0);
      if (x < c.x[0] - edge || x > c.x[c.x.length - 1] + edge) continue;
      let best = 0;
      c.x.forEach((v, i) => { if (Math.abs(v - x) < Math.abs(c.x[best] - x)) best = i; });
      if (at === null || Math.abs(c.x[best] - x) < Math.abs(at - x)) at = c.x[best];
      const y = c.y[best];
      if (y !== null && y !== undefined)
        rows.push('<div><i style="background:' + c.k + '"></i>' + c.n + ' <b>' + y + '</b></div>');
    }
    if (at === null || px < p.from - 4 || px > p.to + 4) return hide();
    const line = p.from + (at - p.low) / (p.high - p.low) * (p.to - p.from);
    rule.setAttribute('x1', line);
    rule.setAttribute('x2', line);
    rule.style.display = '';
    const near = (p.labels || []).find(l => Math.abs(l[0] - at) < 1e-3);
    box.innerHTML = (p.what || 'step') + ' ' + (near ? near[1] : Math.round(at)) + rows.join('');
    box.style.display = 'block';
    const left = e.pageX + 16 + box.offsetWidth > document.documentElement.clientWidth;
    box.style.left = Math.max(4, e.pageX + (left ? -16 - box.offsetWidth : 16)) + 'px';
    box.style.top = (e.pageY + 12) + 'px';
  };
  svg.addEventListener('pointermove', show);
  svg.addEventListener('pointerdown', show);  // a finger
}
for (const table of document.querySelectorAll('table.jobs'))
  for (const button of table.querySelectorAll('th button'))
    button.addEventListener('click', () => {
      const head = button.parentNode, up = head.getAttribute('aria-sort') !== 'ascending';
      for (const other of head.parentNode.cells) other.removeAttribute('aria-sort');
      head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
      const value = row => row.cells[head.cellIndex].dataset.v;
      const body = table.tBodies[0];
      body.append(...[...body.rows].sort((a, b) => {
        const x = value(a), y = value(b);
        if (x === '' || y === '') return (x === '') - (y === '');  // the unknown come last
        const apart = isNaN(x - y) ? x.localeCompare(y, undefined, {numeric: true}) : x - y;
        return up ? apart : -apart;
      }));
    });
if (!matchMedia('(prefers-reduced-motion: reduce)').matches) {
  const seen = new IntersectionObserver(entries => entries.forEach(e => {
    if (e.isIntersecting) e.target.play().catch(() => {}); else e.target.pause();
  }));
  for (const video of document.querySelectorAll('video[muted]')) {
    seen.observe(video);
    video.controls = false;  // they would cover a small clip
    video.addEventListener('pointerenter', () => { video.controls = true; });
    video.addEventListener('pointerleave', () => { video.controls = false; });
  }
}
)js";

}  // namespace

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
  // Rounded before it is divided: never "3 min 60 s".
  const bool hours = s >= 7200;
  const double all = std::round(hours ? s / 60 : s);
  return fmt::format("{:.0f} {} {:02.0f} {}", std::floor(all / 60), hours ? "h" : "min",
                     std::fmod(all, 60), hours ? "min" : "s");
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
      title, page_style, note, several ? mark_of_several : mark_of_one, breakable(title));
}
std::string close_page() {
  return fmt::format("</main><script>{}</script></body></html>\n", page_script);
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

std::string tile(const std::string& value, const std::string& label) {
  return fmt::format("<div class=\"tile\"><b>{}</b><span>{}</span></div>\n", value, label);
}
std::string section(const std::string& title, const std::string& note, const std::string& body) {
  return fmt::format("<section><h2>{}</h2>{}{}</section>\n", title,
                     note.empty() ? "" : "<p class=\"note\">" + note + "</p>", body);
}
std::string warning_section(const std::string& title, const std::vector<std::string>& warnings,
                            const std::string& note) {
  if (warnings.empty()) return "";
  std::string rows = "<div class=\"scroll\"><table>";
  for (const std::string& w : warnings) rows += "<tr><td>" + escape(w) + "</td></tr>\n";
  return section(title, note, rows + "</table></div>");
}
std::string status_sections(const JobStatus& s, const std::string& of) {
  std::string html;
  if (s.state == "failed" || s.state == "stopped" || !s.error.empty())
    html = section("State" + of, "",
                   swatch("var(--part4)", escape(state_text(s)), true) +
                       (s.error.empty() ? "" : "<p class=\"note\">" + escape(s.error) + "</p>"));
  return html + warning_section("Warnings" + of, s.warnings) +
         warning_section("Warnings of earlier starts" + of, warnings_of_before(s),
                         "Of rank 0: the last of each kind.");
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

std::string picture_section(const fs::path& folder,
                            const std::vector<std::pair<std::string, std::string>>& pictures,
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
    const std::size_t n = std::min<std::size_t>(3, bytes.size() - i);
    std::uint32_t group = 0;
    for (std::size_t k = 0; k < 3; ++k)
      group = group << 8 | (k < n ? static_cast<unsigned char>(bytes[i + k]) : 0u);
    for (std::size_t k = 0; k < 4; ++k) out += k <= n ? digits[group >> (18 - 6 * k) & 63] : '=';
  }
  return out;
}

}  // namespace weft::report_page
