// `weft report DIR`: one page over all jobs below a folder.
#include "report/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <map>
#include <numeric>
#include <optional>
#include <system_error>

#include "core/error.h"
#include "core/log.h"
#include "media/resize.h"
#include "media/video_reader.h"
#include "media/writers.h"
#include "report/data.h"
#include "report/gallery.h"
#include "report/html.h"
#include "report/plot.h"

namespace weft::report_page {
namespace {

namespace fs = std::filesystem;

// ---- What is known of a job ----

constexpr std::size_t most_thumbnails = 2;                            // of a job
constexpr std::size_t most_thumbnail_bytes = 32u << 20;               // of all jobs together
constexpr std::int64_t thumbnail_height = 72, thumbnail_width = 144;  // pixels, at most
constexpr std::size_t spark_points = 60;

// The first frame, small, as a PNG file; "" for what cannot be read. Links are not followed: the
// page may be passed on.
std::string thumbnail(const fs::path& file) {
  std::error_code none;
  if (fs::symlink_status(file, none).type() != fs::file_type::regular) return "";
  try {
    const Footage f = read_frames({file.string()}, 1);
    const double scale = std::min({1.0, static_cast<double>(thumbnail_height) / f.height,
                                   static_cast<double>(thumbnail_width) / f.width});
    const auto scaled = [&](std::int64_t side) {
      return std::max<std::int64_t>(1, std::llround(scale * static_cast<double>(side)));
    };
    const std::int64_t height = scaled(f.height), width = scaled(f.width);
    std::vector<std::uint8_t> small(static_cast<std::size_t>(3 * height * width));
    pillow_resize({f.rgb.data(), f.height, f.width, 3 * f.width}, height, width,
                  PillowFilter::bilinear, small.data(), 3 * width);
    return png_bytes(height, width, small);
  } catch (const std::exception&) {  // the job's own page says what is wrong with it
    return "";
  }
}

// Adds thumbnails of the gallery's first clips, as long as they fit into `bytes_left`.
void add_thumbnails(JobRow& row, const Gallery& g, std::size_t& bytes_left) {
  for (std::size_t i = 0; i < std::min(most_thumbnails, g.clips.size()); ++i) {
    std::string png = thumbnail(g.folder / g.clips[i].file);
    if (png.empty() || png.size() > bytes_left) continue;
    bytes_left -= png.size();
    row.pictures.push_back(std::move(png));
  }
}

// Whether the page was written after all that it shows: a job writes its status last.
bool is_fresh(const fs::path& page, const KnownJob& job) {
  if (!job.measured || job.status.state == "running" || job.status.state == "silent") return false;
  std::error_code failed;
  const fs::file_time_type written = fs::last_write_time(page, failed);
  if (failed) return false;
  for (const char* status : {"status.json", "generated/status.json"}) {
    const fs::file_time_type changed = fs::last_write_time(job.path / status, failed);
    if (!failed && changed >= written) return false;  // times may be in whole seconds
  }
  return true;
}

// Writes the page of the job's folder, unless it is there. Returns its name. A page that compares
// the job with others, which lies in the folder of the first, becomes the job's own again.
template <class MakePage>
std::string page_in(const KnownJob& job, const MakePage& make) {
  const fs::path page = job.path / "report.html";
  check_owner(page);
  if (!is_fresh(page, job) || owner_of(page) == PageOwner::weft_for_several_jobs)
    write_page(page, make());
  return page.string();
}

// Fills in what the job's files say. Throws what keeps them from being read, or its page from being
// written.
void read_job(JobRow& row, std::size_t& bytes_left) {
  const fs::path& path = row.job.path;
  if (row.job.status.rate > 0) row.seconds = 1 / row.job.status.rate;
  std::error_code none;
  if (!fs::exists(path / "metrics.jsonl", none)) {
    row.page = own_page(path).string();
    if (!row.page.empty() || !fs::is_directory(path, none)) return;
    const Gallery g = load_gallery(path);
    if (g.clips.empty() && g.failures.empty()) return;
    row.page = page_in(row.job, [&] { return gallery_page({&g, 1}); });
    add_thumbnails(row, g, bytes_left);
    return;
  }
  const Run run = load_run(path);
  row.loss = last_loss(run);
  row.seconds = median(run.steps["seconds"]);
  row.losses = bin(run.steps.step, run.steps["loss"], spark_points).mean;
  if (const std::vector<double> held = finite(run.held_out["loss"]); !held.empty())
    row.held_out = held.back();
  add_thumbnails(row, run.through_time.empty() ? run.samples : run.through_time.back(), bytes_left);
  row.page = page_in(row.job, [&] { return make_page({&run, 1}); });
}

// ---- The page ----

// A cell that its column is sorted by: a number, or text.
std::string cell(const std::string& sorted_by, const std::string& html) {
  return fmt::format("<td data-v=\"{}\">{}</td>", escape(sorted_by), html);
}
std::string cell(double value, const std::string& text) {
  const bool known = std::isfinite(value);
  return cell(known ? fmt::format("{:.9g}", value) : "", known ? escape(text) : "");
}

const char* color_of_state(const std::string& state) {
  if (state == "running") return "var(--run0)";
  if (state == "finished") return "var(--run2)";
  if (state == "failed") return "var(--part4)";
  return state == "silent" ? "var(--run1)" : "var(--run7)";
}

std::string name_cell(const JobRow& r) {
  const std::string name = breakable(escape(r.name));
  return cell(r.name, fmt::format("{}<span class=\"note\">{}</span>",
                                  r.page.empty()
                                      ? "<b>" + name + "</b>"
                                      : fmt::format("<a href=\"{}\">{}</a>", url_of(r.page), name),
                                  escape(r.job.status.command)));
}

std::string state_cell(const JobStatus& s, const std::string& error) {
  std::string html = swatch(color_of_state(s.state), escape(state_text(s)), true);
  for (const std::string& more : {s.error, error})
    if (!more.empty()) html += "<span class=\"note\">" + escape(more) + "</span>";
  return cell(s.state, html);
}

std::string warnings_cell(const std::vector<std::string>& warnings) {
  if (warnings.empty()) return cell("0", "");
  std::string list;
  for (const std::string& w : warnings) list += "<li>" + escape(w) + "</li>";
  return cell(
      fmt::format("{}", warnings.size()),
      fmt::format("<details><summary>{}</summary><ul>{}</ul></details>", warnings.size(), list));
}

std::string row_of(const JobRow& r, double now) {
  const JobStatus& s = r.job.status;
  const double share =
      s.total > 0 ? static_cast<double>(s.done) / static_cast<double>(s.total) : NAN;
  std::string done = escape(fmt::format("{} {}s", share_text(s), s.noun));
  if (std::isfinite(share)) done = meter(share, color_of_state(s.state)) + "<br>" + done;
  if (s.state == "running" && s.left > 0)
    done += "<span class=\"note\">" + duration_text(s.left) + " left</span>";
  std::string pictures;
  for (const std::string& png : r.pictures)
    pictures += fmt::format("<img alt=\"\" src=\"data:image/png;base64,{}\">", base64(png));
  const std::string heard = s.state == "running"
                                ? duration_text(std::max(0.0, now - s.updated)) + " ago"
                                : time_text(s.updated);
  return "<tr>" + name_cell(r) + state_cell(s, r.error) +
         cell(fmt::format("{:.6g}", std::isfinite(share) ? share : 0), done) +
         cell(r.loss, loss_text(r.loss)) + "<td>" + sparkline(r.losses, color_of(0)) + "</td>" +
         cell(r.held_out, loss_text(r.held_out)) + warnings_cell(s.warnings) +
         "<td class=\"shots\">" + pictures + "</td>" + cell(r.seconds, seconds_text(r.seconds)) +
         cell(r.job.checkpoint, escape(r.job.checkpoint)) +
         cell(fmt::format("{:.0f}", s.updated),
              "<span class=\"when\">" + escape(heard) + "</span>") +
         cell(fmt::format("{}", s.ranks), fmt::format("{}", s.ranks)) + "</tr>\n";
}

// In the order in which a reader looks for them.
std::string count_tiles(std::span<const JobRow> rows) {
  std::map<std::string, std::size_t> states;
  std::size_t warned = 0;
  for (const JobRow& r : rows) {
    ++states[r.job.status.state];
    warned += r.job.status.warnings.empty() ? 0 : 1;
  }
  std::vector<Named> values = {{fmt::to_string(rows.size()), rows.size() == 1 ? "job" : "jobs"}};
  for (const auto& [state, label] : {std::pair{"running", "running"},
                                     {"failed", "failed"},
                                     {"silent", "silent"},
                                     {"stopped", "stopped early"},
                                     {"finished", "finished"}})
    if (states[state] > 0) values.emplace_back(fmt::to_string(states[state]), label);
  if (warned > 0) values.emplace_back(fmt::to_string(warned), "with warnings");
  return tiles(values);
}

}  // namespace

fs::path own_page(const fs::path& input) {
  std::error_code none;
  std::string output = input.string();
  while (output.ends_with('/')) output.pop_back();
  if (output.ends_with(".parts")) output.resize(output.size() - std::string_view(".parts").size());
  for (const fs::path& page : {input / "evaluation.html", fs::path(output + ".html")})
    if (fs::is_regular_file(page, none)) return page;
  return {};
}

std::string folder_page(const fs::path& folder, std::span<const JobRow> rows, double now) {
  struct Column {
    const char* title;
    bool sorts = true;
  };
  constexpr Column columns[] = {
      {"job"},          {"state"},      {"done"},        {"loss"},
      {"curve", false}, {"held out"},   {"warnings"},    {"newest samples", false},
      {"per item"},     {"checkpoint"}, {"last update"}, {"ranks"}};
  std::string head;
  for (const Column& c : columns)
    head += c.sorts ? fmt::format("<th><button>{}</button></th>", c.title)
                    : fmt::format("<th>{}</th>", c.title);
  std::string body =
      "<div class=\"scroll\"><table class=\"jobs\"><thead><tr>" + head + "</tr></thead><tbody>\n";
  for (const JobRow& r : rows) body += row_of(r, now);
  return open_page(
             escape(name_of(folder)),
             escape(fmt::format("{} · as of {}", fs::absolute(folder).lexically_normal().string(),
                                time_text(now)))) +
         count_tiles(rows) +
         section(
             "Jobs",
             "A click on a column's title sorts by it. Loss: the mean of the last tenth of the "
             "steps, at most 50. An item is a step, a clip or a file; of steps it is the median.",
             body + "</tbody></table></div>") +
         close_page();
}

fs::path write_folder_page(const fs::path& folder, std::span<const KnownJob> jobs, double now) {
  std::vector<JobRow> rows;
  const fs::path index = folder / "index.html";
  check_owner(index);  // before the jobs' pages are written
  std::size_t bytes_left = most_thumbnail_bytes;
  for (const KnownJob& job : jobs) {
    JobRow& row = rows.emplace_back();
    row.job = job;
    const auto below = [&](const fs::path& path) {
      return path.lexically_normal().lexically_relative(folder.lexically_normal()).generic_string();
    };
    row.name = below(row.job.path);
    try {
      read_job(row, bytes_left);
    } catch (const Error& e) {
      row.error = e.what();
    } catch (const std::exception& e) {  // of a library
      row.error = fmt::format("its files cannot be read: {}", e.what());
    }
    if (!row.error.empty()) log::warn("{}: {}", row.job.path.string(), row.error);
    if (!row.page.empty()) row.page = below(row.page);
  }
  write_page(index, folder_page(folder, rows, now));
  return index;
}

}  // namespace weft::report_page
