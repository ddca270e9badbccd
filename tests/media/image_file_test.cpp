// Pictures and label maps from files, and their resizing, as Pillow 9.4 does it: the files, sums
// and samples here are Pillow's.
#include "media/image_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "media/resize.h"
#include "media/video_reader.h"

namespace weft {
namespace {

using testing::HasSubstr;

std::vector<std::uint8_t> picture(std::int64_t height, std::int64_t width) {
  std::vector<std::uint8_t> rgb;
  for (std::int64_t y = 0; y < height; ++y)
    for (std::int64_t x = 0; x < width; ++x)
      for (std::int64_t c = 0; c < 3; ++c)
        rgb.push_back(static_cast<std::uint8_t>(x * 37 + y * 91 + c * 53 + x * y * 7));
  return rgb;
}

// The sum of the values, and of the values times their places from 1 on.
std::pair<std::int64_t, std::int64_t> sums(const std::vector<std::uint8_t>& values) {
  std::int64_t sum = 0, weighted = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    sum += values[i];
    weighted += static_cast<std::int64_t>(i + 1) * values[i];
  }
  return {sum, weighted};
}

TEST(PillowResize, MakesThePixelsOfPillow) {
  const struct {
    std::int64_t from_height, from_width, height, width, sum, weighted, cubic, cubic_weighted, near,
        near_weighted;
  } cases[] = {
      {29, 37, 15, 50, 287760, 324381121, 287920, 324414859, 95888, 36529577},
      {48, 64, 48, 31, 570351, 1277852659, 570318, 1277765987, 192904, 144744344},
      {70, 50, 33, 50, 629821, 1557016146, 629821, 1557057636, 208812, 169502639},
      {9, 1, 28, 3, 30996, 4119849, 30996, 4122597, 9072, 458406},
      {3, 100, 7, 11, 28969, 3336925, 28940, 3331431, 9235, 356457},
      {65, 97, 130, 194, 9679804, 366418672174, 9670675, 366067356751, 3257664, 41177399712},
      {211, 157, 12, 9, 41275, 6709591, 41274, 6708960, 12964, 717685},
      {24, 24, 24, 24, 218768, 189209024, 218768, 189209024, 71408, 20458928},
      {40, 33, 1, 1, 384, 764, 383, 761, 44, 44},
      {2, 1, 37, 64, 699840, 3012518752, 704128, 3097875200, 110656, 194809888},
  };
  for (const auto& c : cases) {
    const auto rgb = picture(c.from_height, c.from_width);
    const std::int64_t stride = c.width * 3 + 5;
    std::vector<std::uint8_t> wide(c.height * stride, 77), out;
    pillow_resize({rgb.data(), c.from_height, c.from_width, c.from_width * 3}, c.height, c.width,
                  PillowFilter::bilinear, wide.data(), stride);
    for (std::int64_t y = 0; y < c.height; ++y) {
      const auto row = wide.begin() + y * stride;
      out.insert(out.end(), row, row + c.width * 3);
      EXPECT_TRUE(std::all_of(row + c.width * 3, row + stride, [](int v) { return v == 77; }));
    }
    EXPECT_EQ(sums(out), std::pair(c.sum, c.weighted)) << c.from_height;
    pillow_resize({rgb.data(), c.from_height, c.from_width, c.from_width * 3}, c.height, c.width,
                  PillowFilter::bicubic, out.data(), c.width * 3);
    EXPECT_EQ(sums(out), std::pair(c.cubic, c.cubic_weighted)) << c.from_height;

    std::vector<std::uint8_t> labels, scaled(static_cast<std::size_t>(c.height * c.width));
    for (std::size_t i = 0; i < rgb.size(); i += 3) labels.push_back(rgb[i]);
    nearest_resize(labels.data(), c.from_height, c.from_width, c.height, c.width, scaled.data());
    EXPECT_EQ(sums(scaled), std::pair(c.near, c.near_weighted)) << c.from_height;
  }
}

TEST(PillowResize, OfAWindowIsTheCropOfTheWhole) {
  const struct {
    std::int64_t from_height, from_width, height, width;
    PixelWindow window;
  } cases[] = {
      {29, 37, 15, 50, {3, 11, 7, 20}},  // fewer rows, more columns
      {48, 64, 48, 31, {40, 30, 8, 1}},  // columns alone
      {70, 50, 33, 50, {32, 7, 1, 43}},  // rows alone
      {24, 24, 24, 24, {5, 0, 19, 13}},  // neither
      {20, 300, 128, 1920, {0, 896, 128, 128}}, {300, 20, 1920, 128, {1792, 0, 128, 128}},
      {211, 157, 12, 9, {0, 0, 12, 9}},
  };
  for (const auto& c : cases)
    for (const PillowFilter filter : {PillowFilter::bilinear, PillowFilter::bicubic}) {
      const auto rgb = picture(c.from_height, c.from_width);
      const RgbView in = {rgb.data(), c.from_height, c.from_width, c.from_width * 3};
      std::vector<std::uint8_t> whole(c.height * c.width * 3), wanted;
      pillow_resize(in, c.height, c.width, filter, whole.data(), c.width * 3);
      const PixelWindow& w = c.window;
      for (std::int64_t y = w.top; y < w.top + w.height; ++y)
        wanted.insert(wanted.end(), whole.begin() + (y * c.width + w.left) * 3,
                      whole.begin() + (y * c.width + w.left + w.width) * 3);
      std::vector<std::uint8_t> got(wanted.size());
      pillow_resize_window(in, c.height, c.width, filter, w, got.data(), w.width * 3);
      EXPECT_EQ(got, wanted) << c.from_height;
    }
}

// Of the same pictures through Image.resize(..., BICUBIC) of Pillow and the crop of
// resize_crop_to_fill.
TEST(PillowResize, CoversAsOpenSoraCropsReferences) {
  const struct {
    std::int64_t from_height, from_width, height, width, sum, weighted;
    std::vector<std::uint8_t> first_row;
  } cases[] = {
      {9, 14, 4, 4, 6186, 150336, {122, 131, 149, 127, 132, 132}},
      {5, 4, 7, 10, 27688, 2896369, {40, 89, 160, 44, 98, 167}},
      {6, 6, 6, 6, 14033, 762416, {0, 53, 106, 37, 90, 143}},
      {40, 31, 13, 29, 143822, 82452436, {153, 195, 25, 50, 106, 127}},
  };
  for (const auto& c : cases) {
    const auto rgb = picture(c.from_height, c.from_width);
    VideoFrame frame;
    frame.rgb = rgb.data();
    frame.stride = c.from_width * 3;
    frame.height = c.from_height;
    frame.width = c.from_width;
    const auto out = cover_bicubic(frame, c.height, c.width);
    ASSERT_EQ(out.size(), static_cast<std::size_t>(c.height * c.width * 3));
    EXPECT_EQ(sums(out), std::pair(c.sum, c.weighted)) << c.height;
    EXPECT_EQ(std::vector<std::uint8_t>(out.begin(), out.begin() + 6), c.first_row) << c.height;
  }
}

// Where (i + 0.5) * in / out would be 1.
TEST(PillowResize, NearestAddsUpItsSteps) { EXPECT_EQ(nearest_samples(2, 7)[3], 0); }

std::vector<std::byte> from_hex(std::string_view hex) {
  std::vector<std::byte> bytes;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2)
    bytes.push_back(static_cast<std::byte>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16)));
  return bytes;
}

struct Fixture {
  std::int64_t height, width, sum, weighted;
  const char* hex;
};
const Fixture colour = {
    5, 6, 11889, 550168,
    "89504e470d0a1a0a0000000d4948445200000006000000050802000000e93a0ab100000037494441"
    "54789c636430cd5245058cd1138eeaa002c66daf158c5101a3a05bb5152a60c859786ded23f177ca"
    "11fa29330b96dedaf84c1a00d61519c839b9641d0000000049454e44ae426082"};
const Fixture grey = {
    5, 6, 12072, 565089,
    "89504e470d0a1a0a0000000d49484452000000060000000508000000004333c23a0000002c494441"
    "54789c63d456555555e5606cd3e19f765f87f1c8dc67c6c6628c365656b24bdeb244abacfee2a802"
    "00a5fb0ad628f07a480000000049454e44ae426082"};
const Fixture with_alpha = {
    5, 6, 11889, 550168,
    "89504e470d0a1a0a0000000d494844520000000600000005080600000066589de600000042494441"
    "54789c636430cd3255c50218a3271c9da08305306e7badf0da180b601474ab76b3c2021872165e5b"
    "b8f691f8a377ca11cafa2933530a96de5abaf199f43300d44b2309385b2eba0000000049454e44ae"
    "426082"};
const Fixture palette = {
    5, 6, 11767, 539333,
    "89504e470d0a1a0a0000000d4948445200000006000000050403000000947680d500000030504c54"
    "45b8ed229ed3886da2d7964b80174c81000000000000000000000000000000000000000000000000"
    "000000000000000000ec92da890000001c49444154789c6370515260506276616076526070523061"
    "5030510000178f025f7c17e5550000000049454e44ae426082"};
const Fixture grey_alpha = {
    5, 6, 12072, 565089,
    "89504e470d0a1a0a0000000d4948445200000006000000050804000000cc51556d00000046494441"
    "54789c63d4feafca00811c0c8c6dff7518f819a631dc67d061603cf27f2ec3330663066306310646"
    "9bff560c560cb20c4b18de32b04433a830ac66f8c2e0c8a0c20000e71a0ed20fc6a6a50000000049"
    "454e44ae426082"};
const Fixture black_and_white = {
    5, 6, 12240, 572985,
    "89504e470d0a1a0a0000000d49484452000000060000000501000000004e23a04b00000012494441"
    "54789c63d06178c0b487690bc31a000e3e032de302ccc30000000049454e44ae426082"};
const Fixture jpeg_420 = {
    13, 17, 73440, 28883838,
    "ffd8ffe000104a46494600010100000100010000ffdb00430006040506050406060506070706080a"
    "100a0a09090a140e0f0c1017141818171416161a1d251f1a1b231c1616202c20232627292a29191f"
    "2d302d283025282928ffdb0043010707070a080a130a0a13281a161a282828282828282828282828"
    "2828282828282828282828282828282828282828282828282828282828282828282828282828ffc0"
    "001108000d001103012200021101031101ffc4001f00000105010101010101000000000000000001"
    "02030405060708090a0bffc400b5100002010303020403050504040000017d010203000411051221"
    "31410613516107227114328191a1082342b1c11552d1f02433627282090a161718191a2526272829"
    "2a3435363738393a434445464748494a535455565758595a636465666768696a737475767778797a"
    "838485868788898a92939495969798999aa2a3a4a5a6a7a8a9aab2b3b4b5b6b7b8b9bac2c3c4c5c6"
    "c7c8c9cad2d3d4d5d6d7d8d9dae1e2e3e4e5e6e7e8e9eaf1f2f3f4f5f6f7f8f9faffc4001f010003"
    "0101010101010101010000000000000102030405060708090a0bffc400b511000201020404030407"
    "05040400010277000102031104052131061241510761711322328108144291a1b1c109233352f015"
    "6272d10a162434e125f11718191a262728292a35363738393a434445464748494a53545556575859"
    "5a636465666768696a737475767778797a82838485868788898a92939495969798999aa2a3a4a5a6"
    "a7a8a9aab2b3b4b5b6b7b8b9bac2c3c4c5c6c7c8c9cad2d3d4d5d6d7d8d9dae2e3e4e5e6e7e8e9ea"
    "f2f3f4f5f6f7f8f9faffda000c03010002110311003f00f22d23c2bf77f77fa576da47857eefeeff"
    "004aee748d1adbe5e3f4aedb48d1adbe5e3f4a9c36259c7c3dc4d3d0f2ff00f8457fe99fe9457b77"
    "f635b7a7e9457a1f5967deff00acd33fffd9"};
const Fixture jpeg_grey = {
    13, 17, 72786, 29857650,
    "ffd8ffe000104a46494600010100000100010000ffdb00430006040506050406060506070706080a"
    "100a0a09090a140e0f0c1017141818171416161a1d251f1a1b231c1616202c20232627292a29191f"
    "2d302d283025282928ffc0000b08000d001101011100ffc4001f0000010501010101010100000000"
    "000000000102030405060708090a0bffc400b5100002010303020403050504040000017d01020300"
    "041105122131410613516107227114328191a1082342b1c11552d1f02433627282090a161718191a"
    "25262728292a3435363738393a434445464748494a535455565758595a636465666768696a737475"
    "767778797a838485868788898a92939495969798999aa2a3a4a5a6a7a8a9aab2b3b4b5b6b7b8b9ba"
    "c2c3c4c5c6c7c8c9cad2d3d4d5d6d7d8d9dae1e2e3e4e5e6e7e8e9eaf1f2f3f4f5f6f7f8f9faffda"
    "0008010100003f00f22d23c2bf77f77fa576da47857eefeeff004adfff008457fe99fe95b5a468d6"
    "df2f1fa576da468d6df2f1fa56f7f635b7a7e95fffd9"};
const Fixture jpeg_progressive = {
    13, 17, 73478, 28868533,
    "ffd8ffe000104a46494600010100000100010000ffdb00430006040506050406060506070706080a"
    "100a0a09090a140e0f0c1017141818171416161a1d251f1a1b231c1616202c20232627292a29191f"
    "2d302d283025282928ffdb0043010707070a080a130a0a13281a161a282828282828282828282828"
    "2828282828282828282828282828282828282828282828282828282828282828282828282828ffc2"
    "001108000d001103012100021101031101ffc4001700000301000000000000000000000000000004"
    "0506ffc40017010003010000000000000000000000000002040507ffda000c030100021003100000"
    "01c85b36e80c5e76dcfcfdf18bdfffc4001910000301010100000000000000000000000002030413"
    "14ffda00080101000105029652594f2928a928a9c54fffc4001a1100020203000000000000000000"
    "00000000020305041314ffda0008010301013f01afca3a8af998dcc7ffc400191101000203000000"
    "000000000000000000000103021112ffda0008010201013f01af274ae5b7ffc40016100101010000"
    "0000000000000000000000310020ffda0008010100063f022231ffc4001710000301000000000000"
    "0000000000000000102131ffda0008010100013f21cc66948488ffda000c03010002000300000010"
    "c101ffc4001811000203000000000000000000000000000021103171ffda0008010301013f10ad9b"
    "168bffc40017110100030000000000000000000000000000011011ffda0008010201013f10af3b6f"
    "ffc4001a100002020300000000000000000000000000a141f11161f0ffda0008010100013f10a82a"
    "0e304722391ad1ffd9"};

const Fixture jpeg_cmyk = {
    5, 6, 4870, 230669,
    "ffd8ffee000e41646f626500640000000000ffdb0043000302020302020303030304030304050805"
    "050404050a070706080c0a0c0c0b0a0b0b0d0e12100d0e110e0b0b1016101113141515150c0f1718"
    "16141812141514ffc000140800050006044311004d11005911004b1100ffc4001600010101000000"
    "00000000000000000000060507ffc400211000020202020203010000000000000000020301040506"
    "0712131411152123ffda000e0443004d0059004b00003f0099b1efc76d79bcee597633d4d39eb184"
    "6465cd17af39aa5adeb7f9ac218950c05a35cad35d725d16446523fb957346d1531fc71ae6c595c7"
    "7dcaf376df2a1b235acdc0621afaad63acdb458efe5f5c1900a042c0899f013dbe61470c697f77ca"
    "1844516d7c4decaea25b02ad241f049ad60e9b7d563c1e16de42c797f43b3e3ea203e18ea322955c"
    "4f7a864770d331d9ff00497addba306480b35abd8368da086c2eb595325be2aa91631edb06c9082e"
    "c1fb13ffd9"};
const Fixture jpeg_ycck = {
    5, 6, 6643, 326146,
    "ffd8ffee000e41646f626500640000000002ffdb0043000302020302020303030304030304050805"
    "050404050a070706080c0a0c0c0b0a0b0b0d0e12100d0e110e0b0b1016101113141515150c0f1718"
    "16141812141514ffc000140800050006044311004d11005911004b1100ffc4001600010101000000"
    "00000000000000000000060507ffc400211000020202020203010000000000000000020301040506"
    "0712131411152123ffda000e0443004d0059004b00003f0099b1efc76d79bcee597633d4d39eb184"
    "6465cd17af39aa5adeb7f9ac218950c05a35cad35d725d16446523fb957346d1531fc71ae6c595c7"
    "7dcaf376df2a1b235acdc0621afaad63acdb458efe5f5c1900a042c0899f013dbe61470c697f77ca"
    "1844516d7c4decaea25b02ad241f049ad60e9b7d563c1e16de42c797f43b3e3ea203e18ea322955c"
    "4f7a864770d331d9ff00497addba306480b35abd8368da086c2eb595325be2aa91631edb06c9082e"
    "c1fb13ffd9"};
const Fixture png_sideways = {
    6, 5, 11889, 554896,
    "89504e470d0a1a0a0000000d4948445200000006000000050802000000e93a0ab10000001a655849"
    "664d4d002a00000008000101120003000000010006000000000000d6674b69000000374944415478"
    "9c636430cd5245058cd1138eeaa002c66daf158c5101a3a05bb5152a60c859786ded23f177ca11fa"
    "29330b96dedaf84c1a00d61519c839b9641d0000000049454e44ae426082"};
const Fixture webp = {
    5, 6, 11889, 550168,
    "5249464640000000574542505650384c330000002f05000100cd9521a2ff6151134952149e02e29f"
    "9808359879ada014172b6034ccf2d444f62b7f60e00079b88026d04014780000"};
const Fixture webp_sideways = {
    6, 5, 11889, 554896,
    "524946467400000057454250565038580a000000080000000500000400005650384c330000002f05"
    "000100cd9521a2ff6151134952149e02e29f9808359879ada014172b6034ccf2d444f62b7f60e000"
    "79b88026d04014780000455849461a0000004d4d002a000000080001011200030000000100060000"
    "00000000"};
const Fixture tiff = {
    5, 6, 11889, 550168,
    "49492a00080000000a00000104000100000006000000010104000100000005000000020103000300"
    "00008600000003010300010000000100000006010300010000000200000011010400010000008c00"
    "000015010300010000000300000016010400010000000500000017010400010000005a0000001c01"
    "030001000000010000000000000008000800080000356a255a8f4a7fb46fa4d994c9feb9ee235b90"
    "c587bcf1b3e81ddf14490b4075376ca1b6eb20e91e531c51864f84b982b7ecb5ea1f11467b4b80b5"
    "85baefbff429f92e6333689d6ca1d6ade217ee23582f649970a5dab1e61b"};
const Fixture tiff_sideways = {
    6, 5, 11889, 554896,
    "49492a00080000000b00000104000100000006000000010104000100000005000000020103000300"
    "00009200000003010300010000000100000006010300010000000200000011010400010000009800"
    "00001201030001000000060000001501030001000000030000001601040001000000050000001701"
    "0400010000005a0000001c01030001000000010000000000000008000800080000356a255a8f4a7f"
    "b46fa4d994c9feb9ee235b90c587bcf1b3e81ddf14490b4075376ca1b6eb20e91e531c51864f84b9"
    "82b7ecb5ea1f11467b4b80b585baefbff429f92e6333689d6ca1d6ade217ee23582f649970a5dab1"
    "e61b"};
const Fixture webp_animated = {
    5, 6, 11889, 550168,
    "524946466801000057454250565038580a00000002000000050000040000414e494d060000000000"
    "00000000414e4d469a000000000000000000050000040000000000025650384c810000002f050001"
    "00efa0269224357b7cf74cd1676fe2d5b691a4068fe119a2cf5e4d24496af6f8ee99a2cf5edfcf7f"
    "7cf84b2dcc4ca945ca24974c448888730f4424226aabd65e981922da67636644a4f5e6be4b441011"
    "22828898999979ffc9255355a5165018499219bb7bdb4644ff0398f265d9dc0fca79a98983e8b4bf"
    "70f5f1d00000414e4d469a000000000000000000050000040000000000005650384c810000002f05"
    "000100efa0269224357b7cf74cd1676fe2d5b691a4068fe119a2cf5e4d24496af6f8ee99a2cf5edf"
    "cf7f7cf84b2dcc4ca945ca24974c448888730f4424226aabd65e981922da67636644a4f5e6be4b44"
    "101122828898999979ffc9255355a5165018499219bb7bdb4644ffa305feaa137f274d4634f44e89"
    "a767bb8a570c0000"};

std::string refused(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::data);
    return e.what();
  }
  return "nothing";
}

TEST(ImageFile, ReadsPixelsAsPillow) {
  for (const Fixture* f :
       {&colour, &grey, &with_alpha, &palette, &grey_alpha, &black_and_white, &jpeg_420, &jpeg_grey,
        &jpeg_progressive, &jpeg_cmyk, &jpeg_ycck, &png_sideways}) {
    const ImageFile image = decode_image(from_hex(f->hex), "picture", {});
    EXPECT_EQ(image.height, f->height);
    EXPECT_EQ(image.width, f->width);
    EXPECT_EQ(sums(image.values), std::pair(f->sum, f->weighted)) << f->hex;
  }
}

TEST(ImageFile, ReadsThePalettesIndicesAsLabels) {
  EXPECT_THAT(decode_labels(from_hex(palette.hex), "labels", {}).values,
              testing::ElementsAreArray({4, 4, 2, 2, 2, 0, 2, 2, 0, 3, 4, 4, 0, 3, 4,
                                         2, 2, 0, 4, 2, 2, 0, 3, 4, 2, 0, 3, 4, 2, 0}));
  const ImageFile labels = decode_labels(from_hex(grey.hex), "labels", {});
  EXPECT_EQ(3 * sums(labels.values).first, grey.sum);
}

TEST(ImageFile, RefusesOtherLabels) {
  for (const Fixture* f : {&colour, &with_alpha, &grey_alpha, &black_and_white})
    EXPECT_THAT(refused([&] { decode_labels(from_hex(f->hex), "the labels", {}); }),
                HasSubstr("labels the labels are"));
  EXPECT_THAT(refused([] { decode_labels(from_hex(jpeg_grey.hex), "the labels", {}); }),
              HasSubstr("PNG"));
}

// Every beginning of a file is an error that names it, and so is every file with one byte changed,
// unless it still is a picture.
TEST(ImageFile, SurvivesDamage) {
  for (const Fixture* f : {&colour, &palette, &jpeg_420, &jpeg_progressive}) {
    const auto bytes = from_hex(f->hex);
    // A JPEG's last two bytes say no more than that it has ended.
    for (std::size_t n = 0; n + 2 < bytes.size(); ++n)
      EXPECT_THAT(refused([&] { decode_image(std::span(bytes).first(n), "the file", {}); }),
                  HasSubstr("the file"))
          << n;
    int read = 0;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      auto damaged = bytes;
      damaged[i] ^= std::byte{0x55};
      try {
        decode_image(damaged, "the file", {});
        ++read;
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), Exit::data);
      }
    }
    EXPECT_LT(read, std::ssize(bytes));
  }
}

TEST(ImageFile, KeepsToTheLimits) {
  MediaDeck limits;
  limits.max_megapixels = 0.0001;
  EXPECT_THAT(refused([&] { decode_image(from_hex(jpeg_420.hex), "the file", limits); }),
              HasSubstr("media.max_megapixels"));
  EXPECT_THAT(refused([] { read_image_file("/nowhere.png", {}); }), HasSubstr("/nowhere.png"));
  EXPECT_THAT(refused([] { read_image_file("/proc/self/exe", {}); }), HasSubstr("is a program"));
}

std::vector<std::byte> with_exif(const std::vector<std::byte>& jpeg, int orientation) {
  auto block = from_hex("ffe100224578696600004d4d002a00000008000101120003000000010001000000000000");
  block[block.size() - 7] = static_cast<std::byte>(orientation);
  auto out = jpeg;
  out.insert(out.begin() + 2, block.begin(), block.end());
  return out;
}

// Of Pillow's exif_transpose.
TEST(ImageFile, SetsPicturesUprightUnlessTheDeckSaysOtherwise) {
  const std::int64_t weighted[] = {28883838, 28188048, 19880148, 20575938,
                                   29148978, 28660278, 19615008, 20103708};
  const auto jpeg = from_hex(jpeg_420.hex);
  MediaDeck stored;
  stored.orientation = "stored";
  for (int orientation = 1; orientation <= 8; ++orientation) {
    const auto bytes = with_exif(jpeg, orientation);
    const ImageFile image = decode_image(bytes, "picture", {});
    EXPECT_EQ(image.height, orientation < 5 ? 13 : 17);
    EXPECT_EQ(image.width, orientation < 5 ? 17 : 13);
    EXPECT_EQ(sums(image.values), std::pair(jpeg_420.sum, weighted[orientation - 1]))
        << orientation;
    EXPECT_EQ(decode_image(bytes, "picture", stored).values,
              decode_image(jpeg, "picture", {}).values);
  }
  for (const int nonsense : {0, 9, 255})
    EXPECT_EQ(decode_image(with_exif(jpeg, nonsense), "picture", {}).height, 13);
}

TEST(ImageFile, JpegsOfSomeCamerasAreWhole) {
  const auto whole = decode_image(from_hex(jpeg_420.hex), "picture", {}).values;
  // The scan's header has three zeros; and bytes fill up the space in front of the end.
  std::string hex = jpeg_420.hex;
  hex.replace(hex.rfind("003f00"), 6, "000000");
  EXPECT_EQ(decode_image(from_hex(hex), "picture", {}).values, whole);
  hex = jpeg_420.hex;
  hex.insert(hex.size() - 4, "000000");
  EXPECT_EQ(decode_image(from_hex(hex), "picture", {}).values, whole);
  // 12 bits a sample.
  hex = jpeg_420.hex;
  hex.replace(hex.find("ffc0001108") + 8, 2, "0c");
  EXPECT_THAT(refused([&] { decode_image(from_hex(hex), "the file", {}); }), HasSubstr("8 bits"));
}

class ImageFileOnDisk : public testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(dir_); }
  void TearDown() override { std::filesystem::remove_all(dir_); }
  std::string write(const std::string& name, const std::vector<std::byte>& bytes) const {
    std::ofstream(dir_ / name, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), std::ssize(bytes));
    return (dir_ / name).string();
  }
  // The frames of the file as footage.
  static std::vector<std::vector<std::uint8_t>> frames(const std::string& path,
                                                       const MediaDeck& limits = {}) {
    VideoReader reader({path}, {.fps = 24, .threads = 2, .access = {limits, {}}});
    EXPECT_TRUE(reader.is_image());
    std::vector<std::vector<std::uint8_t>> all;
    while (const VideoFrame* f = reader.next()) {
      EXPECT_EQ(f->height, reader.height());
      EXPECT_EQ(f->width, reader.width());
      auto& rgb = all.emplace_back();
      for (std::int64_t y = 0; y < f->height; ++y)
        rgb.insert(rgb.end(), f->rgb + y * f->stride, f->rgb + y * f->stride + 3 * f->width);
    }
    return all;
  }

  std::filesystem::path dir_ =
      std::filesystem::temp_directory_path() / ("weft_image_file_" + std::to_string(::getpid()));
};

TEST_F(ImageFileOnDisk, IsReadWhateverItsName) {
  for (const Fixture* f : {&colour, &png_sideways, &jpeg_420, &jpeg_progressive, &jpeg_cmyk,
                           &jpeg_ycck, &webp, &webp_sideways, &tiff, &tiff_sideways}) {
    const std::string path = write("picture.any", from_hex(f->hex));
    const ImageFile image = read_image_file(path, {});
    EXPECT_EQ(image.height, f->height);
    EXPECT_EQ(image.width, f->width);
    EXPECT_EQ(sums(image.values), std::pair(f->sum, f->weighted)) << f->hex;
    const auto shown = frames(path);
    ASSERT_EQ(shown.size(), 1u);
    EXPECT_EQ(shown[0], image.values);
  }
}

// A second picture, as phones put it there, and what else may lie behind the first one.
TEST_F(ImageFileOnDisk, WhatLiesBehindThePictureIsNotRead) {
  const auto film = from_hex("000000186674797069736f6d0000020069736f6d69736f32");
  for (const Fixture* f : {&jpeg_420, &jpeg_progressive, &jpeg_cmyk, &colour, &webp}) {
    const auto first = from_hex(f->hex);
    const auto alone = frames(write("alone", first));
    ASSERT_EQ(alone.size(), 1u);
    for (const auto& more : {from_hex(jpeg_grey.hex), from_hex(f->hex), from_hex("0a0a"), film}) {
      auto both = first;
      for (int i = 0; i < 4; ++i) both.insert(both.end(), more.begin(), more.end());
      const std::string path = write("picture.jpg", both);
      EXPECT_EQ(frames(path), alone);
      EXPECT_EQ(sums(read_image_file(path, {}).values), std::pair(f->sum, f->weighted));
    }
  }
}

TEST_F(ImageFileOnDisk, FootageIsSetUprightAlike) {
  MediaDeck stored;
  stored.orientation = "stored";
  std::string hex = png_sideways.hex;
  const std::size_t at = hex.find("01120003000000010006") + 18;
  const auto plain = frames(write("plain.png", from_hex(hex)), stored).at(0);
  for (int orientation = 1; orientation <= 8; ++orientation) {
    hex[at + 1] = static_cast<char>('0' + orientation);
    const auto turned = frames(write("turned.png", from_hex(hex))).at(0);
    const std::int64_t height = orientation < 5 ? 5 : 6, width = orientation < 5 ? 6 : 5;
    // The walk that a turned ImageFile takes, which is checked above.
    const UprightWalk walk = upright_walk(orientation, 5, 6, 6 * 3);
    for (std::int64_t y = 0, i = 0; y < height; ++y)
      for (std::int64_t x = 0; x < width; ++x, i += 3)
        ASSERT_EQ(turned[i], plain[walk.first + y * walk.down + x * walk.along]) << orientation;
  }
}

TEST_F(ImageFileOnDisk, NamesOtherKinds) {
  const auto why = [&](const std::vector<std::byte>& bytes) {
    const std::string path = write("picture.png", bytes);
    return refused([&] { read_image_file(path, {}); });
  };
  EXPECT_THAT(why(from_hex(webp_animated.hex)), HasSubstr("is an animated WebP"));
  EXPECT_THAT(why(from_hex("50415231")), HasSubstr("is a Parquet table"));
  EXPECT_THAT(why({}), HasSubstr("is an empty file"));
  std::string jpeg = tiff.hex;  // with another compression
  jpeg.replace(jpeg.find("0301030001000000010000") + 16, 2, "07");
  EXPECT_THAT(why(from_hex(jpeg)), HasSubstr("a TIFF compressed as JPEG"));
}

}  // namespace
}  // namespace weft
