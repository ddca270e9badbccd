#include "report/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>

#include "report/html.h"

namespace weft::report_page {
namespace {

constexpr double left = 64, right = 14, top = 10, bottom = 42;  // margins in pixels, as in page.js
constexpr double tick_room = 56;  // pixels along the x axis that a number may take
// On a phone, whose page leaves about as many pixels.
constexpr int narrow_width = 370, narrow_height = 240;

// Maps values to pixels along one axis.
struct Axis {
  double low = 0, high = 1, from = 0, to = 1;
  bool log = false;
  std::vector<double> ticks{};

  double operator()(double v) const {
    if (log) v = std::log10(std::max(v, 1e-300));
    return from + (to - from) * (v - low) / (high - low);
  }
};

struct Range {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();
  void add(std::span<const double> values, double reach = 0) {
    for (const double v : values) {
      if (!std::isfinite(v)) continue;
      low = std::min(low, v - reach);
      high = std::max(high, v + reach);
    }
  }
  Range or_unit() const { return low > high ? Range{0, 1} : *this; }
};

// From the first step to the last, edge to edge.
Axis make_x(Range r, const PlotFrame& f) {
  Axis a{r.low, r.high, left, f.width - right};
  if (a.high <= a.low) {
    a.low -= 0.5;
    a.high += 0.5;
  }
  const double room = (f.width - left - right) / tick_room;
  a.ticks = round_ticks(a.low, a.high, static_cast<int>(std::clamp(room, 3.0, 8.0)));
  if (f.whole_x) std::erase_if(a.ticks, [](double t) { return t != std::floor(t); });
  return a;
}

std::vector<double> log_ticks(double low, double high) {
  std::vector<double> ticks;
  const bool few = high - low < 2.5;  // decades: then 2 and 5 are marked too
  for (int d = static_cast<int>(std::floor(low)); d <= std::ceil(high); ++d)
    for (const double m : {1.0, 2.0, 5.0}) {
      const double t = m * std::pow(10.0, d), l = std::log10(t);
      if ((m == 1.0 || few) && l >= low - 1e-9 && l <= high + 1e-9) ticks.push_back(t);
    }
  return ticks;
}

Axis make_y(Range r, const PlotFrame& f) {
  Axis a{0, 1, f.height - bottom, top};
  if (f.allow_log && r.low > 0 && r.high / r.low > 50) {
    a.log = true;
    a.low = std::log10(r.low) - 0.05;
    a.high = std::log10(r.high) + 0.05;
    a.ticks = log_ticks(a.low, a.high);
    return a;
  }
  if (f.from_zero) r.low = std::min(r.low, 0.0);
  if (r.high <= r.low) {
    const double pad = r.low == 0 ? 1 : std::abs(r.low) * 0.1;
    r.high += pad;
    if (!f.from_zero) r.low -= pad;
  }
  // The axis ends on ticks: the curves get some room and both ends a number.
  a.ticks = round_ticks(r.low, r.high, 5);
  const double step = a.ticks.size() > 1 ? a.ticks[1] - a.ticks[0] : r.high - r.low;
  if (a.ticks.front() > r.low + step * 1e-9)
    a.ticks.insert(a.ticks.begin(), a.ticks.front() - step);
  if (a.ticks.back() < r.high - step * 1e-9) a.ticks.push_back(a.ticks.back() + step);
  a.low = a.ticks.front();
  a.high = a.ticks.back();
  return a;
}

// Ticks of one axis share the number of decimals.
std::string tick_text(double t, const Axis& a) {
  if (a.log || a.ticks.size() < 2) return short_number(t);
  const double step = std::abs(a.ticks[1] - a.ticks[0]);
  const double largest = std::max(std::abs(a.ticks.front()), std::abs(a.ticks.back()));
  if (std::abs(t) < step * 1e-6) return "0";
  const int power = static_cast<int>(std::floor(std::log10(step) + 1e-9));
  if (largest >= 1e7 || largest < 1e-3) {
    const int first = static_cast<int>(std::floor(std::log10(std::abs(t)) + 1e-9));
    return fmt::format("{:.{}e}", t, std::max(0, first - power));
  }
  return power >= 0 ? short_number(std::round(t)) : fmt::format("{:.{}f}", t, -power);
}

std::string line(const char* kind, double x1, double x2, double y1, double y2) {
  return fmt::format(
      "<line class=\"{}\" x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>\n", kind, x1,
      x2, y1, y2);
}

// Grid, ticks and labels.
std::string axes(const PlotFrame& f, const Axis& x, const Axis& y) {
  const double base = f.height - bottom, end = f.width - right;
  std::string s;
  for (const double t : y.ticks) {
    s += line("grid", left, end, y(t), y(t));
    s += fmt::format("<text class=\"tick\" x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n",
                     left - 8, y(t) + 4, tick_text(t, y));
  }
  std::vector<std::pair<double, std::string>> places = f.x_labels;
  if (places.empty())
    for (const double t : x.ticks) places.emplace_back(t, tick_text(t, x));
  for (const auto& [t, text] : places) {
    s += line("axis", x(t), x(t), base, base + 4);
    s +=
        fmt::format("<text class=\"tick\" x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n",
                    x(t), base + 17, text);
  }
  s += line("axis", left, end, base, base);
  s += fmt::format("<text class=\"label\" x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n",
                   (left + end) / 2, f.height - 6, f.x_label);
  return s + fmt::format(
                 "<text class=\"label\" transform=\"translate(13 {:.1f}) rotate(-90)\" "
                 "text-anchor=\"middle\">{}{}</text>\n",
                 (top + base) / 2, f.y_label, y.log ? " (log)" : "");
}

// A path through the points; a gap where y is not a number.
std::string points(const Axis& ax, const Axis& ay, std::span<const double> x,
                   std::span<const double> y) {
  std::string d;
  bool pen_down = false;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (!std::isfinite(y[i]) || (ay.log && y[i] <= 0)) {
      pen_down = false;
      continue;
    }
    // The empty stroke after a start makes a dot of a point that stands alone.
    d += fmt::format(fmt::runtime(pen_down ? "L{:.1f} {:.1f}" : "M{:.1f} {:.1f}h0"), ax(x[i]),
                     ay(y[i]));
    pen_down = true;
  }
  return d;
}

// Out along the upper edge and back along the lower one.
std::string band(const Axis& ax, const Axis& ay, const Curve& c) {
  std::string up, down;
  for (std::size_t i = 0; i < c.x.size(); ++i) {
    if (!std::isfinite(c.low[i]) || !std::isfinite(c.high[i])) continue;
    for (const double x : {c.x[i] - c.reach, c.x[i] + c.reach}) {
      up += fmt::format("{}{:.1f} {:.1f}", up.empty() ? 'M' : 'L', ax(x), ay(c.high[i]));
      down = fmt::format("L{:.1f} {:.1f}", ax(x), ay(c.low[i])) + down;
      if (c.reach == 0) break;
    }
  }
  return fmt::format("<path d=\"{}{}Z\" style=\"fill:{}\" opacity=\"{}\"/>\n", up, down, c.color,
                     c.reach > 0 ? 1 : 0.18);
}

// All charts are drawn here. `attributes` of the element, and what lies below and above the chart.
std::string draw(const PlotFrame& f, std::span<const Curve> curves, const std::string& attributes,
                 const std::string& below = "", const std::string& above = "") {
  Range rx, ry;
  for (const Curve& c : curves) {
    rx.add(c.x, c.reach);
    for (const auto* values : {&c.y, &c.low, &c.high}) ry.add(*values);
  }
  const Axis x = make_x(rx.or_unit(), f), y = make_y(ry.or_unit(), f);
  std::string s = fmt::format(
      "<svg viewBox=\"0 0 {} {}\"{} data-range=\"[{},{}]\" role=\"img\" aria-label=\"{} by {}\">\n",
      f.width, f.height, attributes, x.low, x.high, f.y_label, f.x_label);
  s += below + axes(f, x, y);
  for (const Curve& c : curves)
    if (!c.low.empty()) s += band(x, y, c);
  for (const Curve& c : curves)
    if (const std::string d = points(x, y, c.x, c.y); c.width > 0 && !d.empty())
      s += fmt::format(
          "<path d=\"{}\" style=\"fill:none;stroke:{}\" stroke-width=\"{}\" opacity=\"{}\" "
          "stroke-linejoin=\"round\" stroke-linecap=\"round\"/>\n",
          d, c.color, c.width, c.opacity);
  // Over the curves.
  for (const double t : f.restarts)
    if (t >= x.low && t <= x.high) s += line("restart", x(t), x(t), top, f.height - bottom);
  return s + above + "</svg>\n";
}

std::string json_list(std::span<const double> values) {
  std::string s = "[";
  for (const double v : values)
    s += (s.size() > 1 ? "," : "") + (std::isfinite(v) ? fmt::format("{:.5g}", v) : "null");
  return s + "]";
}

// What page.js shows under the pointer.
std::string plot_json(const PlotFrame& f, std::span<const Curve> curves) {
  std::string labels, list;
  for (const auto& [at, text] : f.x_labels)
    labels += fmt::format("{}[{:.5g},\"{}\"]", labels.empty() ? "" : ",", at, text);
  for (const Curve& c : curves) {
    std::string plain;  // names are of runs, thus of directories: quotes could end the attribute
    for (const char letter : c.name)
      if (static_cast<unsigned char>(letter) >= 0x20 &&
          std::string_view("\"'\\<>&").find(letter) == std::string_view::npos)
        plain += letter;
    if (!c.name.empty())
      list += fmt::format("{}{{\"n\":\"{}\",\"k\":\"{}\",\"x\":{},\"y\":{}}}",
                          list.empty() ? "" : ",", plain, c.color, json_list(c.x), json_list(c.y));
  }
  return fmt::format("{{\"what\":\"{}\",\"labels\":[{}],\"curves\":[{}]}}", f.x_label, labels,
                     list);
}

}  // namespace

std::string chart(const PlotFrame& f, std::span<const Curve> curves) {
  std::string s = "<div class=\"chart\" data-plot='" + plot_json(f, curves) + "'>";
  if (f.width <= narrow_width) return s + draw(f, curves, "") + "</div>\n";
  PlotFrame narrow = f;
  narrow.width = narrow_width;
  narrow.height = std::min(f.height, narrow_height);
  return s + draw(f, curves, " class=\"broad\"") + draw(narrow, curves, " class=\"narrow\"") +
         "</div>\n";
}

std::vector<Curve> stacked(std::vector<Curve> layers) {
  if (layers.empty()) return layers;
  std::vector<double> base(layers.front().x.size(), 0.0);
  for (Curve& c : layers) {
    c.width = 0;
    // Half-way to its neighbours.
    c.reach = c.x.size() > 1 ? (c.x[1] - c.x[0]) / 2 : 0.5;
    c.low = base;
    for (std::size_t i = 0; i < base.size(); ++i)
      if (std::isfinite(c.y[i])) base[i] += c.y[i];
    c.high = base;
  }
  return layers;
}

std::string standalone_svg(const PlotFrame& f, std::span<const Curve> curves,
                           std::span<const std::pair<std::string, std::string>> legend, int y) {
  std::string entries;
  for (const auto& [color, text] : legend) {
    entries += fmt::format(
        "<rect x=\"440\" y=\"{}\" width=\"18\" height=\"3\" fill=\"{}\"/><text class=\"label\" "
        "x=\"464\" y=\"{}\">{}</text>\n",
        y - 5, color, y, escape(text));
    y += 17;
  }
  std::string svg =
      draw(f, curves,
           fmt::format(" xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{}\"", f.width,
                       f.height),
           "<style>text{font-family:system-ui,\"DejaVu Sans\",sans-serif}.grid{stroke:var(--line)}"
           ".axis{stroke:var(--axis)}.tick{font-size:12px;fill:var(--soft)}"
           ".label{font-size:12.5px;fill:var(--text)}</style>\n"
           "<rect width=\"100%\" height=\"100%\" fill=\"var(--paper)\"/>\n",
           entries);
  // Outside a page colours have no names: those of the light page are written out.
  const std::string_view style = page_style();
  for (std::size_t at = 0; (at = svg.find("var(", at)) != std::string::npos;) {
    const std::size_t end = svg.find(')', at);
    const std::string name = svg.substr(at + 4, end - at - 4) + ":";
    const std::size_t value = style.find(name) + name.size();
    svg.replace(at, end + 1 - at, style.substr(value, style.find(';', value) - value));
  }
  return svg;
}

std::string sparkline(std::span<const double> y, const std::string& color) {
  constexpr double width = 110, height = 28, edge = 3;
  Range r;
  r.add(y);
  std::vector<double> x;
  for (std::size_t i = 0; i < y.size(); ++i) x.push_back(static_cast<double>(i));
  if (finite(y).size() < 2) return "";
  const Axis ax{0, x.back(), edge, width - edge};
  const Axis ay{r.low, r.high > r.low ? r.high : r.low + 1, height - edge, edge};
  return fmt::format(
      "<svg class=\"spark\" viewBox=\"0 0 {} {}\" aria-hidden=\"true\"><path d=\"{}\" "
      "style=\"fill:none;stroke:{}\" stroke-width=\"1.6\" stroke-linejoin=\"round\" "
      "stroke-linecap=\"round\"/></svg>",
      width, height, points(ax, ay, x, y), color);
}

std::vector<double> round_ticks(double low, double high, int count) {
  std::vector<double> ticks;
  if (!(high > low)) return {low};
  const double raw = (high - low) / count, power = std::pow(10.0, std::floor(std::log10(raw)));
  double step = 10 * power;
  for (const double m : {5.0, 2.0, 1.0})
    if (m * power >= raw * 0.999) step = m * power;
  // Ticks too close, or too far out, for a double to tell apart would make the loop endless.
  if (!std::isfinite(step) || !(step > 1e-14 * std::max(std::abs(low), std::abs(high))))
    return {low};
  for (double i = std::ceil(low / step - 1e-9); i * step <= high + step * 1e-9; ++i)
    ticks.push_back(i * step);
  if (ticks.empty()) ticks.push_back(std::round(low / step) * step);
  return ticks;
}

Binned bin(std::span<const double> x, std::span<const double> y, std::size_t most) {
  Binned b;
  const std::size_t n = x.size(), bins = std::min(n, most);
  for (std::size_t k = 0; k < bins; ++k) {
    const std::size_t begin = n * k / bins, count = n * (k + 1) / bins - begin;
    const std::vector<double> known = finite(y.subspan(begin, count));
    b.x.push_back(total(x.subspan(begin, count)) / static_cast<double>(count));
    b.mean.push_back(known.empty() ? NAN : total(known) / static_cast<double>(known.size()));
    b.low.push_back(known.empty() ? NAN : std::ranges::min(known));
    b.high.push_back(known.empty() ? NAN : std::ranges::max(known));
  }
  return b;
}

std::vector<double> smooth(std::span<const double> y, double sigma) {
  const auto n = std::ssize(y), reach = static_cast<std::ptrdiff_t>(std::ceil(3 * sigma));
  std::vector<double> out;
  for (std::ptrdiff_t i = 0; i < n; ++i) {
    double sum = 0, weights = 0;
    for (std::ptrdiff_t k = std::max<std::ptrdiff_t>(0, i - reach); k <= std::min(n - 1, i + reach);
         ++k) {
      // Missing values drop out, and the weights of the others are normalised below.
      if (!std::isfinite(y[k])) continue;
      const double distance = static_cast<double>(k - i) / sigma;
      const double w = std::exp(-0.5 * distance * distance);
      sum += w * y[k];
      weights += w;
    }
    out.push_back(weights > 0 ? sum / weights : NAN);
  }
  return out;
}

Curve averaged(const std::string& name, std::span<const double> x, std::span<const double> y,
               const std::string& color, double width) {
  const Binned b = bin(x, y, most_points);
  const double sigma = std::max(1.0, static_cast<double>(b.x.size()) / 60);
  return {name, b.x, smooth(b.mean, sigma), color, width};
}

std::string short_number(double v) {
  if (!std::isfinite(v)) return "-";
  if (v != std::round(v) || std::abs(v) >= 1e7) return fmt::format("{:.4g}", v);
  std::string digits = fmt::format("{:.0f}", std::abs(v));
  if (digits.size() > 4)
    for (std::size_t at = digits.size() - 3; at > 0 && at < digits.size(); at -= 3)
      digits.insert(at, ",");
  return (v < 0 ? "-" : "") + digits;
}

}  // namespace weft::report_page
