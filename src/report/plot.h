// Charts as inline SVG: lines with an optional band, and stacked columns, with axes, units and
// ticks. Each carries its values as JSON in data-plot, for page.js, which shows them under the
// pointer.
#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

namespace weft::report_page {

// One curve. NaN in y interrupts it.
struct Curve {
  std::string name;  // shown under the pointer; empty: not shown
  std::vector<double> x, y;
  std::string color;
  double width = 2;  // pixels; 0 draws no line
  double opacity = 1;
  std::vector<double> low{}, high{};  // a band around it, as long as x; may be empty
  double reach = 0;  // above 0 the band is made of columns, which reach so far around x
};

struct PlotFrame {
  std::string x_label, y_label;  // the y label holds the unit
  int width = 760, height = 280;
  bool from_zero = false;  // the y axis begins at 0
  bool allow_log = false;  // a logarithmic y axis if the values span more than a factor of 50
  bool whole_x = true;     // x counts steps or ranks: no ticks between whole numbers
  // Places on the x axis and what to write there, instead of numbers: for axes that are not linear.
  std::vector<std::pair<double, std::string>> x_labels{};
  // Places on the x axis with a dotted line, where a run was resumed.
  std::vector<double> restarts{};
};

// A chart for a page. A broad one is drawn for phones too, where its letters could not be read: the
// page's style shows the one that fits the screen.
std::string chart(const PlotFrame& frame, std::span<const Curve> curves);

// Gives each curve, all over the same x, the columns that lie on those of the curves before it.
std::vector<Curve> stacked(std::vector<Curve> layers);

// The same chart as an SVG document of its own, with a legend whose first line is `y` pixels from
// the top: colour and text.
std::string standalone_svg(const PlotFrame& frame, std::span<const Curve> curves,
                           std::span<const std::pair<std::string, std::string>> legend, int y);

// A curve without axes, for a row of a table. "" for fewer than two values that are finite.
std::string sparkline(std::span<const double> y, const std::string& color);

// Round numbers that cover [low, high], about `count` of them (1, 2 or 5 times a power of ten).
std::vector<double> round_ticks(double low, double high, int count);

// Means over at most `most` bins of neighbours, with the least and greatest of each bin.
struct Binned {
  std::vector<double> x, mean, low, high;
};
Binned bin(std::span<const double> x, std::span<const double> y, std::size_t most);

// A Gaussian average over neighbours; `sigma` in points. NaN do not count.
std::vector<double> smooth(std::span<const double> y, double sigma);

// Points that one curve of a page has at most.
inline constexpr std::size_t most_points = 800;
// A curve of averages over neighbours.
Curve averaged(const std::string& name, std::span<const double> x, std::span<const double> y,
               const std::string& color, double width);

// "1,234,567", "0.0123", "1.2e-5": four digits at most after the first.
std::string short_number(double value);

}  // namespace weft::report_page
