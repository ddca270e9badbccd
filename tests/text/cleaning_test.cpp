// Cleaning: the vectors of docs/models/t5.md, Cleaning, made with the original, and what its
// libraries do to HTML and to broken encodings. validation/check_text.py holds thousands of
// captions to those libraries themselves.
#include "text/cleaning.h"

#include <gmock/gmock.h>

#include "core/error.h"
#include "text/utf8.h"

namespace weft {
namespace {

TEST(Cleaning, VectorsOfTheOriginal) {
  const std::pair<const char*, const char*> vectors[] = {
      {"a beautiful waterfall aesthetic score: 6.5. motion score: 10.0. camera motion: pan left.",
       "a beautiful waterfall aesthetic score: 6.5. motion score: 10.0. camera motion: pan left."},
      {"A  Soaring drone footage; captures (the) majestic beauty — of a “cliff”, 4K!",
       "a soaring drone footage; captures the majestic beauty - of a \"cliff\", 4k!"},
      {"Café & Bar &amp; Grill &lt;b&gt;bold&lt;/b&gt; 你好 world",
       "café bar grill bold< b> world"},
      {"visit https://example.com/x?y=1 now or www.foo.org", "visit ?y=1 now or"},
      {"this-is-my-cute-cat_in_the_hat", "this is my cute cat in the hat"},
      {"clip jc6640 and jc6640vc 6640vc231 #123 1234567 10x20 3:45", "clip and 3:45"},
      {"Hello.World,this/is", "hello. world, this is"},
      {"\"quoted prompt\"", "quoted prompt"},
      {"it's the cat's “toy”...", "it's the cat's \"toy\""},
      {"free shipping download click for more page 12", ""},
      {"I+am 100% sure; a_b_c_d_e", "i am 100% sure; a b c d e"},
      {"new\\nline <person> @nick", "new line person"},
      {"email me a@b.com 192.168.0.1", "email me a"},
      {"Crème brûlée ½ cup №5 ★ 🔥", "crème brûlée cup №5 ★ 🔥"},
      {"", ""},
      {" \t\n ", ""},
      {"%E4%BD%A0 caf%C3%A9 50%", "café 50%"},
      {"a photo.jpg of 3x4 and 20×30", "a of and"},
  };
  for (const auto& [given, wanted] : vectors) EXPECT_EQ(clean_text(given), wanted) << given;
}

// docs/models/t5.md, umT5: made with ftfy 6.3.1.
TEST(Cleaning, VectorsOfWan) {
  const std::pair<const char*, const char*> vectors[] = {
      {"  A  cat\n\tsits ", "A cat sits"},
      {"caf\u00c3\u00a9 \u2014 \u201cquoted\u201d", "caf\u00e9 \u2014 \"quoted\""},
      {"&amp;lt;b&amp;gt; &amp; &lt;i&gt;", "<b> & <i>"},
      {"full\uff37idth \uff0c\u3000space", "fullWidth , space"},
      {"\u00a0nbsp\u00a0 x\u200bzero", "nbsp x\u200bzero"},
      {"&nbsp;x&nbsp;&nbsp;y", "x y"},
      {"it\u2019s \ufb01ne", "it's fine"},
      {"&amp;amp;amp;", "&"},
      {"e\u0301", "\u00e9"},
      {"x\u2028y\u0085z", "x y\u2026z"},
      {"CaSe Kept: #1, 50%+1", "CaSe Kept: #1, 50%+1"},
      {"", ""},
  };
  for (const auto& [given, wanted] : vectors) EXPECT_EQ(clean_basic(given), wanted) << given;
}

TEST(Cleaning, LongCaptionsAreCleanedToo) {
  std::string text;
  for (int i = 0; i < 20000; ++i) text += "a-b (c) ";
  const std::string cleaned = clean_text(text);
  EXPECT_EQ(cleaned.substr(0, 8), "a b c a ");
  EXPECT_EQ(cleaned.size(), 6 * 20000u - 1);
}

TEST(Html, IsReadAsPythonReadsIt) {
  const std::pair<const char*, const char*> pages[] = {
      {"a <b class='x'>bold</b> move", "a bold move"},
      {"1 < 2 and 3<4", "1 < 2 and 3<4"},
      {"a<br/>b<img src=x>c", "abc"},
      {"a <!-- gone --> b <? gone > c <!doctype html> d", "a  b  c  d"},
      {"<p>one<script>var x = '<b>';</script> two<style>p {}</style>", "one two"},
      {"an open <tag and no end", "an open <tag and no end"},
      {"fish &amp; chips &lt;3 &eacute; &#233; &#xe9; &#150;", "fish & chips <3 é é é –"},
      {"&copy 2020 &nosuch; &amp", "© 2020 &nosuch &amp"},
      {"x &", "x &"},
      {"<![CDATA[kept]]> <div", "kept <div"},
      {"<>, </>, </ b>, <3", "<>, , , <3"},
  };
  for (const auto& [page, text] : pages) EXPECT_EQ(html_text(page), text) << page;
}

TEST(Html, Unescape) {
  EXPECT_EQ(html_unescape("&lt;&notit; &notin; &#x80; &#0; &x; & &#; &ampx"),
            "<¬it; ∉ € \uFFFD &x; & &#; &x");
}

TEST(FixText, RepairsWhatItSays) {
  const std::pair<const char*, const char*> texts[] = {
      {"plain", "plain"},
      {"âœ” no problems", "✔ no problems"},
      {"l’humanitÃ©", "l'humanité"},
      {"schÃ¶n", "schön"},
      {"he said â€œyesâ€\u009d", "he said \"yes\""},
      {"voilà le travail", "voilà le travail"},
      {"the soﬁa ﬀ ĳ", "the sofia ff ij"},
      {"ＬＯＵＤ　ＮＯＩＳＥＳ", "LOUD NOISES"},
      {"‘a’ “b”", "'a' \"b\""},
      {"a\r\nb\rc\u2028d", "a\nb\nc\nd"},
      {"\x1b[36;44mblue\x1b[0m \x01 \ufeff", "blue  "},
      {"e\u0301", "é"},
      {"&lt;tag&gt; &nosuch;", "<tag> &nosuch;"},
  };
  for (const auto& [given, wanted] : texts) EXPECT_EQ(fix_text(given), wanted) << given;
}

// What ftfy 6.3.1 makes of them: Windows-1251, 1250, 1253, 1254, 1257, Latin-2, Mac Roman, code
// page 437, surrogates, a lost byte, a reference in capitals; and what is none of these.
TEST(FixText, RepairsTextsOfOtherEncodings) {
  const std::pair<const char*, const char*> texts[] = {
      {"РџСЂРёРІРµС‚ РјРёСЂ", "Привет мир"},
      {"ĹĽĂłĹ‚Ä‡ â€śxâ€ť", "żółć \"x\""},
      {"Ξ³Ξ¬Ο„Ξ± β€“ Ξ\u00adΞ½Ξ±", "γάτα – ένα"},
      {"aÄŸÃ¼ÅŸâ€™s", "ağüş's"},
      {"Ä…Ä¨Ä™ ā€” Ä—", "ąčę — ė"},
      {"PĹ\u0099Ă\u00adliĹĄ ĹžluĹĽ", "Příliš žluť"},
      {"na√Øve caf√©‚Äôs", "naïve café's"},
      {"na├»ve caf├⌐ΓÇÖs", "naïve café's"},
      {"a í\u00a0½í²©", "a 💩"},
      {"â€œ like this â€\ufffd", "\" like this \ufffd"},
      {"P&EACUTE;REZ &GTDOT; &SUP3;", "PÉREZ &GTDOT; ³"},
      {"Россия ‚Ä кот √2 ≈3 (╯°□°)╯", "Россия 'Ä кот √2 ≈3 (╯°□°)╯"},
  };
  for (const auto& [given, wanted] : texts) EXPECT_EQ(fix_text(given), wanted) << given;
}

// What ftfy 6.3.1 makes of them.
TEST(FixText, RepairsPartsAndTextsReadTwice) {
  const std::vector<std::pair<std::string, std::string>> texts = {
      {"z\u00e2\xc2\x80"
       "\u00e2\xc2\x82"
       " y",
       "z\u00e2\u20ac\u00e2' y"},
      {"z\u00e2\xc2\x80"
       "\u00e2\xc2\x82"
       "y",
       "z\u00e2\u20ac\u00e2'y"},
      {"\u00c3\xc2\x83"
       " a\u00c3\u00a7\u00c3\u00a3o",
       "\u00e0 a\u00e7\u00e3o"},
      {"\u00c3\xc2\x83"
       "\u00c2\xc2\x83"
       "\u00c3\xc2\x82"
       "\u00c2\u00a9",
       "\u00e9"},
      {"\u00c3\u0192\u00c6\u2019 \u00c3\u00a2\u00c5\u201c\u00e2\u20ac\u0153", "\u00e0 \u2713"},
      {"caf\u00c3\u00a9\u00e2\u00c3\u00a0 x", "caf\u00e9\u00e2\u00e0 x"},
      {"r\u00c3\u00a9sum\u00c3\u00a9 \u00e2 x", "r\u00e9sum\u00e9 \u00e2 x"},
      {"\u00c2\u00a33 5\u00e2\u201a\u00ac\u00a0cat the \u2713",
       "\u00a33 5\u20ac\u00a0cat the \u2713"},
      {"la \u2713 r\u00c3\u00a9sum\u00c3\u00a9", "la \u2713 r\u00e9sum\u00e9"},
      {"\u00ce\u00a2 \u00c2\u00ae \u00c5\u00a1", "\u03a2 \u00ae \u0161"},
      {"\u00ce\u201a", "\u0382"},
      {"\u00f1and\u00fa \u00ce\u201d \u201cquoted\u201d", "\u00f1and\u00fa \u0394 \"quoted\""},
      {"voil\u00c3 le travail \u2713", "voil\u00e0 le travail \u2713"},
      {"caf\u00e9 \u03c0 \u00bd", "caf\u00e9 \u03c0 \u00bd"},
      {"\u0394 \u00e2\u20ac\u0153quoted\u00e2\u20ac\xc2\x9d"
       "",
       "\u0394 \u00e2\u20ac\u0153quoted\""},
      {"Fran\u00e7ois \u00e0 5 \u20ac", "Fran\u00e7ois \u00e0 5 \u20ac"},
      {"\u00d8\u00a7\u00d9\u201e\u00d8\u00b9 \u2713", "\u0627\u0644\u0639 \u2713"},
  };
  for (const auto& [given, wanted] : texts) EXPECT_EQ(fix_text(given), wanted) << given;
}

TEST(Utf8, NamesTheTextAndTheByte) {
  EXPECT_NO_THROW(check_utf8("añ 你 🔥", "prompt 3"));
  for (const std::string bad : {"ab\xff", "ab\xc3", "ab\xed\xa0\x80", "ab\xc0\xaf"}) {
    try {
      check_utf8(bad, "prompt 3");
      ADD_FAILURE() << "accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data);
      EXPECT_THAT(e.what(), testing::HasSubstr("prompt 3 is not UTF-8: byte 3"));
    }
  }
}

}  // namespace
}  // namespace weft
