// Device and pinned memory from the inside. Called with the device held.
#pragma once

#include <cstddef>

namespace emulation {

enum class Where { elsewhere, device, pinned };
// Where [p, p + bytes) lies; `elsewhere` is plain host memory. Dies if it runs past the end of what
// it begins in.
Where where_is(const void* p, std::size_t bytes);

void check_all_marks();
std::size_t device_bytes_in_use();
// Device memory that a library or the driver takes for itself, where WEFT_EMULATION_OVERHEAD=1 asks
// for it; false where there is not so much.
bool charge(std::size_t bytes);
void give_back(std::size_t bytes);
constexpr std::size_t context_bytes = 500u << 20, cudnn_bytes = 100u << 20;
// Of a communicator of NCCL, and what it takes with its first operation.
constexpr std::size_t nccl_bytes = 200u << 20, nccl_buffer_bytes = 100u << 20;
constexpr std::size_t graph_bytes = 64u << 10, graph_node_bytes = 16u << 10;
std::size_t device_bytes_in_total();

// Device memory can be touched while one of these lives; under WEFT_EMULATION_STRICT=1 at no other
// time.
class OpenMemory {
 public:
  OpenMemory();
  ~OpenMemory();
  OpenMemory(const OpenMemory&) = delete;
  OpenMemory& operator=(const OpenMemory&) = delete;
};

}  // namespace emulation
