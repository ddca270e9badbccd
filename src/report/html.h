// Pieces of the report page that its sections share: text made safe, numbers with units, frames and
// legends.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "report/data.h"

namespace weft::report_page {

// Told apart by most colour-blind eyes and in grey print.
inline constexpr const char* run_colors[] = {"#2f6db5", "#d9772b", "#3b9277", "#b8456b",
                                             "#7a5fa8", "#8a7a2e", "#4aa3c7", "#6b6f76"};
inline constexpr const char* part_colors[parts] = {"#3f74b8", "#7a2f55", "#e08a3c", "#86b6a6",
                                                   "#c8474b", "#8b6db0", "#c3c9d1"};
std::string color_of(std::size_t run);

// Text from files is data, never HTML.
std::string escape(const std::string& text);

// Fields may be absent and losses NaN: statistics cover the finite values. NaN if there are none;
// the sum of none is 0.
std::vector<double> finite(const std::vector<double>& values);
double median(const std::vector<double>& values);
double total(const std::vector<double>& values);
double greatest(const std::vector<double>& values);

std::string seconds_text(double seconds);
std::string bytes_text(double bytes);
std::string percent(double part, double whole);

// A number that a reader looks for first.
std::string tile(const std::string& value, const std::string& label);
// `note` and `body` are HTML; an empty note is left out.
std::string section(const std::string& title, const std::string& note, const std::string& body);
// The pictures of a job's folder, in the page itself as far as 48 MiB of them go; of the others the
// file is named. "" without pictures.
struct PictureFile {
  std::string name, file;  // what it shows; PNG within the folder
};
std::string picture_section(const std::filesystem::path& folder,
                            const std::vector<PictureFile>& pictures, const std::string& note,
                            bool wide);
// One entry of a legend: a stroke, or a box.
std::string swatch(const std::string& color, const std::string& text, bool box = false);

// A bar of stacked parts with text to its left and right, for a list within <div class="bars">.
// `whole` is what the full width stands for; a piece's title shows under the pointer.
struct BarPiece {
  double value;
  std::string color, title;
};
std::string bar(const std::string& name, const std::vector<BarPiece>& pieces, double whole,
                const std::string& text);

}  // namespace weft::report_page
