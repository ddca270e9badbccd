// Small helpers over MPI: broadcasting values whose number one rank knows, texts of all ranks, and
// waiting without spinning on a core that others need.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

namespace weft {

// Collective. Sends `values` (a vector or string of plain values) of rank `root` to all ranks,
// whatever their number.
template <class Values>
void broadcast_sized(Values& values, MPI_Comm comm, int root = 0) {
  static_assert(std::is_trivially_copyable_v<typename Values::value_type>);
  std::uint64_t size = values.size();
  MPI_Bcast(&size, 1, MPI_UINT64_T, root, comm);
  values.resize(size);
  // MPI counts in int, so large data goes in pieces.
  constexpr std::uint64_t longest_call = std::uint64_t{1} << 30;
  const std::uint64_t bytes = size * sizeof(typename Values::value_type);
  char* const data = reinterpret_cast<char*>(values.data());
  for (std::uint64_t at = 0; at < bytes; at += longest_call)
    MPI_Bcast(data + at, static_cast<int>(std::min(longest_call, bytes - at)), MPI_BYTE, root,
              comm);
}

// Collective. The texts of all ranks, in order, on every rank.
inline std::vector<std::string> texts_of_ranks(const std::string& mine, MPI_Comm comm) {
  int ranks = 1;
  MPI_Comm_size(comm, &ranks);
  const int length = static_cast<int>(mine.size());
  std::vector<int> lengths(ranks), starts(ranks + 1, 0);
  MPI_Allgather(&length, 1, MPI_INT, lengths.data(), 1, MPI_INT, comm);
  for (int r = 0; r < ranks; ++r) starts[r + 1] = starts[r] + lengths[r];
  std::string all(starts.back(), '\0');
  MPI_Allgatherv(mine.data(), length, MPI_CHAR, all.data(), lengths.data(), starts.data(), MPI_CHAR,
                 comm);
  std::vector<std::string> texts;
  for (int r = 0; r < ranks; ++r) texts.push_back(all.substr(starts[r], lengths[r]));
  return texts;
}

// Collective. The texts of all ranks, in order, on rank 0; none elsewhere.
inline std::vector<std::string> gather_texts(const std::string& mine, MPI_Comm comm) {
  int rank = 0, ranks = 1;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &ranks);
  std::uint64_t length = mine.size();
  std::vector<std::uint64_t> lengths(rank == 0 ? ranks : 0);
  MPI_Gather(&length, 1, MPI_UINT64_T, lengths.data(), 1, MPI_UINT64_T, 0, comm);
  // One after another, because MPI counts the bytes of all ranks in int.
  constexpr std::uint64_t longest_call = std::uint64_t{1} << 30;
  const auto pieces = [&](std::uint64_t bytes, const auto& transfer) {
    for (std::uint64_t at = 0; at < bytes; at += longest_call)
      transfer(at, static_cast<int>(std::min(longest_call, bytes - at)));
  };
  if (rank != 0) {
    pieces(length, [&](std::uint64_t at, int bytes) {
      MPI_Send(mine.data() + at, bytes, MPI_CHAR, 0, 0, comm);
    });
    return {};
  }
  std::vector<std::string> texts{mine};
  for (int r = 1; r < ranks; ++r) {
    std::string& text = texts.emplace_back(lengths[r], '\0');
    pieces(lengths[r], [&](std::uint64_t at, int bytes) {
      MPI_Recv(text.data() + at, bytes, MPI_CHAR, r, 0, comm, MPI_STATUS_IGNORE);
    });
  }
  return texts;
}

// Waits until done() is true: asleep in between, at first for 20 microseconds at a time, later for
// up to `longest_pause` seconds.
template <class Done>
void wait_asleep(const Done& done, double longest_pause) {
  for (double pause = 20e-6; !done(); pause = std::min(2 * pause, longest_pause))
    std::this_thread::sleep_for(std::chrono::duration<double>(pause));
}

// The same for a request.
inline void wait_asleep(MPI_Request request, double longest_pause = 0.002) {
  const auto done = [&] {
    int complete = 0;
    MPI_Test(&request, &complete, MPI_STATUS_IGNORE);
    return complete != 0;
  };
  wait_asleep(done, longest_pause);
}

}  // namespace weft
