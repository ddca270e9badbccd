// One store of the clips of several ranks. Each rank keeps the clips that it cuts in a file of its
// own, OUTPUT.partN, until all are cut and rank 0 knows where in the store each has its place. On
// one host every rank then copies its own ones there, all at the same time; of several hosts rank 0
// copies all, because network file systems such as NFS write whole pages back: two hosts that write
// to the same page would undo each other's bytes.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "data/clip_source.h"
#include "data/clip_store.h"

namespace weft {

// A clip that was cut: all but its bytes.
struct CutClip {
  std::int64_t video = 0;  // number of its input
  std::uint64_t xxh3 = 0;
  Bucket bucket;
  ClipInfo info;
};

struct Written {
  std::int64_t clips = 0;
  std::uint64_t bytes = 0;
  std::map<std::string, std::pair<Bucket, std::int64_t>> buckets;  // clips of each
};

// A store that creates its buckets when their first clips arrive.
class BucketedWriter {
 public:
  explicit BucketedWriter(const std::string& path) : writer_(path) {}

  // Returns the clip's XXH3-64.
  std::uint64_t append(const Bucket& bucket, std::span<const std::byte> clip, const ClipInfo& info);
  // Gives every clip its place, in the order of the inputs, at most `limit` of them (0: all). A
  // video is whole on one rank, and each rank has its clips in that order already. Returns for each
  // rank the offsets of its clips in the file temporary(); those of clips too many are left out.
  std::vector<std::vector<std::uint64_t>> lay_out(const std::vector<std::vector<CutClip>>& ranks,
                                                  std::int64_t limit);
  void commit() { writer_.commit(); }
  const std::string& temporary() const { return writer_.temporary(); }
  const Written& written() const { return written_; }

 private:
  int id_of(const Bucket& bucket);

  ClipStoreWriter writer_;
  std::map<std::string, int> ids_;
  Written written_;
};

// The clips of this rank, one behind the other. The file is removed by the destructor, also after
// an error.
class PartFile {
 public:
  explicit PartFile(std::string path) : path_(std::move(path)) {}
  ~PartFile();
  PartFile(const PartFile&) = delete;
  PartFile& operator=(const PartFile&) = delete;

  // Returns the clip's XXH3-64. Throws Exit::data where the file cannot be written.
  std::uint64_t append(std::span<const std::byte> clip);
  // All clips are there: other hosts see them now.
  void close();

 private:
  std::string path_;
  int fd_ = -1;
  bool made_ = false;
  std::uint64_t bytes_ = 0;
};

// Copies the first clips of the closed part file `part_path` to `offsets` of the file `store`,
// which is on the disk then. Throws Exit::data where a clip is not what append() got, it cannot be
// opened, or `store` cannot be written.
void copy_part(const std::string& part_path, const std::vector<CutClip>& clips,
               std::span<const std::uint64_t> offsets, const std::string& store);

// Lists of clips as text, to be sent.
std::string to_text(const std::vector<CutClip>& clips);
std::vector<CutClip> from_text(const std::string& text);

}  // namespace weft
