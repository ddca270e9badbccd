// The clip store: one HDF5 file of clips by bucket, made by `weft ingest`, readable with h5ls,
// h5dump and h5py.
//
//   /                       attributes format = "weft clips", schema_version = 3 (1, 2 are read
//                           too); made_by, optional: what `weft encode` made it of, a line each
//   /clips/<bucket>         attributes pixel_frames, pixel_height, pixel_width
//   /clips/<bucket>/frames  u8 [N,T,H,W,3], one clip a chunk, no filter         (pixels), or
//   /clips/<bucket>/latents f32 or f16 [N,C,T,H,W], one clip a chunk, no filter (latents)
//                           attribute kind = "latents" (as the model sees them; the default) or
//                           "moments" (means, then log variances, not normalised); attributes
//                           scale, shift f32, one a channel of the latent, required with moments
//   /clips/<bucket>/fps     f32 [N]; 120 for an image
//   /clips/<bucket>/sources u8 [bytes]: of each clip path, first frame and its time, one behind the
//                           other, UTF-8; sources_end u64 [N]: where each of them ends
//   /clips/<bucket>/captions u8 [bytes]: the captions likewise, "" = none; captions_end u64 [N].
//                           Versions 1 and 2 had string [N] source and text instead, of variable
//                           length: HDF5 keeps those in a heap without checksums
//   /clips/<bucket>/xxh3    u64 [N]: XXH3-64 (seed 0) of the clip's bytes as stored
//   /clips/<bucket>/offset  u64 [N]: where HDF5 put each clip. A shortcut only: HDF5 1.10 finds one
//                           chunk's address in O(N), so that a big store opens N times faster with
//                           it. Checked against HDF5 on opening; optional.
//   /clips/<bucket>/text_features  f32, f16 or u16 (the bits of bf16) [sum of tokens, channels],
//                           contiguous: the captions' features, valid tokens only; optional
//   /clips/<bucket>/text_offset    u64 [N+1]: clip i has the rows [offset i, offset i+1)
//   /clips/<bucket>/text_xxh3      u64 [N]: XXH3-64 (seed 0) of its rows' bytes as stored
//                           attribute tables_xxh3 u64 of the bucket: XXH3-64 of all that is said
//                           above but the places of bytes (store_file.h). HDF5 itself keeps
//                           checksums of a store's structure (its format of version 1.10)
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/file.h"
#include "data/clip_source.h"

namespace weft {

inline constexpr int clip_store_version = 3, oldest_clip_store_version = 1;
inline constexpr int first_hashed_tables = 3;  // the first version with hashes of its tables

// Whether the file starts like an HDF5 file. False for a file that cannot be read.
bool is_hdf5(const std::string& path);

// Opens the store and checks everything except the clips' bytes: schema, ranks, types, one clip per
// chunk, every clip inside the file, the tables' hashes. HDF5 does this in a process that may die
// (store_file.h). Clips are then read with pread, without HDF5 and its lock. Throws
// Exit::data with one message that names file, bucket and fault.
std::unique_ptr<ClipSource> open_clip_store(const std::string& path, bool verify);

// Buckets, clips, shapes, bytes, fps and first captions as text, for `weft inspect`; or what
// describe_image_store() says. Reads the whole file: throws Exit::data, naming the clip, when a
// hash is wrong.
std::string describe_store(const std::string& path);

// Before work whose end replaces what lies at `path`: says so on rank 0, while it can still be
// stopped.
void warn_of_replacing(const std::string& path);
// Exit::usage if a folder or a device stands where a store is to be written.
void check_store_path(const std::string& path, const std::string& key);
// On rank 0, null on others: keeps other jobs from writing the same store while it lives. `key` of
// the deck names the store. Exit::checkpoint where one writes it.
std::unique_ptr<FolderLock> lock_store(const std::string& path, const std::string& key);

// In a line that describes a text encoder: what decides its features follows, by hashes.
inline constexpr const char* encoder_mark = "tokenizer xxh3";
// That part of a text with such a line, to compare; "" of one without, or of an older weft.
std::string encoder_in(const std::string& text);

// Size, step and kind, not time, of the checkpoint in a ModelSource::identity(); "" of others.
std::string checkpoint_in(const std::string& text);

// Exit::data where the captions of two of these stores were encoded by different text encoders, or
// their clips by different checkpoints of a VAE. On rank 0.
void check_encoders(const std::vector<std::string>& paths);

// The captions of a source's clips by permanent id ("" = none). Exit::usage for images.
std::vector<std::string> captions_by_id(const ClipSource& source);

// The store's attribute made_by; "" if it has none, or is not a store. Damage gives a WARN.
std::string stored_made_by(const std::string& path);

// Writes a store to PATH.tmp; commit() renames it to PATH. Without commit nothing is left behind.
// Memory does not grow with the clips' bytes. Throws Exit::data when the disk is full or the
// directory is not writable.
class ClipStoreWriter {
 public:
  // `made_by`, if not empty, is kept for stored_made_by().
  explicit ClipStoreWriter(const std::string& path, const std::string& made_by = "");
  ~ClipStoreWriter();

  // Returns the bucket's number for append(); `bucket.clips` is ignored.
  int add_bucket(const Bucket& bucket);
  // `clip` is one whole clip, Bucket::clip_bytes() of it; `text` whole rows of its text features,
  // in the bucket's type, none where it has no caption. Returns the clip's XXH3-64.
  std::uint64_t append(int bucket, std::span<const std::byte> clip, const ClipInfo& info,
                       std::span<const std::byte> text = {});
  // A clip of a bucket without text features whose bytes come later, by plain writes to offsets()
  // in the file temporary(), from any process: the same store as by append().
  void reserve(int bucket, const ClipInfo& info, std::uint64_t xxh3);
  // Where the clips of a bucket are, in order. Nothing is reserved or appended after that.
  const std::vector<std::uint64_t>& offsets(int bucket);
  const std::string& temporary() const;
  // Writes the tables, closes, fsyncs, renames.
  void commit();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace weft
