// Which items of an ingest are taken: filters by what lists say of them, and duplicates.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "config/deck.h"
#include "data/ingest/ingest.h"
#include "data/lists/lists.h"

namespace weft {

// One bound of the deck: `weft ingest --min-aes 4.5` is ingest.min_aes = 4.5, items of which `aes`
// is at least that.
struct FilterKey {
  const char* key;
  const char* column;
  bool minimum;
  double IngestDeck::*limit;  // below 0: none
  const char* help;
};
const std::vector<FilterKey>& filter_keys();

// An entry of ingest.min or ingest.max: a bound on a column of lists and tables.
struct ColumnBound {
  std::string column;
  bool minimum;
  double limit;
};
// In the order in which list_media() is asked for their columns. Exit::usage for an entry that is
// not COLUMN=NUMBER.
std::vector<ColumnBound> column_bounds(const IngestDeck& deck);

struct Selection {
  struct Dropped {
    std::string rule;          // "min_aes = 4.5", "min psnr = 30"
    std::int64_t items = 0;    // of them
    std::int64_t unknown = 0;  //   without a value
    std::string example;       // of duplicates: the first pair
  };
  std::vector<MediaItem> kept;
  std::vector<Dropped> dropped;  // in the order in which the rules were applied
  std::int64_t missing = 0;      // items whose file is not there
};

// Applies the filters, names files that are not there, and drops items of which an earlier one has
// the same bytes. Ranks look for, open, measure and hash a share of the files each, and only where
// it decides: files whose frames, sizes or rates a filter wants and no list says (`plan`: all of
// these), and files of one size. Collective; all ranks get the same. Throws Exit::data where a
// filter asks for a score that no item has, where no file is there, and with `plan` where one is
// not.
Selection select_items(std::vector<MediaItem> items, const IngestDeck& deck,
                       const MediaAccess& access, bool plan, MPI_Comm comm);

// Whether ingest.inputs names a list, whose paths begin in its own folder.
bool names_a_list(const IngestDeck& deck);

// What the items will give, as far as their sizes and frames are known.
struct Forecast {
  std::int64_t videos = 0, pictures = 0;
  std::int64_t small = 0, brief = 0;          // too small, too short for every clip
  std::vector<std::size_t> unknown;           // items whose size or length is not known
  std::map<std::string, std::int64_t> clips;  // by bucket
};
Forecast forecast(const std::vector<MediaItem>& items, const IngestDeck& deck);

// "3 videos", "1 picture", "3 videos and 1 picture".
std::string count_media(const Forecast& forecast);

// Both on the log of rank 0.
void report_selection(const Selection& selection, std::size_t listed, const Forecast& forecast);

// For --plan, after which no cut names them: a WARN with the reasons of the first measured items
// whose size or length is not known all the same.
void explain_unknown(const Selection& selection, const Forecast& forecast,
                     const MediaAccess& access);

}  // namespace weft
