// `weft report`: what its inputs turn out to be, the pages that are written, and how they are
// opened.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <utility>

#include "core/error.h"
#include "core/host.h"
#include "core/log.h"
#include "report/against.h"
#include "report/page.h"
#include "report/report.h"

namespace weft {

namespace fs = std::filesystem;

namespace {

// What the inputs turn out to be.
struct Inputs {
  std::vector<report_page::Run> runs;
  std::vector<report_page::Gallery> galleries;
  std::vector<report_page::Json> scaling;
  std::vector<fs::path> pages;  // that jobs have written themselves
  struct Folder {
    fs::path path;
    std::vector<KnownJob> jobs;  // below it
  };
  std::vector<Folder> folders;
};

// What a folder or a file without metrics.jsonl is, if it is anything.
bool add_other(Inputs& inputs, const std::string& name) {
  if (const fs::path page = report_page::own_page(name); !page.empty()) {
    inputs.pages.push_back(page);
    return true;
  }
  report_page::Gallery gallery = report_page::load_gallery(name);
  // Loose pictures next to jobs, such as plots of somebody's, are not what is asked for.
  const double now = seconds_since_1970();
  if (gallery.command.empty() && !find_job(name, now))
    if (std::vector<KnownJob> jobs = find_jobs(name, now); !jobs.empty()) {
      inputs.folders.push_back({name, std::move(jobs)});
      return true;
    }
  if (gallery.clips.empty() && gallery.failures.empty()) return false;
  inputs.galleries.push_back(std::move(gallery));
  return true;
}

Inputs load_inputs(const std::vector<std::string>& names) {
  Inputs inputs;
  std::error_code none;
  for (const std::string& name : names) {
    if (name.ends_with(".json")) {
      inputs.scaling.push_back(report_page::load_scaling(fs::weakly_canonical(name)));
      continue;
    }
    if (!fs::exists(fs::path(name) / "metrics.jsonl", none) && add_other(inputs, name)) continue;
    WEFT_CHECK(!fs::exists(fs::path(name) / "scores.json", none), Exit::data,
               "open scores.csv or scores.jsonl in it as a table; docs/evaluate_clips.md names the "
               "columns",
               "{} holds an evaluation of clips, which has no page", name);
    inputs.runs.push_back(report_page::load_run(name));
    if (const std::size_t broken = inputs.runs.back().broken_lines; broken > 0)
      log::warn("{}/metrics.jsonl: {} left out that cannot be read", name, counted(broken, "line"));
  }
  return inputs;
}

// For TensorBoard: all training runs below the folder, under the names that they have there.
void add_runs_below(const Inputs::Folder& folder, std::vector<report_page::Run>& runs) {
  for (const KnownJob& job : folder.jobs) {
    if (job.status.command != "train") continue;
    try {
      runs.push_back(report_page::load_run(job.path));
      runs.back().name =
          job.path.lexically_relative(folder.path.lexically_normal()).generic_string();
    } catch (const Error& e) {  // it has no step yet
      log::warn("{} is left out: {}", job.path.string(), e.what());
    }
  }
}

// ---- --open ----

bool has_desktop() {
  for (const char* name : {"DISPLAY", "WAYLAND_DISPLAY"})
    if (const char* value = std::getenv(name); value != nullptr && *value != 0) return true;
  return false;
}

// Starts the desktop's browser, which lives on. Returns false where that fails within two seconds.
bool start_browser(const fs::path& page) {
  setenv("WEFT_PAGE", fs::absolute(page).c_str(), 1);
  return std::system(
             "setsid xdg-open \"$WEFT_PAGE\" </dev/null >/dev/null 2>&1 & "
             "for poll in 1 2 3 4 5 6 7 8 9 10; do "
             "kill -0 $! 2>/dev/null || { wait $!; exit; }; sleep 0.2; done") == 0;
}

// `folder`: the page links to others below its folder, and these to clips and pictures that were
// too large for them.
void open_or_tell(const fs::path& page, bool folder) {
  if (has_desktop() && start_browser(page)) return;
  const char* why = has_desktop() ? "xdg-open fails here" : "no desktop here";
  const fs::path path = fs::absolute(page).lexically_normal();
  const std::string name = path.parent_path().filename().string();
  const std::string source =
      host_name() + ":" + (folder ? path.parent_path().string() + "/" : path.string());
  // Old scp and rsync pass paths on to the remote shell, new ones do not: there is no quoting that
  // suits both. And a name in front of which they see an option or a host needs "./".
  if (!report_page::is_plain_word(source) || name.starts_with('-') ||
      name.find(':') != std::string::npos)
    log::info("{}; copy it to your own machine: {}", why, printable(source, 2000));
  else if (folder)
    log::info(
        "{}; on your own machine: rsync -am --include='*/' --include='*.html' --include='*.png' "
        "--include='*.jpg' --include='*.jpeg' --include='*.mp4' --exclude='*' {} {}",
        why, source, name);
  else
    log::info("{}; on your own machine: scp {} .", why, source);
}

}  // namespace

int report(const std::vector<std::string>& names, const std::string& tensorboard,
           const std::string& output, bool open) {
  Inputs inputs = load_inputs(names);
  const bool others = !inputs.galleries.empty() || !inputs.pages.empty() || !inputs.folders.empty();
  WEFT_CHECK(!inputs.runs.empty() || !inputs.scaling.empty() || others, Exit::usage,
             "for example: weft report runs/demo", "weft report needs the directory of a run");
  WEFT_CHECK(inputs.scaling.empty() || !inputs.runs.empty() || !output.empty(), Exit::usage,
             "name the directory of a training run too, or --output FILE",
             "{} is shown on the page of a training run",
             *std::ranges::find_if(names, [](const auto& n) { return n.ends_with(".json"); }));
  WEFT_CHECK(tensorboard.empty() || (!open && output.empty()), Exit::usage, "leave one of them out",
             "--tensorboard writes no page for --open and --output");
  if (!tensorboard.empty()) {
    for (const Inputs::Folder& folder : inputs.folders) add_runs_below(folder, inputs.runs);
    for (const report_page::Gallery& gallery : inputs.galleries)
      log::warn("{} is left out: it is no training run", gallery.folder.string());
    for (const fs::path& page : inputs.pages)
      log::warn("{} is left out: it is no training run", page.string());
    WEFT_CHECK(!inputs.runs.empty(), Exit::usage, "name a directory with metrics.jsonl",
               "only training runs have metrics for TensorBoard");
    for (const fs::path& file : report_page::write_event_files(tensorboard, inputs.runs))
      fmt::print("{}\n", file.string());
    return 0;
  }
  const auto done = [&](const fs::path& page, bool folder = false) {
    fmt::print("{}\n", page.string());
    if (open) open_or_tell(page, folder);
  };
  WEFT_CHECK(output.empty() || !others, Exit::usage, "name training runs alone",
             "--output is for the page of training runs");
  const auto write = [&](const fs::path& file, const std::string& page) {
    report_page::write_page(file, page);
    done(file);
  };
  if (!inputs.runs.empty() || !inputs.scaling.empty()) {
    const fs::path page =
        output.empty() ? inputs.runs.front().dir / "report.html" : fs::path(output);
    write(page,
          report_page::make_page(inputs.runs, inputs.scaling, fs::absolute(page).parent_path()));
  }
  if (!inputs.galleries.empty())
    write(inputs.galleries.front().folder / "report.html",
          report_page::gallery_page(inputs.galleries));
  for (const fs::path& page : inputs.pages) done(page);
  for (const Inputs::Folder& folder : inputs.folders)
    done(report_page::write_folder_page(folder.path, folder.jobs, seconds_since_1970()), true);
  return 0;
}

Command report_command() {
  struct Options {
    std::vector<std::string> inputs;
    std::string tensorboard, output, against;
    bool open = false;
  };
  const auto o = std::make_shared<Options>();
  Command c{"report",
            "write RUN/report.html about any job, or DIR/index.html about all jobs below a folder",
            [o](const Deck&, MPI_Comm) {
              if (o->against.empty()) return report(o->inputs, o->tensorboard, o->output, o->open);
              WEFT_CHECK(
                  o->inputs.size() == 1 && o->tensorboard.empty() && o->output.empty() && !o->open,
                  Exit::usage, "for example: weft report runs/mine --against runs/theirs",
                  "--against compares one run, and writes no page");
              return report_against(o->inputs.front(), o->against);
            }};
  c.first_rank_only = true;
  c.path("runs", o->inputs,
         "directories of runs, of a job's results, or that contain several of these; .json files "
         "of weft bench scaling")
      .required = true;
  c.path("--tensorboard", o->tensorboard,
         "instead of a page, write the metrics as event files into this directory, a folder a "
         "run");
  c.path("--output", o->output, "where the page of training runs goes: those of other users");
  c.path(
      "--against", o->against,
      "instead of a page, print how far the results agree with those of this folder; exit code 6 "
      "where they do not");
  c.option("--open", o->open,
           "open the page in the desktop's browser, or print how to copy it from here");
  return c;
}

}  // namespace weft
