// Lets the stand-in see the arena's blocks, so that a kernel that writes past one, or reads what
// nobody wrote, is caught though all of them lie in one allocation.
#include "emulation.h"
#include "ops/conv.h"
#include "tensor/tensor.h"

namespace {

[[maybe_unused]] const bool watching = [] {
  weft::ops::conv_scratch = {8 << 10, 64 << 10};  // so that small cases have bands
  weft::arena_watch = {emulation::arena_block, emulation::arena_block_bytes};
  return true;
}();

}  // namespace
