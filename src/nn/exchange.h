// Sequence parallelism: the ranks of a group share the tokens of their clips
// (docs/models/stdit3.md, Sequence parallelism, says how the original does it). Attention within
// frames needs whole frames and attention along time needs whole tokens, so the grid is cut along
// the other axis each time, and changes hands between the two: one all-to-all a switch, as in DSP
// (Zhao et al. 2024). Heads are never cut, parts may be uneven, nothing is padded.
#pragma once

#include <mpi.h>

#include <memory>
#include <vector>

#include "core/parts.h"
#include "nn/nn.h"
#include "parallel/communicator.h"

namespace weft::nn {

// This rank's place among those that share its clips.
struct SequenceGroup {
  Communicator* ranks = nullptr;  // null: a rank alone, or a group used only for planning
  int rank = 0, size = 1;
  double blocked_seconds = 0;  // the host's waiting time in exchanges so far

  SequenceGroup() = default;
  // Null: alone.
  explicit SequenceGroup(Communicator* group) {
    if (group != nullptr) ranks = group, rank = group->rank(), size = group->size();
  }
  bool alone() const { return size == 1; }
};

// How a token grid [B,T,S,C] is cut: a rank has its share of the frames [B,T_r,S,C], or in every
// frame its share of the tokens [B,T,S_r,C].
enum class Cut { frames, tokens };

// The share of `rank` in n frames or tokens: shares tile [0, n) in order of ranks and differ by one
// at most. With fewer frames than ranks some have none.
inline Part share_of(std::int64_t n, int rank, int ranks) {
  return {n * rank / ranks, n * (rank + 1) / ranks};
}

// A rectangle of a token grid, and what each rank of a group has of one.
struct Block {
  Part frames, tokens;
};
using Blocks = std::vector<Block>;
Blocks blocks_of(Cut cut, std::int64_t frames, std::int64_t tokens, int ranks);

// x, which is this rank's block of `from`, to that of `to`; backward the same in reverse. Blocks of
// `to` may overlap: backward then sums what the ranks return. The ranks must then form runs of
// equal length, each of which has the whole grid. Every rank of the group takes part, even with
// nothing to send. Frees x's value: nothing else may need it.
Var exchange(Context c, const Var& x, SequenceGroup& group, const Blocks& from, const Blocks& to);
// From one cut to the other, `to`. `whole` is the number of frames (to tokens) or of tokens a frame
// (to frames) of the clip, all of which this rank will have.
Var exchange(Context c, const Var& x, SequenceGroup& group, Cut to, std::int64_t whole);

// x [B,T,S_r,C] of all ranks -> [B,T,S,C] on every rank. Backward takes this rank's own tokens:
// each rank has the whole gradient of the result, and what the ranks send back adds up to it once.
Var gather_tokens(Context c, const Var& x, SequenceGroup& group, std::int64_t S);

// Stands for an operation that this rank skips because it has none of its tokens: the parameters
// count as used, without a contribution. Buckets of gradients are thus announced between the same
// exchanges on every rank of a group. On GPUs all collectives share a stream, where two of them in
// another order on another rank would deadlock.
void skip(Context c, const std::vector<Parameter*>& parameters);

// Collective. The communicator of this rank's group, which are `ranks` consecutive ranks of the
// world; null for groups of one. Exit::usage unless groups come out even. The timeout is
// make_communicator's. `whole`, if there is one, is a communicator of the world, of which the
// group's is split off.
std::unique_ptr<Communicator> make_sequence_group(MPI_Comm world, std::int64_t ranks,
                                                  double timeout_seconds = default_comm_timeout,
                                                  Communicator* whole = nullptr);

}  // namespace weft::nn
