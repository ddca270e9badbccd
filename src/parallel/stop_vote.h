// Whether any rank was asked to stop, known to all of them while each is at its own work: rounds of one small reduction that
// nobody waits for, until all are done.
#pragma once

#include <mpi.h>

#include <functional>
#include <memory>

namespace weft {

class StopVote {
 public:
  // Collective in that every rank makes one and calls finish(). `asked`, if given, is called by the thread that calls poll();
  // once it has said yes, this rank stays asked.
  StopVote(const std::function<bool()>& asked, MPI_Comm comm);
  ~StopVote();
  StopVote(const StopVote&) = delete;
  StopVote& operator=(const StopVote&) = delete;

  // Looks whether a round has ended, and begins the next one. True from when this rank has learnt that one was asked.
  bool poll();

  // Waits for the others. Whether any rank was ever asked: the same answer on all.
  bool finish();

 private:
  void begin(bool working);

  const std::function<bool()>& asked_;
  MPI_Comm comm_;
  bool mine_ = false, any_ = false;
  struct Votes {
    int asked = 0, working = 0;
  };
  struct Round {
    Votes mine, all;
  };
  std::unique_ptr<Round> values_ = std::make_unique<Round>();
  MPI_Request round_ = MPI_REQUEST_NULL;
};

}  // namespace weft
