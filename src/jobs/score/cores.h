// The cores of a host, shared by the ranks on it, so that never more threads run than there are
// cores: a thread that runs holds a core, which is a lock on a byte of a file that the ranks of the
// host have open. The kernel lifts the locks of a rank that ends, however it ends.
#pragma once

#include <mpi.h>

#include <mutex>
#include <vector>

namespace weft {

// What a feed needs of it (feed.h).
class Cores {
 public:
  virtual ~Cores() = default;
  // Threads that this rank may run now.
  virtual int budget() = 0;
  // Threads of a turn, in which a rank has its cores to itself.
  virtual int turn() { return budget(); }
  // Waits until `least` cores are free and takes up to `most` that are. Returns how many. Ranks
  // that wait already come first.
  virtual int take(int most, int least = 1) = 0;
  virtual void give(int count) = 0;
  // Whether this rank has work: the cores of those that have none go to the others.
  virtual void set_at_work(bool at_work) = 0;
};

// Cores that this process may use, by its affinity and its control groups.
int granted_cores();

// The budget of a rank among those at work that share `cores`: an even share, the remainder to the
// first ones, at least one.
int core_share(int cores, int at_work, int place);

class HostCores : public Cores {
 public:
  // Collective. Ranks on a host with the same cores share them; ranks that the launcher has bound
  // to cores of their own do not. `fixed` > 0: the budget whatever the others do. Where ranks
  // cannot share a file, a warning: each then takes its even share.
  HostCores(int fixed, MPI_Comm world);
  ~HostCores() override;
  HostCores(const HostCores&) = delete;
  HostCores& operator=(const HostCores&) = delete;

  int cores() const { return cores_; }
  int ranks() const { return ranks_; }  // that share them
  // This rank's part of the cores, where ranks take turns a fraction.
  double share() const;
  int budget() override;
  // Four, or all cores of a smaller host: a frame by a few threads in turns is done sooner than a
  // frame of each rank at once, since these share the caches; by many threads it is not.
  int turn() override;
  int take(int most, int least = 1) override;
  void give(int count) override;
  void set_at_work(bool at_work) override;

 private:
  bool lock(long byte);
  void unlock(long byte);
  bool locked_by_others(long byte) const;
  bool others_wait() const;
  int try_take(int most);

  int cores_, fixed_, rank_ = 0, ranks_ = 1;
  int fd_ = -1;  // none for a rank that shares with nobody
  std::mutex mutex_;
  std::vector<bool> held_;  // [cores], by this rank
  int waiting_ = 0;         // threads of this rank
};

}  // namespace weft
