#include "jobs/jobs.h"

#include "data/ingest/ingest.h"
#include "data/stage.h"
#include "jobs/animate/clips.h"
#include "jobs/encode/encode.h"
#include "jobs/evaluate/clips.h"
#include "jobs/evaluate/evaluate.h"
#include "jobs/evaluate/reconstruct.h"
#include "jobs/generate/options.h"
#include "jobs/generate/samples.h"
#include "jobs/score/score.h"
#include "jobs/segment/segment.h"
#include "models/registry.h"
#include "train/validation.h"

namespace weft {

void register_deck_tables() {
  std::vector<DeckTable> tables = model_tables();
  for (DeckTable (*table)() : {ingest_table, reconstruct_table, encode_table, generate_table,
                               evaluate_table, evaluate_clips_table, segment_table, score_table,
                               animate_table, validation_table, samples_table, stage_table})
    tables.push_back(table());
  set_deck_tables(std::move(tables), model_names());
}

}  // namespace weft
