// Streams run in any legal order and in no other; events and graphs order what they should.
#include <numeric>

#include "test_support.h"

namespace stand_in_test {
namespace {

__global__ void add(const int* x, int* y, int n, int value) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < static_cast<unsigned>(n)) y[i] = x[i] + value;
}

// y = x + 1 on one stream, z = y + 1 on another. Is z right?
bool chain_is_right(unsigned long long seed, bool with_event) {
  emulation::set_seed(seed);
  constexpr int n = 100;
  const Stream first, second;
  const Array<int> x(std::vector<int>(n, 5)), y(std::vector<int>(n, 0)), z(n);
  cudaEvent_t event;
  EXPECT_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  EXPECT_CUDA(start(first, add, 4, 32, 0, x.get(), y.get(), n, 1));
  EXPECT_CUDA(cudaEventRecord(event, first));
  if (with_event) {
    EXPECT_CUDA(cudaStreamWaitEvent(second, event));
  }
  EXPECT_CUDA(start(second, add, 4, 32, 0, y.get(), z.get(), n, 1));
  EXPECT_CUDA(cudaEventDestroy(event));
  return z.read() == std::vector<int>(n, 7);
}

TEST(Streams, MissingEventIsCaughtAndAnEventOrders) {
  int caught = 0;
  for (unsigned long long seed = 1; seed <= 20; ++seed) {
    EXPECT_TRUE(chain_is_right(seed, true)) << "seed " << seed;
    caught += !chain_is_right(seed, false);
  }
  EXPECT_GE(caught, 3);
  EXPECT_LE(caught, 17);  // both orders are legal, both happen
}

TEST(Streams, NothingRunsBeforeTheHostWaits) {
  const Stream stream;
  const Array<int> x(std::vector<int>(10, 1));
  int* host = nullptr;
  EXPECT_CUDA(cudaHostAlloc(&host, 10 * sizeof(int), cudaHostAllocDefault));
  host[0] = -1;
  EXPECT_CUDA(cudaMemcpyAsync(host, x.get(), 10 * sizeof(int), cudaMemcpyDeviceToHost, stream));
  EXPECT_EQ(host[0], -1);
  EXPECT_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(host[0], 1);
  EXPECT_CUDA(cudaFreeHost(host));
}

TEST(Streams, PinnedMemoryIsReadWhenTheCopyRuns) {
  const Stream stream;
  const Array<int> pinned_to(1), pageable_to(1);
  int* pinned = nullptr;
  EXPECT_CUDA(cudaHostAlloc(&pinned, sizeof(int), cudaHostAllocDefault));
  int pageable = 1;
  *pinned = 1;
  EXPECT_CUDA(
      cudaMemcpyAsync(pinned_to.get(), pinned, sizeof(int), cudaMemcpyHostToDevice, stream));
  EXPECT_CUDA(
      cudaMemcpyAsync(pageable_to.get(), &pageable, sizeof(int), cudaMemcpyHostToDevice, stream));
  *pinned = pageable = 2;  // reused too early
  EXPECT_EQ(pinned_to.read()[0], 2);
  EXPECT_EQ(pageable_to.read()[0], 1);
  EXPECT_CUDA(cudaFreeHost(pinned));
}

TEST(Streams, EventsMeanTheirLastRecord) {
  for (unsigned long long seed = 1; seed <= 10; ++seed) {
    emulation::set_seed(seed);
    const Stream first, second;
    const Array<int> x(std::vector<int>{1}), y(std::vector<int>{0}), z(1);
    cudaEvent_t event;
    EXPECT_CUDA(cudaEventCreate(&event));
    EXPECT_CUDA(cudaEventQuery(event));  // never recorded: nothing to wait for
    EXPECT_CUDA(cudaEventRecord(event, first));
    EXPECT_CUDA(start(first, add, 1, 1, 0, x.get(), y.get(), 1, 1));
    EXPECT_CUDA(cudaEventRecord(event, first));
    EXPECT_CUDA(cudaStreamWaitEvent(second, event));
    EXPECT_CUDA(cudaEventRecord(event, second));  // does not move the wait
    EXPECT_CUDA(start(second, add, 1, 1, 0, y.get(), z.get(), 1, 1));
    EXPECT_EQ(z.read()[0], 3);
    cudaError_t state = cudaErrorNotReady;
    while ((state = cudaEventQuery(event)) == cudaErrorNotReady) {
    }
    EXPECT_EQ(state, cudaSuccess);
    EXPECT_CUDA(cudaEventDestroy(event));
  }
}

TEST(Streams, ElapsedTimeNeedsBothRecords) {
  const Stream stream;
  cudaEvent_t from, to;
  EXPECT_CUDA(cudaEventCreate(&from));
  EXPECT_CUDA(cudaEventCreate(&to));
  EXPECT_CUDA(cudaEventRecord(from, stream));
  EXPECT_CUDA(cudaEventRecord(to, stream));
  float ms = -1;
  EXPECT_EQ(cudaEventElapsedTime(&ms, from, to), cudaErrorNotReady);
  EXPECT_CUDA(cudaEventSynchronize(to));
  EXPECT_CUDA(cudaEventElapsedTime(&ms, from, to));
  EXPECT_GE(ms, 0.0f);
  EXPECT_CUDA(cudaEventDestroy(from));
  EXPECT_CUDA(cudaEventDestroy(to));
}

// a += 1 on one stream and b += 10 on another, then c = a + b on the first, as a graph.
struct Forked {
  Stream main, side;
  Array<int> a{std::vector<int>{0}}, b{std::vector<int>{0}}, c{std::vector<int>{0}};
  cudaEvent_t fork, join;
  Forked() {
    EXPECT_CUDA(cudaEventCreate(&fork));
    EXPECT_CUDA(cudaEventCreate(&join));
  }
  ~Forked() {
    EXPECT_CUDA(cudaEventDestroy(fork));
    EXPECT_CUDA(cudaEventDestroy(join));
  }
  static void sum(const int* a, const int* b, int* c) { *c = *a + *b; }
  cudaError_t capture(bool joined, cudaGraph_t* graph) {
    EXPECT_CUDA(cudaStreamBeginCapture(main, cudaStreamCaptureModeThreadLocal));
    EXPECT_CUDA(cudaEventRecord(fork, main));
    EXPECT_CUDA(cudaStreamWaitEvent(side, fork));
    EXPECT_CUDA(start(main, add, 1, 1, 0, a.get(), a.get(), 1, 1));
    EXPECT_CUDA(start(side, add, 1, 1, 0, b.get(), b.get(), 1, 10));
    EXPECT_CUDA(cudaEventRecord(join, side));
    if (joined) {
      EXPECT_CUDA(cudaStreamWaitEvent(main, join));
    }
    EXPECT_CUDA(start(main, sum, 1, 1, 0, a.get(), b.get(), c.get()));
    return cudaStreamEndCapture(main, graph);
  }
};

TEST(Graphs, ReplayRespectsEdges) {
  for (unsigned long long seed = 1; seed <= 10; ++seed) {
    emulation::set_seed(seed);
    Forked f;
    cudaGraph_t graph = nullptr;
    EXPECT_CUDA(f.capture(true, &graph));
    EXPECT_EQ(f.c.read()[0], 0);  // recorded, not run
    cudaGraphExec_t exec = nullptr;
    EXPECT_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    EXPECT_CUDA(cudaGraphDestroy(graph));
    for (int run = 1; run <= 3; ++run) {
      EXPECT_CUDA(cudaGraphLaunch(exec, f.main));
      EXPECT_EQ(f.c.read()[0], 11 * run);
    }
    EXPECT_CUDA(cudaGraphExecDestroy(exec));
  }
}

TEST(Graphs, ForkedStreamMustBeJoined) {
  Forked f;
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(f.capture(false, &graph), cudaErrorStreamCaptureUnjoined);
  EXPECT_EQ(graph, nullptr);
  // Both streams are usable again.
  EXPECT_CUDA(start(f.side, add, 1, 1, 0, f.a.get(), f.c.get(), 1, 4));
  EXPECT_EQ(f.c.read()[0], 4);
}

TEST(Graphs, WaitingAndAllocatingSpoilACapture) {
  const Stream stream;
  cudaGraph_t graph = nullptr;
  void* p = nullptr;
  EXPECT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
  EXPECT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  EXPECT_EQ(cudaMalloc(&p, 16), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
  EXPECT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  EXPECT_CUDA(cudaMalloc(&p, 16));
  EXPECT_CUDA(cudaStreamEndCapture(stream, &graph));
  EXPECT_CUDA(cudaGraphDestroy(graph));
  EXPECT_CUDA(cudaFree(p));
}

TEST(Graphs, WorkOutsideCannotBeWaitedFor) {
  const Stream stream, other;
  cudaEvent_t event;
  EXPECT_CUDA(cudaEventCreate(&event));
  EXPECT_CUDA(cudaEventRecord(event, other));
  EXPECT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  EXPECT_EQ(cudaStreamWaitEvent(stream, event), cudaErrorStreamCaptureIsolation);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
  EXPECT_CUDA(cudaEventDestroy(event));
}

TEST(Streams, DefaultStreamIsRefused) {
  const Array<int> x(1);
  EXPECT_EQ(start(nullptr, add, 1, 1, 0, x.get(), x.get(), 1, 1), cudaErrorNotSupported);
}

}  // namespace
}  // namespace stand_in_test
