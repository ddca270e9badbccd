#include "jobs/evaluate/evaluate.h"

#include <algorithm>
#include <set>

#include "config/deck_table.h"
#include "config/keep_inputs.h"
#include "core/error.h"
#include "core/file.h"
#include "core/host.h"
#include "core/json.h"
#include "core/log.h"
#include "data/images/labelled_images.h"
#include "data/text_images/drawn/drawn_text.h"
#include "jobs/evaluate/clips.h"
#include "models/registry.h"
#include "tensor/device.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

void write_text(const fs::path& path, const std::string& text) {
  replace_file(path, text, Exit::data, Durable::no);
}

EvaluationPace earlier_pace(const fs::path& json) {
  const auto j = try_parse_json<Json>(content_of(json));
  try {
    const Json& p = j.at("pace");
    return {p.at("images"), p.at("ranks"), p.at("seconds")};
  } catch (const nlohmann::json::exception&) {
    return {};
  }
}

// Pictures and predictions of images that an earlier evaluation in this folder had.
void remove_others(const ListEngine& engine, const ManifestLines& lines) {
  std::set<std::string> files;
  for (const ListItem& item : engine.items()) {
    const auto line = lines.find(item.name);
    if (line == lines.end()) continue;
    const Json j = line->second.parsed();
    for (const char* member : {"picture", "prediction"})
      if (j.contains(member)) files.insert(j[member].get<std::string>());
  }
  const auto is_own = [](const std::string& name) {  // 00012_NAME.png
    const std::size_t digits = name.find_first_not_of("0123456789");
    return digits != name.npos && digits >= 5 && name[digits] == '_' && name.ends_with(".png");
  };
  std::vector<fs::path> others;
  std::error_code failed;
  for (const char* folder : {"pictures", "predictions"})
    for (fs::directory_iterator it(engine.settings().directory / folder, failed), last;
         !failed && it != last; it.increment(failed)) {
      const std::string name = it->path().filename().string();
      if (is_own(name) && !files.contains(std::string(folder) + "/" + name))
        others.push_back(it->path());
    }
  for (const fs::path& file : others) fs::remove(file, failed);
}

}  // namespace

HeldOutChoice evaluated_samples(const Deck& deck) {
  const std::string& own = deck.get<EvaluateDeck>().data;
  HeldOutChoice choice = held_out_choice(deck);
  if (!own.empty()) choice.path = own, choice.share = 0;
  return choice;
}

const std::string& evaluated_data(const Deck& deck) {
  const std::string &own = deck.get<EvaluateDeck>().data,
                    &validation = deck.get<ValidationDeck>().path;
  WEFT_CHECK(!own.empty() || !validation.empty() || deck.data.paths.empty(), Exit::usage,
             "name one store in evaluate.data",
             "weft evaluate takes one store, and data.path names {}", deck.data.paths.size());
  return !own.empty() ? own : !validation.empty() ? validation : deck.data.path;
}

std::string data_identity(const Deck& deck) {
  const std::string& data = evaluated_data(deck);
  const bool drawn = is_shapes(data) || is_drawn_text(data);
  const HeldOutChoice choice = evaluated_samples(deck);
  const std::string share =
      choice.share > 0 ? fmt::format(" share {} seed {}", choice.share, choice.seed) : "";
  return (drawn ? data : folder_identity(data)) + share;
}

ListSettings evaluation_settings(const Deck& deck) {
  ListSettings s = list_settings(deck, "evaluate", deck.get<EvaluateDeck>().output, "image");
  s.stem = "images";
  return s;
}

void check_results(const Deck& deck, const std::vector<std::string>& pictures) {
  if (log::rank() != 0) return;
  const fs::path folder =
      absolute_path(fs::path(deck.get<EvaluateDeck>().output) / "").parent_path();
  keep_inputs(deck, "evaluate.output", pictures, [&](const fs::path& path) {
    const fs::path relative = path.lexically_relative(folder);
    const std::string first = relative.begin() == relative.end() ? "" : relative.begin()->string();
    return first == "pictures" || first == "predictions" ||
           (relative.stem() == "evaluation" && !relative.has_parent_path());
  });
}

void add_results(EvaluationRecord& record, const Deck& deck, const ListEngine& engine,
                 const ListReport& report, const std::function<std::string(std::int64_t)>& name,
                 const std::function<void(const Json&)>& add) {
  const ManifestLines lines = engine.lines();
  for (std::int64_t i = 0; i < std::ssize(engine.items()); ++i) {
    const Json line = lines.at(engine.items()[i].name).parsed();
    add(line);
    record.seconds.push_back(line.at("seconds"));
    if (line.contains("picture")) record.pictures.push_back({name(i), line["picture"]});
  }
  remove_others(engine, lines);
  record.facts.emplace_back("number format", deck.model.dtype);
  record.facts.emplace_back("hardware", on_cuda() ? device_runtime().describe() : describe_cpu());
  record.facts.emplace_back("build", version_line());
  if (report.made == 0) {
    record.pace = earlier_pace(record.folder / "evaluation.json");
    return;
  }
  record.pace = {report.made, std::ssize(report.ranks), 0};
  for (const Json& share : report.ranks)
    record.pace.seconds = std::max(record.pace.seconds, share.at("last_end").get<double>());
}

void write_results(const EvaluationRecord& record, const Json& json, const std::string& table,
                   const std::function<void(const fs::path&)>& page) {
  const fs::path& folder = record.folder;
  write_text(folder / "evaluation.json",
             dump_json(json, 2, ' ', false, Json::error_handler_t::replace) + "\n");
  write_text(folder / "evaluation.txt", table);
  fmt::print("{}", table);
  page(folder / "evaluation.html");
  log::write_info(fmt::format("results   {}", (folder / "evaluation.json").string()));
}

// ---- The command ----

int evaluate(const Deck& deck, const EvaluationPages& pages, MPI_Comm world) {
  WEFT_CHECK(!deck.get<EvaluateDeck>().output.empty(), Exit::usage,
             "set evaluate.output = \"evaluation\"", "evaluate.output is empty");
  const ListStart start = start_list_job(deck, world);
  if (!deck.get<EvaluateClipsDeck>().clips.empty()) return evaluate_clips(deck, start, world);
  const Model* model = find_model(deck.model.name);
  if (model != nullptr && (model->make_denoiser || model->make_codec))
    return evaluate_held_out(deck, start, world);
  if (deck.model.name == "dbnet") return evaluate_detection(deck, start, pages.detection, world);
  return evaluate_segmentation(deck, start, pages.segmentation, world);
}

namespace {

void evaluate_rows(Rows& r, EvaluateDeck& d) {
  r.path("data", d.data,
         "Images whose truth is known, as in data.path: a store of labelled images or shapes:..., "
         "or for a text detector a list with polygons or text:...; clips for the models of clips. "
         "Empty takes what [validation] holds out, or else data.path.");
  r.path("output", d.output, "Folder of the results.");
  r.number("pictures", d.pictures, 0, 10000,
           "Number of images, the first ones, that the page shows with truth and prediction.");
  r.flag("predictions", d.predictions,
         "Write what is predicted for every image: a PNG of labels (class + 1), or the boxes and "
         "their scores in images.jsonl.");
  r.flag("ema", d.ema, "Take the moving average of the weights from a checkpoint.");
  r.number("short_side", d.short_side, 0, 65536,
           "Text detector: short side in pixels that a picture is scaled to; 0 keeps its size.");
  r.number("long_side", d.long_side, 32, 65536,
           "Text detector: longest side in pixels that a picture is scaled to.");
}

}  // namespace

DeckTable evaluate_table() { return deck_table("evaluate", evaluate_rows); }

Command evaluate_command(EvaluationPages pages) {
  Command c{"evaluate",
            "measure a model: IoU of classes, Hmean of text, the loss of held-out clips; or the "
            "quality of clips",
            [pages = std::move(pages)](const Deck& deck, MPI_Comm world) {
              return evaluate(deck, pages, world);
            }};
  c.handles_stop_signals = true;
  takes_list_job(c);
  return c;
}

}  // namespace weft
