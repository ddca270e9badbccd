// Latents, moments and text features in the clip store.
#include <array>
#include <cmath>
#include <fstream>

#include "clip_store_fixture.h"

namespace weft {
namespace {

using testing::HasSubstr;
using ClipStoreLatents = ClipStoreTest;

TEST_F(ClipStoreLatents, HalfLatents) {
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
