// What of the tokenizer needs no model of a real size; validation/check_text.py trains one and
// compares 1,000 lines.
#include "text/tokenizer.h"

#include <gmock/gmock.h>
#include <sentencepiece_trainer.h>
#include <unistd.h>

#include <fstream>

#include "core/error.h"
#include "tests/folder.h"

namespace weft {
namespace {

class TokenizerTest : public FolderTest {
 protected:
  // A model of a few pieces; `ids` are its --pad_id and so on.
  fs::path model(const std::string& name, const std::string& ids, int pieces = 30) {
    std::ofstream text(dir_ / "text.txt");
    for (int i = 0; i < 30; ++i) text << "a cat and a dog\nthe dog and the cat\n";
    text.close();
    const auto status = sentencepiece::SentencePieceTrainer::Train(
        "--input=" + (dir_ / "text.txt").string() + " --model_prefix=" + (dir_ / name).string() +
        " --vocab_size=" + std::to_string(pieces) + " --hard_vocab_limit=false --minloglevel=3 " +
        ids);
    EXPECT_TRUE(status.ok()) << status.ToString();
    return dir_ / (name + ".model");
  }
  std::string refused(const std::function<void()>& f) {
    try {
      f();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data);
      return std::string(e.what()) + " | " + e.hint();
    }
    return "";
  }

  const std::string t5_ids_ = "--pad_id=0 --eos_id=1 --unk_id=2 --bos_id=-1";
};

TEST_F(TokenizerTest, PiecesEndMarkAndLength) {
  const Tokenizer t(model("spiece", t5_ids_));
  using testing::ElementsAre;
  EXPECT_THAT(t.encode("", 300), ElementsAre(1));
  const auto cat = t.encode("the cat", 300);
  EXPECT_EQ(cat.back(), Tokenizer::end_mark);
  EXPECT_GT(cat.size(), 1u);
  EXPECT_EQ(t.encode("  the   cat ", 300), cat) << "spaces are single, and none at the ends";
  const auto unknown = t.encode("𓀀𓀁", 300);  // neighbours that nobody knows are one
  EXPECT_EQ(std::count(unknown.begin(), unknown.end(), 2), 1);
  EXPECT_THAT(t.encode("the cat and the dog", 3), ElementsAre(cat[0], cat[1], 1));
  EXPECT_THAT(t.encode("the cat", 1), ElementsAre(1));
  const auto last = static_cast<std::int32_t>(t.size()) - 1;
  EXPECT_THAT(t.encode("<extra_id_0><extra_id_99>", 9), ElementsAre(last, last - 99, 1));
  auto with_mark = t.encode("the cat <extra_id_7> the cat", 300);
  EXPECT_EQ(with_mark.size(), 2 * cat.size());
  EXPECT_EQ(with_mark[cat.size() - 1], last - 7);
}

TEST_F(TokenizerTest, IdsOfTheFile) {
  const std::string ids = "--pad_id=0 --eos_id=1 --bos_id=2 --unk_id=3";
  const Tokenizer t(model("umt5", ids), Tokenizer::Ids::of_file);
  using testing::ElementsAre;
  EXPECT_THAT(t.encode("", 512), ElementsAre(1));
  EXPECT_THAT(t.encode("𓀀𓀁", 512), testing::Contains(3).Times(1));
  EXPECT_THAT(t.encode("<unk></s>", 512), ElementsAre(3, 1, 1));
  const auto cat = t.encode("the cat", 512);
  EXPECT_GT(*std::min_element(cat.begin(), cat.end() - 1), 3);
  for (const std::int32_t id : t.encode("<extra_id_0>", 512)) EXPECT_LT(id, t.size());
  EXPECT_THROW(Tokenizer(model("again", ids)), Error) << "T5's unknown id is 2";

  // With pieces for bytes nothing is unknown.
  const Tokenizer bytes(model("bytes", ids + " --byte_fallback=true", 300),
                        Tokenizer::Ids::of_file);
  EXPECT_GE(bytes.size(), 256);
  const auto letter = bytes.encode("é", 512);  // of two bytes, 0xc3 and 0xa9
  EXPECT_THAT(letter, testing::Not(testing::Contains(3)));
  ASSERT_GE(letter.size(), 3u);
  EXPECT_EQ(letter[letter.size() - 3] + (0xa9 - 0xc3), letter[letter.size() - 2]);
  EXPECT_GT(bytes.encode("𓀀", 512).size(), letter.size());
}

TEST_F(TokenizerTest, FoundWhereReleasedFoldersHaveIt) {
  const fs::path file = model("any", t5_ids_);
  for (const auto& [weights, place] :
       {std::pair("wan/t5.safetensors", "wan/google/umt5-xxl"),
        std::pair("pipe/text_encoder/model.safetensors", "pipe/tokenizer")}) {
    fs::create_directories(dir_ / place);
    fs::create_directories((dir_ / weights).parent_path());
    EXPECT_THROW(open_tokenizer("", (dir_ / weights).string(), 1000), Error);
    fs::copy(file, dir_ / place / "spiece.model");
    EXPECT_GT(open_tokenizer("", (dir_ / weights).string(), 1000).size(), 100) << place;
  }
}

TEST_F(TokenizerTest, SaysWhatDoesNotFit) {
  using testing::HasSubstr;
  std::ofstream(dir_ / "text") << "no model";
  EXPECT_THAT(refused([&] { Tokenizer t(dir_ / "text"); }), HasSubstr("text is not"));
  EXPECT_THAT(refused([&] { Tokenizer t(model("other", "--pad_id=3")); }),
              HasSubstr("T5's are 0, 1 and 2"));
  EXPECT_THAT(refused([&] { Tokenizer t(model("last", "--pad_id=-1"), Tokenizer::Ids::of_file); }),
              HasSubstr("umT5's are 0, 1 and a later one"));
  const std::string weights = (dir_ / "t5.safetensors").string();
  EXPECT_THAT(refused([&] { open_tokenizer("", weights, 32128); }), HasSubstr("spiece.model"));
  model("spiece", t5_ids_);
  EXPECT_EQ(refused([&] { open_tokenizer("", weights, 32128); }), "");  // found beside the weights
  EXPECT_THAT(refused([&] { open_tokenizer("", weights, 100); }),
              HasSubstr("t5.vocab_size is 100"));
}

}  // namespace
}  // namespace weft
