// `weft report RUN --against REFERENCE`: how far the results of two jobs agree.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

namespace weft {

struct Comparison {
  std::vector<std::string> lines;  // for people: "OK    ...", "FAIL  ..." and what was not compared
  std::size_t compared = 0;
  std::vector<std::string> wrong;  // the text of each FAIL: what does not agree, or is missing
};

// Each is a folder with the results of a job, or what is left of them, or one file of them: numbers
// by step (metrics.jsonl, validation.jsonl), of an evaluation (evaluation.json, scores.json,
// reconstruct.json) or of a table (.csv), and clips and pictures of generate, animate and segment,
// in it or in folders below. A training's deck is compared too. What the reference has, the run
// must have. Exit::data where they have nothing in common.
//
// How many digits must agree: another instruction set, number of ranks or MPI sums in another
// order. In f32 that changes the seventh digit or later of the first step's loss and gradient norm;
// a product that is wrong by 1 % changes the third or fourth. Steps, and most of all batch norm,
// enlarge the difference, up to tenfold a step. So losses must agree to 5 digits in the first step,
// to one less in each after it, but to 2 in any; gradient norms to one digit less than losses;
// other numbers of a step, which may be counts, to half as many. bf16 and tf32 have 2 to 3 digits:
// a half of all this.
Comparison compare_results(const std::filesystem::path& run,
                           const std::filesystem::path& reference);

// Prints that, and a last line for scripts. Returns 0, or Exit::hardware where they do not agree.
int report_against(const std::string& run, const std::string& reference);

}  // namespace weft
