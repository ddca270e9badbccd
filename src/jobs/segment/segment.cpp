#include "jobs/segment/segment.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <span>

#include "config/deck_table.h"
#include "config/keep_inputs.h"
#include "core/error.h"
#include "core/host.h"
#include "core/log.h"
#include "data/clip_store.h"
#include "data/images/shapes.h"
#include "jobs/segment/segment_job.h"
#include "models/segmentation/class_names.h"
#include "models/segmentation/options.h"
#include "models/segmentation/palette.h"
#include "parallel/mpi.h"
#include "parallel/rank_device.h"
#include "train/memory_plan.h"
#include "train/stop.h"

namespace weft {
namespace {

ListSettings settings_of(const Deck& deck) {
  ListSettings s;
  s.directory = deck.get<SegmentDeck>().output;
  s.command = "segment";
  s.stem = "segment";
  s.report = "segment_report.json";
  s.noun = "input";
  s.key = "segment.output";
  s.stop_margin = deck.run.stop_margin;
  s.ahead = true;
  return s;
}

// Of the data that the deck trains on, where it has them and as many classes as the model; pictures
// can be segmented without that data.
struct DataClasses {
  std::vector<std::string> names;
  std::string palette;  // bytes, as LabelledImages::palette()
};

// Collective: rank 0 asks for all.
DataClasses classes_of_data(const Deck& deck, MPI_Comm world) {
  const std::string& data = deck.data.path;
  std::error_code none;
  std::string text, palette;  // each name ended by a zero byte
  if (log::rank() == 0 &&
      (is_shapes(data) || (std::filesystem::exists(data, none) && is_hdf5(data))))
    try {
      const auto images = open_labelled_images(data, deck.data.verify);
      if (images->num_classes() == deck.get<SegmentationDeck>().num_classes) {
        for (const std::string& name : images->class_names()) text += name + '\0';
        for (const std::uint8_t value : images->palette()) palette += static_cast<char>(value);
      }
    } catch (const Error& e) {
      log::warn("classes have neither names nor colours of the data: {}", e.what());
    }
  broadcast_sized(text, world);
  broadcast_sized(palette, world);
  std::vector<std::string> names;
  for (std::size_t at = 0, end; at < text.size(); at = end + 1) {
    end = text.find('\0', at);
    names.push_back(text.substr(at, end - at));
  }
  return {names, palette};
}

// No result may replace an input.
void check_results(const Deck& deck, const std::vector<SegmentInput>& inputs) {
  const std::filesystem::path output = deck.get<SegmentDeck>().output;
  std::set<std::filesystem::path> results;
  std::vector<std::string> paths;
  for (const SegmentInput& i : inputs) {
    results.insert(absolute_path(output / result_file(i)));
    paths.push_back(i.media.path);
  }
  keep_inputs(deck, "segment.output", paths,
              [&](const std::filesystem::path& path) { return results.contains(path); });
}

// "sky 41.2 %, sea 30.1 %, ...", at most 8 classes.
std::string shares_text(const nlohmann::ordered_json& line) {
  std::string text;
  std::size_t named = 0;
  for (const auto& s : line.at("shares")) {
    if (++named > 8) return text + ", ...";
    text += fmt::format("{}{} {:.1f} %", text.empty() ? "" : ", ", s.at("name").get<std::string>(),
                        100 * s.at("share").get<double>());
  }
  return text;
}

// What is in the first inputs; segment.jsonl has all.
void print_shares(const ListEngine& engine) {
  constexpr std::size_t most = 20;
  const ManifestLines lines = engine.lines();
  std::size_t printed = 0;
  for (const ListItem& item : engine.items()) {
    const auto line = lines.find(item.name);
    if (line == lines.end() || !is_result(line->second, item.key)) continue;
    if (++printed > most) break;
    fmt::print("{}: {}\n", printable(item.name),
               printable(shares_text(line->second.parsed()), 1000));
  }
  const auto all = (engine.settings().directory / (engine.settings().stem + ".jsonl")).string();
  if (printed > most)
    fmt::print("... and of {}: {}\n", counted(engine.items().size() - most, "other"), all);
  else
    log::write_info("results   " + all);
}

}  // namespace

int segment(const Deck& deck, MPI_Comm world) {
  // 1. What is to be made.
  watch_stop_signals();
  const SegmentDeck& s = deck.get<SegmentDeck>();
  WEFT_CHECK(!s.output.empty(), Exit::usage, "set segment.output = \"segmented\"",
             "segment.output is empty");
  const RankDevice device = choose_device(deck.device.kind, deck.device.share, world);
  set_threads(static_cast<int>(deck.run.threads), device.host_ranks);
  const std::vector<SegmentInput> inputs = list_inputs(s, deck.media, world);
  if (log::rank() == 0) check_results(deck, inputs);
  Predictor predictor(deck);
  const SegmentationSource weights(deck, s.ema, world);
  const DataClasses of_data = classes_of_data(deck, world);
  const std::vector<std::string> names = class_names(deck, of_data.names);
  const std::span bytes(reinterpret_cast<const std::uint8_t*>(of_data.palette.data()),
                        of_data.palette.size());
  const std::vector<Rgb> palette = label_palette(predictor.num_classes(), bytes);
  std::string job = fmt::format("weights {}\n{}overlay {}\norientation {}\nclasses {}\n",
                                weights.identity(), describe_prediction(deck), s.overlay,
                                deck.media.orientation, fmt::join(names, "\n"));
  for (const Rgb& colour : palette) job += css_colour(colour);
  ListEngine engine(settings_of(deck), segment_items(inputs, job), world);
  const std::size_t missing = engine.missing().size();
  log::info(
      "segment   {} at {} into {}{}", counted(std::ssize(inputs), "input"),
      counted(std::ssize(deck.data.short_sides), "scale"), s.output,
      missing < inputs.size() ? fmt::format(", {} made before", inputs.size() - missing) : "");

  // 2. Inputs through the model; a rank that is free takes the next one.
  ListEnd last;
  if (missing > 0) {
    weights.load(predictor.params());
    log::info("weights   {}", weights.describe());
    const auto arena = Arena::reserve(arena_capacity(deck.memory, device));
    const ArenaScope scope(*arena);
    SegmentJob work(deck, inputs, names, palette, predictor, engine);
    engine.run(work, engine.one_by_one());
    log::info("memory    {} at the peak", size_text(static_cast<double>(arena->peak())));
    last.share = work.share();
  }

  // 3. The report.
  last.print = [&](const ListReport&) { print_shares(engine); };
  return engine.end(last);
}

namespace {

void segment_rows(Rows& r, SegmentDeck& d) {
  r.text("inputs", d.inputs,
         "Pictures and videos, folders of them, globs, lists and shards, as ingest.inputs takes "
         "them.");
  r.text("output", d.output, "Folder of the results: a PNG for a picture, an MP4 for a video.");
  r.text("overlay", d.overlay,
         "What is drawn: side_by_side has the picture and the classes' colours, blend mixes them, "
         "mask "
         "is a PNG of labels (class + 1) with a palette.",
         {"side_by_side", "blend", "mask"});
  r.flag("ema", d.ema, "Take the moving average of the weights from a checkpoint.");
}

}  // namespace

DeckTable segment_table() { return deck_table("segment", segment_rows); }

Command segment_command() {
  Command c{"segment", "classify the pixels of pictures and videos", segment};
  c.heeds_stops = true;
  c.takes_deck();
  return c;
}

}  // namespace weft
