// Labelled images as micro-batches: pixels, labels, padding; from memory and from a store.
#include "data/images/image_source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <span>

#include "core/error.h"
#include "data/clip_store.h"
#include "data/images/image_store.h"
#include "data/images/labelled_images.h"
#include "data/step_plan.h"
#include "media/resize.h"

namespace weft {
namespace {

using testing::HasSubstr;

std::string message_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

DataDeck deck_of(const std::string& path) {
  DataDeck d;
  d.path = path;
  d.short_sides = {30, 45};
  d.max_side = 100;
  return d;
}

const std::uint8_t* u8(const std::vector<std::byte>& clip) {
  return reinterpret_cast<const std::uint8_t*>(clip.data());
}

TEST(Shapes, AreTheSameEveryTimeAndDifferByImageAndSeed) {
  const auto one = make_shapes("shapes:images=20,classes=6,height=40..64,width=40..64,seed=1"),
             other = make_shapes("shapes:images=20,classes=6,height=40..64,width=40..64,seed=2");
  LabelledImage a, b, c;
  std::set<std::uint8_t> labels;
  std::set<bool> orientations;
  for (std::int64_t i = 0; i < 20; ++i) {
    one->read(i, a);
    one->read(i, b);
    EXPECT_EQ(a.rgb, b.rgb);
    EXPECT_EQ(a.labels, b.labels);
    EXPECT_EQ(a.size, one->size(i));
    EXPECT_EQ(std::ssize(a.rgb), 3 * a.size.height * a.size.width);
    other->read(i, c);
    EXPECT_NE(a.rgb, c.rgb);
    labels.insert(a.labels.begin(), a.labels.end());
    orientations.insert(a.size.height > a.size.width);
  }
  EXPECT_EQ(labels, (std::set<std::uint8_t>{0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(orientations.size(), 2u);
  EXPECT_EQ(one->num_classes(), 6);
  EXPECT_EQ(one->class_names().size(), 6u);
}

TEST(Shapes, RefuseWhatMakesNoSense) {
  EXPECT_THAT(message_of([] { make_shapes("shapes:image=3"); }),
              HasSubstr("unknown key \"image\""));
  EXPECT_THAT(message_of([] { make_shapes("shapes:classes=1"); }), HasSubstr("out of range"));
  EXPECT_THAT(message_of([] { make_shapes("shapes:height=9..8"); }), HasSubstr("out of range"));
  EXPECT_THAT(message_of([] { make_shapes("shapes:seed=x"); }), HasSubstr("not a whole number"));
}

TEST(ImageSource, HasABucketForEachOrientationAndShortSide) {
  const auto source = open_clip_source(deck_of("shapes:images=30,height=40..64,width=40..64"));
  const auto& buckets = source->buckets();
  ASSERT_EQ(buckets.size(), 4u);
  EXPECT_EQ(buckets[0].name, "landscape-30");
  EXPECT_EQ(buckets[3].name, "portrait-45");
  EXPECT_EQ(buckets[0].clips + buckets[2].clips, 30);
  for (const Bucket& b : buckets) {
    EXPECT_EQ(b.frames, 1);
    EXPECT_EQ(b.label_rate, 8);
    EXPECT_EQ(b.height % 8 + b.width % 8, 0);
  }
  const auto landscape = open_clip_source(deck_of("shapes:images=3,height=40,width=64"));
  ASSERT_EQ(landscape->buckets().size(), 2u);
  EXPECT_EQ(landscape->buckets()[1].height, 48);
  EXPECT_EQ(landscape->buckets()[1].width, 72);
  EXPECT_EQ(landscape->buckets()[0].clip_bytes(), 32u * 48 * 3 + 4 * 6);
}

// Against the two steps of the definition: NEAREST to the view's size, then the pixels at rate * i
// + rate / 2 of a canvas of zeros.
TEST(ImageSource, GivesViewsWithTheirLabels) {
  for (const std::int64_t pad : {-1, 0, 3}) {
    DataDeck deck = deck_of("shapes:images=12,height=40..64,width=40..64,seed=5");
    deck.pad_label = pad;
    deck.padding = 32;
    deck.label_rate = 4;
    const auto images = open_labelled_images(deck.path, true);
    const auto source = open_clip_source(deck);
    const auto plan = source->plan_steps(std::vector<std::int64_t>(4, 3), 2, 1);
    for (std::int64_t step = 0; step < 6; ++step)
      for (const MicroBatch& batch : plan->plan(step)) {
        std::vector<std::byte> clip(source->clip_bytes(batch));
        for (std::size_t i = 0; i < batch.views.size(); ++i) {
          std::fill(clip.begin(), clip.end(), std::byte{0xaa});
          source->read_sample(batch, i, clip);
          const ImageView view = batch.views[i];
          LabelledImage image;
          images->read(batch.samples[i], image);
          const auto [h, w] = image.size;
          if (view.flip)
            for (std::int64_t y = 0; y < h; ++y)
              for (std::int64_t x = 0; x < w / 2; ++x) {
                for (int c = 0; c < 3; ++c)
                  std::swap(image.rgb[(y * w + x) * 3 + c], image.rgb[(y * w + w - 1 - x) * 3 + c]);
                std::swap(image.labels[y * w + x], image.labels[y * w + w - 1 - x]);
              }
          std::vector<std::uint8_t> rgb(view.height * view.width * 3),
              labels(static_cast<std::size_t>(view.height * view.width));
          pillow_resize({image.rgb.data(), h, w, w * 3}, view.height, view.width,
                        PillowFilter::bilinear, rgb.data(), view.width * 3);
          nearest_resize(image.labels.data(), h, w, view.height, view.width, labels.data());
          for (std::int64_t y = 0; y < batch.height; ++y)
            for (std::int64_t x = 0; x < batch.width * 3; ++x)
              ASSERT_EQ(u8(clip)[y * batch.width * 3 + x],
                        y < view.height && x < view.width * 3 ? rgb[y * view.width * 3 + x] : 0)
                  << y << " " << x;
          const std::uint8_t* out = u8(clip) + batch.height * batch.width * 3;
          for (std::int64_t y = 0; y < batch.height / 4; ++y)
            for (std::int64_t x = 0; x < batch.width / 4; ++x) {
              std::int64_t want = pad + 1;
              if (4 * y < view.height && 4 * x < view.width)
                want = 4 * y + 2 < view.height && 4 * x + 2 < view.width
                           ? labels[(4 * y + 2) * view.width + 4 * x + 2]
                           : 0;
              ASSERT_EQ(out[y * (batch.width / 4) + x], want) << y << " " << x;
            }
        }
      }
  }
}

// In the place of a damaged image comes the next of its orientation, at the size of the view.
TEST(ImageSource, TakesTheNextImageUnderItsOwnId) {
  const DataDeck deck = deck_of("shapes:images=30,height=40..64,width=40..64");
  const auto images = open_labelled_images(deck.path, true);
  const auto source = open_clip_source(deck);
  const auto plan = source->plan_steps(std::vector<std::int64_t>(4, 2), 1, 1);
  for (std::int64_t step = 0; step < 15; ++step) {
    MicroBatch batch = plan->plan(step)[0];
    const bool portrait = batch.bucket >= 2;
    const MicroBatch before = batch;
    std::set<SampleId> seen;
    for (std::int64_t i = 0; i < source->buckets()[batch.bucket].clips; ++i) {
      source->take_next(batch, 1);
      const ImageSize size = images->size(batch.samples[1]);
      EXPECT_EQ(size.height > size.width, portrait);
      EXPECT_EQ(source->info(batch.bucket, batch.clips[1]).source, images->name(batch.samples[1]));
      seen.insert(batch.samples[1]);
    }
    EXPECT_EQ(std::ssize(seen), source->buckets()[batch.bucket].clips);
    EXPECT_EQ(batch.samples, before.samples);
    EXPECT_EQ(batch.views, before.views);
  }
}

TEST(ImageSource, RefusesARateThatDoesNotDivideThePadding) {
  DataDeck deck = deck_of("shapes:images=3");
  deck.padding = 12;
  EXPECT_THAT(message_of([&] { open_clip_source(deck); }), HasSubstr("data.label_rate = 8"));
}

class ImageStoreTest : public testing::Test {
 protected:
  void SetUp() override {
    path_ = std::filesystem::temp_directory_path() /
            ("weft_image_store_" + std::to_string(::getpid()) + ".h5");
    const auto shapes = make_shapes("shapes:images=7,classes=5,height=20..50,width=20..50");
    std::vector<ImageStoreWriter::Entry> entries;
    for (std::int64_t i = 0; i < 7; ++i)
      entries.push_back({shapes->size(i), fmt::format("pictures/{}.png", i)});
    ImageStoreWriter writer(path_.string(), entries, 5, shapes->class_names());
    LabelledImage image;
    for (std::int64_t i = 0; i < 7; ++i) {
      shapes->read(i, image);
      writer.append(image.rgb, image.labels);
    }
    writer.commit();
  }
  void TearDown() override { std::filesystem::remove(path_); }

  // Changes one byte where `bytes` first occur.
  void damage(const std::vector<std::uint8_t>& bytes) {
    std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
    const std::string all((std::istreambuf_iterator<char>(file)), {});
    const auto at = all.find(std::string(bytes.begin(), bytes.end()));
    ASSERT_NE(at, std::string::npos);
    file.seekp(static_cast<std::streamoff>(at));
    file.put(static_cast<char>(all[at] ^ 1));
  }

  std::filesystem::path path_;
};

TEST_F(ImageStoreTest, GivesBackWhatWasWritten) {
  const auto shapes = make_shapes("shapes:images=7,classes=5,height=20..50,width=20..50");
  const auto store = open_labelled_images(path_.string(), true);
  EXPECT_EQ(store->count(), 7);
  EXPECT_EQ(store->num_classes(), 5);
  EXPECT_EQ(store->class_names(), shapes->class_names());
  LabelledImage a, b;
  for (std::int64_t i = 6; i >= 0; --i) {
    store->read(i, a);
    shapes->read(i, b);
    EXPECT_EQ(a.size, b.size);
    EXPECT_EQ(a.rgb, b.rgb);
    EXPECT_EQ(a.labels, b.labels);
    EXPECT_EQ(store->name(i), fmt::format("pictures/{}.png", i));
  }
  const std::string text = describe_image_store(StoreFile(path_.string()));
  EXPECT_THAT(text, HasSubstr("7 images"));
  EXPECT_THAT(text, HasSubstr("class 3 triangle"));
  const auto source = open_clip_source(deck_of(path_.string()));
  EXPECT_EQ(source->buckets()[0].name, "landscape-30");
  EXPECT_THAT(message_of([&] { open_clip_store(path_.string(), true); }),
              HasSubstr("labelled images, not clips"));
}

TEST_F(ImageStoreTest, CountsEachLabelAndKeepsAPalette) {
  const std::string other = path_.string() + ".palette";
  const std::vector<std::uint8_t> palette = {0, 0, 0, 9, 8, 7, 6, 5, 4};
  {
    ImageStoreWriter writer(other, {{{1, 2}, "a"}, {{1, 2}, "b"}}, 3, {"x", "y", "z"}, palette);
    const std::vector<std::uint8_t> rgb(6, 1);
    writer.append(rgb, std::vector<std::uint8_t>{0, 1});
    writer.append(rgb, std::vector<std::uint8_t>{1, 3});
    writer.commit();
  }
  const auto store = open_labelled_images(other, true);
  EXPECT_EQ(store->palette(), palette);
  const auto [images, pixels, pixels_of_images, blank] = store->label_counts();
  ASSERT_EQ(images.size(), 256u);
  EXPECT_THAT(std::span(images).first(5), testing::ElementsAre(1, 2, 0, 1, 0));
  EXPECT_THAT(std::span(pixels).first(5), testing::ElementsAre(1, 2, 0, 1, 0));
  EXPECT_THAT(std::span(pixels_of_images).first(5), testing::ElementsAre(1, 3, 0, 2, 0));
  EXPECT_EQ(missing_classes(images, 3, store->class_names()),
            "1 of 3 classes never occurs in the labels: 1 y");
  EXPECT_EQ(missing_classes(images, 0, {}), "1 of 3 classes never occurs in the labels: 1");
  std::filesystem::remove(other);
}

// Training, evaluation and validation open stores alike.
TEST_F(ImageStoreTest, SaysThatNothingIsLabelled) {
  const std::string other = path_.string() + ".blank";
  {
    ImageStoreWriter writer(other, {{{1, 2}, "a"}}, 3, {"x", "y", "z"}, {});
    writer.append(std::vector<std::uint8_t>(6), std::vector<std::uint8_t>(2));
    writer.commit();
  }
  testing::internal::CaptureStderr();
  open_labelled_images(other, true);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("blank: no pixel is labelled"));
  EXPECT_THAT(describe_image_store(StoreFile(other)), HasSubstr("no labelled pixel in 1 of them"));
  std::filesystem::remove(other);
}

TEST(LabelledImages, ClassesThatAreMissing) {
  std::vector<std::uint64_t> images(256);
  images[0] = 8;
  EXPECT_EQ(missing_classes(images, 0, {}), "no pixel is labelled");
  EXPECT_EQ(missing_classes(images, 3, {}), "no pixel is labelled");
  images[1] = 8;
  EXPECT_EQ(missing_classes(images, 0, {}), "class 0 is the only one that occurs in the labels");
  EXPECT_EQ(missing_classes(images, 1, {}), "");
  EXPECT_EQ(missing_classes(images, 20, {}),
            "19 of 20 classes never occur in the labels: 1, 2, 3, 4, 5, 6, 7, 8, ...");
  images[2] = 1;
  EXPECT_EQ(missing_classes(images, 0, {}), "");
  EXPECT_EQ(missing_classes({}, 5, {}), "");
}

TEST(LabelledImages, WithoutALabelledPixelAreCounted) {
  LabelCounts counts;
  for (const auto& labels : {std::vector<std::uint8_t>{0, 0}, {0, 1}, {2, 1}}) counts.add(labels);
  EXPECT_EQ(counts.blank, 1u);
}

TEST(LabelledImages, OfVersion1AreRead) {
  const auto store = open_labelled_images(WEFT_TEST_DATA "/images_v1.h5", true);
  EXPECT_EQ(store->count(), 2);
  EXPECT_TRUE(store->palette().empty());
  EXPECT_TRUE(store->label_counts().images.empty());
  EXPECT_TRUE(store->label_counts().pixels.empty());
  LabelledImage image;
  store->read(1, image);
  EXPECT_EQ(image.labels.size(), 12u);
}

TEST_F(ImageStoreTest, NamesADamagedImage) {
  LabelledImage image;
  open_labelled_images(path_.string(), true)->read(3, image);
  damage({image.rgb.begin(), image.rgb.begin() + 300});
  const auto store = open_labelled_images(path_.string(), true);
  EXPECT_NO_THROW(store->read(2, image));
  EXPECT_THROW(store->read(3, image), DamagedClip);
  EXPECT_THAT(message_of([&] { store->read(3, image); }), HasSubstr("pictures/3.png"));
  EXPECT_NO_THROW(open_labelled_images(path_.string(), false)->read(3, image));
}

TEST_F(ImageStoreTest, RefusesDamagedTables) {
  const std::string name = "pictures/4.png";
  damage({name.begin(), name.end()});
  EXPECT_THAT(message_of([&] { open_labelled_images(path_.string(), true); }),
              HasSubstr("damaged tables"));
}

TEST_F(ImageStoreTest, RefusesATruncatedFile) {
  std::filesystem::resize_file(path_, std::filesystem::file_size(path_) - 1000);
  EXPECT_THAT(message_of([&] { open_labelled_images(path_.string(), true); }),
              HasSubstr("truncated"));
}

TEST_F(ImageStoreTest, LeavesNothingBehindWithoutCommit) {
  const std::string other = path_.string() + ".other";
  {
    ImageStoreWriter writer(other, {{{4, 5}, "a"}}, 0, {});
    EXPECT_TRUE(std::filesystem::exists(other + ".tmp"));
  }
  EXPECT_FALSE(std::filesystem::exists(other + ".tmp"));
  EXPECT_FALSE(std::filesystem::exists(other));
}

}  // namespace
}  // namespace weft
