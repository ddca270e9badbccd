// Clips as a list job: a rank's state while it makes parts of them.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "jobs/animate/frames.h"
#include "jobs/animate/networks.h"
#include "jobs/animate/parts.h"
#include "jobs/animate/work_folder.h"
#include "jobs/engine/list_job.h"

namespace weft {

// Where a clip's frames are kept, in the output folder.
std::string frames_folder(const ClipRequest& clip);

class AnimateJob : public ListJob {
 public:
  // The first rank removes what an earlier job left of the parts that are to be made: files that
  // are there from now on are whole, and of this job.
  AnimateJob(const Deck& deck, const std::vector<ClipRequest>& clips,
             const std::vector<ClipPart>& parts, AnimateNetworks& networks,
             const ListEngine& engine);
  void make(const ItemBatch& items, ItemResults& results) override;
  nlohmann::ordered_json share() const;

 private:
  enum class Made { yes, no, stopped };  // no: the clip has ended otherwise

  const ClipRequest& clip_of(const ClipPart& part) const {
    return clips_[static_cast<std::size_t>(part.clip)];
  }
  const ListItem& item_of(std::int64_t item) const {
    return engine_.items()[static_cast<std::size_t>(item)];
  }
  WorkFolder folder_of(std::int64_t item) const;
  // Files of a part, relative to the output.
  std::string file_of(std::int64_t item) const;
  void add_files(nlohmann::ordered_json& line, std::int64_t item) const;

  void make_part(std::int64_t item, ItemResults& results);
  // Under the file's lock, unless it is there by then.
  Made under_lock(const WorkFolder& folder, const std::string& file,
                  const std::function<bool()>& make);
  Made prepare(std::int64_t item);
  Made make_frames(std::int64_t item);
  Made join(std::int64_t item, nlohmann::ordered_json& line);
  const ClipInHand& in_hand(std::int64_t item);
  void conclude(std::int64_t item, const WorkFolder::End& end, ItemResults& results);

  const Deck& deck_;
  const std::vector<ClipRequest>& clips_;
  const std::vector<ClipPart>& parts_;
  AnimateNetworks& networks_;
  const ListEngine& engine_;
  StageSeconds seconds_;
  std::int64_t frames_ = 0;
  SegmentMaker maker_;
  std::unique_ptr<ClipInHand> in_hand_;  // the last one
  std::string in_hand_key_;
};

}  // namespace weft
