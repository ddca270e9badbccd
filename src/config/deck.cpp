#include "config/deck.h"

#include <toml++/toml.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

#include "config/deck_table.h"
#include "core/error.h"
#include "core/file.h"
#include "core/log.h"

namespace weft {
namespace {

using Bools = std::vector<bool>;
using Ints = std::vector<std::int64_t>;
using Numbers = std::vector<double>;
using Texts = std::vector<std::string>;

// The origin of a value, as the start of a message: "demo.toml:12: " or "override 'a.b=1': ".
struct Origin {
  std::string name;
  bool is_override = false;
  bool from_user = false;  // not of a deck that a run or a checkpoint holds, which nobody edits

  std::string at(const toml::source_region& region) const {
    if (is_override || region.begin.line == 0) return name + ": ";
    return fmt::format("{}:{}: ", name, region.begin.line);
  }
};

[[noreturn]] void refuse(const std::string& what, const std::string& hint) {
  throw_formatted(Exit::usage, hint, __FILE__, __LINE__, "{}", what);
}

std::string section_of(const std::string& key) { return key.substr(0, key.find('.')); }
std::string name_of(const std::string& key) { return key.substr(key.find('.') + 1); }

// The tables in the order of the option table, each once.
std::vector<std::string> sections(const std::vector<Option>& table) {
  std::vector<std::string> names;
  for (const Option& o : table)
    if (names.empty() || names.back() != section_of(o.key)) names.push_back(section_of(o.key));
  return names;
}

// The expected form of a value, for the message about one that does not match.
std::string expected(const Option& o) {
  if (o.list != nullptr) return "a text in quotes, or a list of them, as [\"a\", \"b\"]";
  if (o.more != nullptr) return "a whole number, or so many more in quotes, as \"+1000\"";
  struct Visitor {
    const char* operator()(bool*) const { return "true or false"; }
    const char* operator()(std::int64_t*) const { return "a whole number"; }
    const char* operator()(double*) const { return "a number"; }
    const char* operator()(std::string*) const { return "a text in quotes"; }
    const char* operator()(Bools*) const { return "a list of true and false, as [true, false]"; }
    const char* operator()(Ints*) const { return "a list of whole numbers, as [1, 2]"; }
    const char* operator()(Numbers*) const { return "a list of numbers, as [0.5, 2]"; }
    const char* operator()(Texts*) const { return "a list of texts, as [\"a\", \"b\"]"; }
  };
  return std::visit(Visitor{}, o.target);
}

// A value as the deck has it, with its type: "the text \"many\"".
std::string shown(const toml::node& node) {
  std::ostringstream text;
  switch (node.type()) {
    case toml::node_type::string:
      text << "the text " << *node.as_string();
      break;
    case toml::node_type::integer:
      text << "the whole number " << *node.as_integer();
      break;
    case toml::node_type::floating_point:
      text << "the fraction " << *node.as_floating_point();
      break;
    case toml::node_type::boolean:
      text << *node.as_boolean();
      break;
    case toml::node_type::array:
      text << "a list";
      break;
    case toml::node_type::table:
      text << "a table";
      break;
    default:
      text << "a date or time";
  }
  return text.str();
}

// A number as TOML, in the shortest form that reads back to the same bits.
std::string number(double value) {
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".en") == std::string::npos) text += ".0";
  return text;
}

// A basic TOML string. UTF-8 passes as it is, so that paths stay readable in the stored deck.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\')
      out += std::string("\\") + c;
    else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)
      out += fmt::format("\\u{:04X}", static_cast<unsigned>(c));
    else
      out += c;
  }
  return out + "\"";
}

std::string quoted(const Texts& texts) {
  Texts items;
  for (const std::string& s : texts) items.push_back(quoted(s));
  return fmt::format("[{}]", fmt::join(items, ", "));
}

// The values that a key takes.
std::string list_of(Texts choices) {
  std::ranges::replace(choices, std::string(), quoted(std::string()));
  return fmt::format("{}", fmt::join(choices, ", "));
}

std::string limit(double value) {
  return std::abs(value) >= 1e300 ? "any" : fmt::format("{}", value);
}
std::string range_of(const Option& o) {
  return fmt::format("{} to {}", limit(o.minimum), limit(o.maximum));
}

// Puts one TOML value into the option's target.
class Assign {
 public:
  Assign(const Option& option, const Origin& origin) : option_(option), origin_(origin) {}

  void set(const toml::node& node) const {
    if (option_.list != nullptr) return set_text_or_list(node);
    if (option_.more != nullptr) *option_.more = node.is_string() ? read_more(node) : 0;
    if (option_.more != nullptr && *option_.more > 0) return;
    std::visit([&](auto* target) { *target = read(node, target); }, option_.target);
  }

 private:
  void set_text_or_list(const toml::node& node) const {
    auto* text = std::get<std::string*>(option_.target);
    option_.list->clear();
    if (!node.is_array()) {
      *text = read(node, text);
      return;
    }
    const Texts all = read(node, static_cast<const Texts*>(nullptr));
    if (all.empty())
      refuse(fmt::format("{}{} is an empty list", origin_.at(node.source()), option_.key),
             option_.help);
    *text = all.size() == 1 ? all.front() : quoted(all);
    if (all.size() > 1) *option_.list = all;
  }
  // N of "+N".
  std::int64_t read_more(const toml::node& node) const {
    const std::string text = node.as_string()->get();
    std::int64_t more = 0;
    const char* end = text.data() + text.size();
    if (!text.starts_with('+') || std::from_chars(text.data() + 1, end, more).ptr != end ||
        more < 1)
      wrong_type(node);
    in_range(node, static_cast<double>(more));
    return more;
  }
  bool read(const toml::node& node, const bool*) const {
    if (const auto* v = node.as_boolean()) return v->get();
    wrong_type(node);
  }
  std::int64_t read(const toml::node& node, const std::int64_t*) const {
    const auto* v = node.as_integer();
    if (v == nullptr) wrong_type(node);
    in_range(node, static_cast<double>(v->get()));
    return v->get();
  }
  double read(const toml::node& node, const double*) const {
    if (const auto* whole = node.as_integer())
      return in_range(node, static_cast<double>(whole->get()));
    if (const auto* v = node.as_floating_point()) return in_range(node, v->get());
    wrong_type(node);
  }
  std::string read(const toml::node& node, const std::string*) const {
    const auto* v = node.as_string();
    if (v == nullptr) wrong_type(node);
    const std::string where = origin_.at(node.source()) + option_.key;
    if (v->get().find('\0') != std::string::npos)
      refuse(fmt::format("{} = \"{}\" has a zero byte", where, v->get()), "leave it out");
    const auto& choices = option_.choices;
    if (!choices.empty() && std::find(choices.begin(), choices.end(), v->get()) == choices.end()) {
      // As near to "cpu" as a name can be, and not what is meant.
      const std::string near = nearest_name(v->get() == "gpu" ? "cuda" : v->get(), choices);
      refuse(fmt::format("{} = \"{}\" is not one of: {}", where, v->get(), list_of(choices)),
             near.empty() ? "take one of the names listed"
                          : fmt::format("did you mean \"{}\"?", near));
    }
    // The deck of a run or a checkpoint has what was made of it.
    const bool as_written = option_.path && (origin_.from_user || origin_.is_override);
    return as_written ? written_path(v->get(), where) : v->get();
  }
  template <class T>
  std::vector<T> read(const toml::node& node, const std::vector<T>*) const {
    const auto* list = node.as_array();
    // A single value for a list saves brackets and quotes on the command line; accepted only there,
    // and where decks have had one.
    if (list == nullptr && (origin_.is_override || option_.or_one))
      return {read(node, static_cast<const T*>(nullptr))};
    if (list == nullptr) wrong_type(node);
    std::vector<T> values;
    for (const toml::node& item : *list)
      values.push_back(read(item, static_cast<const T*>(nullptr)));
    return values;
  }

  double in_range(const toml::node& node, double value) const {
    // This form of the comparison refuses nan too.
    if (!(value >= option_.minimum && value <= option_.maximum))
      refuse(
          fmt::format("{}{} = {} is out of range", origin_.at(node.source()), option_.key, value),
          fmt::format("it goes from {}: {}", range_of(option_), option_.help));
    return value;
  }

  [[noreturn]] void wrong_type(const toml::node& node) const {
    std::string hint = "weft help deck shows every key with its type";
    const auto* fraction = node.as_floating_point();
    if (fraction != nullptr && std::abs(fraction->get()) < 1e15 &&
        fraction->get() == std::trunc(fraction->get()))
      hint = fmt::format("write {} without a point or exponent", std::int64_t(fraction->get()));
    refuse(fmt::format("{}{}: expected {}, got {}", origin_.at(node.source()), option_.key,
                       expected(option_), shown(node)),
           hint);
  }

  const Option& option_;
  const Origin& origin_;
};

// The hint for an unknown key.
std::string suggestion(const std::string& key, const std::vector<Option>& table) {
  Texts known;
  for (const Option& o : table) known.push_back(o.key);
  std::string near = nearest_name(key, known);
  // The right name in the wrong table (or in none) is as common as a typo.
  for (const Option& o : table)
    if (near.empty() && name_of(o.key) == name_of(key)) near = o.key;
  if (!near.empty()) return fmt::format("did you mean {}?", near);
  return "weft help deck lists every key";
}

// The row of a key; another model's gives way to an older name of a key of this one's. With some
// two hundred rows, a linear search is fast enough.
const Option& find(const std::string& key, const std::vector<Option>& table,
                   const std::string& where) {
  const Option* found = nullptr;
  for (const Option& o : table)
    if ((o.key == key || o.alias == key) && (found == nullptr || (o.own && !found->own)))
      found = &o;
  if (found != nullptr) return *found;
  refuse(fmt::format("{}unknown key {}", where, key), suggestion(key, table));
}

// A WARN where `given` is an older name of that key.
void warn_of_older_name(const std::string& given, const Option& o, const std::string& where) {
  if (given != o.key && o.alias_is_older && log::rank() == 0)
    log::warn("{}{} is an older name of {}: rename it, because a later version will refuse it",
              where, given, o.key);
}

// Keys of earlier versions with the values that they wrote into every run and checkpoint. Nothing
// read them there; another value is somebody's wish, and refused as an unknown key.
constexpr std::pair<std::string_view, double> retired_keys[] = {
    {"model.channels", 8},       {"model.momentum", 0.001}, {"model.eps", 1e-5},
    {"model.ranks", 1},          {"train.ranks", 1},        {"train.first_iteration", 0},
    {"train.max_iterations", 1}, {"score.network_wait", 0}};

// Keys, or a value of one, that have lost their effect, and what holds now. Ignored with a WARN in
// 0.3 and 0.4, which read the decks of 0.2.
struct Obsolete {
  std::string_view key, value, now;  // an empty value: any
};
constexpr Obsolete obsolete_keys[] = {
    {"animate.plan", "", "clips and pieces of them go to whichever rank is free"},
    {"data.size_policy", "", "a step takes micro-batches of equal cost"},
    {"diffusion.fix_short_clips", "", "clips of 2 to 16 frames count as 1 latent frame"},
    {"generate.share_out", "", "prompts go to whichever rank is free"},
    {"model.skip_y_embedder", "", "captions are always projected"},
    {"train.loss_spike", "ignore", "a spike is logged as a WARN"}};

bool is_obsolete(const std::string& key, std::string_view value, bool from_user,
                 const std::string& where) {
  for (const Obsolete& o : obsolete_keys) {
    if (o.key != key || (!o.value.empty() && o.value != value)) continue;
    if (from_user && log::rank() == 0)
      log::warn("{}{}{} is obsolete and ignored: {}", where, key,
                o.value.empty() ? "" : fmt::format(" = \"{}\"", o.value), o.now);
    return true;
  }
  return false;
}

bool is_retired(const std::string& key, const toml::node& value) {
  return std::ranges::any_of(retired_keys, [&](const auto& retired) {
    return retired.first == key && value.value<double>() == retired.second;
  });
}

// Puts a parsed deck into the targets of the option table. Every entry must have a row: a key that
// nothing reads would be a setting without effect.
void apply(const toml::table& root, const std::vector<Option>& table, const Origin& origin) {
  const Texts known = sections(table);
  for (const auto& [name, node] : root) {
    const std::string section(name.str());
    const bool is_section = std::find(known.begin(), known.end(), section) != known.end();
    if (!is_section && node.is_table()) {
      const std::string near = nearest_name(section, known);
      refuse(fmt::format("{}unknown table [{}]", origin.at(node.source()), section),
             near.empty() ? fmt::format("the tables are: {}", fmt::join(known, ", "))
                          : fmt::format("did you mean [{}]?", near));
    }
    if (!is_section)
      refuse(fmt::format("{}unknown key {} outside any table", origin.at(node.source()), section),
             suggestion(section, table));
    const toml::table* entries = node.as_table();
    if (entries == nullptr)
      refuse(fmt::format("{}{} is a table, not {}", origin.at(node.source()), section, shown(node)),
             fmt::format("write [{}] on a line of its own and its keys below", section));
    for (const auto& [key, value] : *entries) {
      const std::string full = section + "." + std::string(key.str());
      const std::string where = origin.at(value.source());
      if (is_retired(full, value) ||
          is_obsolete(full, value.value_or<std::string_view>(""), origin.from_user, where))
        continue;
      const Option& option = find(full, table, where);
      if (origin.from_user) warn_of_older_name(full, option, where);
      Assign(option, origin).set(value);
    }
  }
}

// Parses the value of an override. If the key wants a text, anything that does not look like TOML
// is taken as text, so that run.dir=runs/a needs no quotes, which the shell would remove anyway.
toml::table parse_value(const std::string& text, const Option& option, const Origin& origin) {
  const bool texts = std::holds_alternative<Texts*>(option.target);
  const bool wants_text = texts || std::holds_alternative<std::string*>(option.target) ||
                          (option.more != nullptr && text.starts_with('+'));
  const bool looks_like_toml = text.starts_with('"') || text.starts_with('\'') ||
                               ((texts || option.list != nullptr) && text.starts_with('['));
  if (wants_text && !looks_like_toml) {
    try {
      return toml::parse("v = " + quoted(text));
    } catch (const toml::parse_error&) {
      refuse(origin.name + ": the value is not UTF-8 text", "rename the file or directory");
    }
  }
  try {
    toml::table parsed = toml::parse("v = " + text);
    if (parsed.size() == 1) return parsed;
  } catch (const toml::parse_error&) {
  }
  const char* hint = texts || option.list != nullptr
                         ? "put double quotes around each text, and single quotes around the list"
                         : "weft help deck shows every key with its type";
  const bool fraction = std::holds_alternative<double*>(option.target) ||
                        std::holds_alternative<Numbers*>(option.target);
  refuse(
      fmt::format("{}: {}: expected {}, got '{}'", origin.name, option.key, expected(option), text),
      fraction ? number_hint(text, hint) : hint);
}

// "train.lr" of "train.lr=2e-4".
std::string override_key(const std::string& text) {
  std::string key = text.substr(0, text.find('='));
  while (!key.empty() && key.back() == ' ') key.pop_back();
  return key;
}

// "train.lr=2e-4" of the command line.
void apply_override(const std::string& text, const std::vector<Option>& table) {
  const Origin origin{fmt::format("override '{}'", text), true};
  const std::size_t equals = text.find('=');
  if (equals == std::string::npos || text.find('.') > equals)
    refuse(origin.name + " is not of the form section.key=value", "for example: train.steps=100");
  if (is_obsolete(override_key(text), text.substr(equals + 1), true, origin.name + ": ")) return;
  const Option& option = find(override_key(text), table, origin.name + ": ");
  warn_of_older_name(override_key(text), option, origin.name + ": ");
  const toml::table value = parse_value(text.substr(equals + 1), option, origin);
  Assign(option, origin).set(*value.get("v"));
}

// model.name, which chooses the rows of the keys that several models have.
void apply_model_name(Deck& deck, const toml::table& root, const Origin& origin,
                      const std::vector<std::string>& overrides) {
  const std::string key = "model.name";
  const std::vector<Option> table = option_table(deck);
  if (const auto node = root["model"]["name"])
    Assign(find(key, table, ""), origin).set(*node.node());
  for (const std::string& o : overrides)
    if (override_key(o) == key) apply_override(o, table);
}

// The target's present value.
std::string value_as_toml(const Option& o) {
  if (o.list != nullptr && !o.list->empty()) return quoted(*o.list);
  struct Visitor {
    bool single;
    std::string operator()(const bool* v) const { return *v ? "true" : "false"; }
    std::string operator()(const std::int64_t* v) const { return std::to_string(*v); }
    std::string operator()(const double* v) const { return number(*v); }
    std::string operator()(const std::string* v) const { return quoted(*v); }
    std::string operator()(const Numbers* v) const {
      Texts items;
      for (const double n : *v) items.push_back(number(n));
      if (single && items.size() == 1) return items.front();
      return fmt::format("[{}]", fmt::join(items, ", "));
    }
    std::string operator()(const Bools* v) const {
      return fmt::format("[{}]", fmt::join(*v, ", "));
    }
    std::string operator()(const Ints* v) const { return fmt::format("[{}]", fmt::join(*v, ", ")); }
    std::string operator()(const Texts* v) const { return quoted(*v); }
  };
  return std::visit(Visitor{o.or_one}, o.target);
}

// Checks conditions over several keys.
void cross_check(const Deck& deck, const std::string& origin) {
  const DeckDemand demand = [&](bool holds, const std::string& what, const std::string& hint) {
    if (!holds) refuse(origin + ": " + what, hint);
  };
  for (const DeckTable& table : deck_tables())
    if (table.check) table.check(deck, demand);

  // What other models have in this model's place: a value there is a wish without effect.
  Deck copy = deck, plain;  // the table points into mutable decks
  plain.model.name = deck.model.name;
  const std::vector<Option> rows = option_table(copy), defaults = option_table(plain);
  for (std::size_t i = 0; i < rows.size(); ++i)
    demand(rows[i].applies || value_as_toml(rows[i]) == value_as_toml(defaults[i]),
           fmt::format("{} has no effect with model.name = \"{}\"", rows[i].key, deck.model.name),
           fmt::format("leave it out: it is a key of {}", fmt::join(rows[i].models, ", ")));
}

// "whole number, 1 to 64", "one of: f32, bf16": the type and range in a comment.
std::string type_as_comment(const Option& o) {
  if (o.list != nullptr) return "text, or list of texts";
  // As in messages, without article and example.
  std::string text = expected(o);
  if (text.starts_with("a ")) text.erase(0, 2);
  text.resize(
      std::min({text.size(), text.find(", as "), text.find(" in quotes"), text.find(", or so")}));
  if (o.or_one) text = "number or " + text;
  if (!o.choices.empty()) return text + ", of: " + list_of(o.choices);
  const bool below = o.maximum < 1e15 && o.maximum != 1e300;
  if (o.minimum > -1e300)
    text += below ? ", " + range_of(o) : fmt::format(", {} or more", o.minimum);
  return text;
}

// " Default of wan: 1536." where other models have another.
std::string other_defaults(const Option& option) {
  std::map<std::string, Texts> models;  // of each value
  for (const Option& o : option.others)
    if (const std::string value = value_as_toml(o); value != value_as_toml(option))
      models[value].insert(models[value].end(), o.models.begin(), o.models.end());
  std::string text;
  for (const auto& [value, names] : models)
    text += fmt::format(" Default of {}: {}.", fmt::join(names, ", "), value);
  return text;
}

// Every key with its value, table by table; with_help puts its row of the option table above it.
// `only`: a table, a key, or the name of a key in any table.
std::string write(const Deck& deck, bool with_help, const std::string& only = "") {
  Deck copy = deck;  // the table points into a mutable deck
  std::string out, section;
  for (const Option& o : option_table(copy)) {
    if (!only.empty() && only != section_of(o.key) && only != o.key && only != name_of(o.key))
      continue;
    if (section_of(o.key) != section) {
      section = section_of(o.key);
      out += fmt::format("{}[{}]\n", out.empty() ? "" : "\n", section);
    }
    if (with_help)
      out += fmt::format("# {}{} ({})\n", o.help, other_defaults(o), type_as_comment(o));
    out += fmt::format("{} = {}\n", name_of(o.key), value_as_toml(o));
  }
  return out;
}

// Number of edits (insert, delete, replace, swap of neighbours) that turn a into b, ignoring case.
std::size_t edit_distance(const std::string& a, const std::string& b) {
  const auto same = [](char x, char y) {
    return std::tolower(static_cast<unsigned char>(x)) ==
           std::tolower(static_cast<unsigned char>(y));
  };
  std::vector<std::vector<std::size_t>> d(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (std::size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i)
    for (std::size_t j = 1; j <= b.size(); ++j) {
      d[i][j] = std::min(
          {d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (same(a[i - 1], b[j - 1]) ? 0 : 1)});
      if (i > 1 && j > 1 && same(a[i - 1], b[j - 2]) && same(a[i - 2], b[j - 1]))
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  return d[a.size()][b.size()];
}

// The table, or the key with its table, that is nearest to such a name; "" if none is near.
std::string nearest_key(const std::string& name) {
  Deck deck;
  const std::vector<Option> table = option_table(deck);
  Texts full, names;
  for (const Option& o : table) {
    if (!o.alias.empty() && o.alias == name) return o.key;
    full.push_back(o.key);
    names.push_back(name_of(o.key));
  }
  for (const Texts& known : {sections(table), full})
    if (std::string near = nearest_name(name, known); !near.empty()) return near;
  // The right name in the wrong table, or in none.
  const auto same = std::ranges::find(names, nearest_name(name_of(name), names));
  return same == names.end() ? "" : full[same - names.begin()];
}

Deck read_deck(const std::string& toml_text, const Origin& origin,
               const std::vector<std::string>& overrides) {
  Deck deck;
  toml::table root;
  try {
    root = toml::parse(toml_text);
  } catch (const toml::parse_error& e) {
    refuse(fmt::format("{}:{}:{}: not TOML: {}", origin.name, e.source().begin.line,
                       e.source().begin.column, e.description()),
           "a deck has lines of the form [section] and key = value, texts in quotes");
  }
  apply_model_name(deck, root, origin, overrides);
  const std::vector<Option> table = option_table(deck);
  apply(root, table, origin);
  for (const std::string& o : overrides) apply_override(o, table);
  cross_check(deck, origin.name);
  if (deck.train.epochs > 0 && deck.train.epoch_steps > (std::int64_t{1} << 53) / deck.train.epochs)
    refuse(fmt::format("{}: train.epochs = {} of train.epoch_steps = {} are too many steps",
                       origin.name, deck.train.epochs, deck.train.epoch_steps),
           "lower either");
  if (deck.train.epochs > 0 && deck.train.more_steps > 0)
    refuse(origin.name + ": train.epochs is set, and train.steps is \"+N\"",
           "set train.epochs = 0, or raise it");
  if (deck.train.epochs > 0) deck.train.steps = deck.train.epochs * deck.train.epoch_steps;
  return deck;
}

}  // namespace

Deck load_deck(const std::filesystem::path& path, const std::vector<std::string>& overrides) {
  std::error_code ec;
  const char* hint =
      "the first argument after the command is the deck, for example inputs/smoke.toml";
  WEFT_CHECK(is_there(path, Exit::usage), Exit::usage, hint, "deck {} does not exist",
             path.string());
  WEFT_CHECK(std::filesystem::is_regular_file(path, ec), Exit::usage, hint, "deck {} is not a file",
             path.string());
  WEFT_CHECK(std::filesystem::file_size(path, ec) <= (1u << 20) && !ec, Exit::usage, hint,
             "deck {} exceeds the 1 MiB limit of a deck", path.string());
  std::ifstream in(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(in), {}};
  WEFT_CHECK(in.good() || in.eof(), Exit::usage, "check its permissions", "cannot read deck {}",
             path.string());
  Deck deck = read_deck(text, Origin{path.string(), false, true}, overrides);
  deck.file = path.string();
  return deck;
}

Deck parse_deck(const std::string& toml_text, const std::string& origin,
                const std::vector<std::string>& overrides) {
  return read_deck(toml_text, Origin{origin}, overrides);
}

void set_keys(Deck& deck, std::span<const std::pair<std::string, std::string>> values,
              const std::string& origin) {
  const std::vector<Option> table = option_table(deck);
  const Origin where{origin, true};
  for (const auto& [key, text] : values) {
    const Option& option = find(key, table, where.name + ": ");
    const toml::table value = parse_value(text, option, where);
    Assign(option, where).set(*value.get("v"));
  }
}

std::string to_toml(const Deck& deck) { return write(deck, false); }

std::vector<DeckLine> identity(const Deck& deck, const std::set<std::string>& tables) {
  Deck copy = deck;  // the table points into a mutable deck
  std::vector<DeckLine> lines;
  for (const Option& o : option_table(copy))
    if (o.decides && o.applies && tables.contains(section_of(o.key)))
      lines.push_back(
          {section_of(o.key), fmt::format("{} = {}", name_of(o.key), value_as_toml(o))});
  return lines;
}

std::string written_path(const std::string& text, const std::string& where, Exit code) {
  const std::string first = text.substr(0, text.find('/'));
  if (!first.starts_with('$') && !first.starts_with('~')) return text;
  const char* home = first == "~" ? std::getenv("HOME") : nullptr;
  WEFT_CHECK(home != nullptr, code,
             fmt::format("write the whole path, or ./{} if that is its name; on a command line "
                         "shells replace $NAME outside single quotes",
                         text),
             "{} = \"{}\": {}", where, text,
             first == "~" ? "HOME is not set" : first + " is not replaced here");
  return home + text.substr(1);
}

std::string number_hint(const std::string& text, const std::string& other) {
  const std::size_t comma = text.find(',');
  if (comma == 0 || comma == text.npos || comma + 1 == text.size() ||
      text.find_first_not_of("0123456789", comma + 1) != text.npos ||
      text.find_first_not_of("+-0123456789") != comma)
    return other;
  return fmt::format("write {}.{}, with a decimal point", text.substr(0, comma),
                     text.substr(comma + 1));
}

std::string default_deck_with_help() { return write(Deck{}, true); }

std::string deck_help(const std::string& name) {
  const std::string text = write(Deck{}, true, name);
  if (!text.empty()) return text;
  const std::string near = nearest_key(name);
  refuse(fmt::format("no table or key of a deck is named {}", name),
         near.empty() ? "weft help lists the commands, weft help deck every key"
                      : fmt::format("did you mean {}?", near));
}

std::string nearest_name(const std::string& name, const std::vector<std::string>& known) {
  // A third of the name may differ: enough for typos, too little for another word. Very long names
  // are not compared, since the cost grows with the product of the lengths.
  if (name.size() > 1000) return "";
  std::size_t best = std::max<std::size_t>(name.size() <= 3 ? 1 : 2, name.size() / 3) + 1;
  std::string nearest;
  for (const std::string& k : known) {
    const std::size_t gap =
        k.size() > name.size() ? k.size() - name.size() : name.size() - k.size();
    if (gap >= best) continue;
    const std::size_t distance = edit_distance(name, k);
    if (distance < best) {
      best = distance;
      nearest = k;
    }
  }
  return nearest;
}

std::vector<ChangedKey> changed_keys(Deck a, Deck b, bool fixed) {
  const std::vector<Option> left = option_table(a), right = option_table(b);
  std::vector<ChangedKey> keys;
  for (std::size_t i = 0; i < left.size(); ++i) {
    ChangedKey k{left[i].key, value_as_toml(left[i]), value_as_toml(right[i])};
    if (k.was != k.is && (left[i].fixed || !fixed)) keys.push_back(std::move(k));
  }
  return keys;
}

namespace {

bool ends_word(std::string_view text, std::size_t at) {
  return at >= text.size() || std::string_view(" \"',;:()[]").find(text[at]) != text.npos;
}

bool has_word(std::string_view text, const std::string& word) {
  for (std::size_t at = text.find(word); at != text.npos; at = text.find(word, at + 1))
    if (const std::size_t end = at + word.size();
        (at == 0 || ends_word(text, at - 1)) &&
        (ends_word(text, end) || text[end] == '/'))  // or what is below that folder
      return true;
  return false;
}

}  // namespace

std::string key_of_value(const Deck& deck, std::string_view message) {
  Deck copy = deck, untouched;  // tables point into mutable decks
  const std::vector<Option> rows = option_table(copy), defaults = option_table(untouched);
  std::string key;
  std::size_t longest = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (!rows[i].choices.empty()) continue;
    const auto look = [&](const std::string& value) {
      if (value.empty() || value.size() < longest || !has_word(message, value)) return;
      key = (value.size() == longest ? key + " or " : "") + rows[i].key;
      longest = value.size();
    };
    if (const auto* text = std::get_if<std::string*>(&rows[i].target);
        text != nullptr && **text != *std::get<std::string*>(defaults[i].target))
      look(**text);
    if (const auto* texts = std::get_if<std::vector<std::string>*>(&rows[i].target))
      for (const std::string& text : **texts) look(text);
    if (rows[i].list != nullptr)
      for (const std::string& text : *rows[i].list) look(text);
  }
  return key;
}

}  // namespace weft
