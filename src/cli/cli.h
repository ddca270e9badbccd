// The command line: a program's way from main() to its exit code (weft and the programs of its
// tests start by run_program), weft's commands, and what shells and `man` are told about them.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "config/command.h"

namespace weft {

struct Program {
  std::string name, help;
  std::string footer;  // of --help
  // `weft COMMAND ...`; or one command without a name, whose arguments follow the program's.
  std::vector<Command> commands;
  std::function<void()> register_tables;  // of the decks that the commands read; null: none do
};

// Returns the exit code of docs/errors.md, the same on every rank.
int run_program(int argc, char** argv, const Program& program);

// The commands of weft.
Program weft_program();

// Runs a process that weft has started itself (data/store_file.h), before MPI: returns its
// exit code. Nothing for a process that a user started.
std::optional<int> run_as_child(int argc, char** argv);

// A script that completes weft's command line. `shell`: bash, zsh or fish.
std::string completion_script(const std::string& shell, const std::vector<Command>& commands);

// Pages for `man`: weft(1), and weft-deck(5) with every key.
std::string man_page(const std::vector<Command>& commands);
std::string deck_man_page();

// As a word of a POSIX shell's command line: in quotes where it needs them.
std::string shell_word(const std::string& text);

// "0 done, 2 usage or deck, ...", on two lines.
std::string exit_codes_text();

// deck_help() of a table or key, or of all where `name` is empty, with the commands that read each
// table and the page about it. Exit::usage where there is none of that name.
std::string key_help(const std::string& name);

// `weft init` writes a deck to start from: one of inputs/, which are compiled into the program.
Command init_command();

struct InputDeck {
  std::string name, text;  // "smoke"; the file as it is
};
// tools/input_decks.cmake writes the source.
const std::vector<InputDeck>& input_decks();
// Of inputs/reference/, on one rank: "reference/smoke.1/deck", "reference/smoke.1/metrics.jsonl".
const std::vector<InputDeck>& reference_files();

}  // namespace weft
