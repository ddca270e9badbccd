// How a module describes its table of the deck: one function that adds its rows, and one that
// checks conditions over several keys.
#pragma once

#include <functional>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "config/deck.h"
#include "core/error.h"

namespace weft {

inline constexpr double no_limit = 1e300;
inline constexpr double many = 9e15;  // whole numbers up to here are exact as double
// The largest number below 1: for rates and shares that must not reach it.
inline constexpr double below_one = 1.0 - std::numeric_limits<double>::epsilon() / 2;

// One key of the deck. `target` points into the Deck that the row was made for.
struct Option {
  using Target =
      std::variant<bool*, std::int64_t*, double*, std::string*, std::vector<bool>*,
                   std::vector<std::int64_t>*, std::vector<double>*, std::vector<std::string>*>;
  std::string key;  // "train.lr"
  Target target;
  std::string help;                  // one sentence, with the unit
  std::vector<std::string> choices;  // of a string; empty: any
  double minimum, maximum;           // of a number, inclusive
  bool fixed = false;                // a training run's results depend on it
  std::string alias = {};            // another key that decks may use
  // A text that may also be a list of texts. Two or more texts are here, and the text is the list
  // as TOML; a list of one is that text.
  std::vector<std::string>* list = nullptr;
  bool decides = true;  // results of running a model depend on it (identity)
  // Of a whole number: a text "+N" is taken, too, and is N here (train.steps).
  std::int64_t* more = nullptr;
  bool or_one = false;         // of a list: a deck may give one value without brackets
  bool alias_is_older = true;  // and its use a WARN
  bool path = false;           // a text, or each of a list, that names a file or folder
  // Several models may have a row for a key (DeckTable::models); this one is model.name's, or else
  // that of any model, or else the first. The rows of the others:
  std::vector<Option> others = {};
  std::vector<std::string> models = {};  // of its table
  bool own = false;                      // model.name is among them
  // False: another model's table stands in for this row's, so the key has no effect with
  // model.name.
  bool applies = true;
};

// The rows of one table, in the order of the reference page.
class Rows {
 public:
  Rows(std::string section, bool fixed) : section_(std::move(section)), fixed_(fixed) {}

  template <class T>
  Option& flag(const char* name, T& target, const char* help) {
    return add(name, &target, help, {}, -no_limit, no_limit);
  }
  template <class T>
  Option& number(const char* name, T& target, double minimum, double maximum, const char* help) {
    return add(name, &target, help, {}, minimum, maximum);
  }
  template <class T>
  Option& text(const char* name, T& target, const char* help,
               std::vector<std::string> choices = {}) {
    return add(name, &target, help, std::move(choices), -no_limit, no_limit);
  }
  template <class T>
  Option& path(const char* name, T& target, const char* help) {
    Option& o = text(name, target, help);
    o.path = true;
    return o;
  }
  // Sets Option::decides of the rows that follow.
  void decide(bool results) { decides_ = results; }
  std::vector<Option> take() { return std::move(rows_); }

 private:
  Option& add(const char* name, Option::Target target, const char* help,
              std::vector<std::string> choices, double minimum, double maximum) {
    return rows_.emplace_back(Option{section_ + "." + name,
                                     target,
                                     help,
                                     std::move(choices),
                                     minimum,
                                     maximum,
                                     fixed_,
                                     {},
                                     nullptr,
                                     decides_});
  }
  std::string section_;
  bool fixed_, decides_ = true;
  std::vector<Option> rows_;
};

// Refuses the deck unless `holds`: what is wrong, and what to do.
using DeckDemand =
    std::function<void(bool holds, const std::string& what, const std::string& hint)>;

struct DeckTable {
  std::string section;
  std::function<void(Rows&, Deck&)> rows;
  std::function<void(const Deck&, const DeckDemand&)> check;
  std::string next =
      {};  // the section whose last table it stands in front of; empty: it comes last. A table of
           // a section that there is already comes behind that, unless `next` is the section
  bool fixed = false;  // of its rows (Option::fixed)
  // The values of model.name that it is for, set by the registry; empty: any. If two tables have
  // rows of the same key, the table that model.name names is used, or else that of any model, or
  // else the first.
  std::vector<std::string> models = {};
};

// The table that is kept as a T.
template <class T>
DeckTable deck_table(std::string section, void (*rows)(Rows&, T&),
                     void (*check)(const T&, const DeckDemand&) = nullptr) {
  return {std::move(section), [rows](Rows& r, Deck& d) { rows(r, d.get<T>()); },
          [check](const Deck& d, const DeckDemand& demand) {
            if (check != nullptr) check(d.get<T>(), demand);
          }};
}

// What decides the results of a job that runs models: every key of these tables but those whose row
// says otherwise (Option::decides) and those of other models (Option::applies), in the order of the
// reference page.
struct DeckLine {
  std::string table, text;  // "vae", "filters = 128"
};
std::vector<DeckLine> identity(const Deck& deck, const std::set<std::string>& tables);

// Every key once, in the order of the reference page, with targets in `deck`; deck.model.name
// chooses among the rows of several models.
std::vector<Option> option_table(Deck& deck);

// A path as somebody wrote it, with ~/ in front as the home directory. Error(code) for what else a
// shell would have put in its place: $SCRATCH/x, ~somebody/x. `where` begins the message.
std::string written_path(const std::string& text, const std::string& where,
                         Exit code = Exit::usage);

// What to do where a number was expected: of one with a decimal comma how to write it, else
// `other`.
std::string number_hint(const std::string& text, const std::string& other);

// For config/deck.cpp: the tables of the run itself, and all tables in order.
std::vector<DeckTable> common_tables();
const std::vector<DeckTable>& deck_tables();

}  // namespace weft
