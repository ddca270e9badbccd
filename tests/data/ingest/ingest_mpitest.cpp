#include "data/ingest/ingest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <mpi.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "core/error.h"
#include "data/clip_store.h"
#include "data/ingest/cut.h"
#include "data/ingest/selection.h"
#include "data/lists/lists.h"
#include "media/video_reader.h"

static bool each_rank_has_a_host = false;

// In front of MPI's own.
extern "C" int MPI_Comm_split_type(MPI_Comm comm, int type, int key, MPI_Info info,
                                   MPI_Comm* part) {
  if (each_rank_has_a_host) return PMPI_Comm_dup(MPI_COMM_SELF, part);
  return PMPI_Comm_split_type(comm, type, key, info, part);
}

namespace weft {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
namespace fs = std::filesystem;

std::string source(const std::string& name, int frames, const std::string& size) {
  return fmt::format("lavfi:{}=rate=10:size={},trim=end_frame={}", name, size, frames);
}

// Every rank runs every test, in one directory that rank 0 makes.
class IngestTest : public testing::Test {
 protected:
  void SetUp() override {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    int pid = getpid();
    MPI_Bcast(&pid, 1, MPI_INT, 0, MPI_COMM_WORLD);
    dir_ = fs::temp_directory_path() /
           fmt::format("weft_ingest_{}_{}", pid,
                       testing::UnitTest::GetInstance()->current_test_info()->name());
    if (rank_ == 0) fs::create_directories(dir_);
    deck_.get<IngestDeck>().output = file("clips.h5");
    MPI_Barrier(MPI_COMM_WORLD);
  }
  void TearDown() override {
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank_ == 0) fs::remove_all(dir_);
  }

  std::string file(const std::string& name) const { return (dir_ / name).string(); }
  static std::string bytes_of(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  // "bucket: clips" of the store.
  std::vector<std::string> buckets() const {
    std::vector<std::string> out;
    const auto store = open_clip_store(deck_.get<IngestDeck>().output, true);
    for (const Bucket& b : store->buckets()) out.push_back(fmt::format("{}: {}", b.name, b.clips));
    return out;
  }

  int rank_ = 0;
  fs::path dir_;
  Deck deck_;
};

TEST_F(IngestTest, SameStoreAtAnyRankCount) {
  deck_.get<IngestDeck>().inputs = {
      source("testsrc2", 40, "320x180"), source("testsrc", 23, "256x192"), file("missing.mp4"),
      source("smptebars", 5, "300x300"), source("testsrc2", 17, "320x240")};
  deck_.get<IngestDeck>().frames = {5, 17};
  for (const auto& [limit, hosts] : {std::pair{0, 1}, {3, 1}, {0, 3}, {3, 3}}) {
    deck_.get<IngestDeck>().max_clips = limit;
    deck_.get<IngestDeck>().output = file("all.h5");
    each_rank_has_a_host = hosts > 1;
    EXPECT_EQ(ingest(deck_, MPI_COMM_WORLD), 0);
    each_rank_has_a_host = false;
    if (rank_ == 0) {
      deck_.get<IngestDeck>().output = file("one.h5");
      EXPECT_EQ(ingest(deck_, MPI_COMM_SELF), 0);
      EXPECT_EQ(bytes_of(file("all.h5")), bytes_of(file("one.h5")));
      if (limit == 0)
        EXPECT_THAT(buckets(), ElementsAre("144p-17-0.56: 2", "144p-17-0.75: 2", "144p-5-0.56: 1",
                                           "144p-5-0.75: 1", "144p-5-1.00: 1"));
      else
        EXPECT_THAT(buckets(), ElementsAre("144p-17-0.56: 2", "144p-5-0.56: 1"));
      for (const auto& entry : fs::directory_iterator(dir_))  // no part file is left
        EXPECT_TRUE(entry.path().extension() == ".h5" ||
                    entry.path().string().ends_with(".h5.status.json") ||
                    entry.path().string().ends_with(".h5.summary.json"))
            << entry.path();
    }
    MPI_Barrier(MPI_COMM_WORLD);
  }
}

TEST_F(IngestTest, PixelsTimesAndRates) {
  const std::string video = source("testsrc2", 30, "64x48");
  deck_.get<IngestDeck>().inputs = {video};
  deck_.get<IngestDeck>().frames = {4};
  deck_.get<IngestDeck>().frame_interval = 2;
  deck_.get<IngestDeck>().stride = 3;  // windows overlap, and take odd frames too
  deck_.get<IngestDeck>().height = 24;
  deck_.get<IngestDeck>().width = 32;
  EXPECT_EQ(ingest(deck_, MPI_COMM_WORLD), 0);
  if (rank_ != 0) return;
  const Footage whole = read_frames({video, MediaTrust::deck}, 0, 24, 32);
  const auto store = open_clip_store(deck_.get<IngestDeck>().output, true);
  const Bucket& b = store->buckets().at(0);
  ASSERT_EQ(b.clips, 8);  // windows of 8 frames at 0, 3 ... 21
  EXPECT_EQ(b.name, "24x32-4");
  std::vector<std::byte> clip(b.clip_bytes());
  const std::size_t frame = 24 * 32 * 3;
  for (std::int64_t i = 0; i < b.clips; ++i) {
    store->read(0, i, clip);
    for (std::size_t t = 0; t < 4; ++t)
      EXPECT_EQ(
          std::memcmp(clip.data() + t * frame,
                      whole.rgb.data() + (static_cast<std::size_t>(3 * i) + 2 * t) * frame, frame),
          0);
    const ClipInfo info = store->info(0, i);
    EXPECT_FLOAT_EQ(info.fps, 5);
    EXPECT_THAT(info.source, HasSubstr(fmt::format("frame {} at {:.3f} s", 3 * i,
                                                   0.3 * static_cast<double>(i))));
  }
}

// The largest listed resolution that the picture serves, and stills only from stills.
TEST_F(IngestTest, ResolutionAndStills) {
  deck_.get<IngestDeck>().inputs = {source("testsrc2", 6, "320x180"),
                                    source("testsrc2", 6, "480x270")};
  deck_.get<IngestDeck>().resolutions = {"144p", "240p", "360p"};
  deck_.get<IngestDeck>().frames = {1, 5};
  EXPECT_EQ(ingest(deck_, MPI_COMM_WORLD), 0);
  if (rank_ != 0) return;
  EXPECT_THAT(buckets(), ElementsAre("144p-5-0.56: 1", "240p-5-0.56: 1"));
}

TEST_F(IngestTest, BrokenVideosAreSkippedAndStrictSaysSo) {
  if (rank_ == 0) std::ofstream(file("text.mp4")) << "no video";
  MPI_Barrier(MPI_COMM_WORLD);
  deck_.get<IngestDeck>().inputs = {file("text.mp4"), source("testsrc2", 5, "320x180")};
  deck_.get<IngestDeck>().frames = {5};
  EXPECT_EQ(ingest(deck_, MPI_COMM_WORLD), 0);
  deck_.get<IngestDeck>().strict = true;
  EXPECT_EQ(ingest(deck_, MPI_COMM_WORLD), 3);
  if (rank_ != 0) return;
  EXPECT_THAT(buckets(), ElementsAre("144p-5-0.56: 1"));
}

TEST_F(IngestTest, NoClipAtAll) {
  deck_.get<IngestDeck>().inputs = {source("testsrc2", 4, "320x180")};  // one frame too short
  deck_.get<IngestDeck>().frames = {5};
  // What a killed job has left makes room before anything is written.
  const std::string left[] = {file("clips.h5.part9"), file("clips.h5.tmp")};
  if (rank_ == 0)
    for (const std::string& name : left) std::ofstream(name) << "old";
  if (rank_ != 0) {
    EXPECT_EQ(ingest(deck_, MPI_COMM_WORLD), 3);
    return;
  }
  try {
    ingest(deck_, MPI_COMM_WORLD);
    FAIL() << "an empty store was made";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::data);
    EXPECT_THAT(e.what(), HasSubstr("4 frames, fewer than the"));
  }
  EXPECT_FALSE(fs::exists(deck_.get<IngestDeck>().output));
  for (const std::string& name : left) EXPECT_FALSE(fs::exists(name)) << name;
}

TEST_F(IngestTest, SenselessDecks) {
  const auto refused = [&](auto change) {
    Deck deck = deck_;
    deck.get<IngestDeck>().inputs = {source("testsrc2", 5, "320x180")};
    change(deck.get<IngestDeck>());
    try {
      ingest(deck, MPI_COMM_WORLD);
      return false;
    } catch (const Error& e) {
      return e.code() == Exit::usage && !e.hint().empty();
    }
  };
  EXPECT_TRUE(refused([](IngestDeck& d) { d.inputs.clear(); }));
  EXPECT_TRUE(refused([](IngestDeck& d) { d.frames.clear(); }));
  EXPECT_TRUE(refused([](IngestDeck& d) { d.resolutions = {"145p"}; }));
  EXPECT_TRUE(refused([](IngestDeck& d) { d.height = 32; }));
}

// Filters, measured items and duplicates: the same on every rank.
TEST_F(IngestTest, Selection) {
  const auto item = [&](const std::string& path, double aes, double frames) {
    MediaItem i;
    i.media = {path, MediaTrust::deck};
    i.facts[Fact::aes] = aes;
    i.facts[Fact::num_frames] = frames;
    return i;
  };
  if (rank_ == 0) {
    std::ofstream(file("one.mp4")) << "same bytes";
    std::ofstream(file("two.mp4")) << "SAME BYTES";
    std::ofstream(file("three.mp4")) << "same bytes";
    std::ofstream(file("long.mp4")) << "long";
    std::ofstream(file("shard.tar")) << "in a shard: same bytes";
  }
  MPI_Barrier(MPI_COMM_WORLD);
  const double none = std::nan("");
  MediaItem member = item(file("shard.tar"), 5, 51);
  member.media.member = "m.mp4";
  member.media.begin = 12;
  member.media.bytes = 10;
  const std::vector<MediaItem> all = {item(file("one.mp4"), 5, 51),
                                      item(file("two.mp4"), 5, 51),
                                      item(file("three.mp4"), 5, 51),
                                      item(file("low.mp4"), 4.4, 51),
                                      item(file("na.mp4"), none, 51),
                                      item(file("gone.mp4"), 5, 51),
                                      item(file("long.mp4"), 5, 99),
                                      member,
                                      item(source("testsrc2", 20, "320x180"), 5, 20)};
  IngestDeck& deck = deck_.get<IngestDeck>();
  deck.min_aes = 4.5;
  deck.max_frames = 51;
  deck.min_fps = 10;
  const auto names = [&](const Selection& s) {
    std::vector<std::string> out;
    for (const MediaItem& i : s.kept) out.push_back(fs::path(i.media.name()).filename());
    return out;
  };
  // No file here can be opened but the source, so that only it has a rate.
  Selection s = select_items(all, deck, {}, false, MPI_COMM_WORLD);
  ASSERT_EQ(s.kept.size(), 1u);
  EXPECT_EQ(s.kept[0].facts[Fact::fps], 10);
  EXPECT_EQ(s.kept[0].facts[Fact::height], 180);
  EXPECT_EQ(s.missing, 1);
  deck.min_fps = -1;
  s = select_items(all, deck, {}, false, MPI_COMM_WORLD);
  ASSERT_EQ(s.kept.size(), 3u);
  EXPECT_THAT(names(s), ElementsAre("one.mp4", "two.mp4", HasSubstr("lavfi:")));
  ASSERT_EQ(s.dropped.size(), 3u);
  EXPECT_EQ(s.dropped[0].rule, "min_aes = 4.5");
  EXPECT_EQ(s.dropped[0].items, 2);
  EXPECT_EQ(s.dropped[0].unknown, 1);
  EXPECT_EQ(s.dropped[1].rule, "max_frames = 51");
  EXPECT_EQ(s.dropped[1].items, 1);
  EXPECT_EQ(s.dropped[1].unknown, 0);
  EXPECT_EQ(s.dropped[2].rule, "duplicates");
  EXPECT_EQ(s.dropped[2].items, 2);  // a file, and a member of a shard
  EXPECT_THAT(s.dropped[2].example, HasSubstr("three.mp4 has the bytes of"));
  deck.keep_duplicates = true;
  s = select_items(all, deck, {}, false, MPI_COMM_WORLD);
  EXPECT_THAT(names(s),
              ElementsAre("one.mp4", "two.mp4", "three.mp4", "m.mp4", HasSubstr("lavfi:")));
  deck.max_ocr = 5;
  EXPECT_THROW(select_items(all, deck, {}, false, MPI_COMM_WORLD), Error);
}

// Any column of a list.
TEST_F(IngestTest, BoundsOfColumns) {
  IngestDeck& deck = deck_.get<IngestDeck>();
  deck.inputs = {file("list.csv")};
  const auto row = [](int frames, const char* values) {
    return fmt::format("\"{}\",{}\n", source("testsrc2", frames, "320x180"), values);
  };
  if (rank_ == 0)
    std::ofstream(file("list.csv"))
        << "path,psnr,flicker\n"
        << row(5, "30,1") << row(6, "29.9,1") << row(7, ",1") << row(8, "31,3");
  MPI_Barrier(MPI_COMM_WORLD);
  deck.min = {"psnr=30"};
  deck.max = {"flicker = 2"};
  Columns columns;
  for (const ColumnBound& b : column_bounds(deck)) columns.push_back(b.column);
  ASSERT_THAT(columns, ElementsAre("psnr", "flicker"));
  const auto items = list_media(deck.inputs, "ingest.inputs", {}, Described::yes, {}, columns);
  const Selection s = select_items(items, deck, {}, false, MPI_COMM_WORLD);
  ASSERT_EQ(s.kept.size(), 1u);
  EXPECT_EQ(s.kept[0].facts.values.at(8), 30);
  ASSERT_EQ(s.dropped.size(), 2u);
  EXPECT_EQ(s.dropped[0].rule, "min psnr = 30");
  EXPECT_EQ(s.dropped[0].items, 2);
  EXPECT_EQ(s.dropped[0].unknown, 1);
  EXPECT_EQ(s.dropped[1].items, 1);
  const auto fault = [&] {
    try {
      ingest(deck_, MPI_COMM_WORLD);
      return std::string("accepted");
    } catch (const Error& e) {
      return fmt::format("{}: {}", static_cast<int>(e.code()), e.what());
    }
  };
  deck.min = {"psnrr=30"};
  EXPECT_THAT(fault(), testing::AllOf(HasSubstr("3: "), HasSubstr("psnrr"),
                                      HasSubstr("path, psnr, flicker")));
  for (const char* entry : {"psnr", "=30", "psnr=", "psnr=many", "psnr=nan", "psnr=30=x", ""}) {
    deck.min = {entry};
    EXPECT_THAT(fault(), HasSubstr("2: ingest.min has")) << entry;
  }
}

// Three scenes of 10, 7 and 13 frames, each of one colour.
TEST_F(IngestTest, NoClipCrossesACut) {
  IngestDeck& deck = deck_.get<IngestDeck>();
  deck.inputs = {file("scenes.y4m")};
  if (rank_ == 0) {
    std::ofstream out(file("scenes.y4m"), std::ios::binary);
    out << "YUV4MPEG2 W64 H48 F10:1 Ip A1:1 C420jpeg\n";
    for (const auto& [frames, level] : {std::pair{10, 60}, {7, 150}, {13, 220}})
      for (int i = 0; i < frames; ++i)
        out << "FRAME\n"
            << std::string(64 * 48, static_cast<char>(level))
            << std::string(64 * 48 / 2, static_cast<char>(128));
  }
  MPI_Barrier(MPI_COMM_WORLD);
  deck.height = deck.width = 32;
  const auto starts = [&](double cuts, std::vector<std::int64_t> frames, std::int64_t interval) {
    deck.cuts = cuts;
    deck.frames = std::move(frames);
    deck.frame_interval = interval;
    EXPECT_EQ(ingest(deck_, MPI_COMM_WORLD), 0);
    std::string text;
    if (rank_ != 0) return text;
    const auto store = open_clip_store(deck.output, true);
    for (std::size_t b = 0; b < store->buckets().size(); ++b) {
      const Bucket& bucket = store->buckets()[b];
      std::vector<std::byte> clip(bucket.clip_bytes());
      for (std::int64_t i = 0; i < bucket.clips; ++i) {
        const std::string from = store->info(static_cast<int>(b), i).source;
        text +=
            fmt::format("{}:{} ", bucket.frames, std::atoi(from.c_str() + from.find("frame ") + 6));
        store->read(static_cast<int>(b), i, clip);
        if (cuts > 0) EXPECT_EQ(std::ranges::count(clip, clip[0]), std::ssize(clip)) << text;
      }
    }
    return text;
  };
  const auto expect = [&](const std::string& found, const std::string& wanted) {
    if (rank_ == 0) EXPECT_EQ(found, wanted);
  };
  expect(starts(0, {5}, 1), "5:0 5:5 5:10 5:15 5:20 5:25 ");
  expect(starts(10, {5}, 1), "5:0 5:5 5:10 5:17 5:22 ");
  expect(starts(10, {3}, 2), "3:0 3:10 3:17 3:23 ");
  expect(starts(10, {8, 3}, 1), "3:10 3:13 3:25 8:0 8:17 ");
}

// What is expected is what the cut gives.
TEST_F(IngestTest, Forecast) {
  IngestDeck& deck = deck_.get<IngestDeck>();
  deck.inputs = {source("testsrc2", 40, "320x180"), source("testsrc", 23, "256x192"),
                 source("smptebars", 5, "300x300"), source("testsrc2", 4, "320x240"),
                 source("testsrc2", 40, "64x48")};
  deck.frames = {5, 17, 1};
  const std::vector<double> frames = {40, 23, 5, 4, 40};
  const std::vector<std::pair<double, double>> sizes = {
      {180, 320}, {192, 256}, {300, 300}, {240, 320}, {48, 64}};
  std::vector<MediaItem> items(frames.size() + 1);
  for (std::size_t i = 0; i < frames.size(); ++i) {
    items[i].facts[Fact::num_frames] = frames[i];
    items[i].facts[Fact::height] = sizes[i].first;
    items[i].facts[Fact::width] = sizes[i].second;
  }
  items.back().media.path = "unknown.png";
  for (const auto& [stride, interval] : {std::pair{0, 1}, {0, 2}, {3, 1}, {7, 2}}) {
    deck.stride = stride;
    deck.frame_interval = interval;
    EXPECT_EQ(ingest(deck_, MPI_COMM_WORLD), 0);
    const Forecast f = forecast(items, deck);
    EXPECT_EQ(f.videos, 5);
    EXPECT_EQ(f.pictures, 1);
    EXPECT_EQ(f.small, 1);
    EXPECT_EQ(f.brief, interval == 1 ? 1 : 2);
    EXPECT_THAT(f.unknown, ElementsAre(5));
    if (rank_ != 0) continue;
    std::vector<std::string> expected;
    for (const auto& [bucket, clips] : f.clips)
      expected.push_back(fmt::format("{}: {}", bucket, clips));
    EXPECT_EQ(buckets(), expected) << stride << " " << interval;
  }
}

TEST_F(IngestTest, PlanWritesNothing) {
  deck_.get<IngestDeck>().inputs = {source("testsrc2", 6, "320x180")};
  deck_.get<IngestDeck>().frames = {5};
  EXPECT_EQ(ingest(deck_, MPI_COMM_WORLD, true), 0);
  MPI_Barrier(MPI_COMM_WORLD);
  EXPECT_TRUE(fs::is_empty(dir_));
}

TEST_F(IngestTest, Lists) {
  if (rank_ != 0) return;
  std::ofstream(file("a.csv")) << "\xEF\xBB\xBF"
                                  "id,path,text\r\n"
                               << "1,one.mp4,\"a street, \"\"busy\"\"\nat noon\"\r\n"
                               << "\n2,/two.mp4,\n";
  std::ofstream(file("b.jsonl")) << "{\"path\": \"lavfi:testsrc\", \"text\": \"bars\"}\n\n"
                                 << "{\"path\": \"x.mp4\", \"text\": null}\n";
  std::ofstream(file("v1.avi")).flush();
  std::ofstream(file("v2.avi")).flush();
  const auto list = list_media({file("a.csv"), file("b.jsonl"), file("v?.avi"), "plain.mp4"},
                               "ingest.inputs", {}, Described::yes);
  ASSERT_EQ(list.size(), 7u);
  EXPECT_EQ(list[0].media.path, file("one.mp4"));
  EXPECT_EQ(list[0].text, "a street, \"busy\"\nat noon");
  EXPECT_EQ(list[1].media.path, "/two.mp4");
  EXPECT_EQ(list[1].text, "");
  EXPECT_EQ(list[2].media.path, "lavfi:testsrc");
  EXPECT_EQ(list[2].text, "bars");
  EXPECT_EQ(list[3].media.path, file("x.mp4"));
  EXPECT_EQ(list[4].media.path, file("v1.avi"));
  EXPECT_EQ(list[5].media.path, file("v2.avi"));
  EXPECT_EQ(list[6].media.path, "plain.mp4");
  for (std::size_t i = 0; i < list.size(); ++i)  // what a list names is not what the deck names
    EXPECT_EQ(list[i].media.trust, i < 4 ? MediaTrust::untrusted : MediaTrust::deck) << i;
}

TEST_F(IngestTest, BadLists) {
  if (rank_ != 0) return;
  const auto refused = [&](const std::string& name, const std::string& text) -> std::string {
    if (!text.empty()) std::ofstream(file(name)) << text;
    try {
      list_media({file(name)}, "ingest.inputs", {}, Described::yes);
      return "accepted";
    } catch (const Error& e) {
      return e.code() == Exit::data ? e.what() : "wrong code";
    }
  };
  EXPECT_THAT(refused("none.csv", ""), HasSubstr("cannot open"));
  EXPECT_THAT(refused("none*.mp4", ""), HasSubstr("no file matches"));
  EXPECT_THAT(refused("a.csv", "file,text\nx,y\n"), HasSubstr("no column `path`"));
  EXPECT_THAT(refused("b.csv", "path,text\nx\n"),
              HasSubstr("line 2 has 1 values, and there are 2 columns"));
  EXPECT_THAT(refused("c.csv", "path\n\"x\n"), HasSubstr("line 2: a quote is not closed"));
  EXPECT_THAT(refused("d.jsonl", "{\"path\": \"x\"}\n{\"path\": 3}\n"), HasSubstr("line 2"));
  EXPECT_THAT(refused("e.jsonl", "path,text\n"), HasSubstr("line 1"));
  const std::string deep(50'000, '[');
  EXPECT_THAT(refused("f.jsonl", "{\"path\": " + deep + "\n"), HasSubstr("line 1"));
  ASSERT_EQ(mkfifo(file("g.jsonl").c_str(), 0600), 0);
  EXPECT_THAT(refused("g.jsonl", ""), HasSubstr("not a file"));
  MediaDeck small;
  small.max_list_mib = 1e-6;
  std::ofstream(file("h.jsonl")) << "{\"path\": \"x\"}\n";
  EXPECT_THROW(list_media({file("h.jsonl")}, "ingest.inputs", small, Described::yes), Error);
}

}  // namespace
}  // namespace weft
