#include "checkpoint/agree.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "core/file.h"
#include "core/host.h"
#include "core/log.h"
#include "core/mpi.h"

namespace weft::checkpoint {
namespace {

// Fixed size, so that one gather carries everything.
struct Note {
  std::int32_t failed = 0;
  std::int32_t code = 0;
  std::array<char, 1024> error{};
  std::array<char, 256> hint{};
};

// Truncates long text; the arrays start zeroed, so a terminating zero always remains.
template <std::size_t N>
void put(std::array<char, N>& to, const std::string& text) {
  std::memcpy(to.data(), text.data(), std::min(N - 1, text.size()));
}

}  // namespace

void Outcome::raise() const {
  if (!ok()) throw Error(code, error, hint, __FILE__, __LINE__);
}

Outcome outcome_of(std::exception_ptr error) {
  Outcome o;
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    o = {e.what(), e.hint(), e.code()};
  } catch (const std::system_error& e) {
    const Error failed = error_of(e, Exit::checkpoint);
    o = {failed.what(), failed.hint(), failed.code()};
  } catch (const std::exception& e) {
    o = {e.what(), "", Exit::checkpoint};
  } catch (...) {
    o = {"unknown error", "", Exit::checkpoint};
  }
  if (o.error.empty()) o.error = "error without a message";
  return o;
}

// Rank 0 gathers all outcomes, decides and broadcasts the verdict. Both collectives have a fixed
// size, so that nothing has to be agreed on beforehand.
Outcome agree(MPI_Comm comm, const Outcome& mine) {
  int rank = 0, size = 1;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  Note note;
  if (!mine.ok()) {
    note.failed = 1;
    note.code = static_cast<std::int32_t>(mine.code);
    put(note.error,
        size == 1 ? mine.error : fmt::format("{} (rank {} on {})", mine.error, rank, host_name()));
    put(note.hint, mine.hint);
  }
  std::vector<Note> all(rank == 0 ? static_cast<std::size_t>(size) : 0);
  MPI_Request request;
  MPI_Igather(&note, sizeof note, MPI_BYTE, all.data(), sizeof note, MPI_BYTE, 0, comm, &request);
  wait_asleep(request);  // MPI_Wait would spin on a core that the training needs
  // The lowest rank's failure is the verdict; the others are only counted. One that was asked to
  // stop hides no other: the job would be queued again with what has failed.
  constexpr auto stopped = static_cast<std::int32_t>(Exit::stopped);
  int failures = 0;
  for (const Note& n : all)
    if (n.failed != 0 && (failures++ == 0 || (note.code == stopped && n.code != stopped))) note = n;
  if (failures > 1) {
    std::string text = note.error.data();
    put(note.error, text + fmt::format("; {} failed too", counted(failures - 1, "other rank")));
  }
  broadcast_bytes(&note, sizeof note, comm);
  if (note.failed == 0) return {};
  return {note.error.data(), note.hint.data(), static_cast<Exit>(note.code)};
}

// Ranks may contribute different amounts (a shorter shard, or none at all): a first gather
// collects the sizes.
std::vector<std::byte> collect(MPI_Comm comm, std::span<const std::byte> mine) {
  int rank = 0, size = 1;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  // An int is enough: 16 bytes of hash stand for 16 MiB of a shard.
  const int bytes = static_cast<int>(mine.size());
  std::vector<int> counts(size), offsets(counts.size());
  MPI_Request request;
  MPI_Igather(&bytes, 1, MPI_INT, counts.data(), 1, MPI_INT, 0, comm, &request);
  wait_asleep(request);  // MPI_Wait would spin on a core that the training needs
  std::vector<std::byte> all;
  if (rank == 0) {
    for (std::size_t r = 1; r < counts.size(); ++r) offsets[r] = offsets[r - 1] + counts[r - 1];
    all.resize(offsets.back() + counts.back());
  }
  MPI_Igatherv(mine.data(), bytes, MPI_BYTE, all.data(), counts.data(), offsets.data(), MPI_BYTE, 0,
               comm, &request);
  wait_asleep(request);  // MPI_Wait would spin on a core that the training needs
  return all;
}

}  // namespace weft::checkpoint
