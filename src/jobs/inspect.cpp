// `weft inspect`.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <numeric>
#include <optional>
#include <set>

#include "checkpoint/adapter.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/manifest.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/weights.h"
#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "data/clip_store.h"
#include "data/text_images/text_images.h"
#include "jobs/jobs.h"
#include "media/writers.h"
#include "models/registry.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

constexpr const char* not_finite = " NOT FINITE";

std::string shape_text(const SafetensorEntry& e) {
  return fmt::format("[{}]", fmt::join(e.shape, ", "));
}

// "-0.031 to 0.029, norm 1.2" of a tensor's values: enough to see zeros, explosions and NaN.
std::string values_text(const SafetensorsFile& file, const SafetensorEntry& e) {
  if (e.begin == e.end) return "empty";
  if (!e.dtype) return "a type whose values are not read";
  if (!is_floating(e)) {
    const std::vector<std::int64_t> v = file.read_i64(e);
    const auto [low, high] = std::minmax_element(v.begin(), v.end());
    return fmt::format("{} to {}", *low, *high);
  }
  double low = INFINITY, high = -INFINITY, squares = 0;
  std::int64_t strange = 0;
  for (const float x : file.read_f32(e)) {
    if (!std::isfinite(x)) {
      ++strange;
      continue;
    }
    low = std::min<double>(low, x);
    high = std::max<double>(high, x);
    squares += static_cast<double>(x) * x;
  }
  std::string text =
      low > high ? "no finite value"
                 : fmt::format("{:.4g} to {:.4g}, norm {:.5g}", low, high, std::sqrt(squares));
  if (strange > 0) text += fmt::format(", {}{}", strange, not_finite);
  return text;
}

// Reads every value: this compares the hashes, if the file has any, and shows NaN.
void inspect_safetensors(const std::string& path) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  std::uint64_t bytes = 0, elements = 0;
  std::size_t widest = 4, widest_shape = 5;
  for (const SafetensorEntry& e : file.entries()) {
    bytes += e.end - e.begin;
    elements +=
        std::accumulate(e.shape.begin(), e.shape.end(), std::uint64_t{1}, std::multiplies<>());
    widest = std::max(widest, std::min<std::size_t>(printable(e.name).size(), 72));
    widest_shape = std::max(widest_shape, shape_text(e).size());
  }
  fmt::print("safetensors {}\n  {}, {}, {:.1f} MB\n", printable(path),
             counted(std::ssize(file.entries()), "tensor"),
             counted(static_cast<std::int64_t>(elements), "element"),
             static_cast<double>(bytes) / 1e6);
  for (const auto& [key, value] : file.metadata()) {
    // A stored deck has many lines; the first tells which it is.
    const std::string line = value.substr(0, value.find('\n'));
    fmt::print("  {} = {}{}\n", printable(key), printable(line),
               line.size() < value.size() ? " ..." : "");
  }
  std::int64_t strange = 0;
  for (const SafetensorEntry& e : file.entries()) {
    const std::string values = values_text(file, e);
    if (values.ends_with(not_finite)) ++strange;
    fmt::print("  {:<{}}  {:<{}}  {:<4}  {}\n", printable(e.name), widest, shape_text(e),
               widest_shape, e.dtype ? name_of(*e.dtype) : e.type, values);
  }
  fmt::print(
      "safetensors {}: {}, {}{}\n", printable(path), counted(std::ssize(file.entries()), "tensor"),
      file.hashed() ? "every tensor matches its hash" : "no hashes: weft did not write this file",
      strange > 0 ? fmt::format(", {} with values{}", strange, not_finite) : "");
}

// "" for tensors that are no adapter's.
std::string adapter_text(const fs::path& path) {
  if (!holds_adapter(WeightFiles::open(path))) return "";
  Adapter read;
  try {
    read = read_adapter(path);
  } catch (const Error& e) {  // the tensors were told nevertheless
    return fmt::format("adapter that cannot be read: {}\n", printable(e.what()));
  }
  std::map<std::string, std::int64_t> kinds;  // "blocks.*.self_attn.q": how many
  for (const auto& [name, layer] : read.layers) ++kinds[kind_of_tensor(name)];
  std::string text =
      fmt::format("adapter of {}: {}; names of {}", counted(std::ssize(read.layers), "layer"),
                  read.facts.describe(), read.layout);
  if (!read.differences.empty())
    text += fmt::format("; {} of whole parameters",
                        counted(std::ssize(read.differences), "difference"));
  if (read.left_out > 0)
    text += fmt::format("; left out: {} of a model for pictures",
                        counted(static_cast<std::int64_t>(read.left_out), "tensor"));
  text += '\n';
  for (const auto& [kind, count] : kinds)
    text += fmt::format("  {:>5} x {}\n", count, printable(kind));
  return text;
}

// A model's index, or the folder of it or of one file, as keys for weights take them: every file.
void inspect_weights(const std::string& path) {
  const WeightFiles weights = WeightFiles::open(path);
  std::set<fs::path> files;
  for (const WeightFiles::Tensor& t : weights.tensors()) files.insert(weights.file_of(t));
  fmt::print("weights {} in {}\n", printable(describe(weights)),
             counted(std::ssize(files), "file"));
  for (const fs::path& file : files) inspect_safetensors(file.string());
  fmt::print("{}", adapter_text(path));
}

bool holds_weights(const fs::path& folder) {
  std::error_code none;
  return std::ranges::any_of(fs::directory_iterator(folder, none), [](const auto& entry) {
    return entry.path().extension() == ".safetensors" || detail::is_index(entry.path());
  });
}

// A deck: how large the parts of its model are. Nothing is allocated and no file but the deck is
// read.
void inspect_deck(const std::string& path, const std::vector<std::string>& overrides) {
  const Deck deck = load_deck(path, overrides);
  const auto model = std::ranges::find(models(), deck.model.name, &Model::name);
  WEFT_CHECK(model != models().end(), Exit::usage, "weft help model.name lists the models",
             "{}: no model has the name \"{}\"", path, deck.model.name);
  fmt::print("deck {}\n  model         {}\n", printable(path), deck.model.name);
  bool any = false;
  const auto print = [&](const char* role, const std::string& name, const ModelSize& size) {
    any = true;
    fmt::print("  {:<12}  {}: {} in {}\n", role, name, counted(size.parameters, "parameter"),
               counted(size.tensors, "tensor"));
  };
  const auto print_part = [&](const char* role, ModelPart& part) {
    print(role, part.name(), size_of(part.params()));
  };
  if (model->make_denoiser != nullptr) print_part("denoiser", *model->make_denoiser(deck));
  if (model->make_codec != nullptr) print_part("codec", *model->make_codec(deck));
  if (model->make_text_encoder != nullptr) {
    const std::unique_ptr<TextEncoder> encoder = model->make_text_encoder(deck);
    print("text encoder", encoder->name(), encoder->size());
  }
  if (!any && model->make_task != nullptr)
    print("network", deck.model.name, size_of(model->make_task(deck)->params()));
  WEFT_CHECK(any, Exit::usage, "weft inspect FILE of its weights lists their tensors",
             "{}: model.name = \"{}\" is not one network whose size a deck decides", path,
             deck.model.name);
}

// A run directory: every checkpoint in a line. What is in one, inspecting that one shows.
void inspect_run(const fs::path& dir) {
  const std::vector<std::int64_t> steps = checkpoint::list_steps(dir);
  const std::optional<std::string> latest = checkpoint::read_latest(dir);
  fmt::print("run {}\n  latest -> {}\n", printable(dir.string()),
             printable(latest.value_or("(none)")));
  const std::optional<std::int64_t> current = latest ? checkpoint::step_of(*latest) : std::nullopt;
  std::string newest, broken;
  for (const std::int64_t step : steps) {
    const fs::path path = dir / checkpoint::step_name(step);
    const bool verified = is_there(path / "verified", Exit::checkpoint);
    try {
      Checkpoint::open(path);
      // A run that was started anew in this directory leaves those of the one before.
      const bool left = current && step > *current;
      fmt::print("  {:<14} {}, every byte matches its hash{}\n", checkpoint::step_name(step),
                 verified ? "verified" : "never verified", left ? ", left by an earlier run" : "");
      if (newest.empty() && !left) newest = path.string();
    } catch (const Error& e) {
      fmt::print("  {:<14} DAMAGED{}: {}\n", checkpoint::step_name(step),
                 verified ? " since it was verified" : ", never verified", e.what());
      if (broken.empty()) broken = e.what();
    }
  }
  if (!newest.empty())
    fmt::print("newest intact: {0} (weft inspect {0}: tensors, deck)\n", printable(newest));
  WEFT_CHECK(broken.empty(), Exit::checkpoint, "weft train resumes from the newest intact one",
             "{}", broken);
  const bool dangles = latest && std::none_of(steps.begin(), steps.end(), [&](std::int64_t s) {
                         return checkpoint::step_name(s) == *latest;
                       });
  WEFT_CHECK(!dangles, Exit::checkpoint, "weft train resumes from the newest intact one",
             "{} names {}, which is no checkpoint here", (dir / "latest").string(), *latest);
}

bool is_run(const fs::path& dir) {
  return checkpoint::read_latest(dir).has_value() || !checkpoint::list_steps(dir).empty();
}

bool is_checkpoint(const fs::path& dir) {
  return is_there(dir / "manifest.json", Exit::checkpoint) ||
         checkpoint::step_of(dir.filename().string()).has_value();
}

// Pictures with text; the first is written to `picture` with its regions outlined.
void inspect_text_images(const std::string& path, const MediaDeck& limits,
                         const std::string& picture) {
  const auto images = open_text_images(path, limits);
  fmt::print("{}", describe_text_images(*images, path));
  if (picture.empty()) return;
  TextImage image;
  images->read(0, image);
  write_png(picture, image.size.height, image.size.width, with_outlines(image));
  fmt::print("  {} is {} with its regions\n", printable(picture), printable(images->name(0)));
}

// Prints to stdout. PATH is a clip store, a safetensors file, a run directory, a checkpoint in it
// (step_N) or its link `latest`, a deck (with `overrides`), or pictures with text
// (data/text_images/text_images.h), the first of which is written to the PNG `picture` unless that
// is empty. Every hash there is gets checked. Returns 0; throws Exit::data for a broken file and
// Exit::checkpoint for a broken checkpoint.
int inspect(const std::string& path, const std::vector<std::string>& overrides,
            const MediaDeck& limits, const std::string& picture) {
  const bool is_deck = path.ends_with(".toml");
  WEFT_CHECK(is_deck || overrides.empty(), Exit::usage, "leave it out",
             "\"{}\" is for decks; {} is not one", overrides.empty() ? "" : overrides.front(),
             path);
  // A run may hold pictures too.
  std::error_code ec;
  const bool saved = fs::is_directory(path, ec) && (is_checkpoint(path) || is_run(path));
  if (!is_deck && is_text_list(path) && !saved) {
    inspect_text_images(path, limits, picture);
    return 0;
  }
  WEFT_CHECK(picture.empty(), Exit::usage, "leave --picture out",
             "--picture needs a list of pictures with text; {} is not one", path);
  if (is_deck) {
    inspect_deck(path, overrides);
    return 0;
  }
  const fs::path p = path;
  const bool there = is_there(p, Exit::data);
  const fs::file_status status = fs::status(p, ec);
  if (fs::is_directory(status)) {
    if (is_checkpoint(p))
      fmt::print("{}", Checkpoint::open(p).describe());
    else if (is_run(p))
      inspect_run(p);
    else if (holds_weights(p))
      inspect_weights(path);
    else
      throw Error(Exit::checkpoint, fmt::format("{} holds no checkpoint and no weights", path),
                  "give a run directory, one of its step_N, a clip store, a safetensors file or "
                  "a folder of them",
                  __FILE__, __LINE__);
    return 0;
  }
  // A path to a part of a checkpoint means the whole checkpoint.
  const std::string name = p.filename().string();
  if ((name == "manifest.json" || name.starts_with("shard_")) &&
      fs::exists(p.parent_path() / "manifest.json", ec)) {
    fmt::print("{}", Checkpoint::open(p.parent_path().empty() ? "." : p.parent_path()).describe());
    return 0;
  }
  // A dangling link is a checkpoint's fault if its name is that of a checkpoint.
  const bool names_checkpoint =
      p.filename() == "latest" || checkpoint::step_of(p.filename().string()).has_value();
  const Exit kind = names_checkpoint ? Exit::checkpoint : Exit::data;
  WEFT_CHECK(there || !fs::is_symlink(p, ec), kind,
             "weft inspect RUN lists the checkpoints of a run",
             "{} is a link to {}, which does not exist", path, fs::read_symlink(p, ec).string());
  WEFT_CHECK(there, kind, "check the path", "{} does not exist", path);
  WEFT_CHECK(fs::is_regular_file(status), Exit::data, "give a file or a run directory",
             "{} is neither a file nor a directory", path);

  const std::string extension = p.extension().string();
  if (is_hdf5(path) || extension == ".h5" || extension == ".hdf5") {
    fmt::print("{}", describe_store(path));
  } else if (extension == ".safetensors") {
    inspect_safetensors(path);
    fmt::print("{}", adapter_text(p));
  } else if (detail::is_index(p)) {
    inspect_weights(path);
  } else {
    try {
      inspect_safetensors(path);
    } catch (const Error& e) {
      throw Error(e.code(), fmt::format("neither a clip store nor safetensors: {}", e.what()),
                  "weft inspect reads clip stores (.h5), .safetensors, lists of pictures with text "
                  "(.jsonl), decks (.toml) and run directories",
                  __FILE__, __LINE__);
    }
  }
  return 0;
}

}  // namespace

Command inspect_command() {
  const auto file = std::make_shared<std::string>();
  const auto picture = std::make_shared<std::string>();
  const auto overrides = std::make_shared<std::vector<std::string>>();
  Command c{
      "inspect",
      "check and describe a clip store, a checkpoint, a safetensors file, a deck's model or "
      "pictures with text",
      [=](const Deck& deck, MPI_Comm) { return inspect(*file, *overrides, deck.media, *picture); }};
  c.first_rank_only = true;
  c.path("file", *file, "file, checkpoint directory, deck, or list of pictures with text")
      .required = true;
  c.option("overrides", *overrides, "section.key=value, applied over a deck");
  c.path("--picture", *picture,
         "of pictures with text: PNG for the first one with its regions outlined");
  return c;
}

}  // namespace weft
