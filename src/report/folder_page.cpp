// `weft report DIR`: one page over all jobs below a folder.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <system_error>

#include "core/error.h"
#include "core/log.h"
#include "media/resize.h"
#include "media/video_reader.h"
#include "media/writers.h"
#include "report/report.h"

namespace weft::report_page {
namespace {

namespace fs = std::filesystem;

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

// Thumbnails of the gallery's first clips, as long as they fit into `bytes_left`.
Json thumbnails(const Gallery& g, std::size_t& bytes_left) {
  Json pictures = Json::array();
  for (std::size_t i = 0; i < std::min(most_thumbnails, g.clips.size()); ++i) {
    const std::string png = thumbnail(g.folder / g.clips[i].file);
    if (png.empty() || png.size() > bytes_left) continue;
    bytes_left -= png.size();
    pictures.push_back("data:image/png;base64," + base64(png));
  }
  return pictures;
}

// Whether the page was written after all that it shows: a job writes its status last.
bool is_fresh(const fs::path& page, const KnownJob& job) {
  if (job.status.state == "running" || job.status.state == "silent") return false;
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
fs::path page_in(const KnownJob& job, const MakePage& make) {
  const fs::path page = job.path / "report.html";
  check_owner(page);
  if (!is_fresh(page, job) || owner_of(page) == PageOwner::weft_for_several_jobs)
    write_page(page, make());
  return page;
}

// Adds what the job's files say to its row. Returns its page; empty: none. Throws what keeps the
// files from being read, or the page from being written.
fs::path read_job(Json& row, const KnownJob& job, std::size_t& bytes_left) {
  if (job.status.rate > 0) row["seconds"] = 1 / job.status.rate;
  std::error_code none;
  if (!fs::exists(job.path / "metrics.jsonl", none)) {
    fs::path page = own_page(job.path);
    if (!page.empty() || !fs::is_directory(job.path, none)) return page;
    const Gallery g = load_gallery(job.path);
    if (g.clips.empty() && g.failures.empty()) return {};
    row["pictures"] = thumbnails(g, bytes_left);
    return page_in(job, [&] { return gallery_page({&g, 1}); });
  }
  const Run run = load_run(job.path);
  row["loss"] = last_loss(run);
  row["seconds"] = median(run.steps["seconds"]);
  row["losses"] = bin(run.steps.step, run.steps["loss"], spark_points).mean;
  if (const std::vector<double> held = finite(run.held_out["loss"]); !held.empty())
    row["held_out"] = held.back();
  row["pictures"] =
      thumbnails(run.through_time.empty() ? run.samples : run.through_time.back(), bytes_left);
  return page_in(job, [&] { return make_page({&run, 1}); });
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

fs::path write_folder_page(const fs::path& folder, std::span<const KnownJob> jobs, double now) {
  const fs::path index = folder / "index.html";
  check_owner(index);  // before the jobs' pages are written
  const auto below = [&](const fs::path& path) {
    return path.lexically_normal().lexically_relative(folder.lexically_normal()).generic_string();
  };
  Json page = {
      {"kind", "folder"},
      {"title", name_of(folder)},
      {"note", fmt::format("{} · as of {}", fs::absolute(folder).lexically_normal().string(),
                           time_text(now))},
      {"rows", Json::array()}};
  std::size_t bytes_left = most_thumbnail_bytes;
  for (const KnownJob& job : jobs) {
    Json row = {{"name", below(job.path)}, {"job", json_of(job, now)}};
    std::string error;
    try {
      if (const fs::path own = read_job(row, job, bytes_left); !own.empty())
        row["page"] = percent_encoded(below(own));
    } catch (const Error& e) {
      error = e.what();
    } catch (const std::exception& e) {  // of a library
      error = fmt::format("its files cannot be read: {}", e.what());
    }
    if (!error.empty()) log::warn("{}: {}", job.path.string(), error);
    row["error"] = error;
    page["rows"].push_back(std::move(row));
  }
  write_page(index, page_html(page, table_of_jobs({jobs.begin(), jobs.end()}, now)));
  return index;
}

}  // namespace weft::report_page
