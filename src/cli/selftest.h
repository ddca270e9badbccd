// `weft selftest`: whether an installed weft works on these ranks, without decks, data, weights,
// Python or a source tree.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "config/command.h"
#include "config/deck.h"
#include "models/t5/options.h"

namespace weft {

// Collective. Runs small jobs of every kind on all ranks, each a check with a known result, in a
// folder of its own; prints a line a check, and at the end "selftest: passed ...", "selftest:
// failed ..." or "selftest: stopped ..." on a request to stop (Exit::stopped). Returns 0, or the
// exit code of the first check that failed, Exit::hardware where a result is wrong on a GPU. Where
// a check takes longer than --timeout, all ranks end with Exit::hang. Exit::usage for keys other
// than those of the device, memory and threads, and where ranks do not see the folder.
Command selftest_command();

namespace selftest {

// Where the checks run.
struct Context {
  std::filesystem::path folder;  // seen by all ranks
  MPI_Comm world = MPI_COMM_NULL;
  int rank = 0, ranks = 1;
  double timeout = 300;  // seconds that a check may take
  Deck given;            // whose device, memory and threads they take

  // A deck of inputs/, or of a reference there, with these keys ("table.key=value").
  Deck deck(const std::string& name, const std::vector<std::string>& keys) const;
  std::string path(const std::string& name) const { return (folder / name).string(); }
  // As many items as give every rank one, and enough for one rank alone.
  int items() const { return std::max(4, ranks); }
};

// One line of the output. `run` is collective, and throws Error on some ranks or all where the
// check fails: only at its end where it may be some, for then the others have nothing to wait for.
struct Check {
  const char* name;
  const char* what;
  void (*run)(const Context&);
};
const std::vector<Check>& all_checks();

// ---- Files that the jobs read, written by one rank ----

// The folder t5.weights: a random T5 of that shape, in f32, with letters as tokens.
void write_text_encoder(const T5Deck& t5);
// FOLDER/000000.png, 64x56 pixels, landmarks.csv of a face there, and speech.wav, `seconds` long.
void write_face_and_speech(const std::filesystem::path& folder, double seconds);
// FOLDER/000000.png, 000001.png ...: `count` frames of FFmpeg's test picture.
void write_pictures(const std::filesystem::path& folder, int count, int height, int width);

}  // namespace selftest
}  // namespace weft
