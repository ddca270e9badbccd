#include "jobs/animate/clips.h"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <utility>

#include "config/deck.h"
#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/json.h"
#include "core/log.h"
#include "data/lists/lists.h"
#include "data/lists/table.h"
#include "jobs/animate/prepare.h"
#include "media/audio.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Kind = ClipPart::Kind;

// ---- The deck ----

void animate_rows(Rows& r, AnimateDeck& d) {
  r.path("input", d.input,
         "List of clips: CSV with a header line, or JSON lines (.jsonl). Columns are picture, "
         "speech, name and the keys that a row may set (docs/animate.md), paths begin in the "
         "list's folder; empty: one clip, of picture and speech.");
  r.path("picture", d.picture,
         "Picture of a face: JPEG, PNG, BMP, WebP, or a video's first frame.");
  r.path("speech", d.speech, "Speech, in any format and rate that FFmpeg reads.");
  r.text("name", d.name,
         "Name of the clip's file without .mp4; empty: made of the names of picture and speech.");
  r.path("output", d.output, "Folder of the results.");
  r.path("ref_eyeblink", d.ref_eyeblink,
         "Video whose eyes and expression the clip begins from, frame by frame; empty: drawn "
         "blinks.");
  r.path("ref_pose", d.ref_pose, "Video whose head motion is added to the clip's; empty: none.");
  r.path("landmarks", d.landmarks,
         "JSON or CSV of 68 x and y in pixels of the picture, instead of detecting them; pictures "
         "of that many clips share them.");
  r.path("coefficients", d.coefficients,
         "Coefficients of each frame, [frames,70] or [frames,73], as safetensors or JSON, instead "
         "of those predicted from the speech.");
  r.text("enhancer", d.enhancer, "Restores the face of each frame; empty: none.", {"", "gfpgan"});
  r.number("enhancer_scale", d.enhancer_scale, 1, 2,
           "With an enhancer, the clip's size in multiples of the rendered one.");
  r.number("seed", d.seed, 0, many, "Seed of drawn blinks, head motion and the enhancer's noise.");
  r.path("weights", d.weights,
         "SadTalker's networks: the released safetensors file, or random:SEED.");
  r.path("mapping_weights", d.mapping_weights,
         "Mapping network of 70 coefficients, for crop, extcrop and resize; a safetensors file or "
         "random:SEED.");
  r.path("mapping_full_weights", d.mapping_full_weights,
         "Mapping network of 73 coefficients, for full and extfull.");
  r.path("detector_weights", d.detector_weights, "Face detector, RetinaFace of ResNet-50.");
  r.path("landmark_weights", d.landmark_weights, "Landmark network, FAN of 98 points.");
  r.path("gfpgan_weights", d.gfpgan_weights, "Enhancer, GFPGAN v1.4.");
  r.path("parsenet_weights", d.parsenet_weights, "The enhancer's network for masks of faces.");
  r.number(
      "gfpgan_channels", d.gfpgan_channels, 32, 4096,
      "Channels of GFPGAN's levels, at most, a multiple of 32; the released weights have 512.");
  r.number("parsenet_channels", d.parsenet_channels, 1, 4096,
           "Channels of ParseNet's first level; the released weights have 64.");
  r.number("piece", d.piece, 1, 100000,
           "Frames of a piece, rounded up to batches: what a rank takes at a time, and what a "
           "killed one loses at most.");
  r.flag("keep_frames", d.keep_frames,
         "Beside each clip its frames as NAME_frames/000000.png, before compression.");
}

void check_animate(const AnimateDeck& d, const DeckDemand& demand) {
  demand(d.gfpgan_channels % 32 == 0,
         fmt::format("animate.gfpgan_channels = {}", d.gfpgan_channels),
         "take a multiple of 32; the released weights have 512");
}

// ---- The list ----

using KeyValues = std::vector<std::pair<std::string, std::string>>;

constexpr std::size_t longest_name = 180;  // bytes; endings and marks come behind it

struct Row {
  std::string where;
  KeyValues values;
};

// The key that a column sets.
std::string key_of(const std::string& column, const std::string& where) {
  std::vector<std::string> known;
  for (const ListColumn& c : list_columns()) {
    if (is_column(column, c.name)) return c.key;
    known.emplace_back(c.name);
  }
  const std::string near = nearest_name(column, known);
  throw Error(Exit::data, fmt::format("{}: unknown column \"{}\"", where, printable(column, 60)),
              near.empty() ? "docs/animate.md lists the columns"
                           : fmt::format("did you mean \"{}\"?", near),
              __FILE__, __LINE__);
}

// A cell as an override has it: lists may also be numbers with spaces between them.
std::string as_value(const std::string& key, const std::string& cell) {
  if (!key.starts_with("sadtalker.input_") || cell.find('[') != cell.npos) return cell;
  std::string list = "[";
  bool gap = false;
  for (const char c : cell) {
    if (c == ' ') {
      gap = list.size() > 1;
      continue;
    }
    if (gap && c != ',' && list.back() != ',') list += ',';
    gap = false;
    list += c;
  }
  return list + "]";
}

// Whether a key's value is a path, which in a list begins in the list's folder.
bool is_path(const std::string& key) {
  static const std::set<std::string> paths = {"animate.picture",      "animate.speech",
                                              "animate.ref_eyeblink", "animate.ref_pose",
                                              "animate.landmarks",    "animate.coefficients"};
  return paths.contains(key);
}

KeyValues values_of(const TableReader& table, const TableRow& row, const std::string& file) {
  std::vector<std::string> names = table.columns();
  for (const auto& [name, value] : row.object.items()) names.push_back(name);  // of JSON lines
  KeyValues values;
  for (const std::string& name : names) {
    const std::string key = key_of(name, table.where(row));
    const Json value = table.value(row, name);
    if (value.is_null()) continue;
    WEFT_CHECK(!value.is_object(), Exit::data, "give a text, a number, a list, true or false",
               "{}: {} is an object", table.where(row), name);
    WEFT_CHECK(
        !value.is_string() || value.get_ref<const std::string&>().find('\0') == std::string::npos,
        Exit::data, "write it without", "{}: {} has a zero byte", table.where(row), name);
    if (!value.is_string())
      values.emplace_back(key, dump_json(value));
    else if (is_path(key))
      values.emplace_back(key, beside_list(file, value.get<std::string>()));
    else
      values.emplace_back(key, as_value(key, value.get<std::string>()));
  }
  return values;
}

std::vector<Row> read_list(const std::string& file, const MediaDeck& limits) {
  std::error_code none;
  constexpr const char* pairs =
      "pictures and speech come in pairs: give a list (.csv or .jsonl) with columns picture and "
      "speech";
  WEFT_CHECK(!fs::is_directory(file, none), Exit::data, pairs, "animate.input = {} is a folder",
             file);
  if (form_of_name(file) == TableForm::none) {
    refuse_other_forms(file);
    throw Error(Exit::data, fmt::format("animate.input = {} is not a list", file), pairs, __FILE__,
                __LINE__);
  }
  WEFT_CHECK(fs::exists(file, none), Exit::data,
             "check animate.input, and the directory weft was started in", "{} is not there", file);
  check_list_size(file, limits);
  TableReader table(file, "");
  std::set<std::string> seen;
  for (const std::string& column : table.columns())
    WEFT_CHECK(seen.insert(key_of(column, file)).second, Exit::data, "name each column once",
               "{} has the column {} twice", file, printable(column));
  std::vector<Row> rows;
  for (TableRow row; table.next(row);)
    rows.push_back({table.where(row), values_of(table, row, file)});
  WEFT_CHECK(!rows.empty(), Exit::data, "give it a row for each clip", "{} lists no clip", file);
  return rows;
}

// Names files of the clips that are not there, before any work.
void check_files(const std::vector<ClipRequest>& clips) {
  std::vector<std::string> missing;
  std::size_t incomplete = 0;
  std::map<std::string, bool> there;
  for (const ClipRequest& c : clips) {
    const AnimateDeck& a = c.animate;
    bool whole = true;
    for (const std::string* file :
         {&a.picture, &a.speech, &a.ref_eyeblink, &a.ref_pose, &a.landmarks, &a.coefficients}) {
      if (file->empty()) continue;
      const auto [known, is_new] = there.emplace(*file, true);
      if (is_new)
        if (std::string why = missing_file(*file); !why.empty()) {
          known->second = false;
          missing.push_back(std::move(why));
        }
      whole = whole && known->second;
    }
    incomplete += whole ? 0 : 1;
  }
  report_missing(missing, there.size(), "file", missing_hint, incomplete == clips.size());
}

// Printed, and a file's name: UTF-8 without control characters or slashes.
std::string plain(const std::string& text) {
  std::string name = plain_text(text, "/");
  while (!name.empty() && name.front() == '.') name.erase(0, 1);
  name = cut_text(name, longest_name - 20);
  return name.empty() ? "clip" : name;
}

void check_name(const std::string& name, const std::string& where) {
  const bool good =
      !name.starts_with('.') && name.size() <= longest_name && name == plain_text(name, "/");
  WEFT_CHECK(
      good, Exit::data,
      fmt::format("a name is that of a file in the output folder: no slash, no dot in front, "
                  "at most {} bytes",
                  longest_name),
      "{}: the name \"{}\" cannot be taken", where, printable(name, 60));
}

// Names that rows give stand; the others are made of picture and speech, with a number where one is
// taken.
void name_clips(std::vector<ClipRequest>& clips) {
  std::map<std::string, std::string> taken;  // name: where
  for (const ClipRequest& c : clips) {
    const std::string& name = c.animate.name;
    if (name.empty()) continue;
    check_name(name, c.where);
    const auto [other, is_new] = taken.emplace(name, c.where);
    WEFT_CHECK(is_new, Exit::data, "give each clip a name of its own, or none",
               "{} and {} both have the name \"{}\"", other->second, c.where, name);
  }
  for (ClipRequest& c : clips) {
    c.name = c.animate.name;
    if (!c.name.empty()) continue;
    const std::string speech = c.animate.speech.empty() ? c.animate.coefficients : c.animate.speech;
    const std::string stem =
        plain(fs::path(c.animate.picture).stem().string() + "_" + fs::path(speech).stem().string());
    c.name = stem;
    for (int n = 2; !taken.emplace(c.name, c.where).second; ++n)
      c.name = fmt::format("{}-{}", stem, n);
  }
}

ClipRequest request_of(const Deck& deck, const Row& row) {
  Deck mine = deck;
  set_keys(mine, row.values, row.where);
  ClipRequest c{"", row.where, mine.get<AnimateDeck>(), mine.get<SadtalkerDeck>()};
  WEFT_CHECK(!c.animate.picture.empty(), Exit::data, "give it a picture, or set animate.picture",
             "{}: no picture", row.where);
  WEFT_CHECK(!c.animate.speech.empty(), Exit::data, "give it a speech, or set animate.speech",
             "{}: no speech", row.where);
  return c;
}

std::vector<ClipRequest> requests_of(const Deck& deck, const std::vector<Row>& rows) {
  std::vector<ClipRequest> clips;
  clips.reserve(rows.size());
  for (const Row& row : rows) clips.push_back(request_of(deck, row));
  name_clips(clips);
  return clips;
}

}  // namespace

DeckTable animate_table() { return deck_table("animate", animate_rows, check_animate); }

const std::vector<ListColumn>& list_columns() {
  static const std::vector<ListColumn> columns = {
      {"picture", "animate.picture"},
      {"speech", "animate.speech"},
      {"name", "animate.name"},
      {"ref_eyeblink", "animate.ref_eyeblink"},
      {"ref_pose", "animate.ref_pose"},
      {"landmarks", "animate.landmarks"},
      {"coefficients", "animate.coefficients"},
      {"enhancer", "animate.enhancer"},
      {"enhancer_scale", "animate.enhancer_scale"},
      {"seed", "animate.seed"},
      {"pose_style", "sadtalker.pose_style"},
      {"expression_scale", "sadtalker.expression_scale"},
      {"still", "sadtalker.still"},
      {"preprocess", "sadtalker.preprocess"},
      {"size", "sadtalker.size"},
      {"input_yaw", "sadtalker.input_yaw"},
      {"input_pitch", "sadtalker.input_pitch"},
      {"input_roll", "sadtalker.input_roll"},
  };
  return columns;
}

std::vector<ClipRequest> list_clips(const Deck& deck, MPI_Comm world) {
  const AnimateDeck& a = deck.get<AnimateDeck>();
  WEFT_CHECK(!a.input.empty() || (!a.picture.empty() && !a.speech.empty()), Exit::usage,
             "set animate.input = \"clips.csv\", or animate.picture and animate.speech (--picture, "
             "--speech)",
             "there is nothing to animate");
  WEFT_CHECK(a.input.empty() || a.name.empty(), Exit::usage,
             "give the list a column `name`, or leave out animate.name",
             "animate.name = \"{}\" would be the name of every clip of {}", a.name, a.input);
  std::vector<ClipRequest> clips;
  const Json all = from_first_rank(world, [&] {
    const std::vector<Row> rows =
        a.input.empty() ? std::vector<Row>{{"the deck", {}}} : read_list(a.input, deck.media);
    // Checked before others have them, so that one rank reports what is wrong.
    clips = requests_of(deck, rows);
    check_files(clips);
    Json j = Json::array();
    for (const Row& row : rows) j.push_back({row.where, row.values});
    return j;
  });
  if (log::rank() == 0) return clips;
  std::vector<Row> rows;
  for (const Json& j : all) rows.push_back({j.at(0), j.at(1).get<KeyValues>()});
  return requests_of(deck, rows);
}

// ---- Parts ----

namespace {

std::int64_t frames_of(const ClipRequest& clip, const MediaDeck& limits) {
  if (!clip.animate.coefficients.empty())
    return std::ssize(read_motion(clip.animate.coefficients, limits)) / motion_coefficients;
  AudioReader reader({clip.animate.speech, MediaTrust::untrusted}, {.access = {limits, {}}});
  std::int64_t samples = 0;
  for (auto some = reader.next(); !some.empty(); some = reader.next()) samples += std::ssize(some);
  return samples / speech_samples_per_frame;
}

}  // namespace

std::vector<AnimateSize> measure_clips(const std::vector<ClipRequest>& clips,
                                       const MediaDeck& limits, MPI_Comm world) {
  int rank = 0, ranks = 1;
  MPI_Comm_rank(world, &rank);
  MPI_Comm_size(world, &ranks);
  std::vector<std::int64_t> numbers(3 * clips.size(), 0);
  for (auto i = static_cast<std::size_t>(rank); i < clips.size();
       i += static_cast<std::size_t>(ranks)) {
    try {
      const std::int64_t frames = frames_of(clips[i], limits);
      const ImageFile picture = read_picture(clips[i].animate.picture, limits);
      numbers[3 * i] = frames;
      numbers[3 * i + 1] = picture.height;
      numbers[3 * i + 2] = picture.width;
    } catch (const Error& e) {
      // Whoever prepares the clip meets it again, and reports it.
      if (e.code() != Exit::data && e.code() != Exit::usage) throw;
    }
  }
  MPI_Allreduce(MPI_IN_PLACE, numbers.data(), static_cast<int>(numbers.size()), MPI_INT64_T,
                MPI_SUM, world);
  std::vector<AnimateSize> sizes;
  for (std::size_t i = 0; i < clips.size(); ++i)
    sizes.push_back({numbers[3 * i], numbers[3 * i + 1], numbers[3 * i + 2]});
  return sizes;
}

std::int64_t piece_of(const ClipRequest& clip) {
  const std::int64_t batch = clip.sadtalker.batch_size;
  return (clip.animate.piece + batch - 1) / batch * batch;
}

std::vector<ClipPart> parts_of(const std::vector<AnimateSize>& sizes,
                               const std::vector<ClipRequest>& clips) {
  std::vector<ClipPart> parts;
  for (std::size_t i = 0; i < clips.size(); ++i) {
    const auto clip = static_cast<std::int64_t>(i);
    const std::int64_t frames = sizes[i].frames, piece = piece_of(clips[i]);
    for (std::int64_t first = 0; first < frames; first += piece)
      parts.push_back({Kind::piece, clip, first, std::min(piece, frames - first)});
    parts.push_back({Kind::clip, clip, 0, frames});
  }
  return parts;
}

std::vector<ListItem> items_of(const std::vector<ClipPart>& parts,
                               const std::vector<ClipRequest>& clips,
                               const std::vector<ClipCost>& costs,
                               const std::vector<std::string>& keys) {
  std::vector<ListItem> items;
  for (const ClipPart& p : parts) {
    const auto c = static_cast<std::size_t>(p.clip);
    const std::string& name = clips[c].name;
    const std::string key = keys.empty() ? "" : keys[c];
    if (p.kind == Kind::piece)
      items.push_back({fmt::format("{}/{}-{}", name, p.first, p.first + p.count - 1), key,
                       costs[c].frame * static_cast<double>(p.count)});
    else
      items.push_back({name, key, costs[c].join});
  }
  // A clip's pieces stand in front of it.
  for (std::size_t i = items.size(), whole = 0; i-- > 0;)
    if (parts[i].kind == Kind::clip)
      whole = i;
    else
      items[i].whole = static_cast<std::int64_t>(whole);
  return items;
}

SharedParts share_parts(const std::vector<ClipPart>& parts,
                        const std::vector<std::int64_t>& missing,
                        const std::set<std::int64_t>& suspects, const std::vector<ClipCost>& costs,
                        int ranks) {
  struct Clip {
    ItemBatch items;
    double cost = 0;
    bool suspect = false;
  };
  std::map<std::int64_t, Clip> clips;
  std::vector<std::int64_t> sorted = missing;
  std::ranges::sort(sorted);  // clip by clip, in the order in which parts are made
  double remaining = 0;
  for (const std::int64_t item : sorted) {
    const ClipPart& p = parts[item];
    const ClipCost& c = costs[p.clip];
    Clip& clip = clips[p.clip];
    const double cost = (clip.items.empty() ? c.prepare : 0) +
                        (p.kind == Kind::piece ? c.frame * static_cast<double>(p.count) : c.join);
    clip.items.push_back(item);
    clip.cost += cost;
    clip.suspect = clip.suspect || suspects.contains(item);
    remaining += cost;
  }
  std::vector<Clip> order;
  for (auto& [number, clip] : clips) order.push_back(std::move(clip));
  std::ranges::stable_sort(order, std::greater(), &Clip::cost);
  SharedParts shared;
  for (Clip& clip : order) {
    // One piece and its join, or the join alone, have nothing to share.
    if (!clip.suspect && (ranks == 1 || clip.items.size() <= 2 || ranks * clip.cost <= remaining)) {
      shared.pieces.push_back(std::move(clip.items));
    } else {
      for (const std::int64_t item : clip.items)
        (parts[item].kind == Kind::piece ? shared.pieces : shared.joins).push_back({item});
    }
    remaining -= clip.cost;
  }
  return shared;
}

namespace {

std::vector<double> numbers_of_networks(const SadtalkerDeck& s) {
  std::vector<double> all = {s.kp_scale_factor, s.kp_temperature};
  for (const std::int64_t n : {s.num_kp,
                               s.kp_block_expansion,
                               s.kp_max_features,
                               s.kp_num_blocks,
                               s.kp_reshape_channel,
                               s.kp_reshape_depth,
                               s.gen_block_expansion,
                               s.gen_max_features,
                               s.gen_num_down_blocks,
                               s.gen_reshape_channel,
                               s.gen_reshape_depth,
                               s.gen_num_resblocks,
                               s.motion_block_expansion,
                               s.motion_max_features,
                               s.motion_num_blocks,
                               s.motion_compress,
                               s.mapping_coeff_nc,
                               s.mapping_descriptor_nc,
                               s.mapping_layer,
                               s.fan_num_modules})
    all.push_back(static_cast<double>(n));
  return all;
}

}  // namespace

std::string clip_key(const ClipRequest& clip, const std::string& weights) {
  const AnimateDeck& a = clip.animate;
  const SadtalkerDeck& s = clip.sadtalker;
  nlohmann::json j = {{"weights", weights},
                      {"name", clip.name},
                      {"seed", a.seed},
                      {"preprocess", s.preprocess},
                      {"size", s.size},
                      {"batch", s.batch_size},
                      {"piece", piece_of(clip)},
                      {"pose_style", s.pose_style},
                      {"expression_scale", s.expression_scale},
                      {"still", s.still},
                      {"turns", {s.input_yaw, s.input_pitch, s.input_roll}},
                      {"enhancer", {a.enhancer, a.enhancer.empty() ? 0 : a.enhancer_scale}},
                      {"keep_frames", a.keep_frames}};
  // Only where they are not the released networks': the keys of those stay as they were.
  if (const auto networks = numbers_of_networks(s); networks != numbers_of_networks({}))
    j["networks"] = networks;
  for (const std::string* file :
       {&a.picture, &a.speech, &a.ref_eyeblink, &a.ref_pose, &a.landmarks, &a.coefficients})
    j["files"].push_back(file->empty() ? "" : file_identity(*file));
  return to_hex(hash128(
      std::string_view(dump_json(j, -1, ' ', false, nlohmann::json::error_handler_t::replace))));
}

}  // namespace weft
