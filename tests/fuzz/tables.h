// The tables of the deck for the targets that read one: those that need nothing but the parser.
#pragma once

#include "config/deck_table.h"
#include "jobs/generate/options.h"
#include "models/stdit3/options.h"
#include "models/t5/options.h"
#include "models/video_vae/options.h"

namespace weft::fuzz {

inline bool register_tables() {
  std::vector<DeckTable> tables = stdit3_tables();
  for (auto owner : {video_vae_tables, t5_tables})
    for (DeckTable& t : owner()) tables.push_back(std::move(t));
  tables.push_back(generate_table());
  set_deck_tables(std::move(tables), {"stdit3", "vae"});
  return true;
}

}  // namespace weft::fuzz
