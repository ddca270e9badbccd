#include "parallel/wait.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace weft {

void wait_asleep(MPI_Request request, double longest_pause) {
  for (double pause = 20e-6;; pause = std::min(2 * pause, longest_pause)) {
    int done = 0;
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (done != 0) return;
    std::this_thread::sleep_for(std::chrono::duration<double>(pause));
  }
}

}  // namespace weft
