#include "train/stop.h"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <initializer_list>
#include <thread>

namespace weft {
namespace {

std::atomic<int> received = 0;
std::atomic<bool> asked_to_end = false;

void on_signal(int signal) {
  if (signal != SIGUSR1 && asked_to_end.exchange(true)) _exit(64 + signal);
  int none = 0;
  received.compare_exchange_strong(none, signal);
}

}  // namespace

void watch_stop_signals() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  sigset_t watched;
  sigemptyset(&watched);
  for (const int signal : {SIGTERM, SIGINT, SIGUSR1}) {
    sigaction(signal, &action, nullptr);
    sigaddset(&watched, signal);
  }
  // A thread of their own takes the signals; this one and all that it starts never see them. oneDNN 2.6's sgemm keeps
  // data below the stack's red zone, which a handler on a computing thread would overwrite.
  std::thread([] {
    for (;;) pause();
  }).detach();
  pthread_sigmask(SIG_BLOCK, &watched, nullptr);
}

int stop_signal() { return received; }

}  // namespace weft
