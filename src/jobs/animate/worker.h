// One thread that does tasks in their order, beside the thread that hands them over.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

namespace weft {

class Worker {
 public:
  Worker() : thread_([this] { run(); }) {}
  // Does what was handed over first.
  ~Worker() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // The future has the task's result, or what it threw.
  template <class Task>
  auto start(Task task) -> std::future<decltype(task())> {
    auto job = std::make_shared<std::packaged_task<decltype(task())()>>(std::move(task));
    auto result = job->get_future();
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back([job] { (*job)(); });
    }
    changed_.notify_one();
    return result;
  }

 private:
  void run() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return ended_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool ended_ = false;
  std::thread thread_;
};

}  // namespace weft
