#include "jobs/animate/work_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <thread>

#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "jobs/engine/output.h"

namespace weft {
namespace fs = std::filesystem;

namespace {

constexpr const char* work = ".work";

}  // namespace

WorkLock::WorkLock(const fs::path& file, const std::function<bool()>& go_on)
    : fd_(open(file.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666)) {
  WEFT_CHECK(fd_ >= 0, Exit::data, "may all ranks write there?", "cannot open {}: {}",
             file.string(), std::strerror(errno));
  // A process that ends gives its lock back at once; looking every few milliseconds costs nothing
  // beside what is waited for.
  for (std::chrono::milliseconds pause(1);; pause = std::min(2 * pause, decltype(pause)(50))) {
    if (flock(fd_, LOCK_EX | LOCK_NB) == 0) {
      held_ = true;
      return;
    }
    if (errno != EWOULDBLOCK && errno != EINTR) {
      held_ = true;  // the file system has no locks
      return;
    }
    if (!go_on()) return;
    std::this_thread::sleep_for(pause);
  }
}

WorkLock::~WorkLock() {
  if (fd_ >= 0) close(fd_);
}

WorkFolder::WorkFolder(const fs::path& output, const std::string& name, const std::string& key)
    : output_(output),
      folder_(std::string(work) + "/" + name),
      mark_(folder_ + "/" + key.substr(0, 16)) {}

std::string WorkFolder::segment(std::int64_t first) const {
  return fmt::format("{}.{:07d}.mp4", mark_, first);
}

bool WorkFolder::has(const std::string& file) const {
  std::error_code none;
  return fs::exists(path(file), none);
}

void WorkFolder::create() const { make_folders(output_, mark_); }

void WorkFolder::drop_others() const {
  std::error_code failed;
  const std::string mine = fs::path(mark_).filename().string();
  for (const auto& entry : fs::directory_iterator(output_ / folder_, failed))
    if (!entry.path().filename().string().starts_with(mine)) fs::remove(entry.path(), failed);
}

void WorkFolder::remove() const {
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(output_ / folder_, none))
    if (entry.path() != end_file()) fs::remove(entry.path(), none);
}

fs::path WorkFolder::end_file() const { return output_ / (mark_ + ".end"); }

std::optional<WorkFolder::End> WorkFolder::end() const {
  std::error_code none;
  if (!fs::exists(end_file(), none)) return std::nullopt;
  const auto j = try_parse_json(read_whole(end_file(), 1 << 20, Exit::data, "remove it"));
  if (!j.is_object()) return std::nullopt;
  return End{j.value("whole", false), j.value("code", 0), j.value("what", ""), j.value("hint", "")};
}

void WorkFolder::note_end(const End& e) const {
  const nlohmann::json j = {
      {"whole", e.whole}, {"code", e.code}, {"what", e.what}, {"hint", e.hint}};
  create();
  replace_file(end_file(), j.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace),
               Exit::data, Durable::no);
}

void WorkFolder::forget_end() const {
  std::error_code none;
  fs::remove(end_file(), none);
}

void remove_work(const fs::path& output) {
  std::error_code none;
  fs::remove_all(output / work, none);
}

}  // namespace weft
