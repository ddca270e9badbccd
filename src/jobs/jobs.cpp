#include "jobs/jobs.h"

#include "data/ingest/ingest.h"
#include "jobs/animate/clips.h"
#include "jobs/encode/encode.h"
#include "jobs/evaluate/clips.h"
#include "jobs/evaluate/evaluate.h"
#include "jobs/generate/options.h"
#include "jobs/generate/samples.h"
#include "jobs/reconstruct/reconstruct.h"
#include "jobs/score/score.h"
#include "jobs/segment/segment.h"
#include "models/registry.h"
#include "train/validation.h"

namespace weft {

void register_deck_tables() {
  std::vector<DeckTable> tables;
  std::vector<std::string> names;
  for (const Model& m : models()) {
    if (!m.name.empty()) names.push_back(m.name);
    if (m.tables == nullptr) continue;
    for (DeckTable& t : m.tables()) tables.push_back(std::move(t));
  }
  for (DeckTable (*table)() : {ingest_table, reconstruct_table, encode_table, generate_table,
                               evaluate_table, evaluate_clips_table, segment_table, score_table,
                               animate_table, validation_table, samples_table})
    tables.push_back(table());
  set_deck_tables(std::move(tables), std::move(names));
}

}  // namespace weft
