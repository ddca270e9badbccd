#include "cli/cli.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>
#include <variant>

#include "config/deck_table.h"
#include "core/host.h"
#include "report/html.h"

namespace weft {
namespace {

// A command by the words that name it: "train", "bench step". Groups come before their commands.
struct Place {
  std::string path;
  const Command* command;
};

std::vector<Place> places(const std::vector<Command>& commands, const std::string& above = "") {
  std::vector<Place> all;
  for (const Command& c : commands) {
    const std::string path = above + c.name;
    all.push_back({path, &c});
    for (Place& p : places(c.commands, path + " ")) all.push_back(std::move(p));
  }
  return all;
}

bool is_option(const Argument& a) { return a.name.starts_with("--"); }
bool takes_value(const Argument& a) { return !std::holds_alternative<bool*>(a.target); }
bool takes_keys(const Command& c) {
  return std::any_of(c.arguments.begin(), c.arguments.end(), [](const Argument& a) {
    return std::holds_alternative<Argument::Overrides>(a.target);
  });
}

// The values of a key that can be listed; empty: any.
std::vector<std::string> values_of(const Option& key) {
  if (std::holds_alternative<bool*>(key.target)) return {"true", "false"};
  return key.choices;
}

std::string joined(const std::vector<std::string>& words, const char* between = " ") {
  return fmt::format("{}", fmt::join(words, between));
}

// In single quotes, where only a single quote means anything.
std::string quoted(const std::string& text, const char* quote = "'\\''") {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? quote : std::string(1, c);
  return out + "'";
}

std::vector<std::string> names(const std::vector<Command>& commands) {
  std::vector<std::string> all;
  for (const Command& c : commands) all.push_back(c.name);
  return all;
}

std::vector<std::string> options_of(const Command& c) {
  std::vector<std::string> all{"--help"};
  for (const Argument& a : c.arguments)
    if (is_option(a)) all.push_back(a.name);
  return all;
}

// A branch of a shell's `case` for every key whose values can be listed; `line` has {key},
// {values}.
std::string value_cases(const char* line) {
  std::string out;
  Deck deck;
  for (const Option& key : option_table(deck))
    if (const auto values = values_of(key); !values.empty())
      out += fmt::format(fmt::runtime(line), fmt::arg("key", key.key),
                         fmt::arg("values", joined(values)));
  return out;
}

std::vector<std::string> all_keys() {
  std::vector<std::string> keys;
  Deck deck;
  for (const Option& key : option_table(deck)) keys.push_back(key.key + "=");
  return keys;
}

// The words so far that name a command, as bash and zsh write it.
std::string path_pattern(const std::vector<Place>& all) {
  std::vector<std::string> paths;
  for (const Place& p : all) paths.push_back(quoted(p.path));
  return joined(paths, "|");
}

std::string choice_cases(const std::vector<Place>& all, const char* line) {
  std::string out;
  for (const Place& p : all)
    for (const Argument& a : p.command->arguments)
      if (is_option(a) && !a.choices.empty())
        out += fmt::format(fmt::runtime(line), fmt::arg("place", p.path + " " + a.name),
                           fmt::arg("values", joined(a.choices)));
  return out;
}

// Positional arguments of which the values can be listed, as of `weft help`.
std::vector<std::string> words_of(const Command& c) {
  std::vector<std::string> all = names(c.commands);
  for (const Argument& a : c.arguments)
    if (!is_option(a)) all.insert(all.end(), a.choices.begin(), a.choices.end());
  return all;
}

std::string bash(const std::vector<Command>& commands) {
  const std::vector<Place> all = places(commands);
  std::string cases =
      fmt::format("    '') words={} ;;\n", quoted(joined(names(commands)) + " --help --version"));
  for (const Place& p : all) {
    std::vector<std::string> words = words_of(*p.command), options = options_of(*p.command);
    words.insert(words.end(), options.begin(), options.end());
    cases += fmt::format("    {}) words={}{} ;;\n", quoted(p.path), quoted(joined(words)),
                         takes_keys(*p.command) ? " keys=yes" : "");
  }
  return fmt::format(
      R"(# bash completion of weft: source this, or keep it as share/bash-completion/completions/weft.
_weft_keys='{keys}'
_weft() {{
  local line=${{COMP_LINE:0:COMP_POINT}} word=${{COMP_WORDS[COMP_CWORD]}} place= words= keys= i
  # The word as it was typed: bash parts it at "=".
  local whole=${{line##*[[:space:]]}} previous=${{COMP_WORDS[COMP_CWORD-1]}}
  [[ $word == = ]] && word=
  local before=${{whole%"$word"}}
  for ((i = 1; i < COMP_CWORD; ++i)); do
    case "${{place:+$place }}${{COMP_WORDS[i]}}" in
      {paths}) place="${{place:+$place }}${{COMP_WORDS[i]}}" ;;
    esac
  done
  COMPREPLY=()
  if [[ $whole == *=* ]]; then
    case ${{whole%%=*}} in
{values}    esac
    [[ $words ]] || return
    words=$(compgen -P "${{whole%%=*}}=" -W "$words" -- "${{whole#*=}}")
    for i in $words; do COMPREPLY+=("${{i#"$before"}}"); done
    return
  fi
  case "$place $previous" in
{choices}  esac
  if [[ $words ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$whole"))
    return
  fi
  case $place in
{cases}  esac
  [[ $keys ]] && words="$words $_weft_keys"
  COMPREPLY=($(compgen -W "$words" -- "$whole"))
  if [[ $keys && $whole != -* ]]; then
    COMPREPLY+=($(compgen -f -X '!*.toml' -- "$whole") $(compgen -d -S / -- "$whole"))
  fi
  [[ ${{#COMPREPLY[@]}} == 1 && ${{COMPREPLY[0]}} == *[=/] ]] && compopt -o nospace 2> /dev/null
  return 0
}}
complete -o default -F _weft weft
)",
      fmt::arg("keys", joined(all_keys())), fmt::arg("paths", path_pattern(all)),
      fmt::arg("values", value_cases("      {key}) words='{values}' ;;\n")),
      fmt::arg("choices", choice_cases(all, "    '{place}') words='{values}' ;;\n")),
      fmt::arg("cases", cases));
}

// "name:help" as _describe reads it.
std::string described(const std::string& name, const std::string& help) {
  std::string text;
  for (const char c : help) text += c == ':' ? std::string("\\:") : std::string(1, c);
  return quoted(name + ":" + text);
}

std::string zsh(const std::vector<Command>& commands) {
  const std::vector<Place> all = places(commands);
  const auto list = [](const std::vector<Command>& of) {
    std::string out;
    for (const Command& c : of) out += " " + described(c.name, c.help);
    return out;
  };
  std::string cases =
      fmt::format("    ('') commands=({} ) options=('--help' '--version') ;;\n", list(commands));
  for (const Place& p : all) {
    std::string options = " '--help'";
    for (const Argument& a : p.command->arguments)
      if (is_option(a)) options += " " + described(a.name, a.help);
    std::string words;
    for (const Argument& a : p.command->arguments)
      if (!is_option(a))
        for (const std::string& w : a.choices) words += " " + quoted(w);
    cases += fmt::format("    ({}) commands=({}{} ) options=({} ){} ;;\n", quoted(p.path),
                         list(p.command->commands), words, options,
                         takes_keys(*p.command) ? " keys=yes" : "");
  }
  return fmt::format(
      R"(#compdef weft
# zsh completion of weft: keep this as _weft in a folder of $fpath.
_weft() {{
  local place= keys= whole=$words[CURRENT] i
  local -a commands options
  for ((i = 2; i < CURRENT; ++i)); do
    case "${{place:+$place }}$words[i]" in
      ({paths}) place="${{place:+$place }}$words[i]" ;;
    esac
  done
  if [[ $whole == *=* ]]; then
    compset -P '*='
    case ${{whole%%=*}} in
{values}      (*) _files ;;
    esac
    return
  fi
  case "$place $words[CURRENT-1]" in
{choices}  esac
  case $place in
{cases}  esac
  (( $#commands )) && _describe -t commands command commands
  [[ $whole == -* || -z $place ]] && _describe -t options option options
  if [[ -n $keys && $whole != -* ]]; then
    compadd -S '' -- {keys}
    _files -g '*.toml'
  elif [[ -n $place && $#commands -eq 0 ]]; then
    _files
  fi
}}
_weft "$@"
)",
      fmt::arg("keys", joined(all_keys())), fmt::arg("paths", path_pattern(all)),
      fmt::arg("values", value_cases("      ({key}) compadd -- {values} ;;\n")),
      fmt::arg("choices", choice_cases(all, "    ('{place}') compadd -- {values}; return ;;\n")),
      fmt::arg("cases", cases));
}

std::string fish(const std::vector<Command>& commands) {
  const auto text = [](const std::string& t) {
    std::string out;
    for (const char c : t) out += c == '\\' ? std::string("\\\\") : std::string(1, c);
    return quoted(out, "\\'");
  };
  std::string out =
      "# fish completion of weft: keep this as weft.fish in share/fish/vendor_completions.d.\n"
      "complete -c weft -n __fish_use_subcommand -l version -d 'libraries and devices'\n"
      "complete -c weft -l help -d 'help of the command'\n";
  std::vector<std::string> with_keys;
  std::string groups;
  for (const Command& c : commands)
    if (!c.commands.empty()) groups += " " + c.name;
  for (const Place& p : places(commands)) {
    const Command& c = *p.command;
    const std::size_t space = p.path.find(' ');
    const std::string group = space == std::string::npos ? "" : p.path.substr(0, space);
    // Commands of a group may have the names of others.
    const std::string here =
        group.empty()
            ? fmt::format("__fish_seen_subcommand_from {}{}", c.name,
                          groups.empty() || !c.commands.empty()
                              ? ""
                              : "; and not __fish_seen_subcommand_from" + groups)
            : fmt::format("__fish_seen_subcommand_from {}; and __fish_seen_subcommand_from {}",
                          group, c.name);
    const std::string begins =
        group.empty() ? "__fish_use_subcommand" : "__fish_seen_subcommand_from " + group;
    out +=
        fmt::format("complete -c weft -n {} -f -a {} -d {}\n", text(begins), c.name, text(c.help));
    for (const Argument& a : c.arguments) {
      if (is_option(a))
        out +=
            fmt::format("complete -c weft -n {} -l {}{}{} -d {}\n", text(here), a.name.substr(2),
                        takes_value(a) ? " -r" : "",
                        a.choices.empty() ? "" : " -f -a " + text(joined(a.choices)), text(a.help));
      else if (!a.choices.empty())
        out +=
            fmt::format("complete -c weft -n {} -f -a {}\n", text(here), text(joined(a.choices)));
    }
    if (takes_keys(c)) with_keys.push_back(here);
  }
  out += "function __weft_keys\n  switch (commandline -ct)\n";
  Deck deck;
  for (const Option& key : option_table(deck))
    if (const auto values = values_of(key); !values.empty()) {
      out += fmt::format("    case {}\n      printf '%s\\n'", text(key.key + "=*"));
      for (const std::string& v : values) out += " " + text(key.key + "=" + v);
      out += "\n";
    }
  out += "    case '*=*'\n      return 1\n    case '*'\n      printf '%s\\t%s\\n'";
  for (const Option& key : option_table(deck))
    out += fmt::format(" \\\n        {} {}", text(key.key + "="), text(key.help));
  out += "\n  end\nend\n";
  // Files beside what is listed, but for keys whose values are all listed.
  out +=
      "function __weft_listed\n  string match -q '*=*' -- (commandline -ct)\n"
      "    and __weft_keys > /dev/null\nend\n";
  for (const std::string& here : with_keys)
    out += fmt::format("complete -c weft -n {} -a '(__weft_keys)'\ncomplete -c weft -n {} -f\n",
                       text(here), text(here + "; and __weft_listed"));
  return out;
}

// Text that roff takes as it is.
std::string roff(const std::string& text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const bool begins = i == 0 || text[i - 1] == '\n';
    if (begins && (c == '.' || c == '\'')) out += "\\&";
    out += c == '\\' ? "\\e" : c == '-' ? "\\-" : std::string(1, c);
  }
  return out;
}

std::string title(const char* name, int section) {
  std::istringstream words(version_line());
  std::string program, version;
  words >> program >> version;
  return fmt::format(".TH {} {} \"\" \"weft {}\" \"weft manual\"\n", name, section, version);
}

}  // namespace

std::string shell_word(const std::string& text) {
  return report_page::is_plain_word(text) ? text : quoted(text);
}

std::string exit_codes_text() {
  return "0 done, 2 usage or deck, 3 data, 4 checkpoint, 5 non-finite, 6 hardware suspected,\n"
         "7 no progress, 70 internal error (a bug), 71 out of memory,\n"
         "75 stopped early (state saved: run again), 137 killed";
}

std::string completion_script(const std::string& shell, const std::vector<Command>& commands) {
  return shell == "bash" ? bash(commands) : shell == "zsh" ? zsh(commands) : fish(commands);
}

std::string man_page(const std::vector<Command>& commands) {
  std::string out =
      title("WEFT", 1) +
      ".SH NAME\nweft \\- train and run video and vision models on MPI ranks\n"
      ".SH SYNOPSIS\n.B mpirun \\-n\n.I N\n.B weft\n.I COMMAND DECK.toml\n"
      "[\\fIsection.key\\fR=\\fIvalue\\fR ...]\n"
      ".SH DESCRIPTION\nOne rank a GPU; without GPUs the same jobs run on processor cores. A deck "
      "says what a job does; any of its keys can be set behind it, see\n.BR weft\\-deck (5).\n"
      ".SH COMMANDS\n";
  for (const Place& p : places(commands)) {
    const Command& c = *p.command;
    if (!c.commands.empty()) continue;
    out += fmt::format(".SS weft {}", roff(p.path));
    for (const Argument& a : c.arguments)
      if (!is_option(a))
        out += a.required ? fmt::format(" {}", roff(a.name)) : fmt::format(" [{}]", roff(a.name));
    out += fmt::format("\n{}.\n", roff(c.help));
    for (const Argument& a : c.arguments) {
      const bool deck = std::holds_alternative<Argument::DeckFile>(a.target);
      if (deck || std::holds_alternative<Argument::Overrides>(a.target)) continue;
      out += fmt::format(".TP\n\\fB{}\\fR{}\n{}{}\n", roff(a.name),
                         is_option(a) && takes_value(a) ? " \\fIVALUE\\fR" : "", roff(a.help),
                         a.choices.empty() ? "" : roff(" (" + joined(a.choices, ", ") + ")"));
    }
  }
  out += ".SH EXIT STATUS\n" + roff(exit_codes_text()) + ".\n";
  return out + ".SH SEE ALSO\n.BR weft\\-deck (5),\n.BR mpirun (1),\n.BR sbatch (1)\n";
}

std::string deck_man_page() {
  std::string out = title("WEFT-DECK", 5) +
                    ".SH NAME\nweft\\-deck \\- input decks of weft\n"
                    ".SH DESCRIPTION\nA deck is a TOML file. Every key has a default; an unknown "
                    "one is an error.\n.SH KEYS\n";
  // Comment, key and default follow each other in the commented deck.
  std::istringstream deck(default_deck_with_help());
  std::string line, comment, section;
  while (std::getline(deck, line)) {
    if (line.starts_with("[")) {
      section = line.substr(1, line.find(']') - 1);
      out += ".SS " + roff(line) + "\n";
    } else if (line.starts_with("# ")) {
      comment = line.substr(2);
    } else if (const std::size_t end = line.find(" = "); end != std::string::npos) {
      out += fmt::format(".TP\n\\fB{}.{}\\fR = {}\n{}\n", roff(section), roff(line.substr(0, end)),
                         roff(line.substr(end + 3)), roff(comment));
    }
  }
  return out + ".SH SEE ALSO\n.BR weft (1)\n";
}

}  // namespace weft
