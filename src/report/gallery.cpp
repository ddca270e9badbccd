#include "report/gallery.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "core/json.h"
#include "core/log.h"
#include "jobs/engine/manifest.h"
#include "report/data.h"
#include "report/status.h"

namespace weft::report_page {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t most_shown = 600, most_failures = 1000;

// A member of an untrusted line that should be text; "" for what is absent or of another type.
std::string text_of(const Json& line, const char* key) {
  const auto it = line.find(key);
  return it != line.end() && it->is_string() ? it->get<std::string>() : "";
}

// A clip of an animation is made in parts, whose lines are named CLIP/PART: theirs are its seconds
// and its ranks.
void add_parts(std::vector<GalleryClip>& clips, const ManifestLines& lines) {
  struct Parts {
    double seconds = 0;
    std::set<double> ranks;
  };
  std::map<std::string, Parts> parts;
  for (const auto& [name, line] : lines) {
    const Json j = line.parsed();
    Parts& of_clip = parts[name.substr(0, name.find('/'))];
    of_clip.seconds += number_of(j, "seconds");
    of_clip.ranks.insert(number_of(j, "rank"));
  }
  for (GalleryClip& clip : clips) {
    const Parts& of_clip = parts.at(clip.name);
    clip.line["seconds"] = of_clip.seconds;
    clip.line["rank"] = fmt::format("{:g}", fmt::join(of_clip.ranks, ", "));
  }
}

void load_manifest(Gallery& g, const std::string& stem) {
  const ManifestLines lines = Manifest::all(g.folder, stem);
  for (const auto& [name, line] : lines) {
    if (g.command == "animate" && name.find('/') != std::string::npos) continue;
    GalleryClip c{name, "", line.parsed(), {}};
    c.file = text_of(c.line, "file");
    if (!stays_inside(c.file)) continue;
    for (const Json& r : list_of(c.line, "references"))
      if (r.is_string() && stays_inside(r.get<std::string>())) c.references.push_back(r);
    g.clips.push_back(std::move(c));
  }
  if (g.command == "animate") add_parts(g.clips, lines);
}

void load_reconstruction(Gallery& g) {
  const Json j = try_parse_json<Json>(read_text(g.folder / "reconstruct.json"));
  if (!j.is_object()) return;
  for (const Json& line : list_of(j, "clips")) {
    if (!line.is_object()) continue;
    const fs::path file = fs::path(text_of(line, "output")).filename();
    if (stays_inside(file.string()))
      g.clips.push_back({file.stem().string(), file.string(), line, {}});
  }
  for (const Json& s : list_of(j, "skipped"))
    if (s.is_object()) g.failures.push_back(text_of(s, "input") + ": " + text_of(s, "fault"));
}

// Files that no manifest names, put there by hand.
void load_loose(Gallery& g) {
  std::set<std::string> files;
  std::error_code ec;
  for (fs::directory_iterator it(g.folder, ec), end; !ec && it != end; it.increment(ec)) {
    const std::string name = it->path().filename().string(), kind = it->path().extension().string();
    if (!name.starts_with('.') && (kind == ".png" || kind == ".mp4")) files.insert(name);
  }
  for (const std::string& file : files) g.clips.push_back({file, file, Json::object(), {}});
}

// Whether a job has written a manifest here, or its ranks parts of one.
bool has_manifest(const fs::path& folder, const std::string& stem) {
  std::error_code ec;
  bool there = fs::exists(folder / (stem + ".jsonl"), ec);
  for (fs::directory_iterator it(folder, ec), end; !there && !ec && it != end; it.increment(ec))
    there = it->path().filename().string().starts_with(stem + ".rank");
  return there;
}

}  // namespace

Gallery load_gallery(const fs::path& folder) {
  Gallery g;
  g.folder = folder;
  g.status = read_status(folder / "status.json").value_or(JobStatus());
  g.name = name_of(folder);
  constexpr std::pair<const char*, const char*> jobs[] = {
      {"generated", "generate"}, {"animate", "animate"}, {"segment", "segment"}};
  const auto job =
      std::ranges::find_if(jobs, [&](const auto& j) { return has_manifest(folder, j.first); });
  std::error_code none;
  if (job != std::end(jobs)) {
    g.command = job->second;
    load_manifest(g, job->first);
    const Json j = try_parse_json<Json>(read_text(folder / (g.command + "_report.json")));
    if (!j.is_object()) return g;
    for (const Json& f : list_of(j, "failures"))
      if (f.is_string()) g.failures.push_back(f);
    g.ranks = list_of(j, "ranks");
  } else if (fs::exists(folder / "reconstruct.json", none)) {
    g.command = "reconstruct";
    load_reconstruction(g);
  } else {
    load_loose(g);
  }
  return g;
}

Json json_of(const Gallery& g, Embedder& embedder) {
  std::vector<double> seconds;
  for (const GalleryClip& c : g.clips) seconds.push_back(number_of(c.line, "seconds"));
  Json j = {{"name", g.name},
            {"folder", g.folder.string()},
            {"command", g.command},
            {"count", g.clips.size()},
            {"seconds", median(seconds)},
            {"failed", g.failures.size()},
            {"failures", std::span(g.failures).first(std::min(most_failures, g.failures.size()))},
            {"ranks", g.ranks},
            {"status", json_of(known(g.folder, g.status), g.status.updated)},
            {"clips", Json::array()}};
  for (const GalleryClip& c : std::span(g.clips).first(std::min(most_shown, g.clips.size()))) {
    Json references = Json::array();
    for (const std::string& file : c.references)
      references.push_back({{"file", file}, {"media", embedder.media(g.folder, file)}});
    j["clips"].push_back({{"name", c.name},
                          {"line", c.line},
                          {"references", references},
                          {"media", embedder.media(g.folder, c.file)}});
  }
  return j;
}

std::string gallery_page(std::span<const Gallery> galleries) {
  const Gallery& first = galleries.front();
  Embedder embedder(first.folder);
  std::string names, note = first.command.empty() ? "" : "weft " + first.command, text;
  Json page = {
      {"kind", "gallery"}, {"several", galleries.size() > 1}, {"galleries", Json::array()}};
  for (const Gallery& g : galleries) {
    names += (names.empty() ? "" : ", ") + g.name;
    note += (note.empty() ? "" : " · ") + g.folder.string();
    text += fmt::format("{}: {}, {} failed\n", g.folder.string(),
                        counted(std::ssize(g.clips), "clip"), g.failures.size());
    if (!g.status.command.empty())
      text += describe_job(known(g.folder, g.status), g.status.updated);
    page["galleries"].push_back(json_of(g, embedder));
  }
  page["title"] = names;
  page["note"] = note;
  return page_html(page, text);
}

}  // namespace weft::report_page
