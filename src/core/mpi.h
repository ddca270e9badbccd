// Small helpers over MPI: values whose number one rank knows, texts of all ranks, the ranks of a
// host, and waiting without spinning on a core that others need.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "core/error.h"

namespace weft {

// In bytes: MPI counts in int, so more goes in pieces.
constexpr std::uint64_t longest_message = std::uint64_t{1} << 30;

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

// Collective. MPI_Bcast of bytes, which sleeps while it waits: MPI would spin on a core that a
// training needs.
inline void broadcast_bytes(void* data, std::uint64_t bytes, MPI_Comm comm, int root = 0) {
  for (std::uint64_t at = 0; at < bytes; at += longest_message) {
    MPI_Request request;
    MPI_Ibcast(static_cast<char*>(data) + at,
               static_cast<int>(std::min(longest_message, bytes - at)), MPI_BYTE, root, comm,
               &request);
    wait_asleep(request);
  }
}

// Collective. Sends `values` (a vector or string of plain values) of rank `root` to all ranks,
// whatever their number.
template <class Values>
void broadcast_sized(Values& values, MPI_Comm comm, int root = 0) {
  static_assert(std::is_trivially_copyable_v<typename Values::value_type>);
  std::uint64_t size = values.size();
  broadcast_bytes(&size, sizeof size, comm, root);
  values.resize(size);
  broadcast_bytes(values.data(), size * sizeof(typename Values::value_type), comm, root);
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

inline void send_text(const std::string& text, int to, MPI_Comm comm) {
  const std::uint64_t bytes = text.size();
  MPI_Send(&bytes, 1, MPI_UINT64_T, to, 0, comm);
  for (std::uint64_t at = 0; at < bytes; at += longest_message)
    MPI_Send(text.data() + at, static_cast<int>(std::min(longest_message, bytes - at)), MPI_BYTE,
             to, 0, comm);
}

inline std::string receive_text(int from, MPI_Comm comm) {
  std::uint64_t bytes = 0;
  MPI_Recv(&bytes, 1, MPI_UINT64_T, from, 0, comm, MPI_STATUS_IGNORE);
  std::string text(bytes, '\0');
  for (std::uint64_t at = 0; at < bytes; at += longest_message)
    MPI_Recv(text.data() + at, static_cast<int>(std::min(longest_message, bytes - at)), MPI_BYTE,
             from, 0, comm, MPI_STATUS_IGNORE);
  return text;
}

// Collective. The texts of all ranks, in order, on rank 0; none elsewhere. They may be long: a
// gather would count the bytes of all ranks in int.
inline std::vector<std::string> gather_texts(const std::string& mine, MPI_Comm comm) {
  int rank = 0, ranks = 1;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &ranks);
  if (rank != 0) {
    send_text(mine, 0, comm);
    return {};
  }
  std::vector<std::string> texts{mine};
  for (int r = 1; r < ranks; ++r) texts.push_back(receive_text(r, comm));
  return texts;
}

// Collective. The way back: this rank's one of `texts` of rank 0.
inline std::string scatter_texts(const std::vector<std::string>& texts, MPI_Comm comm) {
  int rank = 0;
  MPI_Comm_rank(comm, &rank);
  if (rank != 0) return receive_text(0, comm);
  for (std::size_t r = 1; r < texts.size(); ++r) send_text(texts[r], static_cast<int>(r), comm);
  return texts.at(0);
}

// Collective. The ranks of `comm` on this rank's host, in their order.
inline MPI_Comm split_by_host(MPI_Comm comm) {
  int rank = 0;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm host = MPI_COMM_NULL;
  WEFT_CHECK(
      MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &host) == MPI_SUCCESS,
      Exit::hardware, "weft doctor checks the nodes and the network between them",
      "MPI: the ranks of a host cannot be told from others");
  return host;
}

// The library of this process: "Open MPI v4.1.4", "MPICH 4.0.2".
inline std::string mpi_library() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(text, &length);
  // "Open MPI v4.1.4, package: ...", "MPICH Version:      4.0.2\nMPICH Release date: ..."
  std::string name(text, static_cast<std::size_t>(length));
  name.resize(std::min(name.size(), name.find_first_of(",\n")));
  constexpr std::string_view label = "Version:";
  if (const std::size_t at = name.find(label); at != std::string::npos)
    name.erase(at, name.find_first_not_of(" \t", at + label.size()) - at);
  return name;
}

}  // namespace weft
