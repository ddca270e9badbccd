// Flash attention in bf16 for Hopper (sm_90a): wgmma, bulk tensor copies, warps that only copy.
#pragma once

#include "attention/flash_common.cuh"

namespace weft::kernels {

// Whether these kernels take a problem: a device of compute capability 9.0, no packed captions, D a multiple of 8 from 64
// on, rows along S. The environment variable WEFT_ATTENTION=sm80 refuses all, =sm90 demands what can be taken at all.
bool flash_sm90_takes(const FlashShape& shape);

void flash_sm90_forward(const FlashForward<__nv_bfloat16>& p);
void flash_sm90_backward(const FlashBackward<__nv_bfloat16>& p);

}  // namespace weft::kernels
