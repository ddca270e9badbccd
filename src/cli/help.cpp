// `weft help KEY` and `weft help deck TABLE`: which commands read a table, and where it is
// explained.
#include <fmt/format.h>

#include <map>
#include <sstream>
#include <utility>

#include "cli/cli.h"
#include "config/deck.h"

namespace weft {
namespace {

// Each table's readers and its page in docs/. Commands that plan or measure a job (plan, bench)
// read what the job does. A test holds this to the tables that there are (tests/e2e/test_shell.py).
const std::map<std::string, std::pair<const char*, const char*>> readers = {
    {"run", {"every job", "decks.md"}},
    {"device", {"every job", "gpu.md"}},
    {"memory", {"every job", "plan.md"}},
    {"media", {"whatever reads pictures, videos, sound or lists", "security.md"}},
    {"ingest", {"ingest", "data.md"}},
    {"data", {"train, encode, generate, evaluate, segment", "data.md"}},
    {"model", {"every job that runs a model", "train.md"}},
    {"diffusion", {"train, generate, evaluate", "train.md"}},
    {"mask", {"train of STDiT3", "train.md"}},
    {"lora", {"train", "train.md"}},
    {"train", {"train", "train.md"}},
    {"validation", {"train, evaluate", "train.md"}},
    {"samples", {"train", "train.md"}},
    {"parallel", {"train; sp also generate", "parallel.md"}},
    {"sampler", {"generate, samples of train", "generate.md"}},
    {"vae", {"train, encode, generate, reconstruct", "vae.md"}},
    {"vae_train", {"train of a VAE", "vae.md"}},
    {"postprocess", {"score, evaluate and train of a text detector", "models/dbnet.md"}},
    {"sadtalker", {"animate", "animate.md"}},
    {"t5", {"encode, generate, text", "encode.md"}},
    {"reconstruct", {"reconstruct", "vae.md"}},
    {"clip", {"evaluate of clips", "evaluate_clips.md"}},
    {"encode", {"encode", "encode.md"}},
    {"generate", {"generate, samples of train", "generate.md"}},
    {"evaluate", {"evaluate", "segmentation.md"}},
    {"segment", {"segment", "segmentation.md"}},
    {"score", {"score", "score.md"}},
    {"animate", {"animate", "animate.md"}}};

}  // namespace

std::string key_help(const std::string& name) {
  std::istringstream lines(name.empty() ? default_deck_with_help() : deck_help(name));
  std::string out;
  for (std::string line; std::getline(lines, line);) {
    out += line + "\n";
    if (!line.starts_with('[')) continue;
    if (const auto table = readers.find(line.substr(1, line.size() - 2)); table != readers.end())
      out += fmt::format("# This table is read by: {}. Explained in docs/{}.\n\n",
                         table->second.first, table->second.second);
  }
  return out;
}

}  // namespace weft
