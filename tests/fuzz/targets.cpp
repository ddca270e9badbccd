// The fuzz targets: one parser each. What it may do with any bytes is to take them or to throw
// weft::Error.
#include "fuzz.h"

#include <cmath>
#include <cstdlib>
#include <sstream>
#include <string_view>

#include "checkpoint/manifest.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/weight_files.h"
#include "config/deck.h"
#include "config/deck_table.h"
#include "core/json.h"
#include "core/progress.h"
#include "data/lists/lists.h"
#include "data/lists/table.h"
#include "data/text_images/text_list.h"
#include "jobs/engine/manifest.h"
#include "jobs/generate/options.h"
#include "jobs/generate/prompts.h"
#include "media/media_source.h"
#include "media/video_reader.h"
#include "media/writers.h"
#include "models/t5/options.h"
#include "models/video_vae/options.h"
#include "report/data.h"
#include "report/report.h"
#include "text/cleaning.h"
#include "text/utf8.h"
#include "train/cost_table.h"
#include "train/metrics/metrics.h"

namespace weft {

// FFmpeg is no part of this program: clips on pages have no pictures.
Footage read_frames(const MediaSource& source, std::int64_t, std::int64_t, std::int64_t,
                    VideoReaderOptions) {
  throw Error(Exit::data, "no media here: " + source.path, "", __FILE__, __LINE__);
}
std::string png_bytes(std::int64_t, std::int64_t, std::span<const std::uint8_t>) { return ""; }

}  // namespace weft

// Nor are the files that pages embed: this folder does not know where they are.
namespace weft::report_page {
std::string_view page_style() { return ""; }
std::string_view page_script() { return ""; }
}  // namespace weft::report_page

namespace weft::fuzz {
namespace {

// The tables of the deck for the targets that read one: those that need nothing but the parser.
void register_tables() {
  std::vector<DeckTable> tables;
  for (auto owner : {video_vae_tables, t5_tables})
    for (DeckTable& t : owner()) tables.push_back(std::move(t));
  tables.push_back(generate_table());
  set_deck_tables(std::move(tables), {"vae"});
}

// A deck: what is taken can be written and read back to the same values.
void deck(const std::uint8_t* data, std::size_t size) {
  const std::string text(text_of(data, size));
  accepts([&] {
    const Deck deck = parse_deck(text, "deck.toml", {});
    require(changed_keys(deck, parse_deck(to_toml(deck), "copy", {})).empty(),
            "the stored deck differs");
  });
}

// Overrides of the command line, one a line.
void override(const std::uint8_t* data, std::size_t size) {
  std::vector<std::string> overrides;
  std::istringstream in{std::string(text_of(data, size))};
  for (std::string line; std::getline(in, line);) overrides.push_back(line);
  accepts([&] {
    const Deck deck = parse_deck("", "deck.toml", overrides);
    require(changed_keys(deck, parse_deck(to_toml(deck), "copy", {})).empty(),
            "the stored deck differs");
  });
}

// JSON from outside: both ways to parse agree, nothing nests deeper than the limit, and what is
// written reads back.
int depth_of(const nlohmann::json& j) {
  int deepest = 0;
  if (j.is_structured())
    for (const auto& item : j) deepest = std::max(deepest, depth_of(item));
  return deepest + (j.is_structured() ? 1 : 0);
}

void json(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = text_of(data, size);
  const nlohmann::json j = try_parse_json(text);
  bool thrown = false;
  try {
    require(parse_json(text) == j, "the two ways differ");
  } catch (const nlohmann::json::exception&) {
    thrown = true;
  }
  require(thrown == j.is_discarded(), "one way takes what the other refuses");
  if (thrown) return;
  require(depth_of(j) <= deepest_json, "too deep");
  require(parse_json(j.dump()) == j, "written and read it is another");
}

// The cleaning of captions: UTF-8 in, UTF-8 out.
void captions(const std::uint8_t* data, std::size_t size) {
  const std::string text(text_of(data, size));
  if (!accepts([&] { check_utf8(text, "caption"); })) return;
  std::string clean;
  if (accepts([&] { clean = clean_text(text); })) check_utf8(clean, "a clean caption");
}

// A safetensors file, or its JSON header alone: ranges match shapes, and lie in the file.
void safetensors(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = text_of(data, size);
  const auto check = [&](const std::vector<SafetensorEntry>& entries) {
    for (const SafetensorEntry& e : entries) {
      if (!e.dtype) continue;
      std::uint64_t bytes = size_of(*e.dtype);
      for (const std::int64_t n : e.shape) bytes *= static_cast<std::uint64_t>(n);
      require(e.begin <= e.end && e.end - e.begin == bytes, "a range is not its shape's");
    }
  };
  if (text.starts_with('{')) {
    accepts([&] { check(detail::parse_safetensors_header(text, "file").entries); });
    return;
  }
  const auto path = put("a.safetensors", text);
  accepts([&] {
    const SafetensorsFile file = SafetensorsFile::open(path);
    check(file.entries());
    for (const SafetensorEntry& e : file.entries()) {
      require(e.end <= size, "a tensor ends behind the file");
      std::vector<std::byte> bytes(e.end - e.begin);
      file.read(e, bytes);
      require(file.find(e.name) != nullptr, "a name is not found");
    }
  });
}

// The index of weights in shards: shards lie beside it.
void weight_index(const std::uint8_t* data, std::size_t size) {
  const auto path = put("a.safetensors.index.json", text_of(data, size));
  accepts([&] {
    for (const auto& [tensor, shard] : detail::read_weight_index(path))
      require(!shard.empty() && shard != "." && shard != ".." && shard.find('/') == shard.npos,
              "a shard elsewhere");
  });
}

// A checkpoint's manifest. Its own hash would refuse nearly every mutation: it is made anew for
// what stands before it.
void checkpoint_manifest(const std::uint8_t* data, std::size_t size) {
  using namespace checkpoint;
  std::string text(text_of(data, size));
  accepts([&] { manifest_from_text(text, "manifest"); });
  const auto tail = text.rfind(",\n \"manifest_hash\"");
  text = text.substr(0, tail);
  text += ",\n \"manifest_hash\": \"" + to_hex(hash128(text)) + "\"\n}\n";
  accepts([&] {
    const checkpoint::Manifest m = manifest_from_text(text, "manifest");
    const checkpoint::Manifest again = manifest_from_text(to_text(m), "again");
    require(again.state_hash == m.state_hash && again.info.step == m.info.step &&
                again.shards.size() == m.shards.size(),
            "the manifest has changed");
    for (std::size_t r = 0; r < m.shards.size(); ++r)
      tensors_in(m, static_cast<int>(r), 0, m.shards[r].bytes);
  });
}

// The costs in a checkpoint's notes, of a table of two buckets. What is taken reads back equal, and
// every cost can be placed by.
void cost_table(const std::uint8_t* data, std::size_t size) {
  const std::string text(text_of(data, size));
  CostTable table({{2, 10}, {2, 20}});
  if (!accepts([&] { table.from_text(text); })) return;
  for (int b = 0; b < 2; ++b) {
    require(table.cost(b) >= 0 && std::isfinite(table.cost(b)), "a cost that cannot place");
    require(!(table.expected(b) < 0), "a negative time");
  }
  CostTable again({{2, 10}, {2, 20}});
  again.from_text(table.to_text());
  require(again.to_text() == table.to_text(), "costs that read back otherwise");
}

// The lines of finished items, gathered and part, with a zero byte between them: gathering once
// more changes nothing.
void clip_manifest(const std::uint8_t* data, std::size_t size) {
  const auto parts = pieces_of(text_of(data, size), 2);
  put("generated.jsonl", parts[0]);
  put("generated.rank0.jsonl", parts[1]);
  accepts([&] {
    const auto once = Manifest::gather(scratch(), "generated");
    const auto twice = Manifest::gather(scratch(), "generated");
    require(once.size() == twice.size(), "items were lost");
    for (const auto& [name, line] : once) {
      const ManifestLine& again = twice.at(name);
      require(line.key == again.key && line.text == again.text, "a line has changed");
      require(line.parsed().at("name") == name, "a line of another item");
      is_finished(once, name, line.key, scratch());
    }
  });
}

// A file of prompts with options: texts stay UTF-8, and names made of them stay names.
void prompts(const std::uint8_t* data, std::size_t size) {
  GenerateDeck deck;
  deck.loop = 4;
  deck.prompt_file = put("prompts.txt", text_of(data, size)).string();
  std::vector<Prompt> prompts;
  accepts([&] { prompts = read_prompts(deck); });
  for (const Prompt& p : prompts) {
    for (std::int64_t loop = 0; loop < deck.loop; ++loop)
      check_utf8(p.text_of_loop(loop), "a text");
    const std::string name = file_name_of(p.text);
    check_utf8(name, "a name");
    require(name.size() <= 180 && !name.starts_with('.') && name.find('/') == name.npos,
            "no name of a file: " + name);
    accepts([&] { parse_mask_strategy(p.mask_strategy, "mask"); });
  }
}

// A mask strategy behind three bytes: frames of the clip, of each of two references, and the
// alignment. What is placed lies within both.
void mask_strategy(const std::uint8_t* data, std::size_t size) {
  if (size < 3) return;
  const std::int64_t frames = data[0], given = data[1], align = data[2] % 8;
  const std::string text(text_of(data + 3, size - 3));
  std::vector<MaskGroup> groups;
  if (!accepts([&] { groups = parse_mask_strategy(text, "mask"); })) return;
  for (std::int64_t loop = 0; loop < 3; ++loop)
    accepts([&] {
      const auto placed = place_references(groups, loop, frames, {given, given}, align, "mask");
      for (const Placement& p : placed)
        require(p.from >= 0 && p.to >= 0 && p.length >= 1 && p.length <= given - p.from &&
                    p.length <= frames - p.to,
                "frames outside");
      edit_ratios(placed, frames);
    });
  accepts([&] {
    const LatentRange r = frames_taken(groups, 3, 0, given, frames, align, "mask");
    require(r.first >= 0 && r.first <= r.last && r.last <= given, "a range outside");
  });
}

// FFmpeg's sources as a deck names them: what passes has no character by which FFmpeg could read it
// otherwise, and none of the filters that open files.
void source_graph(const std::uint8_t* data, std::size_t size) {
  const std::string graph(text_of(data, size));
  if (!accepts([&] { check_source_graph(graph); })) return;
  require(graph.find_first_of("'\"\\ \n\t") == graph.npos, "a quote or blank passed");
  // FFmpeg reads filters between commas and semicolons, behind labels in brackets.
  for (std::size_t at = 0; at <= graph.size();) {
    const std::size_t end = std::min(graph.find_first_of(",;", at), graph.size());
    std::string_view filter = std::string_view(graph).substr(at, end - at);
    while (filter.starts_with('['))
      filter.remove_prefix(std::min(filter.find(']'), filter.size() - 1) + 1);
    for (const char* opens_files : {"movie", "amovie", "lut3d", "drawtext", "metadata", "sendcmd",
                                    "zmq", "curves", "frei0r", "life", "cellauto", "subtitles"})
      require(filter.substr(0, filter.find_first_of("=@[")) != opens_files, graph);
    at = end + 1;
  }
}

// A list of footage (.csv, .jsonl): what it names is a file and not trusted.
void list_of_footage(const char* name, const std::uint8_t* data, std::size_t size) {
  const auto path = put(name, text_of(data, size));
  accepts([&] {
    for (const MediaItem& input : list_media({path.string()}, "ingest.inputs", {}, Described::yes))
      require(input.media.trust == MediaTrust::untrusted, "a list is trusted");
  });
}
void ingest_csv(const std::uint8_t* data, std::size_t size) {
  list_of_footage("list.csv", data, size);
}
void ingest_jsonl(const std::uint8_t* data, std::size_t size) {
  list_of_footage("list.jsonl", data, size);
}

// A WebDataset shard: an item is a stretch of the file, and its name is only a label.
void shard(const std::uint8_t* data, std::size_t size) {
  const auto path = put("shard.tar", text_of(data, size));
  accepts([&] {
    std::vector<MediaItem> items;
    list_shard(path.string(), Described::yes, items);
    for (const MediaItem& item : items) {
      require(item.media.path == path && !item.media.member.empty() &&
                  item.media.trust == MediaTrust::untrusted,
              "an item is not in its shard");
      require(item.media.begin <= size && item.media.bytes <= size - item.media.begin,
              "an item is longer than its shard");
    }
  });
}

// A table of scores that is joined with the items of an ingest, CSV and JSON lines.
void scores(const std::uint8_t* data, std::size_t size) {
  for (const char* name : {"scores.csv", "scores.jsonl"}) {
    const auto path = put(name, text_of(data, size));
    accepts([&] {
      std::vector<MediaItem> items(2);
      items[0].media.path = "a.mp4";
      items[1].media.path = (scratch() / "b.mp4").string();
      require(join_scores(path.string(), {}, items) <= items.size(), "too many joined");
      for (const MediaItem& item : items)
        for (const double value : item.facts.values)
          require(std::isnan(value) || std::isfinite(value), "a score is no number");
    });
  }
}

// The table of `weft score`, CSV and JSON lines: what is written reads back to the same rows.
struct Copy {
  std::vector<std::string> paths;
  std::string text;
};

Copy copy_of(const std::filesystem::path& path) {
  Copy copy;
  TableReader table(path);
  TableWriter writer(table, {"ocr"}, [&](std::string_view text) { copy.text += text; });
  for (TableRow row; table.next(row);) {
    copy.paths.push_back(row.path);
    writer.add(row, {3});
  }
  return copy;
}

void score_table(const std::uint8_t* data, std::size_t size) {
  for (const char* name : {"table.csv", "table.jsonl"}) {
    const std::string_view text = text_of(data, size);
    accepts([&] {
      const Copy first = copy_of(put(name, text));
      // With its column in place, a copy is the same to the byte.
      const Copy second = copy_of(put(name, first.text));
      require(second.paths == first.paths, "a copy has other rows");
      require(second.text == first.text, "a copy of a copy is another one");
    });
  }
}

// A list of pictures with polygons, as JSON lines and in ICDAR's form: not trusted.
void text_list(const std::uint8_t* data, std::size_t size) {
  const auto text = text_of(data, size);
  put("gt_a.txt", text);
  for (const auto& path : {put("list.jsonl", text), put("list.txt", "a.jpg\n")})
    accepts([&] {
      for (const TextListEntry& entry : read_text_list(path.string(), {}))
        for (const TextRegion& region : entry.regions) {
          require(region.polygon.size() >= 3, "a polygon of less than three points");
          for (const Point& p : region.polygon)
            require(std::abs(p.x) <= 1e6 && std::abs(p.y) <= 1e6, "a point far away");
        }
    });
}

// What weft report and weft status read of a run: metrics.jsonl, run.json, deck.toml, scaling.json,
// the manifest of its samples and status.json with zero bytes between them. No text of theirs
// becomes markup. And what a restart does to the metrics.
void report(const std::uint8_t* data, std::size_t size) {
  const auto parts = pieces_of(text_of(data, size), 6);
  put("metrics.jsonl", parts[0]);
  put("run.json", parts[1]);
  put("deck.toml", parts[2]);
  if (parts[3].empty())
    std::filesystem::remove(scratch() / "scaling.json");
  else
    put("scaling.json", parts[3]);
  std::filesystem::create_directories(scratch() / "generated");
  put("generated/generated.jsonl", parts[4]);
  read_status(put("status.json", parts[5]));
  accepts([&] {
    const report_page::Run run = report_page::load_run(scratch());
    const std::string page = report_page::make_page({&run, 1});
    require(page.find("<b0>") == page.npos, "text of a run became markup");
    report_page::event_file(run);
  });
  accepts([&] { MetricsWriter(scratch(), 5); });
}

struct Target {
  const char* name;  // of its corpus, too
  void (*run)(const std::uint8_t* data, std::size_t size);
};
constexpr Target targets[] = {
    {"deck", deck},
    {"override", override},
    {"json", json},
    {"captions", captions},
    {"safetensors", safetensors},
    {"weight_index", weight_index},
    {"checkpoint_manifest", checkpoint_manifest},
    {"cost_table", cost_table},
    {"clip_manifest", clip_manifest},
    {"prompts", prompts},
    {"mask_strategy", mask_strategy},
    {"source_graph", source_graph},
    {"ingest_csv", ingest_csv},
    {"ingest_jsonl", ingest_jsonl},
    {"shard", shard},
    {"scores", scores},
    {"score_table", score_table},
    {"text_list", text_list},
    {"report", report},
};
const Target* chosen = nullptr;

}  // namespace

void choose(std::string_view name) {
  for (const Target& t : targets)
    if (t.name == name) chosen = &t;
  require(chosen != nullptr, "no target " + std::string(name));
  register_tables();
}

}  // namespace weft::fuzz

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  const char* name = std::getenv("WEFT_FUZZ_TARGET");
  weft::fuzz::choose(name == nullptr ? "" : name);
  return 0;
}
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  weft::fuzz::chosen->run(data, size);
  return 0;
}
