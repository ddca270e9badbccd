#include "checkpoint/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>

#include "core/error.h"
#include "core/host.h"
#include "tests/folder.h"

namespace weft {
namespace {

using testing::HasSubstr;

class Safetensors : public FolderTest {
 protected:
  // A file of that header and so many bytes of data; its own length field unless one is given.
  fs::path make(const std::string& json, std::size_t data, std::int64_t length = -1) {
    const fs::path path = dir_ / "attack.safetensors";
    const std::uint64_t n = length < 0 ? json.size() : std::uint64_t(length);
    std::ofstream out(path, std::ios::binary);
    out.write(reinterpret_cast<const char*>(&n), 8);
    out << json << std::string(data, '\1');
    return path;
  }
  std::string refusal(const fs::path& path) {
    const std::size_t before = resident_bytes();
    try {
      SafetensorsFile::open(path);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data) << e.what();
      EXPECT_THAT(e.what(), HasSubstr(path.filename().string()));
      EXPECT_FALSE(e.hint().empty()) << e.what();
      EXPECT_LT(resident_bytes() - before + (100u << 20), 200u << 20) << "memory stays small";
      return e.what();
    }
    ADD_FAILURE() << "taken";
    return "";
  }
  std::string attack(const std::string& json, std::size_t data = 0) {
    return refusal(make(json, data));
  }
  // One tensor with the given fields beside its name.
  std::string fields(const std::string& text, std::size_t data = 8) {
    return attack("{\"a\":{" + text + "}}", data);
  }
};

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& v) {
  return std::as_bytes(std::span(v));
}

TEST_F(Safetensors, RoundTripOfEveryType) {
  const std::vector<float> f = {1.5f, -2.25f, std::nanf(""), 0x1p-140f};
  const std::vector<std::uint16_t> half = {0x3c00, 0xc000, 0x0001, 0x7c00, 0x7bff, 0x8000};
  const std::vector<std::uint16_t> brain = {0x3f80, 0xc040};
  const std::vector<std::int64_t> i64 = {-5, INT64_MAX};
  const std::vector<std::int32_t> i32 = {INT32_MIN, 7};
  const std::vector<std::uint8_t> u8 = {0, 255, 3}, boolean = {1, 0, 1};
  const std::vector<SafetensorWrite> tensors = {
      {"u8", DType::u8, {3}, bytes_of(u8)},
      {"flags", DType::boolean, {1, 3}, bytes_of(boolean)},
      {"half", DType::f16, {2, 3}, bytes_of(half)},
      {"a.b \"c\"\n\xc3\xa9", DType::f32, {2, 2}, bytes_of(f)},
      {"brain", DType::bf16, {2}, bytes_of(brain)},
      {"i64", DType::i64, {2}, bytes_of(i64)},
      {"i32", DType::i32, {2}, bytes_of(i32)},
      {"scalar", DType::f32, {}, bytes_of(f).first(4)},
      {"empty", DType::f32, {0, 4}, {}}};
  const fs::path path = dir_ / "t.safetensors";
  write_safetensors(path, tensors, {{"step", "12"}, {"deck", "a = \"b\"\n"}});
  const SafetensorsFile file = SafetensorsFile::open(path);
  EXPECT_EQ(file.metadata().at("deck"), "a = \"b\"\n");
  ASSERT_EQ(file.entries().size(), tensors.size());
  for (const SafetensorWrite& t : tensors) {
    const SafetensorEntry& e = file.at(t.name);
    EXPECT_EQ(e.dtype, t.dtype);
    EXPECT_EQ(e.shape, t.shape);
    std::vector<std::byte> back(t.bytes.size());
    file.read(e, back);
    EXPECT_TRUE(std::equal(back.begin(), back.end(), t.bytes.begin())) << t.name;
  }
  const auto h = file.read_f32(file.at("half"));
  EXPECT_THAT(h, testing::ElementsAre(1.0f, -2.0f, 0x1p-24f, INFINITY, 65504.0f, -0.0f));
  EXPECT_TRUE(std::signbit(h[5]));
  EXPECT_THAT(file.read_f32(file.at("brain")), testing::ElementsAre(1.0f, -3.0f));
  EXPECT_THAT(file.read_i64(file.at("i64")), testing::ElementsAre(-5, INT64_MAX));
  EXPECT_THAT(file.read_i64(file.at("i32")), testing::ElementsAre(INT32_MIN, 7));
  EXPECT_THAT(file.read_i64(file.at("u8")), testing::ElementsAre(0, 255, 3));
  EXPECT_THAT(file.read_i64(file.at("flags")), testing::ElementsAre(1, 0, 1));
  EXPECT_THROW(file.read_f32(file.at("i64")), Error);
  EXPECT_THROW(file.read_i64(file.at("half")), Error);
  EXPECT_FALSE(fs::exists(path.string() + ".tmp"));
  EXPECT_EQ(file.entries().front().name, "i64") << "wide elements first: all are aligned";
}

TEST_F(Safetensors, TensorsThatComeOneByOneMakeTheSameFile) {
  const std::vector<float> f = {1, 2, 3, 4};
  const std::vector<std::uint8_t> u8 = {5, 6, 7};
  const std::vector<SafetensorWrite> list = {{"u8", DType::u8, {3}, bytes_of(u8)},
                                             {"f", DType::f32, {2, 2}, bytes_of(f)},
                                             {"g", DType::f32, {1}, bytes_of(f).first(4)}};
  const fs::path whole = dir_ / "whole", pieces = dir_ / "pieces";
  write_safetensors(whole, list, {{"k", "v"}});
  {
    SafetensorsWriter writer(pieces, list, {{"k", "v"}});
    writer.write(2, list[2].bytes);
    writer.write(1, list[1].bytes.first(4));
    writer.write(0, list[0].bytes);
    EXPECT_THROW(writer.finish(), Error) << "twelve bytes are missing";
    writer.write(1, list[1].bytes.subspan(4), 4);
    EXPECT_FALSE(fs::exists(pieces));
    writer.finish();
  }
  const auto content = [](const fs::path& p) {
    std::ifstream in(p, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  EXPECT_EQ(content(whole), content(pieces));
  { SafetensorsWriter given_up(dir_ / "half", list); }
  EXPECT_FALSE(fs::exists(dir_ / "half.tmp"));
}

// Everything that a reader gets, tensors once whole and once in two pieces.
std::string all_of(const fs::path& path) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  std::string all;
  for (const auto& [key, value] : file.metadata()) all += key + "=" + value + "\n";
  for (const SafetensorEntry& e : file.entries()) {
    all += fmt::format("{} {} {}", e.name, e.type, fmt::join(e.shape, ","));
    const std::vector<float> whole = file.read_f32(e);
    std::vector<float> pieces(whole.size());
    const std::size_t half = whole.size() / 2;
    file.read_f32(e, 0, std::span(pieces).first(half));
    file.read_f32(e, static_cast<std::int64_t>(half), std::span(pieces).subspan(half));
    EXPECT_EQ(std::memcmp(whole.data(), pieces.data(), whole.size() * 4), 0);
    all.append(reinterpret_cast<const char*>(whole.data()), whole.size() * 4);
  }
  return all;
}

TEST_F(Safetensors, EveryFlippedBitIsNamedOrWithoutEffect) {
  const std::vector<float> f = {1, 2, 3, 4, 5, 6};
  const std::vector<std::uint16_t> half = {0x3c00, 0xc000, 0x0001};
  write_safetensors(
      dir_ / "whole",
      std::vector<SafetensorWrite>{{"blocks.0.weight", DType::f32, {2, 3}, bytes_of(f)},
                                   {"blocks.1.weight", DType::bf16, {3}, bytes_of(half)},
                                   {"empty", DType::f32, {0}, {}}},
      {{"producer", "weft"}});
  ASSERT_TRUE(SafetensorsFile::open(dir_ / "whole").hashed());
  const std::string want = all_of(dir_ / "whole");
  std::ifstream in(dir_ / "whole", std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(in), {});
  std::uint64_t header = 0;
  std::memcpy(&header, bytes.data(), 8);
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] ^= static_cast<char>(1 << bit % 8);
    std::ofstream(dir_ / "flipped", std::ios::binary) << bytes;
    bytes[bit / 8] ^= static_cast<char>(1 << bit % 8);
    try {
      EXPECT_EQ(all_of(dir_ / "flipped"), want) << "bit " << bit;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data);
      EXPECT_THAT(e.what(), HasSubstr((dir_ / "flipped").string()));
      if (bit >= (8 + header) * 8) {
        EXPECT_THAT(e.what(), testing::ContainsRegex("tensor blocks.[01].weight is damaged"));
      }
    }
  }
}

// In pieces that do not follow each other nothing can be compared; read again from the start, it
// is.
TEST_F(Safetensors, PiecesOutOfOrderAreNotHeldAgainstTheFile) {
  const std::vector<float> f = {1, 2, 3, 4};
  write_safetensors(dir_ / "t", std::vector<SafetensorWrite>{{"a", DType::f32, {4}, bytes_of(f)}});
  const SafetensorsFile file = SafetensorsFile::open(dir_ / "t");
  std::vector<float> piece(2);
  file.read_f32(file.at("a"), 2, piece);
  file.read_f32(file.at("a"), 0, piece);
  file.read_f32(file.at("a"), 1, piece);
  EXPECT_THAT(piece, testing::ElementsAre(2, 3));
  file.read_f32(file.at("a"), 0, piece);
  file.read_f32(file.at("a"), 2, piece);
  EXPECT_THAT(piece, testing::ElementsAre(3, 4));
}

TEST_F(Safetensors, FilesOfOthersHaveNoHashes) {
  const SafetensorsFile file = SafetensorsFile::open(make(
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
      4));
  EXPECT_FALSE(file.hashed());
  EXPECT_EQ(file.read_f32(file.at("a")).size(), 1u);
}

TEST_F(Safetensors, AllHashesOrNone) {
  const std::string a = R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]})";
  const std::string zeros(32, '0');
  EXPECT_THAT(attack(R"({"__metadata__":{"xxh3:a":")" + zeros + "\"}," + a + "}", 4),
              HasSubstr("header is damaged"));
  EXPECT_THAT(attack(R"({"__metadata__":{"xxh3":")" + zeros + "\"}," + a + "}", 4),
              HasSubstr("header is damaged"));
  EXPECT_THAT(attack(R"({"__metadata__":{"xxh3:b":")" + zeros + "\"}," + a + "}", 4),
              HasSubstr("a hash of tensor b, which it has not"));
  EXPECT_THAT(attack(R"({"__metadata__":{"xxh3":"z"},)" + a + "}", 4), HasSubstr("no XXH3-128"));
}

TEST_F(Safetensors, MissingTensorSuggestsTheNearest) {
  const std::vector<float> f = {1};
  const std::vector<SafetensorWrite> one = {{"blocks.0.attn.weight", DType::f32, {1}, bytes_of(f)}};
  write_safetensors(dir_ / "t", one);
  const SafetensorsFile file = SafetensorsFile::open(dir_ / "t");
  EXPECT_EQ(file.find("x"), nullptr);
  try {
    file.at("blocks.0.atn.weight");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::data);
    EXPECT_THAT(e.hint(), HasSubstr("blocks.0.attn.weight"));
  }
}

TEST_F(Safetensors, PaddedAndEmptyHeadersAreFine) {
  EXPECT_EQ(SafetensorsFile::open(make("{}     ", 0)).entries().size(), 0u);
}

// fp8 and the like are known of, so that a file may hold them beside what is read.
TEST_F(Safetensors, TensorsOfOtherTypesAreListedAndNotRead) {
  const fs::path path =
      make(R"({"__metadata__":null,"a":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]},)"
           R"("b":{"dtype":"I16","shape":[2],"data_offsets":[4,8]}})",
           8);
  const SafetensorsFile file = SafetensorsFile::open(path);
  EXPECT_EQ(file.at("a").type, "F8_E4M3");
  EXPECT_FALSE(file.at("b").dtype.has_value());
  try {
    file.read_f32(file.at("a"));
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("tensor a is F8_E4M3"));
    EXPECT_THAT(e.hint(), HasSubstr("convert_weights.py"));
  }
  EXPECT_THROW(file.read_i64(file.at("b")), Error);
}

TEST_F(Safetensors, RefusesWhatIsNoFile) {
  EXPECT_THAT(refusal(dir_ / "absent"), HasSubstr("No such file"));
  fs::create_directory(dir_ / "sub");
  EXPECT_THAT(refusal(dir_ / "sub"), HasSubstr("a directory"));
  ASSERT_EQ(mkfifo((dir_ / "pipe").c_str(), 0600), 0);
  EXPECT_THAT(refusal(dir_ / "pipe"), HasSubstr("pipe")) << "and does not wait for a writer";
}

TEST_F(Safetensors, RefusesLengthsThatCannotBe) {
  std::ofstream(dir_ / "short") << "1234567";
  EXPECT_THAT(refusal(dir_ / "short"), HasSubstr("7 bytes: too short"));
  std::ofstream(dir_ / "nothing").flush();
  EXPECT_THAT(refusal(dir_ / "nothing"), HasSubstr("an empty file"));
  EXPECT_THAT(refusal(make("{}", 0, 3)), HasSubstr("a header of 3 bytes in a file of 10"));
  EXPECT_THAT(refusal(make("{}", 0, 0)), HasSubstr("does not begin with a brace"));
  EXPECT_THAT(refusal(make("{}", 0, 1 << 30)), HasSubstr("the format allows 100000000"));
  EXPECT_THAT(refusal(make("{}", 0, INT64_MAX)), HasSubstr("the format allows"));
  // A file that really is that large (sparse on disk) must not be read for its header.
  const fs::path big = make("{}", 0, 100'000'001);
  fs::resize_file(big, 200'000'000);
  EXPECT_THAT(refusal(big), HasSubstr("the format allows"));
}

TEST_F(Safetensors, RefusesWhatIsNotJson) {
  EXPECT_THAT(attack("{\"a\":"), HasSubstr("not JSON"));
  EXPECT_THAT(attack("{} {}"), HasSubstr("not JSON"));
  EXPECT_THAT(attack("[]"), HasSubstr("brace"));
  EXPECT_THAT(attack(std::string("{}\0", 3)), HasSubstr("not JSON"));
  EXPECT_THAT(attack("{\"\xff\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1),
              HasSubstr("not JSON at byte 3"));
  EXPECT_THAT(attack("{\"a\":3}"), HasSubstr("entry a is a number"));
  EXPECT_THAT(attack("{\"a\":null}"), HasSubstr("entry a is null"));
}

TEST_F(Safetensors, RefusesDeepNestingWithoutRecursion) {
  const std::size_t deep = 5'000'000;
  EXPECT_THAT(attack("{\"a\":" + std::string(deep, '[') + std::string(deep, ']') + "}"),
              HasSubstr("is a list"));
  std::string objects = "{";
  for (int i = 0; i < 100000; ++i) objects += "\"a\":{";
  EXPECT_THAT(attack(objects), HasSubstr("unknown field"));
  EXPECT_THAT(fields("\"shape\":" + std::string(deep, '[')), HasSubstr("holds a list"));
}

TEST_F(Safetensors, RefusesDuplicates) {
  const std::string t = "{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}";
  const std::string u = "{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}";
  EXPECT_THAT(attack("{\"a\":" + t + ",\"a\":" + u + "}", 2), HasSubstr("tensor a occurs twice"));
  EXPECT_THAT(attack("{\"\\u0061\":" + t + ",\"a\":" + u + "}", 2), HasSubstr("occurs twice"));
  EXPECT_THAT(fields("\"dtype\":\"U8\",\"dtype\":\"U8\""), HasSubstr("\"dtype\" occurs twice"));
  EXPECT_THAT(fields("\"shape\":[1],\"shape\":[1]"), HasSubstr("\"shape\" occurs twice"));
  EXPECT_THAT(attack("{\"__metadata__\":{},\"__metadata__\":{}}"), HasSubstr("occurs twice"));
  EXPECT_THAT(attack("{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}"), HasSubstr("occurs twice"));
}

TEST_F(Safetensors, RefusesBadRanges) {
  const auto two = [](int b0, int e0, int b1, int e1) {
    return fmt::format(
        "{{\"a\":{{\"dtype\":\"U8\",\"shape\":[{}],\"data_offsets\":[{},{}]}},"
        "\"b\":{{\"dtype\":\"U8\",\"shape\":[{}],\"data_offsets\":[{},{}]}}}}",
        e0 - b0, b0, e0, e1 - b1, b1, e1);
  };
  EXPECT_THAT(attack(two(0, 4, 2, 6), 6), HasSubstr("tensors a and b overlap at byte 2"));
  EXPECT_THAT(attack(two(0, 4, 0, 4), 4), HasSubstr("overlap"));
  EXPECT_THAT(attack(two(0, 4, 6, 8), 8), HasSubstr("2 bytes before tensor b belong to no tensor"));
  EXPECT_THAT(attack(two(1, 4, 4, 8), 8), HasSubstr("1 bytes before tensor a"));
  EXPECT_THAT(attack(two(0, 4, 4, 9), 8), HasSubstr("tensor b ends at byte 9"));
  EXPECT_THAT(attack(two(0, 4, 4, 8), 10), HasSubstr("the last 2 bytes belong to no tensor"));
  EXPECT_THAT(attack("{}", 1), HasSubstr("the last 1 bytes"));
  EXPECT_THAT(fields("\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[5,4]"),
              HasSubstr("run backwards"));
}

TEST_F(Safetensors, RefusesBadShapesAndTypes) {
  const std::string ok = "\"dtype\":\"F32\",\"shape\":[2],";
  EXPECT_THAT(fields(ok + "\"data_offsets\":[0,4]"),
              HasSubstr("shape [2] of F32 takes 8 bytes, but data_offsets [0, 4] span 4"));
  EXPECT_THAT(fields(ok + "\"data_offsets\":[-8,0]"), HasSubstr("negative number, -8"));
  EXPECT_THAT(fields(ok + "\"data_offsets\":[0,8.5]"), HasSubstr("8.5 in \"data_offsets\""));
  EXPECT_THAT(fields(ok + "\"data_offsets\":[0,99999999999999999999]"), HasSubstr("too large"));
  EXPECT_THAT(fields(ok + "\"data_offsets\":[0,18446744073709551615]"), HasSubstr("too large"));
  EXPECT_THAT(fields(ok + "\"data_offsets\":[0]"), HasSubstr("has 1 numbers, not 2"));
  EXPECT_THAT(fields(ok + "\"data_offsets\":[0,4,8]"), HasSubstr("has 3 numbers, not 2"));
  EXPECT_THAT(fields(ok + "\"data_offsets\":[\"0\",8]"), HasSubstr("holds a text"));
  EXPECT_THAT(fields(ok + "\"data_offsets\":8"), HasSubstr("is a number"));
  const std::string end = ",\"data_offsets\":[0,8]";
  EXPECT_THAT(fields("\"dtype\":\"F32\",\"shape\":[-2]" + end), HasSubstr("negative"));
  // 2^33 * 2^31 elements of four bytes wrap to zero in 64 bits.
  EXPECT_THAT(fields("\"dtype\":\"F32\",\"shape\":[8589934592,2147483648]" + end),
              HasSubstr("more bytes than 64 bits"));
  EXPECT_THAT(
      fields("\"dtype\":\"F32\",\"shape\":[0,8589934592,8589934592],\"data_offsets\":[0,0]"),
      HasSubstr("more bytes than 64 bits"));
  EXPECT_THAT(fields("\"dtype\":\"F4\",\"shape\":[16]" + end), HasSubstr("dtype F4"));
  EXPECT_THAT(fields("\"dtype\":\"F8_E4M3\",\"shape\":[4]" + end), HasSubstr("takes 4 bytes"));
  EXPECT_THAT(fields("\"dtype\":1,\"shape\":[8]" + end), HasSubstr("\"dtype\" is a number"));
  std::string axes = "1";
  for (int i = 0; i < 1000; ++i) axes += ",1";
  EXPECT_THAT(fields("\"dtype\":\"F32\",\"shape\":[" + axes + "]" + end),
              HasSubstr("more than 32"));
}

TEST_F(Safetensors, RefusesMissingAndStrangeFields) {
  EXPECT_THAT(fields("\"shape\":[2],\"data_offsets\":[0,8]"), HasSubstr("no \"dtype\""));
  EXPECT_THAT(fields("\"dtype\":\"F32\",\"data_offsets\":[0,8]"), HasSubstr("no \"shape\""));
  EXPECT_THAT(fields("\"dtype\":\"F32\",\"shape\":[2]"), HasSubstr("no \"data_offsets\""));
  EXPECT_THAT(fields("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"x\":1"),
              HasSubstr("unknown field \"x\""));
  EXPECT_THAT(attack("{\"__metadata__\":{\"k\":3}}"), HasSubstr("metadata \"k\" is a number"));
  EXPECT_THAT(attack("{\"__metadata__\":{\"k\":{}}}"), HasSubstr("metadata \"k\" is an object"));
  EXPECT_THAT(attack("{\"__metadata__\":\"x\"}"), HasSubstr("is a text"));
}

TEST_F(Safetensors, RefusesEveryTruncationOfAGoodFile) {
  const std::vector<float> f(100, 1.0f);
  const std::vector<SafetensorWrite> one = {{"weight", DType::f32, {100}, bytes_of(f)}};
  write_safetensors(dir_ / "t.safetensors", one);
  for (auto n = static_cast<std::int64_t>(fs::file_size(dir_ / "t.safetensors")) - 1; n >= 0; --n) {
    fs::resize_file(dir_ / "t.safetensors", std::uintmax_t(n));
    refusal(dir_ / "t.safetensors");
  }
}

TEST_F(Safetensors, WritesNoHeaderThatItWouldNotRead) {
  const std::vector<SafetensorWrite> long_name = {
      {std::string(100'000'000, 'a'), DType::f32, {0}, {}}};
  try {
    write_safetensors(dir_ / "t.safetensors", long_name);
    ADD_FAILURE() << "written";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::data);
    EXPECT_THAT(e.what(), HasSubstr("the names and shapes of 1 tensors take 2000001"));
    EXPECT_THAT(e.what(), HasSubstr("has room for 100000000"));
  }
  EXPECT_TRUE(fs::is_empty(dir_));
}

TEST_F(Safetensors, FullDiskLeavesTheOldFileAndNoTemporary) {
  const std::vector<float> f(100000, 1.0f);
  const std::vector<SafetensorWrite> small = {{"w", DType::f32, {4}, bytes_of(f).first(16)}};
  const std::vector<SafetensorWrite> large = {{"w", DType::f32, {100000}, bytes_of(f)}};
  const fs::path path = dir_ / "t.safetensors";
  write_safetensors(path, small);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit tight{4096, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &tight);
  std::string message;
  try {
    write_safetensors(path, large);
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::data);
    message = e.what();
  }
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_THAT(message, HasSubstr("cannot write"));
  EXPECT_THAT(message, HasSubstr("t.safetensors.tmp"));
  EXPECT_FALSE(fs::exists(path.string() + ".tmp"));
  EXPECT_EQ(SafetensorsFile::open(path).at("w").shape[0], 4);
}

}  // namespace
}  // namespace weft
