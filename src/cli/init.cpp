#include "cli/cli.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string_view>

#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "report/page.h"

namespace weft {
namespace {

// Names of jobs whose deck has another name.
const std::map<std::string, std::string> deck_of_job = {{"ingest", "train"},
                                                        {"evaluate", "segmentation_r50"},
                                                        {"segment", "segmentation_r50"},
                                                        {"segmentation", "segmentation_r50"},
                                                        {"detector", "dbnetpp_icdar2015"},
                                                        {"vae", "vae_stage1"}};

// The line that tells editors of the decks' JSON schema, which stands before everything else.
constexpr std::string_view schema_directive = "#:schema ";

std::string without_schema(const std::string& deck) {
  return deck.starts_with(schema_directive) ? deck.substr(deck.find('\n') + 1) : deck;
}

// The same with the schema of this program's installation or checkout; "" where there is none.
std::string schema_line() {
  namespace fs = std::filesystem;
  std::error_code none;
  const fs::path folder = fs::read_symlink("/proc/self/exe", none).parent_path();
  for (const char* place :
       {"../share/weft/inputs/deck.schema.json", "../inputs/deck.schema.json"}) {
    const fs::path file = (folder / place).lexically_normal();
    if (fs::is_regular_file(file, none))
      return fmt::format("{}file://{}\n", schema_directive,
                         report_page::percent_encoded(file.string()));
  }
  return "";
}

// The comment that a deck begins with, up to its first sentence's end.
std::string first_sentence(const std::string& deck) {
  std::string text;
  for (std::size_t at = 0; at < deck.size() && deck[at] == '#';) {
    const std::size_t end = std::min(deck.find('\n', at), deck.size());
    text += deck.substr(at + 1, end - at - 1);
    at = end + 1;
    if (const std::size_t stop = text.find(". "); stop < text.size())
      return text.substr(1, stop - 1);
    if (text.ends_with('.') || text.ends_with(':')) break;
  }
  if (!text.empty()) text.erase(0, 1);
  while (text.ends_with('.') || text.ends_with(':')) text.pop_back();
  return text;
}

std::string list() {
  std::string text;
  for (const InputDeck& d : input_decks())
    text += fmt::format("{:<24} {}\n", d.name, first_sentence(without_schema(d.text)));
  text += "\nAlso by the names of jobs:";
  for (const auto& [job, deck] : deck_of_job) text += fmt::format(" {} ({})", job, deck);
  return text + "\n";
}

const InputDeck& deck_named(const std::string& name) {
  const auto job = deck_of_job.find(name);
  const std::string& wanted = job == deck_of_job.end() ? name : job->second;
  std::vector<std::string> known;
  for (const InputDeck& d : input_decks()) {
    if (d.name == wanted) return d;
    known.push_back(d.name);
  }
  for (const auto& [other, deck] : deck_of_job) known.push_back(other);
  const std::string near = nearest_name(name, known);
  throw Error(Exit::usage, fmt::format("there is no deck \"{}\" to start from", name),
              near.empty() ? "`weft init` lists them" : fmt::format("did you mean \"{}\"?", near),
              __FILE__, __LINE__);
}

// Never over a file that is there, not even one made in this moment.
void write_new(const std::string& file, const std::string& text) {
  WEFT_CHECK(!is_there(file, Exit::usage), Exit::usage, "give another name: weft init NAME FILE",
             "{} already exists", file);
  File out = File::create(file, Exit::usage);
  try {
    out.write(std::as_bytes(std::span(text)), 0);
    out.close();
  } catch (const Error&) {
    std::error_code none;
    std::filesystem::remove(file, none);
    throw;
  }
}

void replace_all(std::string& text, const std::string& from, const std::string& to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
}

int init(const std::string& name, std::string file) {
  if (name.empty()) {
    fmt::print("{}", list());
    return 0;
  }
  const InputDeck& deck = deck_named(name);
  if (file.empty()) file = name + ".toml";
  WEFT_CHECK(printable(file, file.size()) == file, Exit::usage,
             "choose another name: comments of the deck have it",
             "\"{}\" has control characters or is not UTF-8", printable(file));
  // Its comments have the commands of a checkout; here the deck is `file`, and weft on the PATH.
  std::string text = without_schema(deck.text), others;
  for (const InputDeck& d : input_decks()) {
    const std::string there = "inputs/" + d.name + ".toml";
    if (d.name != deck.name && text.find(there) != std::string::npos) {
      replace_all(text, there, d.name + ".toml");
      others += fmt::format("its comments name {0}.toml, which `weft init {0}` writes\n", d.name);
    }
  }
  replace_all(text, "inputs/" + deck.name + ".toml", shell_word(file));
  replace_all(text, "build/weft", "weft");
  write_new(file, schema_line() + text);
  fmt::print("{} is a commented deck; `weft help deck` has every key\n{}", file, others);
  return 0;
}

}  // namespace

Command init_command() {
  struct Options {
    std::string name, file;
  };
  const auto o = std::make_shared<Options>();
  Command c{"init", "write a commented example deck; without a name, list the examples",
            [o](const Deck&, MPI_Comm) { return init(o->name, o->file); }};
  c.first_rank_only = true;
  c.option("name", o->name, "name of the example deck, or of a job");
  c.path("file", o->file, "where to write it; NAME.toml otherwise");
  return c;
}

}  // namespace weft
