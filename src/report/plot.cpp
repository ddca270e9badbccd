#include "report/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <string_view>

#include "report/html.h"

namespace weft::report_page {
namespace {

constexpr double left = 64, right = 14, top = 10, bottom = 42;  // margins in pixels
constexpr double tick_room = 56;  // pixels along the x axis that a number may take
// On a phone, whose page leaves about as many pixels.
constexpr int narrow_width = 370, narrow_height = 240;

// Maps values to pixels along one axis.
struct Axis {
  double low = 0, high = 1, from = 0, to = 1;
  bool log = false;
  std::vector<double> ticks;

  double operator()(double v) const {
    if (log) v = std::log10(std::max(v, 1e-300));
    return from + (to - from) * (v - low) / (high - low);
  }
};

struct Range {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();
  double least_positive = std::numeric_limits<double>::infinity();
  void add(double v) {
    if (!std::isfinite(v)) return;
    low = std::min(low, v);
    high = std::max(high, v);
    if (v > 0) least_positive = std::min(least_positive, v);
  }
  bool empty() const { return low > high; }
};

// From the first step to the last, edge to edge.
Axis make_x(Range r, const PlotFrame& f) {
  if (r.empty()) r = {0, 1, 1};
  Axis a{r.low, r.high, left, f.width - right, false, {}};
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
  if (r.empty()) r = {0, 1, 1};
  Axis a{0, 1, f.height - bottom, top, false, {}};
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
  if (largest >= 1e7 || largest < 1e-3) {
    const int digits = std::max(0, static_cast<int>(std::floor(std::log10(std::abs(t)) + 1e-9) -
                                                    std::floor(std::log10(step) + 1e-9)));
    return fmt::format("{:.{}e}", t, digits);
  }
  const int decimals = std::max(0, -static_cast<int>(std::floor(std::log10(step) + 1e-9)));
  return decimals == 0 ? short_number(std::round(t)) : fmt::format("{:.{}f}", t, decimals);
}

std::string json_list(std::span<const double> values) {
  std::string s = "[";
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i > 0) s += ',';
    s += std::isfinite(values[i]) ? fmt::format("{:.5g}", values[i]) : "null";
  }
  return s + "]";
}

// Adds a curve to the list of them in data-plot.
void add_json(std::string& list, const std::string& name, const std::string& color,
              std::span<const double> x, std::span<const double> y) {
  std::string plain;  // names are of runs, thus of directories: quotes could end the attribute
  for (const char c : name)
    if (static_cast<unsigned char>(c) >= 0x20 &&
        std::string_view("\"'\\<>&").find(c) == std::string_view::npos)
      plain += c;
  if (!list.empty()) list += ',';
  list += fmt::format("{{\"n\":\"{}\",\"k\":\"{}\",\"x\":{},\"y\":{}}}", plain, color, json_list(x),
                      json_list(y));
}

// Grid, ticks, labels: all but the curves. The caller closes the element.
std::string open_svg(const PlotFrame& f, const Axis& x, const Axis& y, const std::string& curves) {
  std::string s =
      fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{} by {}\" data-plot='",
                  f.width, f.height, f.y_label, f.x_label);
  std::string labels;
  for (const auto& [at, text] : f.x_labels)
    labels += fmt::format("{}[{:.5g},\"{}\"]", labels.empty() ? "" : ",", at, text);
  s += fmt::format(
      "{{\"low\":{},\"high\":{},\"from\":{},\"to\":{},\"base\":{},\"what\":\"{}\",\"labels\":[{}],"
      "\"curves\":[{}]}}'>\n",
      x.low, x.high, x.from, x.to, f.height - bottom, f.x_label, labels, curves);
  for (const double t : y.ticks) {
    s += fmt::format("<line class=\"grid\" x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>", left,
                     f.width - right, y(t), y(t));
    s += fmt::format("<text class=\"tick\" x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n",
                     left - 8, y(t) + 4, tick_text(t, y));
  }
  const double base = f.height - bottom;
  std::vector<std::pair<double, std::string>> places = f.x_labels;
  if (places.empty())
    for (const double t : x.ticks) places.emplace_back(t, tick_text(t, x));
  for (const auto& [t, text] : places) {
    s += fmt::format("<line class=\"axis\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2}\"/>",
                     x(t), base, base + 4);
    s +=
        fmt::format("<text class=\"tick\" x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n",
                    x(t), base + 17, text);
  }
  s += fmt::format("<line class=\"axis\" x1=\"{}\" x2=\"{}\" y1=\"{}\" y2=\"{}\"/>\n", left,
                   f.width - right, base, base);
  s += fmt::format("<text class=\"label\" x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n",
                   (left + f.width - right) / 2, f.height - 6, f.x_label);
  s += fmt::format(
      "<text class=\"label\" transform=\"translate(13 {:.1f}) rotate(-90)\" "
      "text-anchor=\"middle\">{}{}</text>\n",
      (top + base) / 2, f.y_label, y.log ? " (log)" : "");
  return s;
}

// Dotted lines where the run was resumed, over the curves, and the element's end.
std::string close_svg(const PlotFrame& f, const Axis& x) {
  std::string s;
  for (const double t : f.restarts)
    if (t >= x.low && t <= x.high)
      s += fmt::format(
          "<line class=\"restart\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2}\"/>\n", x(t),
          top, f.height - bottom);
  return s + "</svg>\n";
}

PlotFrame narrowed(PlotFrame f) {
  f.width = narrow_width;
  f.height = std::min(f.height, narrow_height);
  return f;
}

std::string at_both_widths(const std::string& broad, const std::string& narrow) {
  return "<div class=\"broad\">" + broad + "</div><div class=\"narrow\">" + narrow + "</div>\n";
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
    up += fmt::format("{}{:.1f} {:.1f}", up.empty() ? 'M' : 'L', ax(c.x[i]), ay(c.high[i]));
    down = fmt::format("L{:.1f} {:.1f}", ax(c.x[i]), ay(c.low[i])) + down;
  }
  return fmt::format("<path d=\"{}{}Z\" style=\"fill:{}\" opacity=\"0.18\"/>\n", up, down, c.color);
}

}  // namespace

std::string line_plot(const PlotFrame& f, std::span<const Curve> curves) {
  Range rx, ry;
  for (const Curve& c : curves) {
    for (const double v : c.x) rx.add(v);
    for (const double v : c.y) ry.add(v);
    for (const double v : c.low) ry.add(v);
    for (const double v : c.high) ry.add(v);
  }
  const Axis x = make_x(rx, f), y = make_y(ry, f);
  std::string values;
  for (const Curve& c : curves)
    if (!c.name.empty()) add_json(values, c.name, c.color, c.x, c.y);
  std::string s = open_svg(f, x, y, values);
  for (const Curve& c : curves)
    if (!c.low.empty()) s += band(x, y, c);
  for (const Curve& c : curves) {
    const std::string d = points(x, y, c.x, c.y);
    if (c.width > 0 && !d.empty())
      s += fmt::format(
          "<path d=\"{}\" style=\"fill:none;stroke:{}\" stroke-width=\"{}\" opacity=\"{}\" "
          "stroke-linejoin=\"round\" stroke-linecap=\"round\"/>\n",
          d, c.color, c.width, c.opacity);
  }
  return s + close_svg(f, x);
}

std::string line_plots(const PlotFrame& f, std::span<const Curve> curves) {
  return at_both_widths(line_plot(f, curves), line_plot(narrowed(f), curves));
}

std::string stacked_plot(const PlotFrame& f, std::span<const double> xs,
                         std::span<const Layer> layers) {
  Range rx, ry;
  std::vector<double> base(xs.size(), 0.0), peak(xs.size(), 0.0);
  for (const Layer& l : layers)
    for (std::size_t i = 0; i < xs.size(); ++i)
      if (std::isfinite(l.y[i])) peak[i] += l.y[i];
  for (const double v : peak) ry.add(v);
  // A column reaches half-way to its neighbours.
  const double half = xs.size() > 1 ? (xs[1] - xs[0]) / 2 : 0.5;
  if (!xs.empty()) {
    rx.add(xs.front() - half);
    rx.add(xs.back() + half);
  }
  PlotFrame zero = f;
  zero.from_zero = true;
  zero.allow_log = false;
  const Axis x = make_x(rx, f), y = make_y(ry, zero);
  std::string values;
  for (const Layer& l : layers) add_json(values, l.name, l.color, xs, l.y);
  std::string s = open_svg(f, x, y, values);
  for (const Layer& l : layers) {
    std::string up, down;
    double most = 0;
    for (std::size_t i = 0; i < xs.size(); ++i) {
      const double h = std::isfinite(l.y[i]) ? l.y[i] : 0;
      most = std::max(most, h);
      const double a = x(xs[i] - half), b = x(xs[i] + half), y0 = y(base[i]), y1 = y(base[i] + h);
      up += fmt::format("{}{:.1f} {:.1f}L{:.1f} {:.1f}", up.empty() ? 'M' : 'L', a, y1, b, y1);
      down = fmt::format("L{:.1f} {:.1f}L{:.1f} {:.1f}", b, y0, a, y0) + down;
      base[i] += h;
    }
    if (most > 0) s += fmt::format("<path d=\"{}{}Z\" style=\"fill:{}\"/>\n", up, down, l.color);
  }
  return s + close_svg(f, x);
}

std::string stacked_plots(const PlotFrame& f, std::span<const double> xs,
                          std::span<const Layer> layers) {
  return at_both_widths(stacked_plot(f, xs, layers), stacked_plot(narrowed(f), xs, layers));
}

std::string sparkline(std::span<const double> y, const std::string& color) {
  constexpr double width = 110, height = 28, edge = 3;
  Range r;
  std::size_t known = 0;
  for (const double v : y) {
    r.add(v);
    known += std::isfinite(v) ? 1 : 0;
  }
  if (known < 2) return "";
  const double last = static_cast<double>(y.size()) - 1;
  const Axis ax{0, last, edge, width - edge, false, {}};
  const Axis ay{r.low, r.high > r.low ? r.high : r.low + 1, height - edge, edge, false, {}};
  std::vector<double> x(y.size());
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<double>(i);
  return fmt::format(
      "<svg class=\"spark\" viewBox=\"0 0 {} {}\" aria-hidden=\"true\"><path d=\"{}\" "
      "style=\"fill:none;stroke:{}\" stroke-width=\"1.6\" stroke-linejoin=\"round\" "
      "stroke-linecap=\"round\"/></svg>",
      width, height, points(ax, ay, x, y), color);
}

std::string standalone_svg(std::string plot, const PlotFrame& frame,
                           std::span<const LegendEntry> legend, int y) {
  const std::string style =
      "<style>text{font-family:system-ui,\"DejaVu Sans\",sans-serif}.grid{stroke:#e9ecf0}"
      ".axis{stroke:#9aa4b1}.tick{font-size:12px;fill:#5b6675}.label{font-size:12.5px;fill:#3a4452}"
      "</style>\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n";
  plot.insert(plot.find(">\n") + 2, style);
  plot.insert(plot.find(' '),
              fmt::format(" xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{}\"",
                          frame.width, frame.height));
  std::string entries;
  for (const LegendEntry& e : legend) {
    entries += fmt::format(
        "<rect x=\"440\" y=\"{}\" width=\"18\" height=\"3\" fill=\"{}\"/><text class=\"label\" "
        "x=\"464\" y=\"{}\">{}</text>\n",
        y - 5, e.color, y, escape(e.text));
    y += 17;
  }
  plot.insert(plot.rfind("</svg>"), entries);
  // The page's style gives runs their colours; here they are written out, as in light.
  constexpr const char* light[] = {"#2f6db5", "#cf6a1c", "#2f8469", "#b8456b",
                                   "#7a5fa8", "#86752a", "#2f8fb8", "#6b6f76"};
  for (std::size_t i = 0; i < std::size(light); ++i)
    for (std::size_t at = 0; (at = plot.find(run_colors[i], at)) != std::string::npos;)
      plot.replace(at, std::string_view(run_colors[i]).size(), light[i]);
  return plot;
}

std::vector<double> round_ticks(double low, double high, int count) {
  std::vector<double> ticks;
  if (!(high > low)) return {low};
  const double raw = (high - low) / count, power = std::pow(10.0, std::floor(std::log10(raw)));
  double step = 10 * power;
  for (const double m : {1.0, 2.0, 5.0})
    if (m * power >= raw * 0.999) {
      step = m * power;
      break;
    }
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
    const std::size_t begin = n * k / bins, end = n * (k + 1) / bins;
    Range r;
    double sum = 0, middle = 0;
    std::size_t count = 0;
    for (std::size_t i = begin; i < end; ++i) {
      middle += x[i];
      r.add(y[i]);
      if (std::isfinite(y[i])) {
        sum += y[i];
        ++count;
      }
    }
    const double none = std::numeric_limits<double>::quiet_NaN();
    b.x.push_back(middle / static_cast<double>(end - begin));
    b.mean.push_back(count > 0 ? sum / static_cast<double>(count) : none);
    b.low.push_back(count > 0 ? r.low : none);
    b.high.push_back(count > 0 ? r.high : none);
  }
  return b;
}

std::vector<double> smooth(std::span<const double> y, double sigma) {
  const auto n = static_cast<std::ptrdiff_t>(y.size());
  const auto reach = static_cast<std::ptrdiff_t>(std::ceil(3 * sigma));
  std::vector<double> out(y.size());
  for (std::ptrdiff_t i = 0; i < n; ++i) {
    double sum = 0, weights = 0;
    for (std::ptrdiff_t k = std::max<std::ptrdiff_t>(0, i - reach); k <= std::min(n - 1, i + reach);
         ++k) {
      const double v = y[k];
      // Missing values drop out, and the weights of the others are normalised below.
      if (!std::isfinite(v)) continue;
      const double distance = static_cast<double>(k - i) / sigma;
      const double w = std::exp(-0.5 * distance * distance);
      sum += w * v;
      weights += w;
    }
    out[i] = weights > 0 ? sum / weights : std::numeric_limits<double>::quiet_NaN();
  }
  return out;
}

std::string short_number(double v) {
  if (!std::isfinite(v)) return "-";
  const double a = std::abs(v);
  if (v == std::round(v) && a < 1e7) {
    std::string digits = fmt::format("{:.0f}", a), out;
    for (std::size_t i = 0; i < digits.size(); ++i) {
      if (i > 0 && (digits.size() - i) % 3 == 0 && digits.size() > 4) out += ',';
      out += digits[i];
    }
    return (v < 0 ? "-" : "") + out;
  }
  return fmt::format("{:.4g}", v);
}

}  // namespace weft::report_page
