// A command of weft: name, help, options and action, as its owner describes it. cli/ builds the
// command line from all of them.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "config/deck.h"

namespace weft {

// "--name VALUE", a flag (bool), or a positional argument, whose name has no dashes.
struct Argument {
  // The command's deck is read from it; without it, the deck has its defaults. `path`, if given,
  // gets the file's name.
  struct DeckFile {
    std::string* path = nullptr;
  };
  struct Overrides {};  // "section.key=value", applied over the deck
  using Target =
      std::variant<DeckFile, Overrides, bool*, int*, std::int64_t*, double*, std::string*,
                   std::vector<int>*, std::vector<std::int64_t>*, std::vector<std::string>*>;
  std::string name, help;
  Target target;
  bool required = false;
  bool commas = false;         // a list, separated by commas
  double least = 0, most = 0;  // of a number, or of each in a list, inclusive
  bool path = false;           // names a file or folder: written_path() (config/deck_table.h)
  std::vector<std::string> choices = {};  // empty: any
  std::string key = {};                   // the value is set as this key of the deck
};

struct Command {
  std::string name, help;
  // `deck` has its defaults in a command that takes none. Returns the exit code, or throws Error.
  std::function<int(const Deck& deck, MPI_Comm world)> run = nullptr;
  bool first_rank_only = false;  // the others do nothing, and end with 0
  // It treats stop_signals (core/faults.h) as requests to save its state and stop.
  bool handles_stop_signals = false;
  std::vector<Argument> arguments = {};
  // The commands of a group, such as `weft bench`, which does nothing itself.
  std::vector<Command> commands = {};
  std::vector<std::shared_ptr<void>> held = {};

  // `target` lives as long as the command.
  template <class T>
  Argument& option(const std::string& option_name, T& target, const std::string& what) {
    static_assert(!std::is_arithmetic_v<T> || std::is_same_v<T, bool>, "number() has its range");
    return arguments.emplace_back(Argument{option_name, what, &target});
  }
  template <class T>
  Argument& path(const std::string& option_name, T& target, const std::string& what) {
    Argument& a = option(option_name, target, what);
    a.path = true;
    return a;
  }
  template <class T>
  Argument& number(const std::string& option_name, T& target, double least, double most,
                   const std::string& what) {
    Argument& a = arguments.emplace_back(Argument{option_name, what, &target});
    a.least = least;
    a.most = most;
    return a;
  }
  // Sets a key of the deck: to true, or to the value that follows.
  template <class T>
  Argument& key_option(const std::string& option_name, const std::string& key,
                       const std::string& what) {
    auto value = std::make_shared<T>();
    held.push_back(value);
    Argument& a = option(option_name, *value, what);
    a.key = key;
    return a;
  }
  void deck_file(const std::string& argument_name = "deck",
                 const std::string& what = "input deck (TOML)") {
    arguments.push_back({argument_name, what, Argument::DeckFile{}, true});
  }
  void overrides(const std::string& what = "section.key=value") {
    arguments.push_back({"overrides", what, Argument::Overrides{}});
  }
  void takes_deck() {
    deck_file();
    overrides("section.key=value, applied over the deck in order");
  }
};

}  // namespace weft
