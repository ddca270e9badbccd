#include "data/text_images/drawn/typesetter.h"

#include <ft2build.h>
#include FT_FREETYPE_H
#include FT_BBOX_H
#include FT_OUTLINE_H

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>

#include "core/error.h"
#include "data/lists/folders.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

struct Library {
  FT_Library handle = nullptr;
  Library() {
    WEFT_CHECK(FT_Init_FreeType(&handle) == 0, Exit::internal, "", "FreeType cannot start");
  }
  ~Library() { FT_Done_FreeType(handle); }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;
};

struct Closed {
  void operator()(FT_Face face) const { FT_Done_Face(face); }
};
using Face = std::unique_ptr<FT_FaceRec_, Closed>;

Face open_face(FT_Library library, const FontFile& font) {
  FT_Face face = nullptr;
  const int error = font.bytes.empty() ? FT_New_Face(library, font.path.c_str(), font.face, &face)
                                       : FT_New_Memory_Face(library, font.bytes.data(),
                                                            static_cast<FT_Long>(font.bytes.size()),
                                                            font.face, &face);
  return Face(error == 0 ? face : nullptr);
}

bool load(FT_Face face, char32_t letter, double size) {
  const auto fixed = static_cast<FT_F26Dot6>(std::lround(size * 64));
  return FT_Set_Char_Size(face, 0, fixed, 72, 72) == 0 &&
         FT_Load_Char(face, letter, FT_LOAD_NO_HINTING | FT_LOAD_NO_BITMAP) == 0 &&
         face->glyph->format == FT_GLYPH_FORMAT_OUTLINE;
}

// Fonts of symbols, or of scripts without Latin letters, have empty glyphs or none; or they draw
// something else under the letters' codes, as dingbats, Greek by Latin keys or pictures of keys do.
// Such glyphs hang below the line on which all these letters and digits stand.
bool writes_latin(FT_Face face) {
  if (!FT_IS_SCALABLE(face) || FT_Select_Charmap(face, FT_ENCODING_UNICODE) != 0) return false;
  FT_Pos capital = 0;
  for (const char32_t letter : std::u32string(U"HAEORSTaehorst019")) {
    if (FT_Get_Char_Index(face, letter) == 0 || !load(face, letter, 32) ||
        face->glyph->outline.n_points == 0)
      return false;
    FT_BBox box;
    FT_Outline_Get_BBox(&face->glyph->outline, &box);
    if (letter == U'H') capital = box.yMax;
    if (10 * std::abs(box.yMin) > capital) return false;
  }
  return true;
}

std::vector<std::string> font_paths(const std::string& folder) {
  std::vector<std::string> paths;
  std::error_code error;
  fs::recursive_directory_iterator entries(folder, fs::directory_options::skip_permission_denied,
                                           error);
  for (; !error && entries != fs::recursive_directory_iterator(); entries.increment(error)) {
    const std::string extension = ending_of(entries->path().string());
    std::error_code none;
    if ((extension == ".ttf" || extension == ".otf" || extension == ".ttc" ||
         extension == ".pfb") &&
        entries->is_regular_file(none))
      paths.push_back(entries->path().string());
  }
  std::ranges::sort(paths);
  return paths;
}

}  // namespace

std::vector<FontFile> find_fonts(const std::string& folder) {
  std::error_code none;
  WEFT_CHECK(fs::is_directory(folder, none), Exit::usage,
             "name a folder with .ttf or .otf files, such as /usr/share/fonts, or leave fonts= out",
             "fonts={} of text is not a folder", folder);
  const Library library;
  std::vector<FontFile> fonts;
  for (const std::string& path : font_paths(folder)) {
    int faces = 1;
    for (int i = 0; i < faces; ++i) {
      const Face face = open_face(library.handle, {path, i, {}});
      if (face == nullptr) break;
      faces = std::min<int>(static_cast<int>(face->num_faces), 16);
      if (writes_latin(face.get())) fonts.push_back({path, i, {}});
    }
  }
  WEFT_CHECK(!fonts.empty(), Exit::usage,
             "name another folder of .ttf or .otf files, or leave fonts= out for weft's own",
             "no font with Latin letters in {}", folder);
  return fonts;
}

struct Typesetter::State {
  const std::vector<FontFile>& files;
  Library library;
  // Open ones; all are closed when they become many.
  static constexpr std::size_t most_open = 64;
  std::vector<Face> faces;
  std::size_t open = 0;
  std::vector<std::optional<double>> capitals;

  explicit State(const std::vector<FontFile>& fonts)
      : files(fonts), faces(fonts.size()), capitals(fonts.size()) {}

  FT_Face face(std::size_t font) {
    if (!faces.at(font)) {
      if (open == most_open) {
        for (Face& f : faces) f.reset();
        open = 0;
      }
      faces[font] = open_face(library.handle, files[font]);
      WEFT_CHECK(faces[font] && FT_Select_Charmap(faces[font].get(), FT_ENCODING_UNICODE) == 0,
                 Exit::data, "it could be opened when weft started", "cannot read font {}",
                 files[font].path);
      ++open;
    }
    return faces[font].get();
  }
};

Typesetter::Typesetter(const std::vector<FontFile>& fonts)
    : state_(std::make_unique<State>(fonts)) {}
Typesetter::~Typesetter() = default;

double Typesetter::capital(std::size_t font) {
  std::optional<double>& height = state_->capitals.at(font);
  if (!height) {
    const Outline h = set(font, U"H", 100, 0);
    height = h.empty() ? 0.7 : (h.high.y - h.low.y) / 100;
  }
  return *height;
}

bool Typesetter::has(std::size_t font, char32_t letter) {
  return FT_Get_Char_Index(state_->face(font), letter) != 0;
}

Outline Typesetter::set(std::size_t font, const std::u32string& text, double size, double spacing) {
  const FT_Face face = state_->face(font);
  Outline word;
  bool first = true;
  for (const char32_t letter : text) {
    if (!load(face, letter, size)) continue;
    const FT_Outline& glyph = face->glyph->outline;
    const auto n = static_cast<std::size_t>(glyph.n_points);
    if (word.points.size() + n > 30'000) break;  // FreeType counts points in 16 bits
    if (n > 0) {
      FT_BBox box;
      FT_Outline_Get_BBox(const_cast<FT_Outline*>(&glyph), &box);
      const auto pixels = [](FT_Pos v) { return static_cast<double>(v) / 64; };
      const Point low{word.advance + pixels(box.xMin), -pixels(box.yMax)};
      const Point high{word.advance + pixels(box.xMax), -pixels(box.yMin)};
      word.low = first ? low : Point{std::min(word.low.x, low.x), std::min(word.low.y, low.y)};
      word.high =
          first ? high : Point{std::max(word.high.x, high.x), std::max(word.high.y, high.y)};
      first = false;
      const auto before = static_cast<std::int16_t>(word.points.size());
      for (std::size_t i = 0; i < n; ++i) {
        word.points.push_back(
            {word.advance + pixels(glyph.points[i].x), -pixels(glyph.points[i].y)});
        word.tags.push_back(static_cast<char>(glyph.tags[i]));
      }
      for (int i = 0; i < glyph.n_contours; ++i)
        word.ends.push_back(static_cast<std::int16_t>(before + glyph.contours[i]));
    }
    word.advance += static_cast<double>(face->glyph->linearHoriAdvance) / 65536 + spacing;
  }
  return word;
}

Coverage Typesetter::fill(const Outline& outline) {
  Coverage out;
  if (outline.empty()) return out;
  // Curves stay within the hull of their points.
  Point low = outline.points[0], high = low;
  for (const Point& p : outline.points) {
    low = {std::min(low.x, p.x), std::min(low.y, p.y)};
    high = {std::max(high.x, p.x), std::max(high.y, p.y)};
  }
  out.left = static_cast<int>(std::floor(low.x));
  out.top = static_cast<int>(std::floor(low.y));
  out.width = static_cast<int>(std::ceil(high.x)) - out.left + 1;
  out.height = static_cast<int>(std::ceil(high.y)) - out.top + 1;
  out.values.assign(static_cast<std::size_t>(out.width) * static_cast<std::size_t>(out.height), 0);

  std::vector<FT_Vector> points;
  for (const Point& p : outline.points)
    points.push_back(
        {std::lround((p.x - out.left) * 64), std::lround((out.top + out.height - p.y) * 64)});
  std::vector<char> tags = outline.tags;
  std::vector<std::int16_t> ends = outline.ends;
  FT_Outline shape{};
  shape.n_points = static_cast<std::int16_t>(points.size());
  shape.n_contours = static_cast<std::int16_t>(ends.size());
  shape.points = points.data();
  // FreeType 2.13.3 made these members unsigned.
  shape.tags = reinterpret_cast<decltype(shape.tags)>(tags.data());
  shape.contours = reinterpret_cast<decltype(shape.contours)>(ends.data());
  FT_Bitmap bitmap{};
  bitmap.rows = static_cast<unsigned>(out.height);
  bitmap.width = static_cast<unsigned>(out.width);
  bitmap.pitch = out.width;
  bitmap.buffer = out.values.data();
  bitmap.num_grays = 256;
  bitmap.pixel_mode = FT_PIXEL_MODE_GRAY;
  const int error = FT_Outline_Get_Bitmap(state_->library.handle, &shape, &bitmap);
  WEFT_CHECK(error == 0, Exit::internal, "", "FreeType cannot fill an outline: error {}", error);
  return out;
}

}  // namespace weft
