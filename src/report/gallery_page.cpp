// What a gallery looks like: figures with captions, alone and beside each other, and their page.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "core/log.h"
#include "report/gallery.h"
#include "report/html.h"

namespace weft::report_page {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t most_figures = 600, most_failures = 1000;
constexpr std::size_t longest_text = 600;  // bytes of a prompt that are shown

std::string shortened(std::string text) {
  if (text.size() <= longest_text) return text;
  std::size_t end = longest_text;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return text.substr(0, end) + "...";
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
  std::string figures;
  for (std::size_t i = 0; i < c.references.size(); ++i)
    figures += embedder.figure(
        base, {g.folder, c.references[i], c.references[i],
               fmt::format("<b>reference {}</b>of {}", i, escape(c.name)), false, false});
  const std::string facts = facts_text(c);
  return figures +
         embedder.figure(base, {g.folder, c.file, c.name,
                                fmt::format("<b>{}</b>{}", escape(head), facts), c.sound, false});
}

std::string more_text(std::size_t left, const Gallery& g) {
  if (left == 0) return "";
  return fmt::format("<p class=\"note\">and {} more in {}</p>", left, escape(g.folder.string()));
}

// The unit of the job's work.
const char* noun_of(const Gallery& g) { return g.command == "segment" ? "input" : "clip"; }

std::string count_tile(std::size_t n, const std::string& noun) {
  return tile(fmt::to_string(n), n == 1 ? noun : noun + "s");
}

std::string tiles(const Gallery& g) {
  std::vector<double> seconds;
  for (const GalleryClip& c : g.clips) seconds.push_back(c.seconds);
  std::string t = "<div class=\"tiles\">\n";
  t += count_tile(g.clips.size(), noun_of(g));
  if (!g.failures.empty()) t += tile(fmt::format("{}", g.failures.size()), "failed");
  if (!finite(seconds).empty()) {
    const bool parts = g.command == "animate";
    t += tile(seconds_text(median(seconds)),
              parts ? "of ranks' work a clip (median)" : "a clip (median)");
  }
  if (!g.ranks.empty()) t += count_tile(g.ranks.size(), "rank");
  if (g.wall_seconds > 0) t += tile(seconds_text(g.wall_seconds), "until the last was made");
  return t + "</div>\n";
}

std::string rank_section(const Gallery& g) {
  if (g.ranks.size() < 2 || !(g.wall_seconds > 0)) return "";
  const bool parts = g.command == "animate";
  std::string body = fmt::format("<div class=\"bars{}\">\n", g.ranks.size() > 16 ? " many" : "");
  for (std::size_t r = 0; r < g.ranks.size(); ++r)
    body += bar(fmt::format("rank {}", r),
                {{g.ranks[r].busy, run_colors[0], "busy " + seconds_text(g.ranks[r].busy)}},
                g.wall_seconds,
                fmt::format("{}, busy {}", counted(g.ranks[r].made, parts ? "part" : noun_of(g)),
                            percent(g.ranks[r].busy, g.wall_seconds)));
  return section("Ranks", "How long each was at work, of the time until the last item was made.",
                 body + "</div>");
}

// The classes' colours in the pictures, in the order in which they first occur.
std::string class_legend(const Gallery& g) {
  std::string legend;
  std::set<std::pair<std::string, std::string>> known;
  for (const GalleryClip& clip : g.clips)
    for (const auto& named : clip.classes)
      if (known.insert(named).second) legend += swatch(named.second, escape(named.first), true);
  return legend.empty() ? "" : "<div class=\"legend\">" + legend + "</div>\n";
}

std::string failure_section(const Gallery& g) {
  if (g.failures.empty()) return "";
  std::string body = "<div class=\"scroll\"><table>";
  for (std::size_t i = 0; i < std::min(most_failures, g.failures.size()); ++i)
    body += fmt::format("<tr><td>{}</td></tr>\n", escape(shortened(g.failures[i])));
  return section("Failed", "The same command tries them again.",
                 body + "</table></div>" +
                     more_text(g.failures.size() - std::min(most_failures, g.failures.size()), g));
}

}  // namespace

std::string clip_figures(const fs::path& base, const Gallery& g, Embedder& embedder) {
  std::string body = "<div class=\"media\">";
  const std::size_t shown = std::min(most_figures, g.clips.size());
  for (std::size_t i = 0; i < shown; ++i) {
    const GalleryClip& c = g.clips[i];
    body += figure(base, g, c, c.text.empty() ? c.name : shortened(c.text), embedder);
  }
  return body + "</div>" + more_text(g.clips.size() - shown, g);
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
    body += "</div>";
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
      open_page(names, first.command.empty() ? folders : "weft " + first.command + " · " + folders);
  Embedder embedder;
  if (galleries.size() == 1) {
    page += tiles(first);
    page += failure_section(first);
    page += warning_section("Warnings", first.warnings);
    page += section(first.command == "segment" ? "Pictures and clips" : "Clips", "",
                    class_legend(first) + clip_figures(first.folder, first, embedder));
    page += rank_section(first);
  } else {
    page += "<p></p>" + section("Clips", "Those of the same name lie beside each other.",
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
