// The only error channel of the program: every failure that a user can meet is an Error, which
// carries what happened, what to do about it, and the exit code of the job.
#pragma once

// fmt 9 considers nvcc a compiler without constexpr, and then does not compile in C++20.
#if defined(__CUDACC__) && !defined(FMT_USE_CONSTEXPR)
#define FMT_USE_CONSTEXPR 1
#endif
#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <string_view>

namespace weft {

// The documented exit codes (docs/errors.md). 64 + n stands for "ended by signal n".
enum class Exit : int {
  done = 0,
  usage = 2,       // command line or deck
  data = 3,        // input that is missing, damaged or of the wrong kind
  checkpoint = 4,  // no usable checkpoint, or none can be written
  non_finite = 5,  // loss or gradient is not finite
  hardware = 6,    // suspected hardware fault
  hang = 7,        // a rank made no progress
  internal = 70,   // a broken invariant inside weft: a bug
  memory = 71,     // the host or a GPU has no memory left
  stopped = 75,    // stopped early on request, state saved: submit again
};

class Error : public std::runtime_error {
 public:
  // `what` says what happened with the offending value; `hint` says what to do (may be empty).
  Error(Exit code, std::string what, std::string hint = "", const char* file = "", int line = 0)
      : std::runtime_error(std::move(what)),
        code_(code),
        hint_(std::move(hint)),
        file_(file),
        line_(line) {}

  Exit code() const { return code_; }
  const std::string& hint() const { return hint_; }
  void add_hint(const std::string& more) { hint_ += (hint_.empty() ? "" : "; ") + more; }
  const char* file() const { return file_; }
  int line() const { return line_; }
  // A table or a list for the lines below the message, which is one line itself.
  const std::string& below() const { return below_; }
  Error& with_below(std::string lines) {
    below_ = std::move(lines);
    return *this;
  }
  // Whether one item of a list job is to blame, its input or what is asked of it: the others can
  // still be made. An error that they would meet too, such as a full disk, is the job's, and says
  // so with for_job() where its code does not.
  bool of_item() const {
    return !for_job_ && (code_ == Exit::data || code_ == Exit::usage || code_ == Exit::non_finite);
  }
  Error& for_job() {
    for_job_ = true;
    return *this;
  }
  // Another rank or thread has reported this error for all ranks: main ends the job silently.
  bool reported() const { return reported_; }
  void set_reported() { reported_ = true; }

 private:
  Exit code_;
  std::string hint_;
  const char* file_;
  int line_;
  std::string below_;
  bool for_job_ = false, reported_ = false;
};

// What the macros below throw. Out of line, and with few templates: in every place that checks
// something they would take the compiler four times as long. (Inlined: no copy of a file that is
// compiled for AVX-512 may serve others.)
[[noreturn]] void throw_error(Exit code, std::string_view hint, const char* file, int line,
                              fmt::string_view format, fmt::format_args values);
[[noreturn]] void throw_broken(const char* invariant, const char* file, int line);

template <class... A>
[[noreturn, gnu::always_inline]] inline void throw_formatted(Exit code, std::string_view hint,
                                                             const char* file, int line,
                                                             fmt::format_string<A...> format,
                                                             const A&... values) {
  throw_error(code, hint, file, line, format, fmt::make_format_args(values...));
}

}  // namespace weft

// Throws Error unless `cond` holds. `hint` is a plain string, the rest is a fmt format and values.
//   WEFT_CHECK(n > 0, Exit::usage, "set train.steps to 1 or more", "train.steps = {}", n);
#define WEFT_CHECK(cond, exit_code, hint, ...) \
  do { \
    if (!(cond)) ::weft::throw_formatted((exit_code), (hint), __FILE__, __LINE__, __VA_ARGS__); \
  } while (false)

// For invariants between weft's own parts: a failure is a bug, never a user's mistake.
#define WEFT_ASSERT(cond) \
  do { \
    if (!(cond)) ::weft::throw_broken(#cond, __FILE__, __LINE__); \
  } while (false)
