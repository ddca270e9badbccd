#include "parallel/wait.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace weft {

void wait_asleep(const std::function<bool()>& done, double longest_pause) {
  for (double pause = 20e-6; !done(); pause = std::min(2 * pause, longest_pause))
    std::this_thread::sleep_for(std::chrono::duration<double>(pause));
}

void wait_asleep(MPI_Request request, double longest_pause) {
  const auto done = [&] {
    int complete = 0;
    MPI_Test(&request, &complete, MPI_STATUS_IGNORE);
    return complete != 0;
  };
  wait_asleep(done, longest_pause);
}

}  // namespace weft
