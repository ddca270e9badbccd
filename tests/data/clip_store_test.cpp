#include "data/clip_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "data/hdf5.h"
#include "data/synthetic.h"

namespace weft {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

class ClipStoreTest : public testing::Test {
 protected:
  void SetUp() override {
    dir_ =
        fs::temp_directory_path() / ("weft_clip_store_" + std::to_string(getpid()) + "_" +
                                     testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(dir_);
    fs::create_directories(dir_);
    path_ = (dir_ / "clips.h5").string();
  }
  void TearDown() override { fs::remove_all(dir_); }

  // Copies every clip of a synthetic source into a store.
  void write(const std::string& spec) {
    source_ = make_synthetic_source(spec);
    ClipStoreWriter writer(path_);
    for (std::size_t b = 0; b < source_->buckets().size(); ++b) {
      const Bucket& bucket = source_->buckets()[b];
      const int id = writer.add_bucket(bucket);
      std::vector<std::byte> clip(bucket.clip_bytes());
      for (std::int64_t i = 0; i < bucket.clips; ++i) {
        source_->read(static_cast<int>(b), i, clip);
        writer.append(id, clip, source_->info(static_cast<int>(b), i));
      }
    }
    writer.commit();
  }

  // Opens with read access and runs `change` on the file, as HDF5 sees it.
  template <class F>
  void edit(F change) {
    const h5::Handle file(H5Fopen(path_.c_str(), H5F_ACC_RDWR, H5P_DEFAULT), H5Fclose);
    ASSERT_TRUE(file.valid());
    change(static_cast<hid_t>(file));
  }

  void expect_refused(const std::string& what) {
    try {
      open_clip_store(path_, true);
      FAIL() << "the store was accepted; expected: " << what;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data);
      EXPECT_THAT(e.what(), HasSubstr(what));
      EXPECT_THAT(e.what(), HasSubstr(path_));
      EXPECT_FALSE(e.hint().empty());
    }
  }

  std::string run(const std::string& command) {
    std::string out;
    FILE* p = popen((command + " 2>&1").c_str(), "r");
    char line[512];
    while (fgets(line, sizeof line, p) != nullptr) out += line;
    const int status = pclose(p);
    EXPECT_EQ(WEXITSTATUS(status), 0) << command << "\n" << out;
    return out;
  }

  fs::path dir_;
  std::string path_;
  std::unique_ptr<ClipSource> source_;
};

// A dataset of `dims` in /clips/<bucket>/<name>, chunked by `chunk`, in place of the one there.
void replace_dataset(hid_t file, const std::string& name, hid_t type, std::vector<hsize_t> dims,
                     std::vector<hsize_t> chunk) {
  H5Ldelete(file, name.c_str(), H5P_DEFAULT);
  const h5::Handle space(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr),
                         H5Sclose);
  const h5::Handle how(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  if (!chunk.empty()) H5Pset_chunk(how, static_cast<int>(chunk.size()), chunk.data());
  const h5::Handle d(H5Dcreate2(file, name.c_str(), type, space, H5P_DEFAULT, how, H5P_DEFAULT),
                     H5Dclose);
  ASSERT_TRUE(d.valid());
}

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

TEST_F(ClipStoreTest, HalfLatents) {
  Bucket b;
  b.name = "latent";
  b.frames = 2;
  b.height = b.width = 3;
  b.channels = 4;
  b.dtype = DType::f16;
  b.pixel_frames = 5;
  b.pixel_height = b.pixel_width = 24;
  std::vector<std::byte> clip(b.clip_bytes(), std::byte{0x3c}), got(b.clip_bytes());
  ClipStoreWriter writer(path_);
  writer.append(writer.add_bucket(b), clip, {24, "made up", ""});
  writer.commit();
  const auto store = open_clip_store(path_, true);
  EXPECT_EQ(store->buckets()[0].dtype, DType::f16);
  EXPECT_EQ(store->buckets()[0].channels, 4);
  store->read(0, 0, got);
  EXPECT_EQ(got, clip);
}

// Two clips of moments with captions of 2 and 0 rows; the values of each row are its number.
Bucket moments_bucket(DType text_dtype) {
  Bucket b;
  b.name = "moments";
  b.frames = 2;
  b.height = b.width = 3;
  b.channels = 4;
  b.dtype = DType::f32;
  b.pixel_frames = 5;
  b.pixel_height = b.pixel_width = 24;
  b.moments = true;
  b.scale = {3.5f, 2.0f};
  b.shift = {-0.25f, 0.5f};
  b.text_channels = 3;
  b.text_dtype = text_dtype;
  return b;
}

template <class T>
void write_moments(const std::string& path) {
  const Bucket b = moments_bucket(dtype_of<T>::value);
  ClipStoreWriter writer(path);
  const int id = writer.add_bucket(b);
  const std::vector<std::byte> clip(b.clip_bytes());
  const std::vector<T> rows = {T(0.5f), T(-2.0f), T(1e-3f), T(4.0f), T(0.0f), T(7.25f)};
  writer.append(id, clip, {24, "a", "a caption"}, std::as_bytes(std::span(rows)));
  writer.append(id, clip, {24, "b", ""});
  writer.commit();
}

TEST_F(ClipStoreTest, MomentsAndTextFeatures) {
  const std::vector<float> want = {0.5f, -2.0f, 1e-3f, 4.0f, 0.0f, 7.25f};
  const auto check = [&](DType dtype, float tolerance) {
    EXPECT_EQ(std::distance(fs::directory_iterator(dir_), {}), 1) << "only the store is left";
    const auto store = open_clip_store(path_, true);
    const Bucket& b = store->buckets()[0];
    EXPECT_TRUE(b.moments);
    EXPECT_EQ(b.channels, 4);
    EXPECT_EQ(b.model_channels(), 2);
    EXPECT_EQ(b.scale, (std::vector<float>{3.5f, 2.0f}));
    EXPECT_EQ(b.shift, (std::vector<float>{-0.25f, 0.5f}));
    EXPECT_EQ(b.text_channels, 3);
    EXPECT_EQ(b.text_dtype, dtype);
    EXPECT_EQ(b.longest_text, 2);
    EXPECT_EQ(store->text_tokens(0, 0), 2);
    EXPECT_EQ(store->text_tokens(0, 1), 0);
    EXPECT_TRUE(store->read_text(0, 1).empty());
    const std::vector<float> got = store->read_text(0, 0);
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < want.size(); ++i)
      EXPECT_NEAR(got[i], want[i], tolerance * std::abs(want[i]));
  };
  write_moments<float>(path_);
  check(DType::f32, 0);
  const std::string text = describe_clip_store(path_);
  EXPECT_THAT(text, HasSubstr("moments (means, log variances) of 5x24x24 footage"));
  EXPECT_THAT(text, HasSubstr("shift -0.25 0.5, scale 3.5 2"));
  EXPECT_THAT(text, HasSubstr("2 tokens, at most 2 a clip, f32 [3]"));
  write_moments<f16>(path_);
  check(DType::f16, 0x1p-11f);
  write_moments<bf16>(path_);
  check(DType::bf16, 0x1p-8f);
}

TEST_F(ClipStoreTest, BadTextFeatures) {
  const auto offsets = [&](std::array<std::uint64_t, 3> values) {
    write_moments<float>(path_);
    edit([&](hid_t f) {
      const h5::Handle d(H5Dopen2(f, "clips/moments/text_offset", H5P_DEFAULT), H5Dclose);
      H5Dwrite(d, H5T_NATIVE_UINT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data());
    });
    expect_refused("does not divide text_features");
  };
  offsets({0, 3, 2});
  offsets({0, 2, 3});
  offsets({1, 2, 2});
  const auto rows = [&](hid_t type, std::vector<hsize_t> dims, std::vector<hsize_t> chunk,
                        const char* what) {
    write_moments<float>(path_);
    edit([&](hid_t f) { replace_dataset(f, "clips/moments/text_features", type, dims, chunk); });
    expect_refused(what);
  };
  rows(H5T_IEEE_F64LE, {2, 3}, {}, "another type than little-endian float32");
  rows(H5T_IEEE_F32LE, {2, 3, 1}, {}, "not [tokens, channels]");
  rows(H5T_IEEE_F32LE, {2, 3}, {1, 3}, "in one piece");
  rows(H5T_IEEE_F32LE, {1 << 30, 3}, {}, "more than the file");
  rows(H5T_IEEE_F32LE, {2, 3}, {}, "beyond the end");
  for (const char* name : {"text_offset", "text_xxh3"}) {
    write_moments<float>(path_);
    edit([&](hid_t f) {
      H5Ldelete(f, (std::string("clips/moments/") + name).c_str(), H5P_DEFAULT);
    });
    expect_refused(std::string("no dataset ") + name);
  }
}

TEST_F(ClipStoreTest, FlippedBitInACaption) {
  write_moments<float>(path_);
  edit([](hid_t f) {
    const h5::Handle d(H5Dopen2(f, "clips/moments/text_features", H5P_DEFAULT), H5Dclose);
    const std::vector<float> other = {0.5f, -2.0f, 1e-3f, 4.0f, 0.0f, 7.5f};
    H5Dwrite(d, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, other.data());
  });
  try {
    open_clip_store(path_, true)->read_text(0, 0);
    FAIL() << "a damaged caption was accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::data);
    EXPECT_THAT(e.what(), HasSubstr("caption 0 of bucket moments"));
  }
  EXPECT_EQ(open_clip_store(path_, false)->read_text(0, 0)[5], 7.5f);
}

TEST_F(ClipStoreTest, BadMoments) {
  const auto bucket = [&](auto change, const char* what) {
    write_moments<float>(path_);
    edit([&](hid_t f) {
      const h5::Handle group(H5Gopen2(f, "clips/moments", H5P_DEFAULT), H5Gclose);
      change(static_cast<hid_t>(group));
    });
    expect_refused(what);
  };
  const auto put = [](hid_t group, const char* name, std::vector<float> values) {
    H5Adelete(group, name);
    const hsize_t n = values.size();
    const h5::Handle space(H5Screate_simple(1, &n, nullptr), H5Sclose);
    const h5::Handle a(H5Acreate2(group, name, H5T_IEEE_F32LE, space, H5P_DEFAULT, H5P_DEFAULT),
                       H5Aclose);
    H5Awrite(a, H5T_NATIVE_FLOAT, values.data());
  };
  bucket([](hid_t g) { H5Adelete(g, "shift"); }, "only one of the attributes");
  bucket([](hid_t g) { H5Adelete(g, "shift"), H5Adelete(g, "scale"); }, "no attributes scale");
  bucket([&](hid_t g) { put(g, "scale", {1, 2, 3}); }, "not 2 finite numbers");
  bucket([&](hid_t g) { put(g, "scale", {1, 0}); }, "scale of 0");
  bucket([&](hid_t g) { put(g, "shift", {1, NAN}); }, "not 2 finite numbers");
  bucket(
      [](hid_t g) {
        const h5::Handle a(H5Aopen(g, "kind", H5P_DEFAULT), H5Aclose);
        const h5::Handle type = h5::string_type();
        const char* other = "pictures";
        H5Awrite(a, type, &other);
      },
      "\"pictures\"");
}

// What `weft ingest` wrote before there was version 2.
TEST_F(ClipStoreTest, VersionOne) {
  write(small);
  edit([](hid_t f) {
    const h5::Handle a(H5Aopen_by_name(f, "/", "schema_version", H5P_DEFAULT, H5P_DEFAULT),
                       H5Aclose);
    const std::int64_t version = 1;
    H5Awrite(a, H5T_NATIVE_INT64, &version);
  });
  EXPECT_EQ(open_clip_store(path_, true)->buckets()[0].clips, 5);
}

TEST_F(ClipStoreTest, NothingIsLeftWithoutCommit) {
  { ClipStoreWriter(path_).add_bucket(moments_bucket(DType::f16)); }
  { ClipStoreWriter writer(path_); }
  EXPECT_TRUE(fs::is_empty(dir_));
}

TEST_F(ClipStoreTest, ReadsWellInHdf5sTools) {
  if (std::system("command -v h5ls >/dev/null && command -v h5dump >/dev/null") != 0)
    GTEST_SKIP() << "h5ls and h5dump are not installed";
  write(small);
  const std::string listing = run("h5ls -r " + path_);
  EXPECT_THAT(listing, HasSubstr("/clips/" + small_name + "/frames Dataset {5/Inf, 3, 8, 12, 3}"));
  EXPECT_THAT(listing, HasSubstr("/clips/" + small_name + "/xxh3 Dataset {5}"));
  const std::string text = run("h5dump -d /clips/" + small_name + "/text " + path_);
  EXPECT_THAT(text, HasSubstr("bright disc"));
  const std::string header = run("h5dump -H " + path_);
  EXPECT_THAT(header, HasSubstr("schema_version"));
  EXPECT_THAT(header, HasSubstr("H5T_STD_U8LE"));
}

TEST_F(ClipStoreTest, Describe) {
  write(small);
  const std::string text = describe_clip_store(path_);
  EXPECT_THAT(text, HasSubstr("bucket " + small_name + ": 5 clips, u8 [3,8,12,3]"));
  EXPECT_THAT(text, HasSubstr("bright disc"));
}

TEST_F(ClipStoreTest, MissingFile) { expect_refused("cannot open"); }

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
  EXPECT_THROW(describe_clip_store(path_), Error);
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
  for (const char* name : {"frames", "fps", "source", "text", "xxh3"}) {
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
