#include "jobs/encode/parts.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/log.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

std::uint64_t hash_of(std::span<const std::byte> bytes) {
  ClipHash hash;
  hash.update(bytes.data(), bytes.size());
  return hash.digest();
}

int create(const fs::path& path) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  WEFT_CHECK(fd >= 0, Exit::data, "check the folder's permissions and the disk",
             "cannot make {}: {}", path.string(), std::strerror(errno));
  return fd;
}

void write_all(int fd, std::span<const std::byte> bytes, const fs::path& path) {
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t wrote = write(fd, bytes.data() + done, bytes.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    WEFT_CHECK(wrote > 0, Exit::data, "is the disk full? what is made so far is kept",
               "cannot write {}: {}", path.string(), std::strerror(errno));
    done += static_cast<std::size_t>(wrote);
  }
}

// A file system that is reached over a network tells late what it could not write.
void flush_and_close(int& fd, const fs::path& path) {
  if (fd < 0) return;
  const bool synced = fsync(fd) == 0, closed = close(fd) == 0;
  fd = -1;
  WEFT_CHECK(synced && closed, Exit::data, "is the disk full? what is made so far is kept",
             "cannot write {}: {}", path.string(), std::strerror(errno));
}

fs::path data_of(fs::path journal) { return journal.replace_extension(".data"); }

}  // namespace

EncodeParts::EncodeParts(const fs::path& folder, const std::string& job, std::int64_t samples,
                         MPI_Comm world)
    : folder_(folder), samples_(samples), made_(static_cast<std::size_t>(samples), 0) {
  MPI_Comm_rank(world, &rank_);
  MPI_Comm_size(world, &ranks_);
  if (rank_ == 0) check_job(job);
  MPI_Barrier(world);  // the folder is there, and of this job

  // Each rank looks whether its share of what is there is whole.
  places_ = read_journals();
  std::vector<std::byte> buffer;
  std::int64_t number = 0;
  for (const auto& [sample, place] : places_)
    if (number++ % ranks_ == rank_ && whole(place, buffer))
      made_[static_cast<std::size_t>(sample)] = 1;
  int start = 0;  // behind those whose files are there
  for (const fs::path& journal : journals_)
    start = std::max(start, std::atoi(journal.filename().c_str()) + 1);
  // All ranks have looked before one of them adds to what they look at.
  MPI_Allreduce(MPI_IN_PLACE, made_.data(), static_cast<int>(made_.size()), MPI_UINT8_T, MPI_MAX,
                world);
  MPI_Bcast(&start, 1, MPI_INT, 0, world);
  stem_ = fmt::format("{}-{}", start, rank_);
}

EncodeParts::~EncodeParts() {
  if (data_ >= 0) close(data_);
  if (journal_ >= 0) close(journal_);
}

void EncodeParts::check_job(const std::string& job) const {
  const fs::path path = folder_ / "job";
  std::error_code failed;
  fs::create_directories(folder_, failed);
  WEFT_CHECK(!failed, Exit::data, "check the folder's permissions", "cannot make {}: {}",
             folder_.string(), failed.message());
  if (!fs::exists(path)) {
    const fs::path temporary = folder_ / "job.tmp";
    std::ofstream out(temporary, std::ios::trunc);
    out << job;
    out.close();
    WEFT_CHECK(bool(out), Exit::data, "check the disk", "cannot write {}", temporary.string());
    rename_file(temporary, path, Exit::data);
    return;
  }
  std::stringstream there, here(job);
  there << std::ifstream(path).rdbuf();
  for (std::string a, b;;) {
    const bool more_a = bool(std::getline(there, a)), more_b = bool(std::getline(here, b));
    if (!more_a && !more_b) break;
    WEFT_CHECK(more_a && more_b && a == b, Exit::usage,
               fmt::format("remove {} to begin anew, or encode as before", folder_.string()),
               "{} holds clips of another job: it has \"{}\", this one \"{}\"", folder_.string(),
               more_a ? a : "", more_b ? b : "");
  }
}

// Cut lines, lines of bytes beyond the file's end and lines that make no sense count for nothing.
std::multimap<std::int64_t, EncodeParts::Place> EncodeParts::read_journals() {
  journals_.clear();
  for (const auto& entry : fs::directory_iterator(folder_))
    if (entry.path().extension() == ".journal") journals_.push_back(entry.path());
  std::sort(journals_.begin(), journals_.end());
  std::multimap<std::int64_t, Place> places;
  for (std::size_t i = 0; i < journals_.size(); ++i) {
    std::error_code missing;
    const std::uint64_t size = fs::file_size(data_of(journals_[i]), missing);
    std::ifstream in(journals_[i]);
    for (std::string line; !missing && std::getline(in, line) && !in.eof();) {
      std::istringstream fields(line);
      std::int64_t sample = -1;
      Place p{static_cast<std::int64_t>(i), 0, 0, 0};
      fields >> sample >> p.offset >> p.bytes >> p.xxh3;
      if (fields && sample >= 0 && sample < samples_ && p.offset <= size &&
          p.bytes <= size - p.offset)
        places.emplace(sample, p);
    }
  }
  return places;
}

bool EncodeParts::whole(const Place& place, std::vector<std::byte>& buffer) const {
  buffer.resize(place.bytes);
  const File data =
      File::open(data_of(journals_[static_cast<std::size_t>(place.file)]), Exit::data);
  data.read(buffer, place.offset);
  return hash_of(buffer) == place.xxh3;
}

void EncodeParts::append(std::int64_t sample, std::span<const std::byte> clip) {
  const fs::path data = folder_ / (stem_ + ".data"), journal = folder_ / (stem_ + ".journal");
  // The journal first: starts are counted by journals, so that one without clips is passed over too.
  if (data_ < 0) journal_ = create(journal), data_ = create(data);
  write_all(data_, clip, data);
  const std::string line = fmt::format("{} {} {} {}\n", sample, end_, clip.size(), hash_of(clip));
  write_all(journal_, std::as_bytes(std::span(line)), journal);
  end_ += clip.size();
}

void EncodeParts::finish() {
  flush_and_close(data_, folder_ / (stem_ + ".data"));
  flush_and_close(journal_, folder_ / (stem_ + ".journal"));
}

void EncodeParts::find_all() { places_ = read_journals(); }

void EncodeParts::read(std::int64_t sample, std::span<std::byte> clip) const {
  std::vector<std::byte> buffer;
  const auto [begin, end] = places_.equal_range(sample);
  for (auto p = begin; p != end; ++p) {
    if (p->second.bytes != clip.size() || !whole(p->second, buffer)) continue;
    std::copy(buffer.begin(), buffer.end(), clip.begin());
    return;
  }
  throw Error(Exit::data, fmt::format("clip {} in {} is damaged", sample, folder_.string()),
              "start again: it is made anew", __FILE__, __LINE__);
}

}  // namespace weft
