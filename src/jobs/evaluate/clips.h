// `weft evaluate` of clips: their quality as columns of a table (docs/evaluate_clips.md).
#pragma once

#include <mpi.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "config/deck_table.h"
#include "data/lists/file_table.h"
#include "jobs/engine/list_job.h"
#include "media/media_source.h"

namespace weft {

// Further keys of the table [evaluate].
struct EvaluateClipsDeck {
  std::string clips, references, lpips_weights;
  std::vector<std::string> measures;
};
DeckTable evaluate_clips_table();

// What evaluate.measures may name, in the order of the columns.
inline constexpr std::array<std::string_view, 7> clip_measures = {
    "psnr", "ssim", "lpips", "flicker", "motion", "match", "aes"};
// Those of them that a job computes.
struct ClipMeasures {
  bool psnr = false, ssim = false, lpips = false, flicker = false, motion = false;
  bool match = false, aes = false;
  bool references = false;  // any row names one

  bool& of(std::string_view name);
  bool compares() const { return references && (psnr || ssim || lpips); }
  bool in_order() const { return compares() || flicker || motion; }  // all frames are read
  bool clip() const { return match || aes; }
  // The table's columns: these measures, of references reference_flicker and reference_motion too,
  // and evaluation_fault.
  std::vector<std::string> columns() const;
};

// A clip with what it is measured against. Rows that are alike are evaluated once.
struct EvaluatedClip {
  std::string path;  // from where weft was started; of a member of a shard: SHARD/MEMBER
  MediaSource media;
  std::string reference, text;  // empty: none
  std::string name() const;     // of the item
};

// The rows of evaluate.clips.
struct ClipRows {
  FileTable table;                   // on rank 0
  std::vector<EvaluatedClip> clips;  // different ones, in the order of their first rows
};
// Collective: rank 0 reads the table, or lists the files, for all.
ClipRows read_clip_rows(const Deck& deck, MPI_Comm world);

// evaluate.measures, or else all for which the deck and the rows give what they need. Exit::usage,
// naming the key, for a measure that lacks something.
ClipMeasures choose_measures(const Deck& deck, const ClipRows& rows);

// Mean and range of a column over the rows that have it.
struct ColumnSummary {
  std::string name;
  std::int64_t rows = 0;
  double sum = 0, least = 0, most = 0;
  void add(double value);
  double mean() const { return rows > 0 ? sum / static_cast<double>(rows) : 0; }
};

// Evaluates the clips that are missing; returns this rank's share of the report. A line has the
// measures' values by the names of their columns, null where there is none (clip_work.cpp).
nlohmann::ordered_json evaluate_missing_clips(const Deck& deck, const ListStart& start,
                                              const ClipRows& rows, const ClipMeasures& measures,
                                              ListEngine& engine);

// Collective. Writes OUTPUT/scores.csv (or .jsonl), the rows with columns for the measures, and
// scores.json. Returns the exit code: 0, 3 if clips could not be read or compared, 75 if asked to
// stop. The same command evaluates what is missing.
int evaluate_clips(const Deck& deck, const ListStart& start, MPI_Comm world);

}  // namespace weft
