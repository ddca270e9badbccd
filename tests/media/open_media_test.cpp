// Media that is not what it says, or asks for what it may not have.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "media/media_source.h"
#include "media/video_reader.h"
#include "media/writers.h"
#include "tests/folder.h"

namespace weft {
namespace {

using testing::AnyOf;
using testing::HasSubstr;
class OpenMediaTest : public FolderTest {
 protected:
  void SetUp() override {
    FolderTest::SetUp();
    home_ = fs::current_path();
    fs::current_path(dir_);
    const std::vector<std::uint8_t> grey(12 * 16 * 16 * 3, 128);
    write_mp4("clip.mp4", {grey.data(), 12, 16, 16}, 12);
    write_png("grey.png", 16, 16, std::span(grey).first(16 * 16 * 3));
  }
  void TearDown() override {
    fs::current_path(home_);
    FolderTest::TearDown();
  }

  fs::path home_;
};

// Code and message of the Error that reading all of it ends with, or the number of frames.
std::string read_all(const std::string& path, MediaTrust trust, const MediaAccess& access = {}) {
  try {
    VideoReader reader({path, trust}, {.access = access});
    int frames = 0;
    while (reader.next() != nullptr) ++frames;
    return fmt::format("{} frames", frames);
  } catch (const Error& e) {
    return fmt::format("{}: {} ({})", static_cast<int>(e.code()), e.what(), e.hint());
  }
}
std::string read_file(const std::string& path, const MediaAccess& access = {}) {
  return read_all(path, MediaTrust::untrusted, access);
}

TEST_F(OpenMediaTest, ReadsFilesUnderAnyName) {
  EXPECT_EQ(read_file("clip.mp4"), "12 frames");
  EXPECT_EQ(read_file("grey.png"), "1 frames");
  // Names that FFmpeg takes for protocols, options or patterns.
  for (const std::string name : {"concat:a.mp4|b.mp4", "subfile,,start,0,end,9,,:clip.mp4",
                                 "http:x", "%03d.png", "-i", "crypto:x.mp4"}) {
    fs::copy_file("clip.mp4", name);
    EXPECT_EQ(read_file(name), "12 frames") << name;
  }
  fs::create_symlink("clip.mp4", "link.avi");
  EXPECT_EQ(read_file("link.avi"), "12 frames");
}

TEST_F(OpenMediaTest, NamesAreNeverProtocols) {
  write("000.png", "");
  fs::copy_file("grey.png", "001.png");
  for (const std::string name : {"concat:clip.mp4|clip.mp4", "subfile,,start,0,end,0,,:clip.mp4",
                                 "file:clip.mp4", "data:video/mp4;base64,AAAA", "%03d.png",
                                 "pipe:0", "tee:clip.mp4", "async:clip.mp4", "cache:file:clip.mp4"})
    EXPECT_THAT(read_file(name), HasSubstr("3: cannot open " + name + ": No such file")) << name;
}

TEST_F(OpenMediaTest, FormatsThatNameOtherFilesAreRefused) {
  const std::string clip = (dir_ / "clip.mp4").string();
  write("hls.mp4", "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile://" +
                       clip + "\n#EXT-X-ENDLIST\n");
  write("concat.mp4", "ffconcat version 1.0\nfile '" + clip + "'\n");
  write("dash.mp4",
        "<?xml version=\"1.0\"?>\n<MPD xmlns=\"urn:mpeg:dash:schema:mpd:2011\" "
        "type=\"static\"><Period><AdaptationSet><Representation><BaseURL>file://" +
            clip + "</BaseURL></Representation></AdaptationSet></Period></MPD>\n");
  write("sdp.mp4",
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nm=video 5004 RTP/AVP "
        "96\na=rtpmap:96 H264/90000\n");
  write("draw.png",
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"16\" height=\"16\">"
        "<image href=\"file://" +
            (dir_ / "grey.png").string() + "\"/></svg>\n");
  for (const char* name : {"hls.mp4", "concat.mp4", "dash.mp4", "sdp.mp4", "draw.png"}) {
    EXPECT_THAT(read_file(name), HasSubstr(std::string("3: cannot open video ") + name)) << name;
    EXPECT_THAT(read_all(name, MediaTrust::deck), HasSubstr("3: cannot open video")) << name;
  }
  // FFmpeg 7.1 itself takes no such list under another name.
  EXPECT_THAT(read_file("hls.mp4"),
              AnyOf(HasSubstr("of the kind \"hls\""), HasSubstr("Not detecting m3u8/hls")));
  EXPECT_THAT(read_file("concat.mp4"), HasSubstr("of the kind \"concat\""));
}

TEST_F(OpenMediaTest, OnlyRegularFiles) {
  ASSERT_EQ(mkfifo("fifo.mp4", 0600), 0);
  fs::create_symlink("/dev/zero", "zero.mp4");
  for (const char* name : {"fifo.mp4", "zero.mp4", "/dev/zero", "."})
    EXPECT_THAT(read_file(name), HasSubstr("not a file")) << name;
}

TEST_F(OpenMediaTest, SourcesOfFFmpegAreForDecksAlone) {
  EXPECT_THAT(read_file("lavfi:testsrc2=duration=1"), HasSubstr("may not be named by a prompt"));
  EXPECT_EQ(read_all("lavfi:testsrc2=duration=1:rate=4:size=32x32,hue=s=0", MediaTrust::deck),
            "4 frames");
  const std::string written = (dir_ / "written").string();
  const std::vector<std::string> graphs = {
      "testsrc2=s=48x32:d=1,metadata=mode=add:key=a:value=b,metadata=print:file=" + written,
      "movie=" + (dir_ / "clip.mp4").string(),
      "testsrc2[a];movie=clip.mp4[b];[a][b]overlay",
      "testsrc2,drawtext=textfile=/etc/passwd",
      "testsrc2,lut3d=/etc/passwd",
      "testsrc2,sendcmd=f=/etc/passwd",
      "testsrc2,zmq",
      "testsrc2,curves=psfile=/etc/passwd",
      "life=filename=/etc/passwd",
      "testsrc2,'metadata=print:file=" + written + "'",
      "testsrc2,\\metadata=print:file=" + written,
      "testsrc2, metadata=print:file=" + written,
      "testsrc2[a,b],metadata=print:file=" + written,
      "sws_flags=x;testsrc2",
      "testsrc2@a=d=1",
      "testsrc2,,null",
      ""};
  for (const std::string& graph : graphs)
    EXPECT_THAT(read_all("lavfi:" + graph, MediaTrust::deck), HasSubstr("3: lavfi:")) << graph;
  EXPECT_FALSE(fs::exists(written));
  EXPECT_NO_THROW(check_source_graph("testsrc2[a];color=c=red@0.5:s=8x8[b];[a][b]overlay=x=1"));
}

TEST_F(OpenMediaTest, LimitsOfTheDeck) {
  MediaAccess access;
  access.limits.max_gib = 1e-7;  // 107 bytes
  EXPECT_THAT(read_file("clip.mp4", access), HasSubstr("media.max_gib = 1e-07"));
  access = {};
  access.limits.max_megapixels = 0.000255;
  EXPECT_THAT(read_file("clip.mp4", access), HasSubstr("raise media.max_megapixels"));
  EXPECT_THAT(read_file("grey.png", access), HasSubstr("raise media.max_megapixels"));
  access.limits.max_megapixels = 0.000256;
  EXPECT_EQ(read_file("clip.mp4", access), "12 frames");
  EXPECT_THAT(read_all("lavfi:testsrc2=size=4096x4096", MediaTrust::deck, access),
              HasSubstr("4096x4096 pixels"));
  access = {};
  access.limits.max_frames = 11;
  EXPECT_THAT(read_file("clip.mp4", access), HasSubstr("media.max_frames = 11"));
  access.limits.max_frames = 12;
  EXPECT_EQ(read_file("clip.mp4", access), "12 frames");
  EXPECT_THAT(read_all("lavfi:testsrc2=size=32x32", MediaTrust::deck, access),
              HasSubstr("give the source a duration"));
  access = {};
  access.limits.max_hours = 0.5 / 3600;
  EXPECT_THAT(read_file("clip.mp4", access), HasSubstr("media.max_hours"));
  EXPECT_THAT(read_all("lavfi:testsrc2=size=32x32", MediaTrust::deck, access),
              HasSubstr("media.max_hours"));
  access = {};
  access.limits.timeout = 1e-9;  // any look at the clock is too late
  EXPECT_THAT(read_file("clip.mp4", access), HasSubstr("media.timeout"));
  EXPECT_THAT(read_all("lavfi:testsrc2=size=32x32", MediaTrust::deck, access),
              HasSubstr("media.timeout"));
}

TEST_F(OpenMediaTest, APictureThatClaimsToBeHugeIsRefused) {
  std::ifstream in("grey.png", std::ios::binary);
  std::string png{std::istreambuf_iterator<char>(in), {}};
  png[16] = png[20] = 0;
  png[17] = png[21] = 1;  // 65552 x 65552, whatever the checksum says
  write("bomb.png", png);
  EXPECT_THAT(read_file("bomb.png"), HasSubstr("3: cannot "));
}

TEST_F(OpenMediaTest, AStopEndsReading) {
  MediaAccess access;
  int asked = 0;
  access.stop = [&] { return ++asked > 40; };
  EXPECT_THAT(read_all("lavfi:testsrc2=size=32x32", MediaTrust::deck, access),
              HasSubstr("75: stopped on request"));
  EXPECT_THAT(read_file("clip.mp4", access), HasSubstr("75: stopped on request"));
}

TEST_F(OpenMediaTest, DownloadsMayBeForbidden) {
  MediaAccess access;
  access.limits.max_download_mib = 0;
  try {
    download("http://127.0.0.1:9/x.mp4", "x.mp4", access);
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("media.max_download_mib = 0"));
  }
  EXPECT_FALSE(fs::exists("x.mp4.part"));
}

}  // namespace
}  // namespace weft
