// Clips of several ranks on their way to one store, without ranks.
#include "data/ingest/parts.h"

#include <gtest/gtest.h>

#include <fstream>

#include "core/error.h"
#include "data/clip_store.h"
#include "tests/folder.h"

namespace weft {
namespace {

class PartsTest : public FolderTest {
 protected:
  static Bucket bucket(std::int64_t frames) {
    Bucket b;
    b.name = fmt::format("2x2-{}", frames);
    b.frames = b.pixel_frames = frames;
    b.height = b.width = b.pixel_height = b.pixel_width = 2;
    return b;
  }
  static std::vector<std::byte> bytes(std::int64_t frames, int value) {
    return std::vector<std::byte>(bucket(frames).clip_bytes(), static_cast<std::byte>(value));
  }
  // A clip of video `video`, which is also its bytes and its name.
  static CutClip cut(PartFile& part, std::int64_t video, std::int64_t frames) {
    const int value = static_cast<int>(video);
    return {video,
            part.append(bytes(frames, value)),
            bucket(frames),
            {10, fmt::format("video {}", video), "a\n\"b\" c"}};
  }
};

TEST_F(PartsTest, TextsOfAnyBytes) {
  CutClip clip{
      7, 0xfedcba9876543210, bucket(3), {29.97f, "a b\n7 7.mp4", std::string("x\0\n ", 4)}};
  const std::vector<CutClip> back = from_text(to_text({clip, {}, clip}));
  ASSERT_EQ(back.size(), 3u);
  for (const std::size_t i : {0, 2}) {
    EXPECT_EQ(back[i].video, 7);
    EXPECT_EQ(back[i].xxh3, clip.xxh3);
    EXPECT_EQ(back[i].bucket.name, clip.bucket.name);
    EXPECT_EQ(back[i].bucket.clip_bytes(), clip.bucket.clip_bytes());
    EXPECT_EQ(back[i].info.fps, clip.info.fps);
    EXPECT_EQ(back[i].info.source, clip.info.source);
    EXPECT_EQ(back[i].info.text, clip.info.text);
  }
  EXPECT_TRUE(from_text("").empty());
}

// The store of two ranks' parts is the one that a single rank writes, also where it is cut off.
TEST_F(PartsTest, PlacesAreInTheOrderOfTheVideos) {
  const std::vector<std::pair<std::int64_t, std::int64_t>> clips = {
      {0, 1}, {0, 2}, {1, 2}, {1, 1}, {2, 1}, {3, 2}, {4, 1}};  // video, frames
  for (const std::int64_t limit : {0, 1, 4}) {
    {
      BucketedWriter whole(path("whole.h5"));
      for (const auto& [video, frames] : clips)
        if (limit == 0 || whole.written().clips < limit)
          whole.append(bucket(frames), bytes(frames, static_cast<int>(video)),
                       {10, fmt::format("video {}", video), "a\n\"b\" c"});
      whole.commit();
    }
    const std::string names[] = {path("part0"), path("part1")};
    {
      PartFile parts[] = {PartFile(names[0]), PartFile(names[1])};
      std::vector<std::vector<CutClip>> cuts(2);
      for (const auto& [video, frames] : clips)
        cuts[video % 2].push_back(cut(parts[video % 2], video, frames));
      BucketedWriter store(path("store.h5"));
      const auto offsets = store.lay_out(cuts, limit);
      for (const int r : {0, 1}) {
        parts[r].close();
        copy_part(names[r], cuts[r], offsets[r], store.temporary());
      }
      EXPECT_EQ(store.written().clips, limit == 0 ? 7 : limit);
      store.commit();
    }
    EXPECT_EQ(read("store.h5"), read("whole.h5")) << limit;
    for (const std::string& name : names) EXPECT_FALSE(fs::exists(name));
  }
}

TEST_F(PartsTest, DamagedPartsGiveNoStore) {
  for (const std::string fault : {"changed", "cut off", "gone"}) {
    try {
      PartFile part(path("part"));
      const std::vector<CutClip> clips = {cut(part, 0, 4), cut(part, 1, 4)};
      part.close();
      if (fault == "changed") std::fstream(path("part")).seekp(50) << 'x';
      if (fault == "cut off") fs::resize_file(path("part"), 95);
      if (fault == "gone") fs::remove(path("part"));
      BucketedWriter store(path("store.h5"));
      copy_part(path("part"), clips, store.lay_out({clips}, 0)[0], store.temporary());
      store.commit();
      FAIL() << fault;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data) << e.what();
    }
    EXPECT_TRUE(fs::is_empty(dir_)) << fault;
  }
}

}  // namespace
}  // namespace weft
