#include "media/image_file.h"

#include <gtest/gtest.h>

#include <string_view>

namespace weft {
namespace {

using std::string_view_literals::operator""sv;

std::string what(std::string_view begin) {
  const FileKind kind = unreadable_kind(std::as_bytes(std::span(begin)));
  return kind.what == nullptr ? "" : kind.what;
}

TEST(FileKind, NamesWhatIsNoMedium) {
  EXPECT_EQ(what(""), "an empty file");
  EXPECT_EQ(what("PAR1\x15\x04"), "a Parquet table");
  EXPECT_EQ(what("PK\x03\x04\x14"), "a ZIP archive");
  EXPECT_EQ(what("\x1f\x8b\x08"), "packed with gzip");
  EXPECT_EQ(what("%PDF-1.7"), "a PDF");
  EXPECT_EQ(what(std::string(257, 'x') + "ustar"), "a tar archive");
  EXPECT_EQ(what(" \n<!DOCTYPE HTML>"), "a web page");
  EXPECT_EQ(what("version https://git-lfs.github.com/spec/v1"),
            "a pointer of Git LFS, not the file itself");
  EXPECT_EQ(what("\0\0\0\x18"
                 "ftypheic\0\0\0\0mif1heic"sv),
            "a HEIC picture");
  EXPECT_EQ(what("\0\0\0\x18"
                 "ftypmif1\0\0\0\0mif1heic"sv),
            "a HEIC picture");
  EXPECT_EQ(what("RIFF\x68\1\0\0WEBPVP8X\x0a\0\0\0\2\0\0\0"sv), "an animated WebP");
}

TEST(FileKind, LeavesMediaAlone) {
  EXPECT_EQ(what("RIFF\x68\1\0\0WEBPVP8X\x0a\0\0\0\x10\0\0\0"sv), "");
  EXPECT_EQ(what("\0\0\0\x1c"
                 "ftypavif\0\0\0\0mif1avifmiaf"sv),
            "");
  EXPECT_EQ(what("\0\0\0\x18"
                 "ftypisom\0\0\2\0isomiso2"sv),
            "");
  EXPECT_EQ(what("\xff\xd8\xff\xe0"sv), "");
  EXPECT_EQ(what("x"), "");
}

}  // namespace
}  // namespace weft
