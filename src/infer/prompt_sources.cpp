#include "infer/prompt_sources.h"

#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/error.h"
#include "core/log.h"
#include "formats/file.h"
#include "formats/hash.h"
#include "media/download.h"
#include "text/utf8.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Texts = std::map<std::string, std::string>;  // as written, as rewritten

constexpr const char* no_command =
    "check generate.refine; the command sees a text a line and prints "
    "one line for each";

std::string content_of(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream content;
  content << in.rdbuf();
  return in ? content.str() : "";
}

void write_whole(const fs::path& path, const std::string& content) {
  const fs::path part = path.string() + ".part";
  fs::remove(part);
  File file = File::create(part, Exit::data);
  file.write(std::as_bytes(std::span(content)), 0);
  file.sync();
  file.close();
  rename_file(part, path, Exit::data);
}

// What the same command made of texts before.
Texts texts_of(const fs::path& path, const std::string& command) {
  const auto j = nlohmann::json::parse(content_of(path), nullptr, false);
  if (!j.is_object() || j.value("command", "") != command || !j.contains("texts")) return {};
  return j["texts"].get<Texts>();
}

// One line a text, as the command must get and give them.
std::string line_of(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c == '\n' || c == '\r'; }, ' ');
  return text + "\n";
}

void run_command(const std::string& command, const std::vector<std::string>& texts,
                 const fs::path& output, Texts& known) {
  const fs::path in = output / "refine_in.txt", out = output / "refine_out.txt";
  std::string lines;
  for (const std::string& text : texts) lines += line_of(text);
  write_whole(in, lines);
  // Paths go through the environment: no quoting can go wrong.
  setenv("WEFT_REFINE_IN", in.c_str(), 1);
  setenv("WEFT_REFINE_OUT", out.c_str(), 1);
  const int status =
      std::system(("{ " + command + "\n} < \"$WEFT_REFINE_IN\" > \"$WEFT_REFINE_OUT\"").c_str());
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  WEFT_CHECK(status == 0, Exit::data, no_command, "generate.refine \"{}\" ended with code {}",
             command, code);
  std::istringstream made(content_of(out));
  std::vector<std::string> refined;
  for (std::string line; std::getline(made, line);) refined.push_back(line);
  WEFT_CHECK(refined.size() == texts.size(), Exit::data, no_command,
             "generate.refine \"{}\" printed {} lines for {} texts", command, refined.size(),
             texts.size());
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const std::string where = fmt::format("line {} of generate.refine", i + 1);
    check_utf8(refined[i], where);
    WEFT_CHECK(refined[i].find_first_not_of(" \t\r") != std::string::npos, Exit::data, no_command,
               "{} is empty, for the text \"{}\"", where, texts[i]);
    known[texts[i]] = refined[i];
  }
  fs::remove(in);
  fs::remove(out);
}

void share(std::string& text, MPI_Comm world) {
  long long size = static_cast<long long>(text.size());
  MPI_Bcast(&size, 1, MPI_LONG_LONG, 0, world);
  text.resize(static_cast<std::size_t>(size));
  MPI_Bcast(text.data(), static_cast<int>(size), MPI_CHAR, 0, world);
}

// The name of an address's file: FFmpeg knows some kinds of files by their ending.
std::string name_of_address(const std::string& address) {
  const std::string ending = fs::path(address.substr(0, address.find_first_of("?#"))).extension();
  const bool plain = ending.size() <= 6 && std::all_of(ending.begin(), ending.end(), [](char c) {
                       return c == '.' || std::isalnum(static_cast<unsigned char>(c)) != 0;
                     });
  return to_hex(hash128(std::string_view(address))) + (plain ? ending : "");
}

}  // namespace

RefineTexts refine_by(const std::string& command, const fs::path& output, MPI_Comm world) {
  if (command.empty()) return {};
  return [=](const std::vector<std::string>& texts) {
    const fs::path path = output / "refined_texts.json";
    std::string known;
    if (log::rank() == 0) {
      Texts refined = texts_of(path, command);
      std::vector<std::string> wanted;
      for (const std::string& text : texts)
        if (!refined.contains(text)) wanted.push_back(text);
      std::sort(wanted.begin(), wanted.end());
      wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
      if (!wanted.empty()) {
        fs::create_directories(output);
        run_command(command, wanted, output, refined);
        const nlohmann::json j = {{"command", command}, {"texts", refined}};
        write_whole(path, j.dump(1));
      }
      log::info("refine    {} texts, {} of them known from before", texts.size(),
                texts.size() - wanted.size());
      known = nlohmann::json(refined).dump();
    }
    share(known, world);
    const Texts refined = nlohmann::json::parse(known).get<Texts>();
    std::vector<std::string> result;
    for (const std::string& text : texts) result.push_back(refined.at(text));
    return result;
  };
}

void fetch_references(std::vector<Prompt>& prompts, const GenerateDeck& deck,
                      const fs::path& output, MPI_Comm world) {
  bool any = false;
  for (Prompt& p : prompts) {
    for (std::string& reference : p.references) {
      if (!is_address(reference)) continue;
      any = true;
      const fs::path file = output / "references" / name_of_address(reference);
      if (log::rank() == 0 && !fs::exists(file)) {
        fs::create_directories(file.parent_path());
        try {
          download(reference, file);
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
