// Stores that are damaged anywhere: one that version 2 wrote, with texts of variable length, and
// one of today. The program must live, and say what it found.
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>

#include "clip_store_fixture.h"
#include "data/store_file.h"

namespace weft {
namespace {

using testing::HasSubstr;

// Written by the last weft that wrote version 2: six clips of pixels and two of moments, with text
// features, between them.
const fs::path version_two = fs::path(WEFT_TEST_DATA) / "clips_v2.h5";

std::string content(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void put(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), std::ssize(bytes));
}

// Everything that a reader gets from a store.
std::string all_of(const std::string& path) {
  const auto store = open_clip_store(path, true);
  std::string all;
  for (std::size_t b = 0; b < store->buckets().size(); ++b) {
    const Bucket& bucket = store->buckets()[b];
    all += fmt::format("{} {} {} {} {} {} {} {} {}", bucket.name, bucket.frames, bucket.height,
                       bucket.width, bucket.channels, name_of(bucket.dtype), bucket.pixel_frames,
                       bucket.pixel_height, bucket.pixel_width);
    all += fmt::format(" {} {} {} {}\n", bucket.clips, bucket.moments, fmt::join(bucket.scale, " "),
                       fmt::join(bucket.shift, " "));
    std::string clip(bucket.clip_bytes(), '\0');
    for (std::int64_t i = 0; i < bucket.clips; ++i) {
      const int at = static_cast<int>(b);
      store->read(at, i, std::as_writable_bytes(std::span(clip)));
      const ClipInfo info = store->info(at, i);
      all += fmt::format("{} {} {} {}\n{}\n", info.fps, info.source, info.text,
                         fmt::join(store->read_text(at, i), " "), clip);
    }
  }
  return all;
}

// For a shell: this program as the reader.
const std::string reader = fmt::format("/proc/{}/exe --read-clip-store", getpid());

class ClipStoreDamage : public ClipStoreTest {
 protected:
  void TearDown() override {
    read_stores_with({"/proc/self/exe", "--read-clip-store"});
    ClipStoreTest::TearDown();
  }
  // The version 2 store's clips in a store of today.
  void write_anew() {
    const auto old = open_clip_store(version_two, true);
    ClipStoreWriter writer(path_, "made by hand");
    for (std::size_t b = 0; b < old->buckets().size(); ++b) {
      const Bucket& bucket = old->buckets()[b];
      const int id = writer.add_bucket(bucket), from = static_cast<int>(b);
      std::vector<std::byte> clip(bucket.clip_bytes());
      for (std::int64_t i = 0; i < bucket.clips; ++i) {
        old->read(from, i, clip);
        const std::vector<float> text = old->read_text(from, i);
        writer.append(id, clip, old->info(from, i), std::as_bytes(std::span(text)));
      }
    }
    writer.commit();
  }
};

TEST_F(ClipStoreDamage, ReadsVersionTwo) {
  write_anew();
  EXPECT_EQ(all_of(version_two), all_of(path_));
  EXPECT_EQ(stored_made_by(version_two), "made by hand");
  EXPECT_EQ(stored_made_by(path_), "made by hand");
}

TEST_F(ClipStoreDamage, NoTextsOfVariableLength) {
  if (std::system("command -v h5dump >/dev/null") != 0) GTEST_SKIP() << "h5dump is not installed";
  write_anew();
  EXPECT_THAT(run("h5dump -H " + version_two.string()), HasSubstr("H5T_VARIABLE"));
  EXPECT_THAT(run("h5dump -H " + path_), testing::Not(HasSubstr("H5T_VARIABLE")));
}

// HDF5 keeps the second in which an object was made unless told not to.
TEST_F(ClipStoreDamage, SameClipsMakeTheSameFileAtAnyTime) {
  write_anew();
  const std::string first = content(path_);
  write_anew();
  EXPECT_EQ(content(path_), first);
  edit([](hid_t f) {
    for (const char* name : {"/", "/clips", "/clips/moments", "/clips/moments/latents",
                             "/clips/moments/text_features", "/clips/moments/captions"}) {
#if H5_VERSION_GE(1, 12, 0)
      H5O_info2_t info;
      ASSERT_GE(H5Oget_info_by_name3(f, name, &info, H5O_INFO_TIME, H5P_DEFAULT), 0);
#else
      H5O_info_t info;
      ASSERT_GE(H5Oget_info_by_name2(f, name, &info, H5O_INFO_TIME, H5P_DEFAULT), 0);
#endif
      EXPECT_EQ(info.ctime + info.mtime + info.atime + info.btime, 0) << name;
    }
  });
}

// Each value of each table, and each attribute: changed as somebody would with HDF5's own tools.
TEST_F(ClipStoreDamage, TablesAreHashed) {
  const auto changed = [&](const char* table, auto value) {
    write_anew();
    edit([&](hid_t f) {
      const h5::Handle d(H5Dopen2(f, (std::string("clips/moments/") + table).c_str(), H5P_DEFAULT),
                         H5Dclose);
      const h5::Handle type(H5Dget_type(d), H5Tclose), space(H5Dget_space(d), H5Sclose);
      std::vector<decltype(value)> values(
          static_cast<std::size_t>(H5Sget_simple_extent_npoints(space)));
      ASSERT_EQ(H5Tget_size(type), sizeof value) << table;
      H5Dread(d, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data());
      values.front() = value;
      H5Dwrite(d, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data());
    });
    expect_refused("bucket moments has damaged tables: their XXH3 is");
  };
  changed("fps", 25.0f);
  changed("xxh3", std::uint64_t{7});
  changed("text_xxh3", std::uint64_t{7});
  changed("sources", std::uint8_t{'z'});
  changed("captions", std::uint8_t{'z'});
  changed("sources_end", std::uint64_t{0});
  write_anew();
  edit([](hid_t f) {
    const h5::Handle group(H5Gopen2(f, "clips/moments", H5P_DEFAULT), H5Gclose);
    const h5::Handle a(H5Aopen(group, "pixel_frames", H5P_DEFAULT), H5Aclose);
    const std::int64_t frames = 9;
    H5Awrite(a, H5T_NATIVE_INT64, &frames);
  });
  expect_refused("damaged tables");
}

// WEFT_STORE_MUTANTS=300 for more than the usual number.
TEST_F(ClipStoreDamage, MutatedAnywhere) {
  const char* asked = std::getenv("WEFT_STORE_MUTANTS");
  const int mutants = asked != nullptr ? std::atoi(asked) : 40;
  write_anew();
  // Some mutants keep HDF5 busy for ever: two processor seconds are enough for a store of this
  // size.
  read_stores_with({"/bin/sh", "-c", "ulimit -t 2; exec " + reader + " \"$0\" \"$1\""});
  const std::string bases[] = {content(version_two), content(path_)};
  const std::string want = all_of(path_);
  int named = 0, crashed = 0, harmless = 0, unseen = 0;
  for (int seed = 0; seed < mutants; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    std::mt19937 random(static_cast<unsigned>(seed));
    const bool today = seed % 2 == 1;
    std::string bytes = bases[today];
    const int kind = seed / 2 % 4;
    if (kind == 3) {
      bytes.resize(random() % bytes.size());
    } else {
      for (int i = 0; i < 1 + 7 * (kind == 1); ++i)
        bytes[random() % bytes.size()] ^= 1 << random() % 8;
      if (kind == 2) bytes.replace(random() % (bytes.size() - 64), 64, 64, '\0');
    }
    put(path_, bytes);
    try {
      const bool same = all_of(path_) == want;
      EXPECT_TRUE(same || !today) << "a store of today was damaged unseen";
      ++(same ? harmless : unseen);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data) << e.what();
      EXPECT_THAT(e.what(), HasSubstr(path_));
      ++named;
      if (std::strstr(e.what(), "HDF5 library") != nullptr) ++crashed;
    }
  }
  std::printf(
      "%d mutants: %d named (%d of them after HDF5 crashed), %d without effect, %d of version 2 "
      "with texts or rates changed unseen\n",
      mutants, named, crashed, harmless, unseen);
}

// WEFT_FLIPS=1000 for more than the usual number.
TEST_F(ClipStoreDamage, FlippedAnywhere) {
  const char* asked = std::getenv("WEFT_FLIPS");
  const int flips = asked != nullptr ? std::atoi(asked) : 20;
  write_anew();
  read_stores_with({"/bin/sh", "-c", "ulimit -t 2; exec " + reader + " \"$0\" \"$1\""});
  const std::string good = content(path_), want = all_of(path_);
  int named = 0;
  std::mt19937 random(3);
  for (int flip = 0; flip < flips; ++flip) {
    const std::size_t at = random() % good.size();
    std::string bytes = good;
    bytes[at] ^= 1 << random() % 8;
    put(path_, bytes);
    SCOPED_TRACE(fmt::format("flip {} in byte {}", flip, at));
    try {
      EXPECT_EQ(all_of(path_), want) << "damaged unseen";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data) << e.what();
      EXPECT_THAT(e.what(), HasSubstr(path_));
      ++named;
    }
  }
  std::printf("%d flips of a store: %d named, %d without effect\n", flips, named, flips - named);
}

// The child's deaths to order, by children that are shells.
class ClipStoreChild : public ClipStoreTest {
 protected:
  void SetUp() override {
    ClipStoreTest::SetUp();
    write("clips=2,frames=1,height=4,width=4");
  }
  void TearDown() override {
    read_stores_with({"/proc/self/exe", "--read-clip-store"});
    ClipStoreTest::TearDown();
  }
  void expect_refused_after(const std::string& script, const std::string& what) {
    read_stores_with({"/bin/sh", "-c", script});
    expect_refused(what);
  }
};

TEST_F(ClipStoreChild, Crashes) {
  expect_refused_after("kill -SEGV $$",
                       "is damaged: reading its structure crashed the HDF5 library (signal 11)");
  expect_refused_after("exit 9", "ended the HDF5 library's process with exit code 9");
}

TEST_F(ClipStoreChild, HasNoEnd) {
  expect_refused_after("ulimit -S -t 1; while :; do :; done", "busy without end");
}

TEST_F(ClipStoreChild, TalksNonsense) {
  expect_refused_after("echo nonsense that no reader writes", "an invalid result");
  expect_refused_after("exit 0", "an invalid result");
  expect_refused_after("head -c 100000 /dev/zero | tr '\\0' '\\377'", "invalid result");
}

// What stops the job must not look like damage.
TEST_F(ClipStoreChild, OutlivesARequestToStop) {
  read_stores_with(
      {"/bin/sh", "-c",
       "kill -TERM $$; kill -INT $$; kill -USR1 $$; exec " + reader + " \"$0\" \"$1\""});
  EXPECT_EQ(open_clip_store(path_, true)->buckets()[0].clips, 2);
}

TEST_F(ClipStoreChild, CannotBeStarted) {
  read_stores_with({(dir_ / "nothing").string()});
  try {
    open_clip_store(path_, true);
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("cannot start"));
  }
}

}  // namespace
}  // namespace weft

// Every store that this program's tests open is read in a child, as in weft itself.
int main(int argc, char** argv) {
  if (const auto code = weft::serve_as_store_reader(argc, argv)) return *code;
  testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
