#include "plan/simulate_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace weft {
namespace {

// Pixels. The right margin holds the names of the curves.
constexpr double width = 860, height = 400, left = 60, right = 210, top = 44, bottom = 48;
constexpr double least_gap = 17;  // between two names

constexpr std::array colors = {"#1f77b4", "#d62728", "#2ca02c", "#9467bd",
                               "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f"};

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '<')
      out += "&lt;";
    else if (c == '&')
      out += "&amp;";
    else
      out += c;
  }
  return out;
}

struct Frame {
  double most_ranks = 2, floor = 0.5;
  double x(double ranks) const {
    return left + (width - left - right) * std::log2(ranks) / std::log2(most_ranks);
  }
  double y(double efficiency) const {
    return height - bottom - (height - top - bottom) * (efficiency - floor) / (1.0 - floor);
  }
};

std::string axes(const Frame& f) {
  std::string s;
  for (double e = f.floor; e < 1.001; e += 0.1)
    s += fmt::format(
        "<line x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"#ddd\"/>"
        "<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{:.0f} %</text>\n",
        left, width - right, f.y(e), f.y(e), left - 6, f.y(e) + 4, 100 * e);
  for (double n = 1; n <= f.most_ranks; n *= 2)
    s += fmt::format(
        "<line x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{}\" y2=\"{}\" stroke=\"#eee\"/>"
        "<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{:.0f}</text>\n",
        f.x(n), f.x(n), top, height - bottom, f.x(n), height - bottom + 18, n);
  s += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">ranks</text>\n",
                   (left + width - right) / 2, height - 8);
  return s;
}

}  // namespace

std::string scaling_plot(const std::string& title, const std::vector<ScalingCurve>& curves) {
  Frame f;
  for (const ScalingCurve& c : curves)
    for (std::size_t i = 0; i < c.ranks.size(); ++i) {
      f.most_ranks = std::max(f.most_ranks, c.ranks[i]);
      if (c.efficiency[i] < 0.5) f.floor = 0;
    }
  std::string s = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" "
      "viewBox=\"0 0 {0} {1}\" font-family=\"sans-serif\" font-size=\"12\" fill=\"#333\">\n"
      "<rect width=\"{0}\" height=\"{1}\" fill=\"#fff\"/>\n"
      "<text x=\"{2}\" y=\"24\" font-size=\"15\">{3}</text>\n",
      width, height, left, escaped(title));
  s += axes(f);

  struct Label {
    double y;
    std::size_t curve;
  };
  std::vector<Label> labels;
  for (std::size_t k = 0; k < curves.size(); ++k) {
    const ScalingCurve& c = curves[k];
    const char* color = colors[k % colors.size()];
    std::string path;
    for (std::size_t i = 0; i < c.ranks.size(); ++i) {
      const double x = f.x(c.ranks[i]), y = f.y(std::min(1.0, c.efficiency[i]));
      path += fmt::format("{}{:.1f} {:.1f}", i == 0 ? 'M' : 'L', x, y);
      s += fmt::format(
          "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"{}\"><title>{}: {:.0f} ranks, "
          "{:.1f} %</title></circle>\n",
          x, y, color, escaped(c.name), c.ranks[i], 100 * c.efficiency[i]);
    }
    s += fmt::format("<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"/>\n", path,
                     color);
    if (!c.ranks.empty()) labels.push_back({f.y(std::min(1.0, c.efficiency.back())), k});
  }

  // Names stand where the curves end, moved apart where they would lie on each other.
  std::stable_sort(labels.begin(), labels.end(),
                   [](const Label& a, const Label& b) { return a.y < b.y; });
  double lowest = top;
  for (Label& l : labels) {
    l.y = std::max(l.y, lowest);
    lowest = l.y + least_gap;
    const ScalingCurve& c = curves[l.curve];
    s += fmt::format("<text x=\"{}\" y=\"{:.1f}\" fill=\"{}\">{}, {:.1f} %</text>\n",
                     width - right + 10, l.y + 4, colors[l.curve % colors.size()], escaped(c.name),
                     100 * c.efficiency.back());
  }
  return s + "</svg>\n";
}

}  // namespace weft
