#include "jobs/generate/texts.h"

#include <signal.h>
#include <spawn.h>
#include <unistd.h>

#include <sys/wait.h>
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/json.h"
#include "core/log.h"
#include "core/mpi.h"
#include "jobs/generate/options.h"
#include "text/utf8.h"

namespace weft {

// ---- Rewriting

namespace {

namespace fs = std::filesystem;
using Texts = std::map<std::string, std::string>;  // as written (key_of), as rewritten

constexpr const char* no_command =
    "check generate.refine; the command reads one text per line and must print "
    "exactly one line for each";

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
  WEFT_CHECK(failed == 0, Exit::data, "check that /bin/sh exists",
             "generate.refine cannot be started: {}", std::strerror(failed));
  int status = 0;
  while (waitpid(shell, &status, WNOHANG) == 0) {
    if (stop()) {
      kill(-shell, SIGTERM);
      waitpid(shell, &status, 0);
      throw Error(Exit::stopped, "stopped on request while generate.refine was running",
                  "run the same command to resume", __FILE__, __LINE__);
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
        make_folders(output, Exit::data, "choose another generate.output");
        run_command(command, wanted, output, stop, refined);
        const nlohmann::json j = {{"command", command}, {"texts", refined}};
        replace_file(path, dump_json(j, 1), Exit::data, Durable::yes);
      }
      log::info("refine    {}, {} of them cached", counted(std::ssize(texts), "text"),
                texts.size() - wanted.size());
      known = dump_json(nlohmann::json(refined));
    }
    broadcast_sized(known, world);
    const Texts refined = parse_json(known).get<Texts>();
    std::vector<std::string> result;
    for (std::size_t i = 0; i < texts.size(); ++i)
      result.push_back(refined.at(key_of(texts[i], numbers, i)));
    return result;
  };
}

// ---- Features

namespace {

constexpr const char* key_name = "key";  // in a file's metadata
constexpr std::size_t most_open = 32;

// "" for a file that is missing or damaged.
std::string stored_key(const fs::path& path) {
  std::error_code none;
  if (!fs::exists(path, none)) return "";
  try {
    const SafetensorsFile file = SafetensorsFile::open(path);
    const auto key = file.metadata().find(key_name);
    return key == file.metadata().end() ? "" : key->second;
  } catch (const Error& e) {
    log::warn("{}: encoding its texts again", e.what());
    return "";
  }
}

}  // namespace

PromptFeatures::PromptFeatures(TextEncoder* encoder, const std::vector<std::string>& texts,
                               const fs::path& directory, MPI_Comm world,
                               const std::function<bool()>& stop, std::int64_t texts_a_file)
    : texts_a_file_(texts_a_file), directory_(directory) {
  if (encoder == nullptr || !encoder->lacks().empty()) return;
  channels_ = encoder->channels();
  longest_ = encoder->max_tokens();
  // Before its tokenizer, which lies in the same folder, is asked for.
  if (log::rank() == 0) encoder->check_weights();
  there_ = true;
  // Rank 0 knows which files are missing, and their texts.
  std::vector<TextFile> files;
  std::vector<std::string> missing;
  if (log::rank() == 0) {
    const std::string described = encoder->describe();
    const auto step = static_cast<std::size_t>(texts_a_file);
    for (std::size_t first = 0; first == 0 || first < texts.size(); first += step) {
      const auto of_file = std::span(texts).subspan(first, std::min(step, texts.size() - first));
      const fs::path path = file_name(static_cast<std::int64_t>(first / step));
      const std::string key = described + " captions " + hash_of_texts(of_file);
      if (stored_key(path) == key) continue;
      missing.insert(missing.end(), of_file.begin(), of_file.end());
      files.push_back({path, missing.size(), {{key_name, key}}});
    }
    if (missing.size() < texts.size() || files.empty())
      log::info("text      {} of {} cached in {}", texts.size() - missing.size(),
                counted(std::ssize(texts), "text"), file_name(0).string());
  }
  int wait = files.empty() ? 0 : 1;
  MPI_Bcast(&wait, 1, MPI_INT, 0, world);
  if (wait == 0) return;
  encoded_ = encoder->encode(missing, files, stop, world);
  // The others may open the files only once rank 0 has written them.
  MPI_Barrier(world);
}

fs::path PromptFeatures::file_name(std::int64_t file) const {
  return directory_ /
         fmt::format("text_features{}.safetensors", file == 0 ? "" : fmt::format("-{}", file));
}

TextRows PromptFeatures::read(std::int64_t text) const {
  WEFT_ASSERT(there_ && text >= 0);
  const std::int64_t number = text / texts_a_file_;
  auto file = open_.find(number);
  if (file == open_.end()) {
    if (open_.size() == most_open) open_.erase(open_.begin());
    file = open_.emplace(number, SafetensorsFile::open(file_name(number))).first;
  }
  const SafetensorEntry& e = file->second.at(std::to_string(text % texts_a_file_));
  WEFT_CHECK(
      e.shape.size() == 2 && e.shape[1] == channels_ && e.shape[0] >= 1 && e.shape[0] <= longest_,
      Exit::data, "delete the file; the same command rebuilds it",
      "{}: text {} has shape [{}], expected [1..{}, {}]", file->second.path().string(), text,
      fmt::join(e.shape, ", "), longest_, channels_);
  return {file->second.read_f32(e), e.shape[0]};
}

}  // namespace weft
