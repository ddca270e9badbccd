#include "report/gallery.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>
#include <optional>
#include <set>

#include "core/json.h"
#include "core/progress.h"
#include "jobs/engine/manifest.h"
#include "report/html.h"

namespace weft::report_page {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// A member of an untrusted line as text; "" for what is absent or of another type.
std::string text_of(const Json& line, const char* key) {
  const auto it = line.find(key);
  if (it == line.end()) return "";
  if (it->is_string()) return it->get<std::string>();
  if (it->is_number_integer()) return it->dump();
  return it->is_number() ? fmt::format("{:.4g}", it->get<double>()) : "";
}

double number_of(const Json& line, const char* key) {
  const auto it = line.find(key);
  return it != line.end() && it->is_number() ? it->get<double>() : NAN;
}

void add_fact(GalleryClip& clip, const Json& line, const char* key, const char* name = nullptr) {
  if (const std::string value = text_of(line, key); !value.empty())
    clip.facts.emplace_back(name == nullptr ? key : name, value);
}

void add_size(GalleryClip& clip, const Json& line) {
  const std::string height = text_of(line, "height"), width = text_of(line, "width");
  const std::string frames = text_of(line, "frames");
  if (!height.empty() && !width.empty()) clip.facts.emplace_back("", width + " x " + height);
  if (!frames.empty() && frames != "1") clip.facts.emplace_back("", frames + " frames");
}

// Of clips that are made in parts, whose lines are named CLIP/PART.
struct Parts {
  double seconds = 0;
  std::set<std::string> ranks;
};
std::map<std::string, Parts> parts_of(const ManifestLines& lines) {
  std::map<std::string, Parts> parts;
  for (const auto& [name, line] : lines) {
    const Json j = line.parsed();
    Parts& of_clip = parts[name.substr(0, name.find('/'))];
    const double s = number_of(j, "seconds");
    of_clip.seconds = std::isfinite(s) ? of_clip.seconds + s : NAN;
    of_clip.ranks.insert(text_of(j, "rank"));
  }
  return parts;
}

// "#rrggbb", and nothing else that a style may hold.
bool is_css_colour(const std::string& text) {
  return text.size() == 7 && text.front() == '#' &&
         std::all_of(text.begin() + 1, text.end(),
                     [](unsigned char c) { return std::isxdigit(c); });
}

void load_manifest(Gallery& g, const std::string& stem) {
  const ManifestLines lines = Manifest::all(g.folder, stem);
  const bool animated = stem == "animate";
  const auto parts = animated ? parts_of(lines) : std::map<std::string, Parts>();
  for (const auto& [name, line] : lines) {
    if (animated && name.find('/') != std::string::npos) continue;
    const Json j = line.parsed();
    GalleryClip c;
    c.name = name;
    c.file = text_of(j, "file");
    if (!stays_inside(c.file)) continue;
    c.text = text_of(j, stem == "segment" ? "input" : "prompt");
    c.sound = animated;
    c.seconds = animated ? parts.at(name).seconds : number_of(j, "seconds");
    add_fact(c, j, "picture");
    add_fact(c, j, "speech");
    add_fact(c, j, "seed");
    add_size(c, j);
    if (const auto references = j.find("references");
        references != j.end() && references->is_array())
      for (const Json& r : *references)
        if (r.is_string() && stays_inside(r.get<std::string>())) c.references.push_back(r);
    if (const auto shares = j.find("shares"); shares != j.end() && shares->is_array())
      for (std::size_t i = 0; i < shares->size(); ++i) {
        const Json& share = (*shares)[i];
        if (!share.is_object()) continue;
        if (i < 3)
          c.facts.emplace_back(text_of(share, "name"),
                               fmt::format("{:.0f} %", 100 * number_of(share, "share")));
        if (const std::string colour = text_of(share, "colour"); is_css_colour(colour))
          c.classes.emplace_back(text_of(share, "name"), colour);
      }
    if (std::isfinite(c.seconds)) c.facts.emplace_back("", seconds_text(c.seconds));
    if (animated)
      c.facts.emplace_back(parts.at(name).ranks.size() == 1 ? "rank" : "ranks",
                           fmt::format("{}", fmt::join(parts.at(name).ranks, ", ")));
    else
      add_fact(c, j, "rank");
    if (const std::string marked = text_of(j, "marked"); stays_inside(marked))
      c.facts.emplace_back("with watermark", marked);
    g.clips.push_back(std::move(c));
  }
}

void load_reconstruction(Gallery& g) {
  const Json j = try_parse_json<Json>(read_text(g.folder / "reconstruct.json"));
  const auto clips = j.is_object() ? j.find("clips") : j.end();
  if (!j.is_object() || clips == j.end() || !clips->is_array()) return;
  for (const Json& line : *clips) {
    if (!line.is_object()) continue;
    GalleryClip c;
    c.file = fs::path(text_of(line, "output")).filename().string();
    c.name = fs::path(c.file).stem().string();
    if (!stays_inside(c.file)) continue;
    c.text = "left: " + text_of(line, "input") + ", right: through the VAE and back";
    add_fact(c, line, "psnr", "PSNR");
    add_fact(c, line, "ssim", "SSIM");
    add_size(c, line);
    c.seconds = number_of(line, "seconds");
    if (std::isfinite(c.seconds)) c.facts.emplace_back("", seconds_text(c.seconds));
    add_fact(c, line, "rank");
    g.clips.push_back(std::move(c));
  }
}

// Files that no manifest names, of a run of an older weft or put there by hand.
void load_loose(Gallery& g) {
  std::set<std::string> files;
  std::error_code ec;
  for (fs::directory_iterator it(g.folder, ec), end; !ec && it != end; it.increment(ec)) {
    const std::string name = it->path().filename().string(), kind = it->path().extension().string();
    if (!name.starts_with('.') && (kind == ".png" || kind == ".mp4")) files.insert(name);
  }
  for (const std::string& file : files) {
    GalleryClip& clip = g.clips.emplace_back();
    clip.name = clip.file = file;
  }
}

void load_report(Gallery& g) {
  const Json j = try_parse_json<Json>(read_text(g.folder / (g.command + "_report.json")));
  if (!j.is_object()) return;
  if (const auto it = j.find("failures"); it != j.end() && it->is_array())
    for (const Json& f : *it)
      if (f.is_string()) g.failures.push_back(f);
  const auto ranks = j.find("ranks");
  if (ranks == j.end() || !ranks->is_array()) return;
  for (const Json& r : *ranks) {
    if (!r.is_object()) continue;
    const double last = number_of(r, "last_end");
    if (last > g.wall_seconds) g.wall_seconds = last;
    RankWork& work = g.ranks.emplace_back();
    for (const char* noun : {"clips", "parts", "inputs"})
      if (const double made = number_of(r, noun); made > 0) work.made = made;
    if (const double busy = number_of(r, "busy"); busy > 0) work.busy = busy;
  }
}

}  // namespace

Gallery load_gallery(const fs::path& folder) {
  Gallery g;
  g.folder = folder;
  if (const std::optional<JobStatus> status = read_status(folder / "status.json"))
    g.warnings = status->warnings;
  const fs::path plain = fs::absolute(folder).lexically_normal();
  g.name = (plain.has_filename() ? plain : plain.parent_path()).filename().string();
  std::error_code ec;
  constexpr std::pair<const char*, const char*> jobs[] = {
      {"generated", "generate"}, {"animate", "animate"}, {"segment", "segment"}};
  for (const auto& [stem, command] : jobs) {
    bool there = fs::exists(folder / fmt::format("{}.jsonl", stem), ec);
    for (fs::directory_iterator it(folder, ec), end; !there && !ec && it != end; it.increment(ec))
      there = it->path().filename().string().starts_with(fmt::format("{}.rank", stem));
    if (!there) continue;
    g.command = command;
    load_manifest(g, stem);
    load_report(g);
    return g;
  }
  if (fs::exists(folder / "reconstruct.json", ec)) {
    g.command = "reconstruct";
    load_reconstruction(g);
    return g;
  }
  load_loose(g);
  return g;
}

}  // namespace weft::report_page
