#include "train/stop.h"

#include <unistd.h>

#include <csignal>
#include <initializer_list>

namespace weft {
namespace {

volatile std::sig_atomic_t received = 0;
volatile std::sig_atomic_t asked_to_end = 0;

void on_signal(int signal) {
  if (signal != SIGUSR1) {
    if (asked_to_end) _exit(64 + signal);
    asked_to_end = 1;
  }
  if (received == 0) received = signal;
}

}  // namespace

void watch_stop_signals() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  for (const int signal : {SIGTERM, SIGINT, SIGUSR1}) sigaction(signal, &action, nullptr);
}

int stop_signal() { return received; }

}  // namespace weft
