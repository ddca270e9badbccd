// Stores that are damaged anywhere: one that version 2 wrote, with texts of variable length, and
// one of today. The program must live, and say what it found.
#include <sys/stat.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>

#include "clip_store_fixture.h"
#include "core/faults.h"
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
  // A copy of the version 2 store, or a store of today, changed by HDF5, is refused for `what`.
  template <class F>
  void expect_refused_when(bool today, const std::string& what, F change) {
    if (today)
      write_anew();
    else
      fs::copy_file(version_two, path_, fs::copy_options::overwrite_existing);
    edit(change);
    SCOPED_TRACE(what);
    expect_refused(what);
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

// Of another file nothing is read, and a pipe is not waited for.
TEST_F(ClipStoreDamage, LinksAreRefused) {
  const std::string pipe = path("pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  for (const bool today : {false, true})
    for (const char* name : {"clips", "clips/moments", "clips/moments/latents", "clips/moments/fps",
                             "not/read/by/weft"}) {
      expect_refused_when(today, fmt::format("has an external link, {},", name), [&](hid_t f) {
        H5Ldelete(f, name, H5P_DEFAULT);
        const h5::Handle folders(H5Pcreate(H5P_LINK_CREATE), H5Pclose);
        H5Pset_create_intermediate_group(folders, 1);
        ASSERT_GE(H5Lcreate_external(pipe.c_str(), "/x", f, name, folders, H5P_DEFAULT), 0);
      });
      expect_refused_when(today, fmt::format("has a soft link, {},", name), [&](hid_t f) {
        const h5::Handle folders(H5Pcreate(H5P_LINK_CREATE), H5Pclose);
        H5Pset_create_intermediate_group(folders, 1);
        H5Ldelete(f, name, H5P_DEFAULT);
        ASSERT_GE(H5Lcreate_soft("/elsewhere", f, name, folders, H5P_DEFAULT), 0);
      });
    }
}

TEST_F(ClipStoreDamage, OtherFilesAreNotRead) {
  const std::string pipe = path("pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const auto fps_with = [&](auto layout) {
    return [&, layout](hid_t f) {
      const hsize_t n = 2;
      const h5::Handle space(H5Screate_simple(1, &n, nullptr), H5Sclose);
      const h5::Handle how(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
      layout(how, space);
      H5Ldelete(f, "clips/moments/fps", H5P_DEFAULT);
      const h5::Handle d(
          H5Dcreate2(f, "clips/moments/fps", H5T_IEEE_F32LE, space, H5P_DEFAULT, how, H5P_DEFAULT),
          H5Dclose);
      ASSERT_TRUE(d.valid());
    };
  };
  for (const bool today : {false, true}) {
    expect_refused_when(today, "keeps fps in other files", fps_with([&](hid_t how, hid_t) {
                          H5Pset_external(how, pipe.c_str(), 0, 8);
                        }));
    expect_refused_when(today, "keeps fps in other files", fps_with([&](hid_t how, hid_t space) {
                          H5Pset_virtual(how, space, pipe.c_str(), "x", space);
                        }));
  }
}

TEST_F(ClipStoreDamage, NoFile) {
  expect_refused("No such file");
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  expect_refused("a pipe or device, not a file");
  fs::remove(path_);
  fs::create_symlink("/dev/zero", path_);
  expect_refused("a pipe or device, not a file");
}

// WEFT_STORE_MUTANTS=300 for more than the usual number.
TEST_F(ClipStoreDamage, MutatedAnywhere) {
  const char* asked = std::getenv("WEFT_STORE_MUTANTS");
  const int mutants = asked != nullptr ? std::atoi(asked) : 40;
  write_anew();
  // Some mutants keep HDF5 busy for ever: two processor seconds are enough for a store of this
  // size.
  read_stores_with({"/bin/sh", "-c", "ulimit -t 2; exec " + reader + " \"$0\""});
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
  read_stores_with({"/bin/sh", "-c", "ulimit -t 2; exec " + reader + " \"$0\""});
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
  // The child is silent for ever.
  Error error_of_silence(double silence, double silence_at_stop) {
    read_stores_with({"/bin/sh", "-c", "exec sleep 100"}, silence, silence_at_stop);
    try {
      open_clip_store(path_, true);
    } catch (const Error& e) {
      EXPECT_THAT(e.what(), HasSubstr(path_));
      return e;
    }
    return {Exit::done, "nothing was thrown"};
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

TEST_F(ClipStoreChild, IsSilent) {
  const Error e = error_of_silence(0.3, 100);
  EXPECT_EQ(e.code(), Exit::data);
  EXPECT_THAT(e.what(), HasSubstr("no sign of life for 0.3 s"));
}

TEST_F(ClipStoreChild, SignsOfLifeCount) {
  read_stores_with(
      {"/bin/sh", "-c",
       "for i in 1 2 3 4 5 6; do printf .; sleep 0.3; done; exec " + reader + " \"$0\""},
      1);
  EXPECT_EQ(open_clip_store(path_, true)->buckets()[0].clips, 2);
}

TEST_F(ClipStoreChild, IsGivenUpForARequestToStop) {
  stop_received = SIGTERM;
  const Error e = error_of_silence(100, 0.3);
  stop_received = 0;
  EXPECT_EQ(e.code(), Exit::stopped);
}

TEST_F(ClipStoreChild, IsKilled) {
  read_stores_with({"/bin/sh", "-c", "kill -KILL $$"});
  try {
    open_clip_store(path_, true);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), exit_killed);
    EXPECT_THAT(e.what(), testing::AllOf(HasSubstr(path_), HasSubstr("was killed"),
                                         testing::Not(HasSubstr("damaged"))));
  }
}

TEST_F(ClipStoreChild, TalksNonsense) {
  expect_refused_after("echo nonsense that no reader writes", "an invalid result");
  expect_refused_after("exit 0", "an invalid result");
  expect_refused_after("head -c 100000 /dev/zero | tr '\\0' '\\377'", "invalid result");
}

// What stops the job must not look like damage.
TEST_F(ClipStoreChild, OutlivesARequestToStop) {
  read_stores_with(
      {"/bin/sh", "-c", "kill -TERM $$; kill -INT $$; kill -USR1 $$; exec " + reader + " \"$0\""});
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
