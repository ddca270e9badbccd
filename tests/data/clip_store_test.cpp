#include "data/clip_store.h"

#include <array>
#include <cmath>
#include <fstream>

#include "clip_store_fixture.h"

namespace weft {
namespace {

using testing::HasSubstr;

const std::string small = "clips=5,frames=3,height=8,width=12";
const std::string small_name = "synthetic-3-8x12";

TEST_F(ClipStoreTest, RoundTrip) {
  write(small + ";clips=3,frames=2,height=4,width=4,latent=1;clips=2,frames=1,height=8,width=8");
  EXPECT_FALSE(fs::exists(path_ + ".tmp"));
  const auto store = open_clip_source(path_, true);
  ASSERT_EQ(store->buckets().size(), 3u);
  for (std::size_t b = 0; b < 3; ++b) {
    const Bucket& got = store->buckets()[b];
    std::size_t s = 0;
    while (source_->buckets().at(s).name != got.name) ++s;
    const Bucket& want = source_->buckets()[s];
    EXPECT_EQ(got.clips, want.clips);
    EXPECT_EQ(got.frames, want.frames);
    EXPECT_EQ(got.height, want.height);
    EXPECT_EQ(got.width, want.width);
    EXPECT_EQ(got.channels, want.channels);
    EXPECT_EQ(got.dtype, want.dtype);
    EXPECT_EQ(got.pixel_frames, want.pixel_frames);
    EXPECT_EQ(got.pixel_height, want.pixel_height);
    EXPECT_EQ(got.pixel_width, want.pixel_width);
    std::vector<std::byte> a(got.clip_bytes()), c(got.clip_bytes());
    for (std::int64_t i = 0; i < got.clips; ++i) {
      store->read(static_cast<int>(b), i, a);
      source_->read(static_cast<int>(s), i, c);
      EXPECT_EQ(a, c);
      const ClipInfo x = store->info(static_cast<int>(b), i);
      const ClipInfo y = source_->info(static_cast<int>(s), i);
      EXPECT_EQ(x.fps, y.fps);
      EXPECT_EQ(x.source, y.source);
      EXPECT_EQ(x.text, y.text);
    }
  }
}

// What `weft ingest` wrote before there was version 2.
TEST_F(ClipStoreTest, VersionOne) {
  fs::copy_file(fs::path(WEFT_TEST_DATA) / "clips_v2.h5", path_);
  edit([](hid_t f) {
    const h5::Handle a(H5Aopen_by_name(f, "/", "schema_version", H5P_DEFAULT, H5P_DEFAULT),
                       H5Aclose);
    const std::int64_t version = 1;
    H5Awrite(a, H5T_NATIVE_INT64, &version);
  });
  EXPECT_EQ(open_clip_store(path_, true)->buckets()[1].clips, 6);
}

TEST_F(ClipStoreTest, ReadsWellInHdf5sTools) {
  if (std::system("command -v h5ls >/dev/null && command -v h5dump >/dev/null") != 0)
    GTEST_SKIP() << "h5ls and h5dump are not installed";
  write(small);
  const std::string listing = run("h5ls -r " + path_);
  EXPECT_THAT(listing, HasSubstr("/clips/" + small_name + "/frames Dataset {5/Inf, 3, 8, 12, 3}"));
  EXPECT_THAT(listing, HasSubstr("/clips/" + small_name + "/xxh3 Dataset {5}"));
  const std::string text = run("h5dump -r -d /clips/" + small_name + "/captions " + path_);
  EXPECT_THAT(text, HasSubstr("bright disc"));  // as text, which lines of 80 characters may cut
  const std::string header = run("h5dump -H " + path_);
  EXPECT_THAT(header, HasSubstr("schema_version"));
  EXPECT_THAT(header, HasSubstr("H5T_STD_U8LE"));
}

TEST_F(ClipStoreTest, Describe) {
  write(small);
  const std::string text = describe_store(path_);
  EXPECT_THAT(text, HasSubstr("bucket " + small_name + ": 5 clips, u8 [3,8,12,3]"));
  EXPECT_THAT(text, HasSubstr("bright disc"));
}

TEST_F(ClipStoreTest, MissingFile) { expect_refused("cannot open"); }

// Where a user may, as root may, a rename would put the store in its place.
TEST_F(ClipStoreTest, NoStoreInThePlaceOfADevice) {
  EXPECT_THROW(check_store_path("/dev/null", "ingest.output"), Error);
  EXPECT_THROW(check_store_path(dir_.string(), "ingest.output"), Error);
  EXPECT_NO_THROW(check_store_path(path_, "ingest.output"));
}

// HDF5 marks a file that is open for writing, and the mark stays where a program is killed.
TEST_F(ClipStoreTest, OpenForWritingElsewhere) {
  write("clips=1,frames=1,height=8,width=8");
  const pid_t child = fork();
  if (child == 0) {
    const h5::Handle access = h5::file_access();
    const hid_t file = H5Fopen(path_.c_str(), H5F_ACC_RDWR, access);
    _exit(file >= 0 && H5Fflush(file, H5F_SCOPE_GLOBAL) >= 0 ? 0 : 1);
  }
  int status = 1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  expect_refused("it is open for writing in another program");
}

TEST_F(ClipStoreTest, TextFile) {
  std::ofstream(path_) << "path,text\nvideo.mp4,a street\n";
  EXPECT_FALSE(is_hdf5(path_));
  expect_refused("not an HDF5 file");
}

TEST_F(ClipStoreTest, Directory) {
  fs::create_directory(path_);
  expect_refused("is not a file");
}

TEST_F(ClipStoreTest, OtherHdf5File) {
  {
    const h5::Handle f(H5Fcreate(path_.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT), H5Fclose);
  }
  EXPECT_TRUE(is_hdf5(path_));
  expect_refused("no clip store");
}

TEST_F(ClipStoreTest, TruncatedAnywhere) {
  write(small);
  const auto size = fs::file_size(path_);
  for (const double part : {0.999, 0.9, 0.5, 0.1, 0.01}) {
    write(small);
    fs::resize_file(path_, static_cast<std::uintmax_t>(static_cast<double>(size) * part));
    expect_refused(path_);
  }
  write(small);
  fs::resize_file(path_, size - 1);
  expect_refused("truncated");
}

TEST_F(ClipStoreTest, FlippedByteInAClip) {
  write(small);
  std::vector<std::byte> clip(source_->buckets()[0].clip_bytes());
  source_->read(0, 3, clip);
  // Finds the clip in the file by its bytes, and flips one bit of it.
  std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
  std::string all((std::istreambuf_iterator<char>(file)), {});
  const auto at = all.find(std::string(reinterpret_cast<const char*>(clip.data()), clip.size()));
  ASSERT_NE(at, std::string::npos);
  file.seekp(static_cast<std::streamoff>(at + 100));
  file.put(static_cast<char>(all[at + 100] ^ 1));
  file.close();

  const auto store = open_clip_store(path_, true);
  store->read(0, 2, clip);
  try {
    store->read(0, 3, clip);
    FAIL() << "a damaged clip was accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::data);
    EXPECT_THAT(e.what(), HasSubstr("clip 3"));
    EXPECT_THAT(e.what(), HasSubstr(small_name));
    EXPECT_THAT(e.what(), HasSubstr(path_));
  }
  EXPECT_THROW(describe_store(path_), Error);
  open_clip_store(path_, false)->read(0, 3, clip);  // unverified reading does not look
}

TEST_F(ClipStoreTest, WrongType) {
  write(small);
  edit([](hid_t f) {
    replace_dataset(f, "clips/" + small_name + "/frames", H5T_STD_I16LE, {5, 3, 8, 12, 3},
                    {1, 3, 8, 12, 3});
  });
  expect_refused("another type than uint8");
}

TEST_F(ClipStoreTest, WrongRank) {
  write(small);
  edit([](hid_t f) {
    replace_dataset(f, "clips/" + small_name + "/frames", H5T_STD_U8LE, {5, 3, 8, 36},
                    {1, 3, 8, 36});
  });
  expect_refused("4 dimensions");
}

TEST_F(ClipStoreTest, WrongChannels) {
  write(small);
  edit([](hid_t f) {
    replace_dataset(f, "clips/" + small_name + "/frames", H5T_STD_U8LE, {5, 3, 8, 12, 1},
                    {1, 3, 8, 12, 1});
  });
  expect_refused("1 channels");
}

TEST_F(ClipStoreTest, TwoClipsAChunk) {
  write(small);
  edit([](hid_t f) {
    replace_dataset(f, "clips/" + small_name + "/frames", H5T_STD_U8LE, {5, 3, 8, 12, 3},
                    {2, 3, 8, 12, 3});
  });
  expect_refused("one clip a chunk");
}

TEST_F(ClipStoreTest, ClipsThatWereNeverWritten) {
  write(small);
  edit([](hid_t f) {
    replace_dataset(f, "clips/" + small_name + "/frames", H5T_STD_U8LE, {5, 3, 8, 12, 3},
                    {1, 3, 8, 12, 3});
  });
  expect_refused("no data for clip 0");
}

// Shapes are never believed: neither an overflowing product nor one beyond the file's size.
TEST_F(ClipStoreTest, HugeShapes) {
  const hsize_t million = 1 << 20;
  for (const auto& [dims, what] :
       {std::pair(std::vector<hsize_t>{5, 1000 * million, million, million, 3},
                  "impossible dimension"),
        std::pair(std::vector<hsize_t>{million, 3, 64, 64, 3}, "more than the file"),
        std::pair(std::vector<hsize_t>{5, hsize_t{1} << 40, 1, 1, 3}, "impossible dimension")}) {
    write(small);
    edit([&, shape = dims](hid_t f) {
      replace_dataset(f, "clips/" + small_name + "/frames", H5T_STD_U8LE, shape, {1, 1, 1, 1, 3});
    });
    expect_refused(what);
  }
}

TEST_F(ClipStoreTest, MissingDatasets) {
  for (const char* name : {"frames", "fps", "sources", "captions_end", "xxh3"}) {
    write(small);
    edit([&](hid_t f) { H5Ldelete(f, ("clips/" + small_name + "/" + name).c_str(), H5P_DEFAULT); });
    expect_refused(std::string("no dataset ") + name);
  }
}

TEST_F(ClipStoreTest, ShortTable) {
  write(small);
  edit(
      [](hid_t f) { replace_dataset(f, "clips/" + small_name + "/xxh3", H5T_STD_U64LE, {4}, {}); });
  expect_refused("xxh3 that is not one value a clip");
}

TEST_F(ClipStoreTest, ZeroClips) {
  ClipStoreWriter writer(path_);
  writer.add_bucket(make_synthetic_source(small)->buckets()[0]);
  writer.commit();
  expect_refused("holds no clip");
}

TEST_F(ClipStoreTest, NoBucket) {
  ClipStoreWriter(path_).commit();
  expect_refused("no bucket");
}

TEST_F(ClipStoreTest, UnknownVersion) {
  write(small);
  edit([](hid_t f) {
    const h5::Handle a(H5Aopen_by_name(f, "/", "schema_version", H5P_DEFAULT, H5P_DEFAULT),
                       H5Aclose);
    const std::int64_t version = 9;
    H5Awrite(a, H5T_NATIVE_INT64, &version);
  });
  expect_refused("schema version 9");
}

// Above 2048 clips the stored offsets are used; when they are stale, HDF5 is asked.
TEST_F(ClipStoreTest, StaleOffsets) {
  const std::string spec = "clips=2100,frames=1,height=2,width=2";
  write(spec);
  std::vector<std::byte> clip(12), want(12);
  for (const bool stale : {false, true}) {
    if (stale) {
      edit([](hid_t f) {
        const h5::Handle d(H5Dopen2(f, "clips/synthetic-1-2x2/offset", H5P_DEFAULT), H5Dclose);
        std::vector<std::uint64_t> offset(2100);
        H5Dread(d, H5T_NATIVE_UINT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, offset.data());
        for (std::uint64_t& o : offset) o += 8;
        H5Dwrite(d, H5T_NATIVE_UINT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, offset.data());
      });
    }
    const auto store = open_clip_store(path_, true);
    for (std::int64_t i = 0; i < 2100; i += 7) {
      store->read(0, i, clip);
      source_->read(0, i, want);
      ASSERT_EQ(clip, want) << "clip " << i << ", stale " << stale;
    }
  }
}

}  // namespace
}  // namespace weft
