// Plots as inline SVG: lines with an optional band, and stacked areas, with axes, units and ticks.
// Each carries its values as JSON in data-plot, for the script that reads them out under the
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
  std::vector<double> low, high;  // a band around it, as long as x; may be empty
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

std::string line_plot(const PlotFrame& frame, std::span<const Curve> curves);
// The same at two widths, of which the page's style shows the one that fits the screen: letters of
// a wide plot could not be read on a phone.
std::string line_plots(const PlotFrame& frame, std::span<const Curve> curves);

// Layer k reaches from the sum of the layers below it to the sum with it, in columns around x.
struct Layer {
  std::string name;
  std::vector<double> y;
  std::string color;
};
std::string stacked_plot(const PlotFrame& frame, std::span<const double> x,
                         std::span<const Layer> layers);
std::string stacked_plots(const PlotFrame& frame, std::span<const double> x,
                          std::span<const Layer> layers);

// A curve without axes, for a row of a table. "" for fewer than two values that are finite.
std::string sparkline(std::span<const double> y, const std::string& color);

// A plot as an SVG document of its own, which needs what the report page otherwise gives: the name
// space, a look, and a legend, whose first line is `y` pixels from the top.
struct LegendEntry {
  std::string color, text;
};
std::string standalone_svg(std::string plot, const PlotFrame& frame,
                           std::span<const LegendEntry> legend, int y);

// Round numbers that cover [low, high], about `count` of them (1, 2 or 5 times a power of ten).
std::vector<double> round_ticks(double low, double high, int count);

// Means over at most `most` bins of neighbours, with the least and greatest of each bin.
struct Binned {
  std::vector<double> x, mean, low, high;
};
Binned bin(std::span<const double> x, std::span<const double> y, std::size_t most);

// A Gaussian average over neighbours; `sigma` in points. NaN do not count.
std::vector<double> smooth(std::span<const double> y, double sigma);

// "1,234,567", "0.0123", "1.2e-5": four digits at most after the first.
std::string short_number(double value);

}  // namespace weft::report_page
