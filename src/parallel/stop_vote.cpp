#include "parallel/stop_vote.h"

namespace weft {

StopVote::StopVote(const std::function<bool()>& asked, MPI_Comm comm) : asked_(asked), comm_(comm) {
  begin(true);
}

StopVote::~StopVote() {
  // On the way of an error a round may be under way still, and nobody waits for it: its memory stays.
  if (round_ != MPI_REQUEST_NULL) values_.release();
}

void StopVote::begin(bool working) {
  mine_ = mine_ || (asked_ && asked_());
  values_->mine = {mine_ ? 1 : 0, working ? 1 : 0};
  MPI_Iallreduce(&values_->mine, &values_->all, 2, MPI_INT, MPI_MAX, comm_, &round_);
}

bool StopVote::poll() {
  int done = 0;
  MPI_Test(&round_, &done, MPI_STATUS_IGNORE);
  if (done == 0) return any_;
  any_ = any_ || values_->all.asked != 0;
  begin(true);
  return any_;
}

// Every rank takes part in every round, up to the first in which nobody works any more.
bool StopVote::finish() {
  for (;;) {
    MPI_Wait(&round_, MPI_STATUS_IGNORE);
    any_ = any_ || values_->all.asked != 0;
    if (values_->all.working == 0) return any_;
    begin(false);
  }
}

}  // namespace weft
