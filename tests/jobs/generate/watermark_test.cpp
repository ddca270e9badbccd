// Pictures laid over clips.
#include "jobs/generate/watermark.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "core/error.h"
#include "media/writers.h"

namespace weft {
namespace {

TEST(Watermark, CoversATenthOfTheHeight) {
  const auto path = std::filesystem::temp_directory_path() /
                    ("weft_watermark_" + std::to_string(::getpid()) + ".png");
  std::vector<std::uint8_t> mark;
  for (int i = 0; i < 20 * 40; ++i) mark.insert(mark.end(), {200, 100, 50});
  write_png(path.string(), 20, 40, mark);
  const Watermark watermark(path.string());
  std::vector<std::uint8_t> rgb(2 * 40 * 32 * 3, 7);
  watermark.lay_over(rgb.data(), 2, 40, 32);
  for (std::int64_t t = 0; t < 2; ++t)
    for (std::int64_t y = 0; y < 40; ++y)
      for (std::int64_t x = 0; x < 32; ++x)
        ASSERT_EQ(rgb[static_cast<std::size_t>(((t * 40 + y) * 32 + x) * 3)],
                  y < 4 && x < 8 ? 200 : 7)
            << y << " " << x;
  std::filesystem::remove(path);
  EXPECT_THROW(Watermark(path.string()), Error);
}

}  // namespace
}  // namespace weft
