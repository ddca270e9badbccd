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
  expect_refused("a directory, not a file");
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

TEST_F(ClipStoreTest, ClipsOfAnotherForm) {
  const struct {
    hid_t type;
    std::vector<hsize_t> dims, chunk;
    const char* what;
  } cases[] = {
      {H5T_STD_I16LE, {5, 3, 8, 12, 3}, {1, 3, 8, 12, 3}, "another type than uint8"},
      {H5T_STD_U8LE, {5, 3, 8, 36}, {1, 3, 8, 36}, "4 dimensions"},
      {H5T_STD_U8LE, {5, 3, 8, 12, 1}, {1, 3, 8, 12, 1}, "1 channels"},
      {H5T_STD_U8LE, {5, 3, 8, 12, 3}, {2, 3, 8, 12, 3}, "one clip a chunk"},
      {H5T_STD_U8LE, {5, 3, 8, 12, 3}, {1, 3, 8, 12, 3}, "no data for clip 0"},  // never written
  };
  for (const auto& c : cases) {
    write(small);
    edit([&](hid_t f) {
      replace_dataset(f, "clips/" + small_name + "/frames", c.type, c.dims, c.chunk);
    });
    expect_refused(c.what);
  }
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
  expect_refused("xxh3 of 4 values, expected 5");
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

using ClipStoreLatents = ClipStoreTest;  // moments and text features, too

// Latents of 2 frames of 3x3, of 5 frames of 24x24.
Bucket latents_bucket(DType dtype) {
  Bucket b;
  b.name = "latents";
  b.frames = 2;
  b.height = b.width = 3;
  b.channels = 4;
  b.dtype = dtype;
  b.pixel_frames = 5;
  b.pixel_height = b.pixel_width = 24;
  return b;
}

TEST_F(ClipStoreLatents, HalfLatents) {
  const Bucket b = latents_bucket(DType::f16);
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
  Bucket b = latents_bucket(DType::f32);
  b.name = "moments";
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

TEST_F(ClipStoreLatents, MomentsAndTextFeatures) {
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
  const std::string text = describe_store(path_);
  EXPECT_THAT(text, HasSubstr("moments (means, log variances) of 5x24x24 footage"));
  EXPECT_THAT(text, HasSubstr("vae.shift=[-0.25,0.5] vae.scale=[3.5,2]"));
  EXPECT_THAT(text, HasSubstr("2 tokens, at most 2 a clip, f32 [3]"));
  write_moments<f16>(path_);
  check(DType::f16, 0x1p-11f);
  write_moments<bf16>(path_);
  check(DType::bf16, 0x1p-8f);
}

TEST_F(ClipStoreLatents, BadTextFeatures) {
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

TEST_F(ClipStoreLatents, FlippedBitInACaption) {
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

TEST_F(ClipStoreLatents, BadMoments) {
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
        const h5::Handle type(H5Aget_type(a), H5Tclose);
        H5Awrite(a, type, "picture");  // as long as "moments"
      },
      "\"picture\"");
}

TEST_F(ClipStoreLatents, NothingIsLeftWithoutCommit) {
  { ClipStoreWriter(path_).add_bucket(moments_bucket(DType::f16)); }
  { ClipStoreWriter writer(path_); }
  EXPECT_TRUE(fs::is_empty(dir_));
}

}  // namespace
}  // namespace weft
