// How the option table is written. For core/deck_table*.cpp only.
#pragma once

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "config/deck.h"

namespace weft {

inline constexpr double no_limit = 1e300;
inline constexpr double many = 9e15;  // whole numbers up to here are exact as double
// The largest number below 1: for rates and shares that must not reach it.
inline constexpr double below_one = 1.0 - std::numeric_limits<double>::epsilon() / 2;

// Rows are added section by section, so that the order of the reference page is the order here.
class Rows {
 public:
  void section(std::string name) { section_ = std::move(name); }

  template <class T>
  void flag(const char* name, T& target, const char* help) {
    rows_.push_back({section_ + "." + name, &target, help, {}, -no_limit, no_limit});
  }
  template <class T>
  void number(const char* name, T& target, double minimum, double maximum, const char* help) {
    rows_.push_back({section_ + "." + name, &target, help, {}, minimum, maximum});
  }
  template <class T>
  void text(const char* name, T& target, const char* help, std::vector<std::string> choices = {}) {
    rows_.push_back(
        {section_ + "." + name, &target, help, std::move(choices), -no_limit, no_limit});
  }
  std::vector<Option> take() { return std::move(rows_); }

 private:
  std::string section_;
  std::vector<Option> rows_;
};

// The sections of config/deck_table_video.cpp.
void vae_rows(Rows& r, Deck& d);
void text_rows(Rows& r, Deck& d);
void generation_rows(Rows& r, Deck& d);

}  // namespace weft
