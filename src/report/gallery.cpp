#include "report/gallery.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "core/json.h"
#include "core/log.h"
#include "core/progress.h"
#include "jobs/engine/manifest.h"
#include "report/html.h"

namespace weft::report_page {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// ---- What is in a folder ----

// A member of an untrusted line as text; "" for what is absent or of another type.
std::string text_of(const Json& line, const char* key) {
  const auto it = line.find(key);
  if (it == line.end()) return "";
  if (it->is_string()) return it->get<std::string>();
  if (it->is_number_integer()) return it->dump();
  return it->is_number() ? fmt::format("{:.4g}", it->get<double>()) : "";
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

// Seconds and ranks of a clip that is made in parts, whose lines are named CLIP/PART.
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

// weft animate names the files for what they are: NAME-picture.png.
std::string title_of_reference(const std::string& file, std::size_t number, bool animated) {
  if (!animated) return fmt::format("reference {}", number);
  const std::string what = fs::path(file).stem().string();
  if (what.ends_with("-ref_pose")) return "head motion";
  return what.ends_with("-ref_eyeblink") ? "eyes and expression" : "picture";
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
    // Several samples of a prompt, whose names carry the sample's number, all have one seed.
    const std::string sample = text_of(j, "sample");
    add_fact(c, j, "seed",
             !sample.empty() && name.ends_with("-" + sample)
                 ? fmt::format("clip {} of seed", sample).c_str()
                 : nullptr);
    add_size(c, j);
    if (const auto references = j.find("references");
        references != j.end() && references->is_array())
      for (const Json& r : *references)
        if (r.is_string() && stays_inside(r.get<std::string>()))
          c.references.emplace_back(r, title_of_reference(r, c.references.size(), animated));
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
    if (const std::string db = text_of(line, "psnr"); !db.empty())
      c.facts.emplace_back("PSNR", db + " dB");
    add_fact(c, line, "ssim", "SSIM");
    add_size(c, line);
    c.seconds = number_of(line, "seconds");
    if (std::isfinite(c.seconds)) c.facts.emplace_back("", seconds_text(c.seconds));
    add_fact(c, line, "rank");
    g.clips.push_back(std::move(c));
  }
  if (const auto skipped = j.find("skipped"); skipped != j.end() && skipped->is_array())
    for (const Json& s : *skipped)
      if (s.is_object()) g.failures.push_back(text_of(s, "input") + ": " + text_of(s, "fault"));
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
  g.status = read_status(folder / "status.json").value_or(JobStatus());
  g.name = name_of(folder);
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

// ---- What it looks like: figures with captions, alone and next to each other, and their page ----

namespace {

constexpr std::size_t most_figures = 600, most_failures = 1000;
constexpr std::size_t longest_text = 600;  // bytes of a prompt that are shown

std::string shortened(const std::string& text) {
  return text.size() <= longest_text ? text : cut_text(text, longest_text) + "...";
}

std::string facts_text(const GalleryClip& clip) {
  std::string text;
  for (const auto& [name, value] : clip.facts)
    text += fmt::format("{}{}{}{}", text.empty() ? "" : " · ", escape(name),
                        name.empty() ? "" : " ", escape(value));
  return text;
}

std::string figure(const fs::path& base, const Gallery& g, const GalleryClip& c,
                   const std::string& head, Embedder& embedder) {
  return embedder.figure(
      base, {g.folder, c.file, c.name, fmt::format("<b>{}</b>{}", escape(head), facts_text(c)),
             c.sound, false});
}

std::string reference_figures(const fs::path& base, const Gallery& g, const GalleryClip& c,
                              const std::string& of, Embedder& embedder) {
  std::string figures;
  for (const auto& [file, what] : c.references)
    figures += embedder.figure(
        base, {g.folder, file, what, fmt::format("<b>{}</b>of {}", escape(what), escape(of)), false,
               false});
  return figures;
}

// A row of its own, so that nothing comes between them.
std::string in_row(const std::string& figures) {
  return "<div class=\"sources\">" + figures + "</div>";
}

// The unit of the job's work.
const char* noun_of(const Gallery& g) { return g.command == "segment" ? "input" : "clip"; }

std::string gallery_tiles(const Gallery& g) {
  std::vector<double> seconds;
  for (const GalleryClip& c : g.clips) seconds.push_back(c.seconds);
  const auto count = [](std::size_t n, const std::string& noun) {
    return Named(fmt::to_string(n), n == 1 ? noun : noun + "s");
  };
  std::vector<Named> t = {count(g.clips.size(), noun_of(g))};
  if (!g.failures.empty()) t.emplace_back(fmt::to_string(g.failures.size()), "failed");
  if (!finite(seconds).empty())
    t.emplace_back(seconds_text(median(seconds)),
                   g.command == "animate" ? "of ranks' work a clip (median)" : "a clip (median)");
  if (!g.ranks.empty()) t.push_back(count(g.ranks.size(), "rank"));
  if (g.wall_seconds > 0) t.emplace_back(seconds_text(g.wall_seconds), "until the last was made");
  return tiles(t);
}

std::string rank_section(const Gallery& g) {
  if (g.ranks.size() < 2 || !(g.wall_seconds > 0)) return "";
  const char* noun = g.command == "animate" ? "part" : noun_of(g);
  std::string list;
  for (std::size_t r = 0; r < g.ranks.size(); ++r)
    list += bar(fmt::format("rank {}", r),
                {{g.ranks[r].busy, run_colors[0], "busy " + seconds_text(g.ranks[r].busy)}},
                g.wall_seconds,
                fmt::format("{}, busy {}", counted(g.ranks[r].made, noun),
                            percent(g.ranks[r].busy, g.wall_seconds)));
  return section("Ranks", "How long each was at work, of the time until the last item was made.",
                 bars(list, g.ranks.size() > 16));
}

// The classes' colours in the pictures, in the order in which they first occur.
std::string class_legend(const Gallery& g) {
  std::string swatches;
  std::set<Named> known;
  for (const GalleryClip& clip : g.clips)
    for (const auto& named : clip.classes)
      if (known.insert(named).second) swatches += swatch(named.second, escape(named.first), true);
  return legend(swatches);
}

std::string failure_section(const std::string& title, const Gallery& g) {
  std::vector<std::string> lines;
  for (const std::string& failure : g.failures) lines.push_back(shortened(failure));
  return list_section(title, "Run the same command to retry them.", lines, most_failures,
                      g.folder.string());
}

}  // namespace

std::string clip_figures(const fs::path& base, const Gallery& g, Embedder& embedder) {
  std::string body = "<div class=\"media\">";
  const std::size_t shown = std::min(most_figures, g.clips.size());
  for (std::size_t i = 0; i < shown; ++i) {
    GalleryClip c = g.clips[i];
    const std::string head = c.text.empty() ? c.name : shortened(c.text);
    // Several clips may be of one prompt.
    if (!c.text.empty()) c.facts.insert(c.facts.begin(), {"", c.name});
    const std::string made = figure(base, g, c, head, embedder);
    body += c.references.empty() ? made
                                 : in_row(reference_figures(base, g, c, c.name, embedder) + made);
  }
  body += "</div>";
  if (shown < g.clips.size())
    body += fmt::format("<p class=\"note\">and {} more in {}</p>", g.clips.size() - shown,
                        escape(g.folder.string()));
  return body;
}

std::string clips_beside(const fs::path& base, std::span<const Gallery> galleries,
                         Embedder& embedder) {
  // In the order of the first gallery that has them.
  std::vector<std::string> names;
  std::map<std::string, std::vector<std::pair<const Gallery*, const GalleryClip*>>> by_name;
  for (const Gallery& g : galleries)
    for (const GalleryClip& c : g.clips) {
      auto& row = by_name[c.name];
      if (row.empty()) names.push_back(c.name);
      row.emplace_back(&g, &c);
    }
  std::string body;
  std::size_t shown = 0;
  for (const std::string& name : names) {
    if (shown >= most_figures) break;
    const auto& row = by_name[name];
    // Clips of the same name may show different prompts.
    const std::string& text = row.front().second->text;
    const bool alike = std::all_of(row.begin(), row.end(),
                                   [&](const auto& clip) { return clip.second->text == text; });
    body += fmt::format("<h3>{}</h3><div class=\"media\">",
                        escape(text.empty() || !alike ? name : name + ": " + shortened(text)));
    for (const auto& [g, c] : row)
      body += figure(base, *g, *c,
                     alike || c->text.empty() ? g->name : g->name + ": " + shortened(c->text),
                     embedder);
    // Below the clips, which are to be compared.
    std::string references;
    for (const auto& [g, c] : row) references += reference_figures(base, *g, *c, g->name, embedder);
    body += (references.empty() ? "" : in_row(references)) + "</div>";
    shown += row.size();
  }
  return body;
}

std::string gallery_page(std::span<const Gallery> galleries) {
  const Gallery& first = galleries.front();
  std::string names, folders;
  for (const Gallery& g : galleries) {
    names += (names.empty() ? "" : ", ") + escape(g.name);
    folders += (folders.empty() ? "" : " · ") + escape(g.folder.string());
  }
  std::string page =
      open_page(names, first.command.empty() ? folders : "weft " + first.command + " · " + folders,
                galleries.size() > 1);
  Embedder embedder;
  if (galleries.size() == 1) {
    page += gallery_tiles(first);
    page += failure_section("Failed", first);
    page += status_sections(first.status);
    page += section(first.command == "segment" ? "Pictures and clips" : "Clips", "",
                    class_legend(first) + clip_figures(first.folder, first, embedder));
    page += rank_section(first);
  } else {
    page += "<p></p>";
    for (const Gallery& g : galleries)
      page += failure_section("Failed in " + escape(g.name), g) +
              status_sections(g.status, " of " + escape(g.name));
    page += section("Clips", "Clips of the same name are shown side by side.",
                    clips_beside(first.folder, galleries, embedder));
  }
  if (embedder.linked() > 0)
    page += fmt::format(
        "<footer>Too large for this page: {}. Keep it in its folder for the links to "
        "work.</footer>\n",
        counted(embedder.linked(), "file"));
  return page + close_page();
}

}  // namespace weft::report_page
