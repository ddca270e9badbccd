// Clips as a list job: a rank's state while it makes parts of them.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "jobs/animate/frames.h"
#include "jobs/animate/networks.h"
#include "jobs/animate/parts.h"
#include "jobs/engine/list_job.h"

namespace weft {

// Where a clip's frames are kept, in the output folder.
std::string frames_folder(const ClipRequest& clip);

// Removes the segments of all clips from the output folder.
void remove_segments(const std::filesystem::path& output);

class AnimateJob : public ListJob {
 public:
  // The first rank removes what an earlier job left of the parts that are to be made: files that
  // remain are whole.
  AnimateJob(const Deck& deck, const std::vector<ClipRequest>& clips,
             const std::vector<ClipPart>& parts, AnimateNetworks& networks,
             const ListEngine& engine);
  void make(const ItemBatch& items, ItemResults& results) override;
  nlohmann::ordered_json share() const;

 private:
  const ClipPart& part(std::int64_t item) const { return parts_[static_cast<std::size_t>(item)]; }
  const ClipRequest& clip_of(std::int64_t item) const {
    return clips_[static_cast<std::size_t>(part(item).clip)];
  }
  const ListItem& item_of(std::int64_t item) const {
    return engine_.items()[static_cast<std::size_t>(item)];
  }
  // The part's file, relative to the output folder.
  std::string file_of(std::int64_t item) const;
  std::filesystem::path path_of(std::int64_t item) const;
  nlohmann::ordered_json line_of(std::int64_t item) const;
  void add_files(nlohmann::ordered_json& line, std::int64_t item) const;

  bool make_part(std::int64_t item, nlohmann::ordered_json& line);
  bool make_piece(std::int64_t item);
  void join(std::int64_t item, nlohmann::ordered_json& line);
  const ClipInHand& in_hand(std::int64_t item);

  const Deck& deck_;
  const std::vector<ClipRequest>& clips_;
  const std::vector<ClipPart>& parts_;
  AnimateNetworks& networks_;
  const ListEngine& engine_;
  StageSeconds seconds_;
  std::int64_t frames_ = 0;
  SegmentMaker maker_;
  std::unique_ptr<ClipInHand> in_hand_;  // the last one
  std::int64_t in_hand_clip_ = -1;
};

}  // namespace weft
