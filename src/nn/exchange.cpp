#include "nn/exchange.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/log.h"
#include "nn/nn.h"
#include "ops/layout.h"
#include "ops/pointwise.h"

namespace weft::nn {
namespace {

using detail::lent;

// What rank `from` has and `to` wants.
struct Piece {
  Block block;
  std::int64_t numel = 0;
};
Piece common(const Shape& grid, const Block& from, const Block& to) {
  const auto both = [](Part a, Part b) {
    const std::int64_t begin = std::max(a.begin, b.begin);
    return Part{begin, std::max(begin, std::min(a.end, b.end))};
  };
  const Block block{both(from.frames, to.frames), both(from.tokens, to.tokens)};
  return {block, grid[0] * block.frames.size() * block.tokens.size() * grid[3]};
}

std::vector<std::int64_t> counts_of(const std::vector<Piece>& pieces) {
  std::vector<std::int64_t> counts;
  for (const Piece& p : pieces) counts.push_back(p.numel);
  return counts;
}

// From a tensor of that block to the piece; `to`: the other way round.
ops::TokenBlock cut_out(const Piece& p, const Block& whole, bool to = false) {
  ops::TokenBlock b{p.block.frames.size(), p.block.tokens.size()};
  (to ? b.to_frame : b.from_frame) = p.block.frames.begin - whole.frames.begin;
  (to ? b.to_token : b.from_token) = p.block.tokens.begin - whole.tokens.begin;
  return b;
}

// With one sample, pieces along time are contiguous in the grid: they are sent without a copy.
bool travel_as_they_are(const Shape& grid, const std::vector<Piece>& pieces) {
  std::int64_t sum = 0;
  for (const Piece& p : pieces) {
    if (p.numel > 0 && p.block.tokens.size() != grid[2]) return false;
    sum += p.numel;
  }
  return grid[0] == 1 && sum == grid.numel();
}

bool planning() { return Arena::current().is_planning(); }

// Exchanges are never part of a recorded graph: they go through table.aside().
Tensor exchanged(const ParameterTable& table, Tensor x, SequenceGroup& group, const Blocks& from,
                 const Blocks& to) {
  const Shape grid = x.shape();
  const DType dtype = x.dtype();
  const Block &own = from[group.rank], &wanted = to[group.rank];
  const Shape shape{grid[0], wanted.frames.size(), wanted.tokens.size(), grid[3]};
  std::vector<Piece> out_pieces, in_pieces;
  for (int r = 0; r < group.size; ++r) {
    out_pieces.push_back(common(grid, own, to[r]));
    in_pieces.push_back(common(grid, from[r], wanted));
  }
  const auto give = counts_of(out_pieces), get = counts_of(in_pieces);
  const auto view_of = [&](const Tensor& all, std::int64_t at, const Piece& p) {
    return all.slice(at, at + p.numel)
        .view({grid[0], p.block.frames.size(), p.block.tokens.size(), grid[3]});
  };

  // 1. Packs the pieces in order of ranks.
  Tensor send = x.view({x.numel()});
  if (!travel_as_they_are(grid, out_pieces)) {
    send = Tensor::empty({std::reduce(give.begin(), give.end())}, dtype);
    std::int64_t at = 0;
    for (const Piece& p : out_pieces) {
      if (p.numel == 0) continue;
      Tensor piece = view_of(send, at, p);
      ops::copy_tokens(x, cut_out(p, own), piece);
      at += p.numel;
    }
  }
  x.release();  // before the next allocation, which can reuse its memory
  // 2. Sends and receives; a dry run only allocates.
  Tensor received = Tensor::empty({std::reduce(get.begin(), get.end())}, dtype);
  if (planning()) {
    // All but this rank's own piece.
    const auto mine = give.begin() + group.rank;
    const std::int64_t begin = std::reduce(give.begin(), mine);
    detail::note_exchange("all_to_all",
                          {send.slice(0, begin), send.slice(begin + *mine, send.numel())});
  } else {
    table.aside([&group, give, get, send = lent(send), received = lent(received)] {
      group.blocked_seconds +=
          group.ranks->wait(group.ranks->all_to_all(send, give, received, get));
    });
  }
  send.release();
  // 3. Puts the received pieces into the grid. Where several ranks have each place of it, their
  // copies of the grid come one after the other, and are summed.
  if (travel_as_they_are(shape, in_pieces)) return received.view(shape);
  WEFT_ASSERT(shape.numel() == 0 || received.numel() % shape.numel() == 0);
  Tensor out = Tensor::empty(shape, dtype), more;
  if (received.numel() > shape.numel()) more = Tensor::empty(shape, dtype);
  std::int64_t at = 0;
  for (const Piece& p : in_pieces) {
    if (p.numel == 0) continue;
    Tensor& copy = at < shape.numel() ? out : more;
    ops::copy_tokens(view_of(received, at, p), cut_out(p, wanted, true), copy);
    at += p.numel;
    if (at > shape.numel() && at % shape.numel() == 0) ops::add_inplace(more, out);
  }
  return out;
}

}  // namespace

Blocks blocks_of(Cut cut, std::int64_t frames, std::int64_t tokens, int ranks) {
  Blocks blocks;
  for (int r = 0; r < ranks; ++r)
    blocks.push_back(cut == Cut::frames ? Block{share_of(frames, r, ranks), {0, tokens}}
                                        : Block{{0, frames}, share_of(tokens, r, ranks)});
  return blocks;
}

Var exchange(Context c, const Var& x, SequenceGroup& group, const Blocks& from, const Blocks& to) {
  WEFT_ASSERT(x->value.shape().rank() == 4 && group.ranks != nullptr);
  const ParameterTable& table = c.parameters;
  const Var out = make_var(exchanged(table, std::exchange(x->value, Tensor()), group, from, to));
  if (c.tape.recording())
    c.tape.record([x, out, &group, &table, from, to] {
      give_grad(x, exchanged(table, std::exchange(out->grad, Tensor()), group, to, from));
    });
  return out;
}

Var exchange(Context c, const Var& x, SequenceGroup& group, Cut to, std::int64_t whole) {
  const bool to_frames = to == Cut::frames;
  const std::int64_t T = to_frames ? x->value.dim(1) : whole;
  const std::int64_t S = to_frames ? whole : x->value.dim(2);
  return exchange(c, x, group, blocks_of(to_frames ? Cut::tokens : Cut::frames, T, S, group.size),
                  blocks_of(to, T, S, group.size));
}

Var gather_tokens(Context c, const Var& x, SequenceGroup& group, std::int64_t S) {
  const Shape own = x->value.shape();
  WEFT_ASSERT(own.rank() == 4 && group.ranks != nullptr);
  const Shape shape{own[0], own[1], S, own[3]};
  const Block whole{{0, own[1]}, {0, S}};
  std::vector<Piece> pieces;
  // Slots of equal size, so that each is its rank's part of the whole (core/parts.h).
  std::int64_t slot = 0;
  for (const Block& b : blocks_of(Cut::tokens, own[1], S, group.size)) {
    pieces.push_back(common(shape, whole, b));
    slot = std::max(slot, pieces.back().numel);
  }
  slot = (slot + part_unit - 1) / part_unit * part_unit;
  Tensor slots = Tensor::empty({group.size * slot}, x->value.dtype());
  const auto slot_of = [&](int r) {
    const Piece& p = pieces[r];
    return slots.slice(r * slot, r * slot + p.numel)
        .view({own[0], own[1], p.block.tokens.size(), own[3]});
  };
  Tensor mine = slot_of(group.rank);
  ops::copy_tokens(x->value, {own[1], own[2]}, mine);
  if (planning())
    detail::note_exchange("all_gather", {slots.slice(slot, group.size * slot)});
  else
    c.parameters.aside([&group, slots = lent(slots)] {
      group.blocked_seconds += group.ranks->wait(group.ranks->all_gather(slots));
    });
  Tensor all = Tensor::empty(shape, x->value.dtype());
  for (int r = 0; r < group.size; ++r)
    ops::copy_tokens(slot_of(r), cut_out(pieces[r], whole, true), all);
  const Var out = make_var(all);
  if (c.tape.recording())
    c.tape.record([x, out, own, block = cut_out(pieces[group.rank], whole)] {
      Tensor dx = Tensor::empty(own, out->grad.dtype());
      ops::copy_tokens(out->grad, block, dx);
      out->grad.release();
      give_grad(x, dx);
    });
  return out;
}

void skip(Context c, const std::vector<Parameter*>& parameters) {
  for (Parameter* p : parameters) detail::use(c, {p});
  if (c.tape.recording())
    c.tape.record([parameters, &table = c.parameters] {
      for (Parameter* p : parameters) detail::note_done(table, {p});
    });
}

std::unique_ptr<Communicator> make_sequence_group(MPI_Comm world, std::int64_t ranks,
                                                  double timeout_seconds, Communicator* whole) {
  if (ranks == 1) return nullptr;
  int rank = 0, size = 1;
  MPI_Comm_rank(world, &rank);
  MPI_Comm_size(world, &size);
  WEFT_CHECK(size % ranks == 0, Exit::usage,
             "start a multiple of parallel.sp ranks, or lower parallel.sp",
             "{} cannot form groups of parallel.sp = {}", counted(size, "rank"), ranks);
  MPI_Comm group = MPI_COMM_NULL;
  MPI_Comm_split(world, static_cast<int>(rank / ranks), rank, &group);
  auto communicator = whole != nullptr
                          ? whole->split(group, timeout_seconds)
                          : make_communicator(group, timeout_seconds);  // of a duplicate
  MPI_Comm_free(&group);
  return communicator;
}

}  // namespace weft::nn
