#include "data/text_images/drawn/drawn_text.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <numbers>
#include <opencv2/imgproc.hpp>
#include <string_view>

#include "core/error.h"
#include "core/hash.h"
#include "core/log.h"
#include "data/lists/folders.h"
#include "data/synthetic.h"
#include "data/text_images/drawn/grounds.h"
#include "data/text_images/opencv.h"
#include "media/image_file.h"

namespace weft {
namespace {

constexpr std::string_view vowels = "aaeeeiioou";
constexpr auto onsets = std::to_array<std::string_view>(
    {"b", "c", "d", "f", "g", "h",  "k",  "l",  "m",  "n",  "p",  "r",  "s",  "t",  "v",
     "w", "y", "z", "j", "q", "st", "tr", "ch", "sh", "pl", "gr", "th", "br", "cl", "sp"});
constexpr auto codas = std::to_array<std::string_view>(
    {"", "", "", "n", "r", "s", "t", "l", "d", "m", "x", "ck", "ng", "st", "ll", "nt", "ty", "p"});
constexpr std::string_view digits = "0123456789";
constexpr std::string_view signs = "&@#!?*+=/()[]%$";

template <class T>
const auto& pick(Draws& d, const T& from) {
  return from[d.below(static_cast<int>(from.size()))];
}

char upper(char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - 32) : c; }

std::string syllables(Draws& d) {
  std::string word;
  for (int n = 1 + d.below(3) + d.below(2); n > 0; --n) {
    if (d.chance(0.85)) word += pick(d, onsets);
    word += pick(d, vowels);
    word += pick(d, codas);
  }
  return word;
}

std::string number(Draws& d, int most) {
  std::string word;
  for (int n = 1 + d.below(most); n > 0; --n) word += pick(d, digits);
  return word;
}

std::string figures(Draws& d) {
  switch (d.below(6)) {
    case 0:
      return "$" + number(d, 3) + "." + pick(d, digits) + pick(d, digits);
    case 1:
      return number(d, 2) + ":" + pick(d, digits) + pick(d, digits);
    case 2:
      return number(d, 2) + "%";
    case 3:
      return number(d, 4) + "-" + number(d, 4);
    default:
      return number(d, 6);
  }
}

std::string letters(Draws& d) {
  std::string word;
  for (int n = 2 + d.below(8); n > 0; --n) word += static_cast<char>('a' + d.below(26));
  return word;
}

// A word of syllables, a number, a price, a time, or letters at random; no blanks.
std::string draw_word(Draws& d) {
  const bool loud = d.chance(0.4);
  if (d.chance(0.15)) return figures(d);
  std::string word = d.chance(0.85) ? syllables(d) : letters(d);
  if (loud)
    for (char& c : word) c = upper(c);
  else if (d.chance(0.5))
    word[0] = upper(word[0]);
  if (d.chance(0.06)) word += pick(d, signs);
  if (d.chance(0.06)) word += pick(d, std::string_view(".,:;!'\""));
  if (d.chance(0.05)) word += pick(d, digits);
  return word;
}

constexpr double least_side = 8;  // of a region that is not ignored, in pixels

using Quad = std::array<Point, 4>;
using Colour = std::array<double, 3>;

// From the plane of a block of text, its middle at the origin, to the picture.
struct View {
  Point middle;
  double cosine = 1, sine = 0, slant = 0, squeeze = 1;
  Point tilt;  // growth of the distance along x and y: perspective

  Point operator()(Point p) const {
    const double u = (p.x + slant * p.y) * squeeze, v = p.y;
    const double away = 1 + tilt.x * p.x + tilt.y * p.y;
    return {middle.x + (cosine * u - sine * v) / away, middle.y + (sine * u + cosine * v) / away};
  }
};

Quad seen(const View& view, Point low, Point high) {
  return {view(low), view({high.x, low.y}), view(high), view({low.x, high.y})};
}

bool inside(const Quad& quad, ImageSize size) {
  return std::ranges::all_of(quad, [&](Point p) {
    return p.x >= 1 && p.y >= 1 && p.x <= static_cast<double>(size.width) - 1 &&
           p.y <= static_cast<double>(size.height) - 1;
  });
}

// Convex quads are apart if an edge of one has the other behind it.
bool apart(const Quad& a, const Quad& b) {
  for (const auto& [edges, other] : {std::pair{&a, &b}, std::pair{&b, &a}})
    for (std::size_t i = 0; i < 4; ++i) {
      const Point p = (*edges)[i], q = (*edges)[(i + 1) % 4];
      if (std::ranges::all_of(*other, [&](Point r) {
            return (q.x - p.x) * (r.y - p.y) - (q.y - p.y) * (r.x - p.x) < 0;
          }))
        return true;
    }
  return false;
}

double length(Point a, Point b) { return std::hypot(a.x - b.x, a.y - b.y); }

double shorter_side(const Quad& q) {
  return std::min(std::min(length(q[0], q[1]), length(q[2], q[3])),
                  std::min(length(q[1], q[2]), length(q[3], q[0])));
}

// How much of each pixel is ink, 0 to 255: [height, width] from column `left` and row `top` on.
struct Coverage {
  int left = 0, top = 0, height = 0, width = 0;
  std::vector<std::uint8_t> values;
};

// A word in OpenCV's stroke letters; x to the right, y down, the baseline at y = 0.
struct Word {
  cv::Mat ink;         // u8, nothing but the letters
  Point low, high;     // where its corners lie
  double advance = 0;  // where the next word begins
};

constexpr auto faces =
    std::to_array({cv::FONT_HERSHEY_SIMPLEX, cv::FONT_HERSHEY_PLAIN, cv::FONT_HERSHEY_DUPLEX,
                   cv::FONT_HERSHEY_COMPLEX, cv::FONT_HERSHEY_TRIPLEX,
                   cv::FONT_HERSHEY_SCRIPT_SIMPLEX, cv::FONT_HERSHEY_SCRIPT_COMPLEX});

struct Lettering {
  int font = 0;
  double capital = 0;  // height of a capital letter in pixels
  double weight = 0;   // thickness of strokes, as a share of it
};

Word set_word(const Lettering& how, const std::string& text) {
  // Small letters are drawn large: strokes have whole pixels.
  const double height = std::max(how.capital, 28.0), scale = how.capital / height;
  const int thickness = std::max(1, static_cast<int>(std::lround(how.weight * height)));
  const double size =
      cv::getFontScaleFromHeight(how.font, static_cast<int>(std::lround(height)), thickness);
  int below = 0;
  const cv::Size box = cv::getTextSize(text, how.font, size, thickness, &below);
  const int margin = 2 * thickness + static_cast<int>(height);
  cv::Mat whole = cv::Mat::zeros(box.height + 2 * margin + below, box.width + 2 * margin, CV_8U);
  cv::putText(whole, text, {margin, margin + box.height}, how.font, size, {255}, thickness,
              cv::LINE_AA);
  const cv::Rect ink = cv::boundingRect(whole);
  if (ink.empty()) return {};
  const auto placed = [&](int x, int y) {
    return Point{scale * (x - margin), scale * (y - margin - box.height)};
  };
  const auto shrunk = [&](int n) { return std::max(1, static_cast<int>(std::lround(scale * n))); };
  cv::Mat letters;
  cv::resize(whole(ink), letters, {shrunk(ink.width), shrunk(ink.height)}, 0, 0, cv::INTER_AREA);
  return {letters, placed(ink.x, ink.y), placed(ink.x + ink.width, ink.y + ink.height),
          scale * box.width};
}

// The word where its ink fills the quad.
Coverage seen_ink(const Word& word, const Quad& quad) {
  Point low = quad[0], high = quad[0];
  for (const Point& p : quad) {
    low = {std::min(low.x, p.x), std::min(low.y, p.y)};
    high = {std::max(high.x, p.x), std::max(high.y, p.y)};
  }
  Coverage out{static_cast<int>(std::floor(low.x)), static_cast<int>(std::floor(low.y)), 0, 0, {}};
  out.width = static_cast<int>(std::ceil(high.x)) - out.left + 1;
  out.height = static_cast<int>(std::ceil(high.y)) - out.top + 1;
  out.values.resize(static_cast<std::size_t>(out.height) * static_cast<std::size_t>(out.width));
  // OpenCV counts from the middle of the first pixel.
  constexpr float half = 0.5f;
  const auto w = static_cast<float>(word.ink.cols), h = static_cast<float>(word.ink.rows);
  const std::array<cv::Point2f, 4> from{
      {{-half, -half}, {w - half, -half}, {w - half, h - half}, {-half, h - half}}};
  std::array<cv::Point2f, 4> to;
  for (std::size_t i = 0; i < 4; ++i)
    to[i] = {static_cast<float>(quad[i].x - out.left) - half,
             static_cast<float>(quad[i].y - out.top) - half};
  cv::Mat values(out.height, out.width, CV_8U, out.values.data());
  cv::warpPerspective(word.ink, values, cv::getPerspectiveTransform(from.data(), to.data()),
                      values.size(), cv::INTER_LINEAR, cv::BORDER_CONSTANT, {0});
  return out;
}

double brightness(const Colour& c) { return 0.299 * c[0] + 0.587 * c[1] + 0.114 * c[2]; }

struct Ground {
  Colour mean{};
  bool mixed = false;  // no one colour stands out everywhere
};

Ground ground_of(const Quad& quad, const Picture& picture) {
  // A few points along its diagonals.
  constexpr int points = 9;
  Ground ground;
  double squares = 0;
  for (int i = 0; i < points; ++i)
    for (std::size_t k = 0; k < 2; ++k) {
      const Point a = quad[k], b = quad[k + 2];
      const double t = (i + 0.5) / points;
      const auto x =
          std::clamp<std::int64_t>(std::llround(a.x + t * (b.x - a.x)), 0, picture.size.width - 1);
      const auto y =
          std::clamp<std::int64_t>(std::llround(a.y + t * (b.y - a.y)), 0, picture.size.height - 1);
      const std::uint8_t* rgb = picture.rgb.data() + (y * picture.size.width + x) * 3;
      const Colour c{static_cast<double>(rgb[0]), static_cast<double>(rgb[1]),
                     static_cast<double>(rgb[2])};
      for (std::size_t n = 0; n < 3; ++n) ground.mean[n] += c[n] / (2 * points);
      squares += brightness(c) * brightness(c) / (2 * points);
    }
  const double mean = brightness(ground.mean);
  ground.mixed = squares - mean * mean > 30 * 30;
  return ground;
}

// Any colour, then black or white mixed in until it stands out.
Colour contrasting(Draws& d, const Colour& ground) {
  Colour c;
  if (d.chance(0.45))
    c.fill(brightness(ground) > 128 ? d.between(0, 60) : d.between(195, 255));
  else
    for (double& v : c) v = d.between(0, 255);
  const double least = d.between(55, 120);
  const double towards = brightness(ground) > 128 ? 0 : 255;
  for (int i = 0; i < 8 && std::abs(brightness(c) - brightness(ground)) < least; ++i)
    for (double& v : c) v += 0.3 * (towards - v);
  return c;
}

void blend(Picture& to, const Coverage& ink, const Colour& colour, double opacity) {
  const auto left = std::max<std::int64_t>(0, ink.left), top = std::max<std::int64_t>(0, ink.top);
  const auto right = std::min<std::int64_t>(to.size.width, ink.left + ink.width);
  const auto bottom = std::min<std::int64_t>(to.size.height, ink.top + ink.height);
  const int share = static_cast<int>(opacity * 257);
  for (std::int64_t y = top; y < bottom; ++y) {
    const std::uint8_t* from = ink.values.data() + (y - ink.top) * ink.width - ink.left;
    std::uint8_t* p = to.rgb.data() + (y * to.size.width + left) * 3;
    for (std::int64_t x = left; x < right; ++x, p += 3) {
      const int a = from[x] * share;  // of 65535
      if (a == 0) continue;
      for (std::size_t c = 0; c < 3; ++c)
        p[c] = static_cast<std::uint8_t>(p[c] + (static_cast<int>(colour[c]) - p[c]) * a / 65535);
    }
  }
}

// Ink thickened by `radius` and, where `soft`, blurred.
Coverage thick(const Coverage& ink, int radius, bool soft) {
  Coverage out{ink.left - 2 * radius,
               ink.top - 2 * radius,
               ink.height + 4 * radius,
               ink.width + 4 * radius,
               {}};
  out.values.resize(static_cast<std::size_t>(out.height) * static_cast<std::size_t>(out.width));
  const cv::Mat from(ink.height, ink.width, CV_8U, const_cast<std::uint8_t*>(ink.values.data()));
  cv::Mat to(out.height, out.width, CV_8U, out.values.data());
  cv::copyMakeBorder(from, to, 2 * radius, 2 * radius, 2 * radius, 2 * radius, cv::BORDER_CONSTANT,
                     0);
  if (soft)
    cv::GaussianBlur(to, to, {2 * radius + 1, 2 * radius + 1}, 0);
  else
    cv::dilate(to, to,
               cv::getStructuringElement(cv::MORPH_ELLIPSE, {2 * radius + 1, 2 * radius + 1}));
  return out;
}

struct Style {
  Colour fill{}, edge{};
  double opacity = 1;
  int outline = 0;  // its thickness in pixels
  int shadow_x = 0, shadow_y = 0;
  bool shadow = false;
};

void draw(Picture& to, const Coverage& ink, const Style& style) {
  if (style.shadow) {
    Coverage shade = thick(ink, std::max(1, std::abs(style.shadow_x)), true);
    shade.left += style.shadow_x;
    shade.top += style.shadow_y;
    blend(to, shade, style.edge, 0.8);
  }
  if (style.outline > 0) blend(to, thick(ink, style.outline, false), style.edge, 1);
  blend(to, ink, style.fill, style.opacity);
}

// Words set in lines, the whole centred about the origin.
struct Block {
  std::vector<Word> words;  // in the block's plane
  Point low, high;          // of all ink
};

Word moved(Word w, double x, double y) {
  w.low = {w.low.x + x, w.low.y + y};
  w.high = {w.high.x + x, w.high.y + y};
  return w;
}

Block set_block(Draws& d, NumberRange letters, int words, ImageSize room) {
  Block block;
  Lettering how;
  how.font = pick(d, faces);
  how.weight = d.between(0.06, 0.16);
  const auto shorter = static_cast<double>(std::min(room.height, room.width));
  const double most = std::min(static_cast<double>(letters.high), 0.35 * shorter);
  const double least = std::min(static_cast<double>(letters.low), most);
  const double capital = how.capital = least * std::pow(most / least, d.unit());
  const double blank = capital * d.between(0.4, 0.75);
  const double leading = capital * d.between(1.6, 2.2);
  const double width = static_cast<double>(room.width) * d.between(0.3, 0.9);
  const int lines = d.chance(0.5) ? 1 : 1 + d.below(4);
  const int align = d.below(3);
  double baseline = 0;
  for (int line = 0; line < lines && words > 0; ++line, baseline += leading) {
    std::vector<Word> row;
    double x = 0;
    for (int n = 1 + d.below(5); n > 0 && words > 0; --n) {
      Word w = set_word(how, draw_word(d));
      if (w.ink.empty()) continue;
      if (!row.empty() && x + w.advance > width) break;
      const double advance = w.advance;
      row.push_back(moved(std::move(w), x, baseline));
      x += advance + blank;
      --words;
    }
    const double shift = align == 0 ? 0 : align == 1 ? -x / 2 : -x;
    for (Word& w : row) block.words.push_back(moved(std::move(w), shift, 0));
  }
  if (block.words.empty()) return block;
  block.low = block.words[0].low;
  block.high = block.words[0].high;
  for (const Word& w : block.words) {
    block.low = {std::min(block.low.x, w.low.x), std::min(block.low.y, w.low.y)};
    block.high = {std::max(block.high.x, w.high.x), std::max(block.high.y, w.high.y)};
  }
  const Point middle{(block.low.x + block.high.x) / 2, (block.low.y + block.high.y) / 2};
  for (Word& w : block.words) w = moved(std::move(w), -middle.x, -middle.y);
  block.high = {block.high.x - middle.x, block.high.y - middle.y};
  block.low = {block.low.x - middle.x, block.low.y - middle.y};
  return block;
}

View draw_view(Draws& d, const Block& block) {
  View view;
  const double kind = d.unit();
  double degrees = 0;
  if (kind > 0.35) degrees = d.between(-5, 5);
  if (kind > 0.65) degrees = d.between(-20, 20);
  if (kind > 0.88) degrees = d.between(-60, 60);
  if (kind > 0.97) degrees = d.chance(0.5) ? 90 : -90;
  const double angle = degrees * std::numbers::pi / 180;
  view.cosine = std::cos(angle);
  view.sine = std::sin(angle);
  if (d.chance(0.3)) view.slant = d.between(-0.3, 0.3);
  if (d.chance(0.3)) view.squeeze = d.between(0.75, 1.25);
  if (d.chance(0.3))
    view.tilt = {d.between(-0.25, 0.25) / block.high.x,
                 d.between(-0.25, 0.25) / std::max(block.high.x, block.high.y)};
  return view;
}

Style draw_style(Draws& d, const Ground& ground, double capital) {
  Style s;
  s.fill = contrasting(d, ground.mean);
  s.edge = contrasting(d, s.fill);
  s.opacity = d.chance(0.2) ? d.between(0.75, 1) : 1;
  const int reach = std::clamp(static_cast<int>(capital / 14), 1, 4);
  if (d.chance(ground.mixed ? 1 : 0.12)) s.outline = reach;
  if (d.chance(0.15)) {
    s.shadow = true;
    s.shadow_x = d.chance(0.5) ? reach : -reach;
    s.shadow_y = reach;
  }
  return s;
}

// A sign behind the block.
void draw_sign(Draws& d, Picture& to, const Quad& quad, const Colour& ground) {
  std::vector<cv::Point> points;
  for (const Point& p : quad)
    points.emplace_back(static_cast<int>(std::lround(p.x)), static_cast<int>(std::lround(p.y)));
  cv::Mat m(static_cast<int>(to.size.height), static_cast<int>(to.size.width), CV_8UC3,
            to.rgb.data());
  const Colour c = d.chance(0.5) ? contrasting(d, ground)
                                 : Colour{d.between(0, 255), d.between(0, 255), d.between(0, 255)};
  cv::fillPoly(m, std::vector{points}, {c[0], c[1], c[2]}, cv::LINE_AA);
  if (!d.chance(0.3)) return;
  const Colour line = contrasting(d, c);
  cv::polylines(m, std::vector{points}, true, {line[0], line[1], line[2]}, 1 + d.below(3),
                cv::LINE_AA);
}

}  // namespace

std::vector<TextRegion> write_words(Draws& d, NumberRange most, NumberRange letters,
                                    Picture& picture) {
  std::vector<TextRegion> regions;
  std::vector<Quad> taken;
  auto words = static_cast<int>(d.from(most.low, most.high));
  for (int tries = 4 + 4 * words; words > 0 && tries > 0; --tries) {
    Block block = set_block(d, letters, words, picture.size);
    if (block.words.empty()) continue;
    View view = draw_view(d, block);
    const double height = block.words[0].high.y - block.words[0].low.y;
    const double margin = height * d.between(0.25, 0.7);
    // Without a place here, perhaps elsewhere.
    Quad whole;
    bool placed = false;
    for (int k = 0; k < 6 && !placed; ++k) {
      view.middle = {d.unit() * static_cast<double>(picture.size.width),
                     d.unit() * static_cast<double>(picture.size.height)};
      whole = seen(view, {block.low.x - margin, block.low.y - margin},
                   {block.high.x + margin, block.high.y + margin});
      placed = inside(whole, picture.size) &&
               std::ranges::all_of(taken, [&](const Quad& t) { return apart(whole, t); });
    }
    if (!placed) continue;
    taken.push_back(whole);
    const Ground before = ground_of(whole, picture);
    if (d.chance(before.mixed ? 0.7 : 0.3)) draw_sign(d, picture, whole, before.mean);
    const Style style = draw_style(d, ground_of(whole, picture), height);
    const double around = d.between(0, 0.06) * height + 0.5;
    for (const Word& w : block.words) {
      const Quad quad =
          seen(view, {w.low.x - around, w.low.y - around}, {w.high.x + around, w.high.y + around});
      draw(picture, seen_ink(w, seen(view, w.low, w.high)), style);
      regions.push_back({{quad.begin(), quad.end()}, shorter_side(quad) < least_side});
      --words;
    }
  }
  return regions;
}

namespace {

constexpr const char* hint =
    "write for example data.path=\"text:images=10000,height=640,width=640,words=0..24\"";

class DrawnText : public TextImages {
 public:
  DrawnText(const std::string& spec, const MediaDeck& limits) : limits_(limits) {
    std::string fonts, pictures;
    const std::array numbers = {NumberKey{"images", &images_, 1, 10'000'000, false},
                                NumberKey{"height", &height_, 32, 8192, true},
                                NumberKey{"width", &width_, 32, 8192, true},
                                NumberKey{"words", &words_, 0, 1000, true},
                                NumberKey{"letters", &letters_, 4, 1000, true},
                                NumberKey{"seed", &seed_, 0, INT64_MAX, false}};
    const std::array texts = {TextKey{"fonts", &fonts}, TextKey{"pictures", &pictures}};
    std::string id = read_keys(spec, "text", hint, numbers, texts);
    if (!fonts.empty())
      log::warn("fonts={} of text has no effect any more: words are in OpenCV's stroke letters",
                fonts);
    if (!pictures.empty()) grounds_ = list_pictures(pictures);
    for (const std::string& g : grounds_) id += std::filesystem::path(g).filename().string() + "\n";
    id_ = to_hex(hash128(id));
  }

  std::int64_t count() const override { return images_.low; }
  std::string name(std::int64_t i) const override {
    return fmt::format("text:seed={} picture {}", seed_.low, i);
  }
  std::string content_id() const override { return id_; }
  ImageSize size(std::int64_t i) const override {
    Draws draws = draws_of(i);
    return size_of_picture(draws);
  }

  void read(std::int64_t i, TextImage& out) const override {
    with_opencv([&] { draw(i, out); });
  }

 private:
  void draw(std::int64_t i, TextImage& out) const {
    Draws draws = draws_of(i);
    Picture picture;
    picture.size = size_of_picture(draws);
    picture.rgb = std::move(out.rgb);  // memory of the picture before
    if (grounds_.empty()) {
      paint_ground(draws, picture);
    } else {
      const auto which = draws.from(0, std::ssize(grounds_) - 1);
      ImageFile file = read_image_file(grounds_[which], limits_);
      take_ground(draws, {{file.height, file.width}, std::move(file.values)}, picture);
    }
    out.regions = write_words(draws, words_, letters_, picture);
    photograph(draws, picture);
    out.size = picture.size;
    out.rgb = std::move(picture.rgb);
  }

  Draws draws_of(std::int64_t i) const {
    WEFT_ASSERT(i >= 0 && i < count());
    // 0 to 2 are streams of data/synthetic and data/images/shapes.
    return Draws(Philox(static_cast<std::uint64_t>(seed_.low), Purpose::synthetic, 3,
                        static_cast<std::uint64_t>(i)));
  }
  ImageSize size_of_picture(Draws& draws) const {
    const std::int64_t height = draws.from(height_.low, height_.high);
    return {height, draws.from(width_.low, width_.high)};
  }

  NumberRange images_{10'000, 10'000}, height_{640, 640}, width_{640, 640}, seed_{1, 1},
      words_{0, 24}, letters_{8, 72};
  std::string id_;
  MediaDeck limits_;
  std::vector<std::string> grounds_;  // paths of pictures to draw on
};

}  // namespace

std::unique_ptr<TextImages> make_drawn_text(const std::string& path, const MediaDeck& limits) {
  return std::make_unique<DrawnText>(path.substr(std::string_view(drawn_text_prefix).size()),
                                     limits);
}

}  // namespace weft
