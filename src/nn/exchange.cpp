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

Cut other(Cut cut) { return cut == Cut::frames ? Cut::tokens : Cut::frames; }

// Each rank's piece, in order of ranks, of a grid [B,T,S,C] that is whole here in the axis that
// `cut` cuts.
struct Piece {
  Shape shape;
  ops::TokenBlock block;  // from the grid to the piece
};
std::vector<Piece> pieces_of(const Shape& grid, Cut cut, int ranks) {
  std::vector<Piece> pieces;
  for (int r = 0; r < ranks; ++r) {
    Piece p;
    const Part share = share_of(grid[cut == Cut::frames ? 1 : 2], r, ranks);
    p.block = {grid[1], grid[2]};
    if (cut == Cut::frames) {
      p.block.frames = share.size();
      p.block.from_frame = share.begin;
    } else {
      p.block.tokens = share.size();
      p.block.from_token = share.begin;
    }
    p.shape = {grid[0], p.block.frames, p.block.tokens, grid[3]};
    pieces.push_back(p);
  }
  return pieces;
}

std::vector<std::int64_t> counts_of(const std::vector<Piece>& pieces) {
  std::vector<std::int64_t> counts;
  for (const Piece& p : pieces) counts.push_back(p.shape.numel());
  return counts;
}

ops::TokenBlock reversed(ops::TokenBlock b) {
  std::swap(b.from_frame, b.to_frame);
  std::swap(b.from_token, b.to_token);
  return b;
}

// With one sample, pieces along time are contiguous in the grid: they are sent without a copy.
bool travels_as_it_is(const Shape& grid, Cut cut) { return grid[0] == 1 && cut == Cut::frames; }

// All ranks' pieces of a grid that is cut by tokens, in slots of equal size: each is its rank's
// part of the whole (core/parts.h).
struct Slots {
  Shape grid;
  std::vector<Piece> pieces;
  std::int64_t size = 0;

  Slots(const Shape& whole, int ranks) : grid(whole), pieces(pieces_of(whole, Cut::tokens, ranks)) {
    for (const Piece& p : pieces) size = std::max(size, p.shape.numel());
    size = (size + part_unit - 1) / part_unit * part_unit;
  }
  Tensor room(DType dtype) const { return Tensor::empty({std::ssize(pieces) * size}, dtype); }
  Tensor of(const Tensor& room, int rank) const {
    const Piece& p = pieces[rank];
    return room.slice(rank * size, rank * size + p.shape.numel()).view(p.shape);
  }
};

bool planning() { return Arena::current().is_planning(); }

// Exchanges are never part of a recorded graph: they go through table.aside().
Tensor exchanged(const ParameterTable& table, Tensor x, SequenceGroup& group, Cut to,
                 std::int64_t whole) {
  const Shape from = x.shape();
  const DType dtype = x.dtype();
  const Part mine = share_of(from[to == Cut::frames ? 1 : 2], group.rank, group.size);
  const Shape shape = to == Cut::frames ? Shape{from[0], mine.size(), whole, from[3]}
                                        : Shape{from[0], whole, mine.size(), from[3]};
  const auto out_pieces = pieces_of(from, to, group.size);
  const auto in_pieces = pieces_of(shape, other(to), group.size);

  // 1. Packs the pieces in order of ranks.
  Tensor send = x.view({x.numel()});
  if (!travels_as_it_is(from, to)) {
    send = Tensor::empty({x.numel()}, dtype);
    std::int64_t at = 0;
    for (const Piece& p : out_pieces) {
      Tensor piece = send.slice(at, at + p.shape.numel()).view(p.shape);
      ops::copy_tokens(x, p.block, piece);
      at += p.shape.numel();
    }
  }
  x.release();  // before the next allocation, which can reuse its memory
  // 2. Sends and receives; a dry run only allocates.
  Tensor received = Tensor::empty({shape.numel()}, dtype);
  const auto give = counts_of(out_pieces), get = counts_of(in_pieces);
  if (planning()) {
    // All but this rank's own piece.
    const auto own = give.begin() + group.rank;
    const std::int64_t begin = std::accumulate(give.begin(), own, std::int64_t{0});
    detail::note_exchange("all_to_all",
                          {send.slice(0, begin), send.slice(begin + *own, send.numel())});
  } else {
    table.aside([&group, give, get, send = lent(send), received = lent(received)] {
      group.blocked_seconds +=
          group.ranks->wait(group.ranks->all_to_all(send, give, received, get));
    });
  }
  send.release();
  // 3. Puts the received pieces into the grid.
  if (travels_as_it_is(shape, other(to))) return received.view(shape);
  Tensor out = Tensor::empty(shape, dtype);
  std::int64_t at = 0;
  for (const Piece& p : in_pieces) {
    ops::copy_tokens(received.slice(at, at + p.shape.numel()).view(p.shape), reversed(p.block),
                     out);
    at += p.shape.numel();
  }
  return out;
}

// This rank's piece of the sum of all ranks' grids, f32. A dry run only allocates.
Tensor summed(const ParameterTable& table, Tensor grid, const Slots& slots, SequenceGroup& group) {
  grid = ops::converted(grid, DType::f32);
  Tensor parts = slots.room(DType::f32);
  ops::fill_zero(parts);  // the ends of slots, too
  for (int r = 0; r < group.size; ++r) {
    Tensor piece = slots.of(parts, r);
    ops::copy_tokens(grid, slots.pieces[r].block, piece);
  }
  grid.release();
  if (planning())
    detail::note_exchange("reduce_scatter", {parts.slice(slots.size, parts.numel())});
  else
    table.aside([&group, parts = lent(parts)] {
      group.blocked_seconds += group.ranks->wait(group.ranks->reduce_scatter_sum(parts));
    });
  return slots.of(parts, group.rank);
}

}  // namespace

Var exchange(Context c, const Var& x, SequenceGroup& group, Cut to, std::int64_t whole) {
  WEFT_ASSERT(x->value.shape().rank() == 4 && group.ranks != nullptr);
  const std::int64_t back = x->value.dim(to == Cut::frames ? 1 : 2);
  const ParameterTable& table = c.parameters;
  const Var out = make_var(exchanged(table, std::exchange(x->value, Tensor()), group, to, whole));
  if (c.tape.recording())
    c.tape.record([x, out, &group, &table, to, back] {
      give_grad(x, exchanged(table, std::exchange(out->grad, Tensor()), group, other(to), back));
    });
  return out;
}

Var gather_tokens(Context c, const Var& x, SequenceGroup& group, std::int64_t S,
                  Gathered gradient) {
  const Shape own = x->value.shape();
  WEFT_ASSERT(own.rank() == 4 && group.ranks != nullptr);
  const Slots slots({own[0], own[1], S, own[3]}, group.size);
  Tensor all = slots.room(x->value.dtype());
  Tensor mine = slots.of(all, group.rank);
  ops::copy_tokens(x->value, {own[1], own[2]}, mine);
  if (planning())
    detail::note_exchange("all_gather", {all.slice(slots.size, all.numel())});
  else
    c.parameters.aside([&group, all = lent(all)] {
      group.blocked_seconds += group.ranks->wait(group.ranks->all_gather(all));
    });
  Tensor grid = Tensor::empty(slots.grid, x->value.dtype());
  for (int r = 0; r < group.size; ++r)
    ops::copy_tokens(slots.of(all, r), reversed(slots.pieces[r].block), grid);
  const Var out = make_var(grid);
  if (c.tape.recording())
    c.tape.record([x, out, own, slots, gradient, &group, &table = c.parameters] {
      Tensor dx = Tensor::empty(own, out->grad.dtype());
      if (gradient == Gathered::whole) {
        ops::copy_tokens(out->grad, slots.pieces[group.rank].block, dx);
        out->grad.release();
      } else {
        ops::convert(summed(table, std::exchange(out->grad, Tensor()), slots, group), dx);
      }
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
