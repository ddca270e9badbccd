// Tasks on threads of their own, a few at a time: files are written while the next pictures are
// made.
#pragma once

#include <deque>
#include <functional>
#include <future>

namespace weft {

class Background {
 public:
  explicit Background(std::size_t most = 2) : most_(most) {}

  // Waits while `most` tasks run. Rethrows what a task of before threw.
  void start(std::function<void()> task) {
    while (running_.size() >= most_) take();
    running_.push_back(std::async(std::launch::async, std::move(task)));
  }
  void wait() {
    while (!running_.empty()) take();
  }

 private:
  void take() {
    std::future<void> first = std::move(running_.front());
    running_.pop_front();
    first.get();
  }

  std::size_t most_;
  std::deque<std::future<void>> running_;  // their destructors wait
};

}  // namespace weft
