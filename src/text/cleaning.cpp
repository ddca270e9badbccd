#include "text/cleaning.h"

#include <gumbo.h>
#include <unicode/locid.h>
#include <unicode/unistr.h>

#include <algorithm>
#include <set>
#include <string_view>
#include <vector>

#include "text/utf8.h"

namespace weft {

std::string lower_case(const std::string& text) {
  std::string out;
  icu::UnicodeString::fromUTF8(text).toLower(icu::Locale::getRoot()).toUTF8String(out);
  return out;
}

namespace {

struct Step {
  Pattern find;
  std::string put;
};
using Steps = std::vector<Step>;

std::string run(const Steps& steps, std::string text) {
  for (const Step& s : steps) text = s.find.replace(text, s.put);
  return text;
}

// '+' is a space and %XX a byte, as in the query of a URL; bytes that are then no UTF-8 become
// U+FFFD.
std::string unquote(const std::string& text) {
  const auto value = [](char c) {
    if (c >= '0' && c <= '9') return c - '0';
    c = static_cast<char>(c | 32);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
  };
  std::string bytes;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool quoted =
        text[i] == '%' && i + 2 < text.size() && value(text[i + 1]) >= 0 && value(text[i + 2]) >= 0;
    if (quoted) {
      bytes += static_cast<char>(value(text[i + 1]) * 16 + value(text[i + 2]));
      i += 2;
    } else {
      bytes += text[i] == '+' ? ' ' : text[i];
    }
  }
  return to_utf8(to_code_points(bytes));
}

// An address: either with its scheme, or by the end of its name.
Pattern address(const std::string& scheme) {
  return Pattern(
      R"(\b()" + scheme +
      R"(:(?:/{1,3}|[a-zA-Z0-9%])|[a-zA-Z0-9.\-]+[.](?:com|co|ru|net|org|edu|gov|it)[\w/\-]*\b/?(?!@)))");
}

const Steps& before_html() {
  static const Steps steps = {
      {Pattern("<person>"), "person"}, {address("https?"), ""}, {address("www"), ""}};
  return steps;
}

// Removes from the page's text the marks that no reader would speak.
const Steps& marks() {
  static const std::string ellipsis_and_signs = R"([#®•©™&@·º½¾¿¡§~)(\]\[}{|\\/*]+)";
  static const Steps steps = {
      {Pattern(R"(@\w+\b)"), ""},  // @name
      // Strokes, phonetic extensions, enclosed letters, compatibility forms, ideographs.
      {Pattern(R"([\x{31c0}-\x{31ff}\x{3200}-\x{4dbf}\x{4dc0}-\x{9fff}]+)"), ""},
      // Dashes of all kinds.
      {Pattern(
           R"([\x{2d}\x{58a}\x{5be}\x{1400}\x{1806}\x{2010}-\x{2015}\x{2e17}\x{2e1a}\x{2e3a}\x{2e3b}\x{2e40})"
           R"(\x{301c}\x{3030}\x{30a0}\x{fe31}\x{fe32}\x{fe58}\x{fe63}\x{ff0d}]+)"),
       "-"},
      {Pattern("[`´«»“”¨]"), "\""},
      {Pattern("[‘’]"), "'"},
      {Pattern("&quot;?"), ""},
      {Pattern("&amp"), ""},
      {Pattern(R"(\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3})"), " "},  // IP addresses
      {Pattern(R"(\d:\d\d\s+$)"), ""},
      {Pattern(R"(\\n)"), " "},
      {Pattern(R"(#\d{1,3}\b)"), ""},
      {Pattern(R"(#\d{5,}\b)"), ""},
      {Pattern(R"(\b\d{6,}\b)"), ""},
      {Pattern(R"(\S+\.(?:png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4))"), ""},
      {Pattern(R"(["']{2,})"), "\""},
      {Pattern(R"(\.{2,})"), " "},
      {Pattern(ellipsis_and_signs), " "},
      {Pattern(R"(\s+\.\s+)"), " "}};
  return steps;
}

// Removes what shops, stock photos and file names leave in captions; then tidies spaces and ends.
const Steps& rubbish() {
  static const Steps steps = {
      {Pattern(R"(\b[a-zA-Z]{1,3}\d{3,15}\b)"), ""},
      {Pattern(R"(\b[a-zA-Z]+\d+[a-zA-Z]+\b)"), ""},
      {Pattern(R"(\b\d+[a-zA-Z]+\d+\b)"), ""},
      {Pattern(R"((worldwide\s+)?(free\s+)?shipping)"), ""},
      {Pattern(R"((free\s)?download(\sfree)?)"), ""},
      {Pattern(R"(\bclick\b\s(?:for|on)\s\w+)"), ""},
      {Pattern(R"(\b(?:png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4)(\simage[s]?)?)"), ""},
      {Pattern(R"(\bpage\s+\d+\b)"), ""},
      {Pattern(R"(\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b)"), " "},
      {Pattern(R"(\b\d+\.?\d*[xх×]\d+\.?\d*\b)"), ""},  // sizes; the second x is Cyrillic
      {Pattern(R"(\b\s+:\s+)"), ": "},
      {Pattern(R"((\D[,./])\b)"), "$1 "},
      {Pattern(R"(\s+)"), " "},
      {Pattern(R"(^["']((?s:.)+)["']$)"), "$1"},
      {Pattern(R"(^['_,\-:;])"), ""},
      {Pattern(R"(['_,\-:+]$)"), ""},
      {Pattern(R"(^\.\S+$)"), ""}};
  return steps;
}

std::string clean_caption(const std::string& caption) {
  std::string text = run(before_html(), lower_case(strip(unquote(caption))));
  text = run(marks(), html_text(text));
  // this-is-a-name, this_is_another
  static const Pattern joint("[-_]");
  if (joint.count(text) > 3) text = joint.replace(text, " ");
  text = strip(html_unescape(html_unescape(fix_text(text))));
  return strip(run(rubbish(), text));
}

}  // namespace

std::string clean_text(const std::string& text) { return clean_caption(clean_caption(text)); }

std::string clean_basic(const std::string& text) {
  static const Pattern spaces(R"(\s+)");
  return strip(spaces.replace(html_unescape(html_unescape(fix_text(text))), " "));
}

// html_text and html_unescape of text/cleaning.h: a tokenizer that follows Python's html.parser,
// and character references.

namespace {

constexpr std::size_t none = std::string::npos;

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

std::string ascii_lower(std::string s) {
  for (char& c : s)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c + 'a' - 'A');
  return s;
}

// Elements without content, and elements whose text does not belong to the page.
const std::set<std::string> empty = {
    "area",     "base", "basefont", "bgsound", "br",     "col",     "command", "embed",
    "frame",    "hr",   "image",    "img",     "input",  "isindex", "keygen",  "link",
    "menuitem", "meta", "nextid",   "param",   "source", "spacer",  "track",   "wbr"};
const std::set<std::string> hidden = {"rp", "rt", "script", "style", "template"};

// Reads a page from its beginning; unfinished constructs are examined again when the end is known.
class Reader {
 public:
  explicit Reader(const std::string& page) : page_(page) {}

  std::string text() {
    read(false);
    read(true);
    return out_;
  }

 private:
  void give(std::string_view text) {
    const bool seen = std::none_of(open_.begin(), open_.end(),
                                   [](const std::string& tag) { return hidden.contains(tag); });
    if (seen) out_ += text;
  }
  bool starts(const char* what) const {
    return page_.compare(at_, std::char_traits<char>::length(what), what) == 0;
  }
  std::size_t behind(char c, std::size_t from) const {
    const std::size_t found = page_.find(c, from);
    return found == none ? none : found + 1;
  }

  void read(bool last) {
    while (at_ < page_.size()) {
      std::size_t next = raw_.empty() ? page_.find_first_of("<&", at_) : end_of_raw();
      if (next == none) {
        if (!raw_.empty()) return;
        next = page_.size();
      }
      give(std::string_view(page_).substr(at_, next - at_));
      at_ = next;
      if (at_ == page_.size()) return;
      if (page_[at_] == '<' ? !markup(last) : !reference(last)) break;
    }
    if (!last || at_ >= page_.size() || !raw_.empty()) return;
    give(std::string_view(page_).substr(at_));
    at_ = page_.size();
  }

  // Where the script or style ends that we are in.
  std::size_t end_of_raw() const {
    static const Pattern tag(R"(</\s*([a-zA-Z]+)\s*>)");
    for (std::size_t i = page_.find("</", at_); i != none; i = page_.find("</", i + 1)) {
      const std::size_t end = tag.match(page_, i);
      if (end != none && ascii_lower(page_.substr(i, end - i)).find(raw_) != none) return i;
    }
    return none;
  }

  // Something that begins with <; false where more text could still change what it is.
  bool markup(bool last) {
    std::size_t end = none;
    if (at_ + 1 >= page_.size()) return false;
    if (is_letter(page_[at_ + 1])) {
      end = start_tag();
    } else if (starts("</")) {
      end = end_tag();
    } else if (starts("<!--")) {
      static const Pattern close(R"(--\s*>)");
      for (std::size_t i = page_.find("--", at_ + 4); i != none && end == none;
           i = page_.find("--", i + 1))
        end = close.match(page_, i);
    } else if (starts("<![")) {
      end = section();
    } else if (starts("<!") || starts("<?")) {
      end = behind('>', at_ + 2);
    } else {
      give("<");
      end = at_ + 1;
    }
    if (end == none) {
      if (!last) return false;
      end = behind('>', at_ + 1);
      if (end == none) end = std::min(page_.find('<', at_ + 1), page_.size());
      if (end == page_.size() && page_.back() != '>') end = at_ + 1;
      give(std::string_view(page_).substr(at_, end - at_));
    }
    at_ = end;
    return true;
  }

  std::size_t start_tag() {
    static const Pattern name(R"([a-zA-Z][^\t\n\r\f />\x00]*)");
    static const Pattern whole(
        R"(<[a-zA-Z][^\t\n\r\f />\x00]*(?:[\s/]*(?:(?<=['"\s/])[^\s/>][^\s/=>]*)"
        R"((?:\s*=+\s*(?:'[^']*'|"[^"]*"|(?!['"])[^>\s]*)\s*)?(?:\s|/(?!>))*)*)?\s*)");
    std::size_t end = whole.match(page_, at_);
    const char next = end < page_.size() ? page_[end] : '\0';
    if (end == page_.size() || is_letter(next) || next == '=') return none;
    if (next == '/') {
      if (page_.compare(end, 2, "/>") != 0) return none;
      ++end;
    } else if (next != '>') {  // not a tag after all
      give(std::string_view(page_).substr(at_, end - at_));
      return end;
    }
    const std::string tag =
        ascii_lower(page_.substr(at_ + 1, name.match(page_, at_ + 1) - at_ - 1));
    if (page_[end - 1] != '/' && !empty.contains(tag)) {
      open_.push_back(tag);
      if (tag == "script" || tag == "style") raw_ = tag;
    }
    return end + 1;
  }

  std::size_t end_tag() {
    static const Pattern whole(R"(</\s*([a-zA-Z][-.a-zA-Z0-9:_]*)\s*>)");
    static const Pattern name(R"([a-zA-Z][^\t\n\r\f />\x00]*)");
    std::size_t end = behind('>', at_ + 1);
    if (end == none) return none;
    std::string tag;
    if (whole.match(page_, at_) != none) {
      const std::size_t first =
          std::find_if(page_.begin() + static_cast<std::ptrdiff_t>(at_), page_.end(), is_letter) -
          page_.begin();
      tag = page_.substr(
          first, page_.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                         "0123456789-.:_",
                                         first) -
                     first);
    } else {
      const std::size_t after = name.match(page_, at_ + 2);
      if (after == none) return end;  // treated as a comment
      tag = page_.substr(at_ + 2, after - at_ - 2);
      end = behind('>', after);
    }
    const auto opened = std::find(open_.rbegin(), open_.rend(), ascii_lower(tag));
    if (opened != open_.rend()) open_.erase(opened.base() - 1, open_.end());
    raw_.clear();
    return end;
  }

  // <![cdata[ text ]]>, and sections that office programs write.
  std::size_t section() {
    static const Pattern close(R"(]\s*]\s*>)");
    if (ascii_lower(page_.substr(at_ + 3, 6)) != "cdata[") return behind('>', at_ + 3);
    for (std::size_t i = page_.find(']', at_ + 9); i != none; i = page_.find(']', i + 1)) {
      const std::size_t end = close.match(page_, i);
      if (end == none) continue;
      give(std::string_view(page_).substr(at_ + 9, i - at_ - 9));
      return end;
    }
    return none;
  }

  // Something that begins with &; false where more text could still change what it is.
  bool reference(bool last) {
    static const Pattern number(R"(&#(?:[0-9]+|[xX][0-9a-fA-F]+)(?=[^0-9a-fA-F]))");
    static const Pattern name(R"(&[a-zA-Z][-.a-zA-Z0-9]*(?=[^a-zA-Z0-9]))");
    if (starts("&#")) {
      const std::size_t end = number.match(page_, at_);
      if (end == none) {
        if (page_.find(';', at_) == none) return false;
        give("&#");
        at_ += 2;
        return false;
      }
      std::string reference = page_.substr(at_, end - at_);
      give(html_unescape(reference + ";"));
      at_ = end + (page_[end] == ';' ? 1 : 0);
      return true;
    }
    const std::size_t end = name.match(page_, at_);
    if (end != none) {
      const std::string known = named_character(page_.substr(at_ + 1, end - at_ - 1));
      give(known.empty() ? std::string_view(page_).substr(at_, end - at_) : known);
      at_ = end + (page_[end] == ';' ? 1 : 0);
      return true;
    }
    if (at_ + 1 >= page_.size()) return false;
    if (is_letter(page_[at_ + 1])) {
      if (last && at_ + 2 == page_.size()) ++at_;  // html.parser drops the & of a last "&x"
      return false;
    }
    give("&");
    ++at_;
    return true;
  }

  const std::string& page_;
  std::size_t at_ = 0;
  std::string out_, raw_;
  std::vector<std::string> open_;
};

}  // namespace

std::string html_text(const std::string& page) { return Reader(page).text(); }

namespace {

void collect(const GumboNode* node, std::string& out) {
  if (node->type == GUMBO_NODE_TEXT || node->type == GUMBO_NODE_WHITESPACE)
    out += node->v.text.text;
  if (node->type != GUMBO_NODE_ELEMENT) return;
  for (unsigned i = 0; i < node->v.element.children.length; ++i)
    collect(static_cast<const GumboNode*>(node->v.element.children.data[i]), out);
}

// The text that an HTML parser reads from `markup` (which has no tags). A letter before it keeps
// white space from being dropped.
std::string parsed(const std::string& markup) {
  const std::string page = "x" + markup;
  GumboOutput* output = gumbo_parse_with_options(&kGumboDefaultOptions, page.data(), page.size());
  std::string text;
  collect(output->root, text);
  gumbo_destroy_output(&kGumboDefaultOptions, output);
  return text.substr(1);
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The number of a numeric reference, as HTML 5 reads it: 0x80 to 0x9f mean Windows-1252.
std::string numbered(std::uint64_t n) {
  static const char32_t windows[32] = {
      0x20ac, 0x81,   0x201a, 0x0192, 0x201e, 0x2026, 0x2020, 0x2021, 0x02c6, 0x2030, 0x0160,
      0x2039, 0x0152, 0x8d,   0x017d, 0x8f,   0x90,   0x2018, 0x2019, 0x201c, 0x201d, 0x2022,
      0x2013, 0x2014, 0x02dc, 0x2122, 0x0161, 0x203a, 0x0153, 0x9d,   0x017e, 0x0178};
  auto c = static_cast<char32_t>(std::min<std::uint64_t>(n, 0x110000));
  if (c >= 0x80 && c < 0xa0) return to_utf8({&windows[c - 0x80], 1});
  if (c == 0 || (c >= 0xd800 && c <= 0xdfff) || c > 0x10ffff) c = 0xfffd;
  const bool control = (c < 0x20 && c != 9 && c != 10 && c != 12 && c != 13) || c == 0x7f;
  if (control || (c >= 0xfdd0 && c <= 0xfdef) || (c & 0xfffe) == 0xfffe) return "";
  return to_utf8({&c, 1});
}

}  // namespace

std::string named_character(const std::string& name) {
  const std::string text = parsed("&" + name + ";");
  // An unknown name, or one known only in part, leaves the semicolon behind.
  return name != "semi" && text.ends_with(';') ? "" : text;
}

std::string html_unescape(const std::string& text) {
  std::string out;
  std::size_t done = 0;
  while (true) {
    const std::size_t at = text.find('&', done);
    out.append(text, done, at - done);
    if (at == std::string::npos) return out;
    std::size_t end = at + 1;
    const auto upto = [&](auto&& accepted) {
      while (end < text.size() && accepted(text[end])) ++end;
    };
    if (end < text.size() && text[end] == '#') {
      ++end;
      const bool hex = end < text.size() && (text[end] == 'x' || text[end] == 'X');
      if (hex) ++end;
      const std::size_t first = end;
      upto([&](char c) {
        return is_digit(c) || (hex && ((c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F')));
      });
      if (end > first) {
        std::uint64_t n = 0;
        for (std::size_t i = first; i < end && n < 0x110000; ++i)
          n = n * (hex ? 16 : 10) + static_cast<std::uint64_t>(is_digit(text[i])
                                                                   ? text[i] - '0'
                                                                   : (text[i] | 32) - 'a' + 10);
        if (end < text.size() && text[end] == ';') ++end;
        out += numbered(n);
        done = end;
        continue;
      }
    } else if (end < text.size() && is_letter(text[end])) {
      upto([](char c) { return is_letter(c) || is_digit(c); });
      if (end < text.size() && text[end] == ';') ++end;
      out += parsed(text.substr(at, end - at));
      done = end;
      continue;
    }
    out += '&';
    done = at + 1;
  }
}

}  // namespace weft
