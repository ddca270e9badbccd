#include "jobs/clip_queue.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>

#include "core/log.h"
#include "jobs/generate/options.h"

namespace weft {

ClipGroups::ClipGroups(MPI_Comm world, int sp) : size(sp) {
  int ranks = 1;
  MPI_Comm_rank(world, &rank);
  MPI_Comm_size(world, &ranks);
  count = ranks / sp;
  index = rank / sp;
  first = rank % sp == 0;
  if (sp > 1) MPI_Comm_split(world, index, rank, &group);
  MPI_Comm_split(world, first ? 0 : MPI_UNDEFINED, rank, &firsts);
}

ClipGroups::~ClipGroups() {
  // Collective: an error on its way to main ends the job, and nobody waits for the others then.
  if (std::uncaught_exceptions() > 0) return;
  if (group != MPI_COMM_NULL) MPI_Comm_free(&group);
  if (firsts != MPI_COMM_NULL) MPI_Comm_free(&firsts);
}

std::vector<int> ClipGroups::mates() const {
  std::vector<int> ranks;
  for (int r = index * size; r < (index + 1) * size; ++r)
    if (r != rank) ranks.push_back(r);
  return ranks;
}

void ClipGroups::share(std::vector<std::int64_t>& numbers) const {
  if (size == 1) return;
  std::int64_t count = std::ssize(numbers);
  MPI_Bcast(&count, 1, MPI_INT64_T, 0, group);
  numbers.resize(static_cast<std::size_t>(count));
  MPI_Bcast(numbers.data(), static_cast<int>(count), MPI_INT64_T, 0, group);
}

ClipQueue::ClipQueue(const Deck& deck, const std::filesystem::path& output,
                     const ClipGroups& groups, RankRoll& roll, std::int64_t items,
                     std::function<bool(int, std::int64_t)> settled)
    : groups_(groups),
      roll_(roll),
      items_(items),
      settled_(std::move(settled)),
      queue_(groups.firsts, items, [&roll, &groups] { return roll.lost(0); }),
      shared_(deck.get<GenerateDeck>().share_out),
      requests_(output, deck.run.stop_margin) {
  at_ = items * groups.index / groups.count;
  end_ = items * (groups.index + 1) / groups.count;
  // A batch takes minutes: in a thread of its own, the others hear before the next of theirs.
  if (groups.first) watch_ = std::jthread([this](const std::stop_token& end) { watch(end); });
}

std::int64_t ClipQueue::share(std::int64_t place) const {
  if (groups_.size > 1) MPI_Bcast(&place, 1, MPI_INT64_T, 0, groups_.group);
  return place;
}

std::int64_t ClipQueue::next() {
  if (!groups_.first) return share(-1);
  for (;;) {
    // Batches dealt out beforehand need leave from the queue too, one for each.
    std::int64_t place = -1;
    if (shared_)
      place = queue_.next();
    else if (at_ < end_ && queue_.next() >= 0)
      place = at_++;
    if (place < 0 || take(place, 0)) return share(place);
  }
}

std::int64_t ClipQueue::leftover() {
  if (!groups_.first || groups_.count == 1) return share(-1);
  bool idle = false;
  for (;;) {
    // In this order: what a rank that is known to be lost has said does not change any more.
    std::vector<bool> lost;
    for (int r = 0; r < roll_.ranks(); ++r) lost.push_back(roll_.lost(r));
    std::vector<RollEntry> states;
    for (int r = 0; r < roll_.ranks(); ++r) states.push_back(roll_.state(r));
    const bool stopped = asked_ || std::any_of(states.begin(), states.end(),
                                               [](const RollEntry& s) { return s.stopped; });
    if (const std::int64_t place = stopped ? -1 : take_over(states, lost); place >= 0)
      return share(place);
    if (!idle) roll_.note_idle();
    idle = true;
    // Who has taken over what this rank would have was no longer idle when it did so: read after that, all being idle means
    // that nothing is left.
    bool over = true;
    for (int r = 0; r < roll_.ranks() && over; r += groups_.size)
      over = r == roll_.rank() || lost[static_cast<std::size_t>(r)] || roll_.state(r).idle;
    if (over) return share(-1);
    roll_.pause();
  }
}

// Said before it is done: others that find it claimed wait for this rank, and should it be lost in between, the batch
// is known to have been in its hands. Where another rank was lost, one that was through may have been first.
bool ClipQueue::take(std::int64_t place, int losses) {
  roll_.note_taken(place);
  if (roll_.claim(fmt::format("{}.{}", place, losses))) return true;
  roll_.note_dropped(place);
  return false;
}

std::int64_t ClipQueue::take_over(const std::vector<RollEntry>& states,
                                  const std::vector<bool>& lost) {
  const std::vector<LeftPlace> places = left_places(states, lost, items_, queue_.works(), settled_);
  for (std::int64_t place = 0; place < items_; ++place) {
    const LeftPlace& p = places[static_cast<std::size_t>(place)];
    if (!p.open || p.losses >= most_losses) continue;
    from_lost_ = p.losses > 0;
    if (take(place, p.losses)) return place;
    roll_.note_idle();
  }
  return -1;
}

void ClipQueue::watch(const std::stop_token& end) {
  std::mutex mutex;
  std::unique_lock lock(mutex);
  std::condition_variable_any ended;
  while (!end.stop_requested()) {
    if ((requests_.look(longest_, 0) & wish::stop) != 0) {
      asked_ = true;
      roll_.note_stopped();
      queue_.close();
      return;
    }
    ended.wait_for(lock, end, std::chrono::milliseconds(100), [] { return false; });
  }
}

}  // namespace weft
