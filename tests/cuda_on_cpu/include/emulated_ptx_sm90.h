// The functions of kernels/ptx_sm90.cuh by the meaning that the PTX ISA documents; that header
// describes each.
#pragma once

#include <cstdint>

#include "cuda.h"
#include "cuda_runtime.h"

namespace emulation {

void mbarrier_init(std::uint64_t* barrier, int count);
void mbarrier_arrive(std::uint64_t* barrier, int bytes);
void mbarrier_wait(const std::uint64_t* barrier, int parity);
void copy_box(void* to, const CUtensorMap& map, std::uint64_t* barrier, const int (&at)[4]);
void copy_bulk(void* to, const void* from, int bytes, std::uint64_t* barrier);
void named_barrier(int id, int threads, bool wait);
void stmatrix(void* row, const std::uint32_t* r);  // four matrices
void add_four(float* to, const float (&x)[4]);

// One lane's part in a product of a warpgroup: its accumulators, its registers of A or A's
// descriptor, B's descriptor.
struct Product {
  int n;
  float* d;
  const std::uint32_t* a;  // null: from shared memory
  std::uint64_t a_matrix, b_matrix;
  bool a_by_rows, b_by_rows, accumulate;
};
void wgmma_issue(const Product& product);
void wgmma_commit();
void wgmma_wait(int pending);

}  // namespace emulation

namespace weft::kernels::sm90 {

inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(static_cast<const char*>(p) -
                                    static_cast<const char*>(emulation::shared_base()));
}
inline int thread_here() { return static_cast<int>(threadIdx.x); }

inline void mbarrier_init(std::uint64_t* barrier, int count) {
  emulation::mbarrier_init(barrier, count);
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive_expect(std::uint64_t* barrier, int bytes) {
  emulation::mbarrier_arrive(barrier, bytes);
}
inline void mbarrier_arrive(std::uint64_t* barrier) { emulation::mbarrier_arrive(barrier, 0); }
inline void mbarrier_wait(std::uint64_t* barrier, int parity) {
  emulation::mbarrier_wait(barrier, parity);
}
inline void copy_box(void* to, const CUtensorMap* map, std::uint64_t* barrier, int column, int head,
                     int row, int sequence) {
  emulation::copy_box(to, *map, barrier, {column, head, row, sequence});
}
inline void copy_bulk(void* to, const void* from, int bytes, std::uint64_t* barrier) {
  emulation::copy_bulk(to, from, bytes, barrier);
}

inline void async_proxy_fence() {}
inline void stmatrix_x4(void* row, const std::uint32_t (&r)[4]) { emulation::stmatrix(row, r); }
inline void add_four(float* to, float a, float b, float c, float d) {
  emulation::add_four(to, {a, b, c, d});
}

template <int registers>
void give_registers() {}
template <int registers>
void take_registers() {}
inline void named_wait(int id, int threads) { emulation::named_barrier(id, threads, true); }
inline void named_arrive(int id, int threads) { emulation::named_barrier(id, threads, false); }

inline void wgmma_fence() {}
inline void wgmma_commit() { emulation::wgmma_commit(); }
template <int pending>
void wgmma_wait() {
  emulation::wgmma_wait(pending);
}
template <class T, int n>
void keep_in_place(T (&)[n]) {}

template <int n>
struct Wgmma {
  template <bool a_by_rows = false, bool b_by_rows = false>
  static void from_shared(float (&d)[n / 2], std::uint64_t a, std::uint64_t b, bool accumulate) {
    emulation::wgmma_issue({n, d, nullptr, a, b, a_by_rows, b_by_rows, accumulate});
  }
  template <bool by_rows>
  static void from_registers(float (&d)[n / 2], const std::uint32_t (&a)[4], std::uint64_t b,
                             bool accumulate) {
    emulation::wgmma_issue({n, d, a, 0, b, false, by_rows, accumulate});
  }
};

}  // namespace weft::kernels::sm90
