#include "jobs/generate/prompts/prompt_sources.h"

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/json.h"
#include "core/log.h"
#include "jobs/generate/options.h"
#include "media/download.h"
#include "parallel/mpi.h"
#include "text/utf8.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Texts = std::map<std::string, std::string>;  // as written (key_of), as rewritten

constexpr const char* no_command =
    "check generate.refine; the command sees a text a line and prints "
    "one line for each";

std::string content_of(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream content;
  content << in.rdbuf();
  return in ? content.str() : "";
}

void make_folder(const fs::path& path) {
  std::error_code failed;
  fs::create_directories(path, failed);
  WEFT_CHECK(!failed, Exit::data, "check generate.output", "cannot make the folder {}: {}",
             path.string(), failed.message());
}

// Results of the same command from earlier runs; empty if the file is not in the form written here.
Texts texts_of(const fs::path& path, const std::string& command) {
  try {
    const auto j = parse_json(content_of(path));
    if (j.at("command") == command) return j.at("texts").get<Texts>();
  } catch (const nlohmann::json::exception&) {
  }
  return {};
}

// One line a text, as the command must get and give them.
std::string line_of(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c == '\n' || c == '\r'; }, ' ');
  return text + "\n";
}

// Runs a shell command and returns its exit code. `stop` ends it with all processes that it
// started: they are a process group.
int run_shell(const std::string& command, const std::function<bool()>& stop) {
  posix_spawnattr_t how;
  posix_spawnattr_init(&how);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&how, &none);  // this thread's mask blocks the stop signals
  posix_spawnattr_setflags(&how, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
  const char* const arguments[] = {"sh", "-c", command.c_str(), nullptr};
  pid_t shell = 0;
  const int failed =
      posix_spawn(&shell, "/bin/sh", nullptr, &how, const_cast<char* const*>(arguments), environ);
  posix_spawnattr_destroy(&how);
  WEFT_CHECK(failed == 0, Exit::data, "is /bin/sh there?", "generate.refine cannot be started: {}",
             std::strerror(failed));
  int status = 0;
  while (waitpid(shell, &status, WNOHANG) == 0) {
    if (stop()) {
      kill(-shell, SIGTERM);
      waitpid(shell, &status, 0);
      throw Error(Exit::stopped, "stopped on request while generate.refine was at work",
                  "run the same command to go on", __FILE__, __LINE__);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Refines the texts `wanted` and adds the results to `known` under the same keys.
void run_command(const std::string& command, const Texts& wanted, const fs::path& output,
                 const std::function<bool()>& stop, Texts& known) {
  const fs::path in = output / "refine_in.txt", out = output / "refine_out.txt";
  std::string lines;
  for (const auto& [key, text] : wanted) lines += line_of(text);
  std::error_code left;  // leftover files do no harm, but the shell would write through a link
  fs::remove(out, left);
  replace_file(in, lines, Exit::data, Durable::yes);
  // Paths are passed in the environment, so they need no quoting.
  setenv("WEFT_REFINE_IN", in.c_str(), 1);
  setenv("WEFT_REFINE_OUT", out.c_str(), 1);
  const int code =
      run_shell("{ " + command + "\n} < \"$WEFT_REFINE_IN\" > \"$WEFT_REFINE_OUT\"", stop);
  WEFT_CHECK(code == 0, Exit::data, no_command, "generate.refine \"{}\" ended with code {}",
             command, code);
  std::istringstream made(content_of(out));
  std::vector<std::string> refined;
  for (std::string line; std::getline(made, line);) refined.push_back(line);
  WEFT_CHECK(refined.size() == wanted.size(), Exit::data, no_command,
             "generate.refine \"{}\" printed {} for {}", command,
             counted(std::ssize(refined), "line"), counted(std::ssize(wanted), "text"));
  std::size_t i = 0;
  for (const auto& [key, text] : wanted) {
    const std::string& line = refined[i++];
    const std::string where = fmt::format("line {} of generate.refine", i);
    check_utf8(line, where);
    WEFT_CHECK(line.find_first_not_of(" \t\r") != std::string::npos, Exit::data, no_command,
               "{} is empty, for the text \"{}\"", where, text);
    known[key] = line;
  }
  fs::remove(in, left);
  fs::remove(out, left);
}

std::string key_of(const std::string& text, const std::vector<std::int64_t>& numbers,
                   std::size_t i) {
  return numbers.empty() ? text : fmt::format("{}:\n{}", numbers[i], text);
}

// The name of an address's file. Keeps the ending: FFmpeg recognises some formats by it.
std::string name_of_address(const std::string& address) {
  const std::string ending = fs::path(address.substr(0, address.find_first_of("?#"))).extension();
  const bool plain = ending.size() <= 6 && std::all_of(ending.begin(), ending.end(), [](char c) {
                       return c == '.' || std::isalnum(static_cast<unsigned char>(c)) != 0;
                     });
  return to_hex(hash128(std::string_view(address))) + (plain ? ending : "");
}

}  // namespace

RefineTexts refine_by(const std::string& command, const fs::path& output, MPI_Comm world,
                      const std::function<bool()>& stop) {
  if (command.empty()) return {};
  return [=](const std::vector<std::string>& texts, const std::vector<std::int64_t>& numbers) {
    const fs::path path = output / "refined_texts.json";
    std::string known;
    if (log::rank() == 0) {
      Texts refined = texts_of(path, command);
      Texts wanted;
      for (std::size_t i = 0; i < texts.size(); ++i)
        if (const std::string key = key_of(texts[i], numbers, i); !refined.contains(key))
          wanted.emplace(key, texts[i]);
      if (!wanted.empty()) {
        make_folder(output);
        run_command(command, wanted, output, stop, refined);
        const nlohmann::json j = {{"command", command}, {"texts", refined}};
        replace_file(path, j.dump(1), Exit::data, Durable::yes);
      }
      log::info("refine    {}, {} of them known from before", counted(std::ssize(texts), "text"),
                texts.size() - wanted.size());
      known = nlohmann::json(refined).dump();
    }
    broadcast_sized(known, world);
    const Texts refined = parse_json(known).get<Texts>();
    std::vector<std::string> result;
    for (std::size_t i = 0; i < texts.size(); ++i)
      result.push_back(refined.at(key_of(texts[i], numbers, i)));
    return result;
  };
}

void fetch_references(std::vector<Prompt>& prompts, const GenerateDeck& deck,
                      const MediaAccess& access, const fs::path& output, MPI_Comm world) {
  bool any = false;
  for (Prompt& p : prompts) {
    for (std::string& reference : p.references) {
      if (!is_address(reference)) continue;
      any = true;
      const fs::path file = output / "references" / name_of_address(reference);
      std::error_code none;
      if (log::rank() == 0 && !fs::is_regular_file(fs::symlink_status(file, none))) {
        make_folder(file.parent_path());
        try {
          download(reference, file, access);
        } catch (const Error& e) {
          throw Error(e.code(), fmt::format("{}: {}", place_of(deck, p), e.what()), e.hint(),
                      __FILE__, __LINE__);
        }
        log::info("fetched   {}", reference);
      }
      reference = file;
    }
  }
  if (any) MPI_Barrier(world);
}

}  // namespace weft
