#include "data/images/labelled_images.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <sstream>

#include "core/error.h"
#include "core/hash.h"
#include "core/log.h"
#include "core/philox.h"
#include "data/images/image_store.h"
#include "data/synthetic.h"

namespace weft {

ImageSize training_size(ImageSize image, std::int64_t short_side, std::int64_t max_side) {
  WEFT_ASSERT(image.height > 0 && image.width > 0 && short_side > 0 && max_side > 0);
  const auto [shorter, longer] = std::minmax(image.height, image.width);
  const double scale = std::min(static_cast<double>(short_side) / static_cast<double>(shorter),
                                static_cast<double>(max_side) / static_cast<double>(longer));
  const auto scaled = [&](std::int64_t side) {
    return std::max<std::int64_t>(1, static_cast<std::int64_t>(static_cast<double>(side) * scale));
  };
  return {scaled(image.height), scaled(image.width)};
}

ImageSize micro_batch_size(std::span<const ImageView> views, std::int64_t padding) {
  ImageSize size;
  for (const ImageView& v : views) {
    size.height = std::max(size.height, rounded_up(v.height, padding));
    size.width = std::max(size.width, rounded_up(v.width, padding));
  }
  return size;
}

ImageSize evaluation_size(ImageSize image, std::int64_t short_side, std::int64_t max_side,
                          std::int64_t padding) {
  const ImageSize scaled = training_size(image, short_side, max_side);
  return {rounded_up(scaled.height, padding), rounded_up(scaled.width, padding)};
}

void LabelCounts::add(std::span<const std::uint8_t> labels) {
  for (auto* counts : {&images, &pixels, &pixels_of_images}) counts->resize(256);
  std::array<std::uint64_t, 256> here{};
  for (const std::uint8_t label : labels) ++here[label];
  blank += here[0] == labels.size() ? 1 : 0;
  for (std::size_t v = 0; v < here.size(); ++v) {
    images[v] += here[v] > 0 ? 1 : 0;
    pixels[v] += here[v];
    pixels_of_images[v] += here[v] > 0 ? labels.size() - here[0] : 0;
  }
}

std::unique_ptr<LabelledImages> open_labelled_images(const std::string& path, bool verify) {
  return is_shapes(path) ? make_shapes(path) : open_image_store(path, verify);
}

std::string missing_classes(std::span<const std::uint64_t> label_images, std::int64_t num_classes,
                            std::span<const std::string> class_names) {
  if (label_images.empty()) return "";
  std::size_t classes = static_cast<std::size_t>(num_classes), missing = 0;
  for (std::size_t label = 1; num_classes == 0 && label < label_images.size(); ++label)
    if (label_images[label] > 0) classes = label;
  constexpr std::size_t most = 8;
  std::string list;
  for (std::size_t c = 0; c < classes && c + 1 < label_images.size(); ++c) {
    if (label_images[c + 1] > 0) continue;
    if (++missing > most) continue;
    list += fmt::format("{}{}{}", list.empty() ? "" : ", ", c,
                        c < class_names.size() ? " " + class_names[c] : "");
  }
  if (missing > most) list += ", ...";
  if (missing == classes) return "no pixel is labelled";
  // A network that only ever sees one class learns to answer with it.
  if (num_classes == 0 && classes == 1) return "class 0 is the only one that occurs in the labels";
  if (missing == 0) return "";
  return fmt::format("{} of {} classes never {} in the labels: {}", missing, classes,
                     missing == 1 ? "occurs" : "occur", list);
}

void check_class_names(const std::string& trained, const std::string& model,
                       const std::string& names, const std::string& data) {
  if (trained.empty() || names.empty()) return;
  std::istringstream was(trained), is(names);
  std::string a, b;
  int c = 0;
  const auto next = [](std::istream& names, std::string& name) {
    name.clear();
    return bool(std::getline(names, name));
  };
  for (; next(was, a) | next(is, b) && a == b;) ++c;
  WEFT_CHECK(trained == names, Exit::data,
             "ingest the data with the class names of the training (ingest.class_names), or train "
             "on it in another run.dir",
             "class {} is \"{}\" in {}, and \"{}\" in the data that {} was trained on", c,
             printable(b), data, printable(a), model);
}

namespace {

constexpr const char* hint =
    "write for example data.path=\"shapes:images=400,classes=6,height=96..160,width=96..160\"";

const std::vector<std::string> all_names = {"ground", "disc",    "square", "triangle",
                                            "ring",   "stripes", "cross",  "checks"};

struct Spec {
  NumberRange images{400, 400}, classes{6, 6}, height{96, 160}, width{96, 160}, hues{0, 0},
      seed{1, 1};
};

// Random numbers of a picture, one after the other.
class Draw {
 public:
  Draw(std::uint64_t seed, std::int64_t image)
      : random_(seed, Purpose::synthetic, 1, static_cast<std::uint64_t>(image)) {}
  float unit() { return random_.uniform(next_++); }
  float between(float low, float high) { return low + (high - low) * unit(); }
  std::int64_t from(NumberRange r) {
    return r.low + random_.below(next_++, static_cast<std::uint32_t>(r.high - r.low + 1));
  }

 private:
  Philox random_;
  std::uint32_t next_ = 0;
};

using Colour = std::array<float, 3>;

Colour colour(Draw& draw) {
  return {draw.between(20, 235), draw.between(20, 235), draw.between(20, 235)};
}

// The colours of a class with hues=1 are around this one.
constexpr std::array<Colour, 8> hues = {{{130, 130, 130},
                                         {205, 60, 60},
                                         {60, 180, 75},
                                         {70, 90, 210},
                                         {215, 190, 60},
                                         {185, 70, 200},
                                         {60, 190, 200},
                                         {230, 140, 60}}};
Colour shade(Draw& draw, std::size_t kind) {
  Colour c = colour(draw);
  for (std::size_t k = 0; k < 3; ++k) c[k] = hues[kind][k] + 0.35f * (c[k] - 127);
  return c;
}

// 0 to 1 and back, period 1.
float wave(float x) { return std::abs(2 * (x - std::floor(x)) - 1); }

struct Shape {
  std::size_t kind = 0;  // its class
  float y = 0, x = 0, radius = 1;
  float cosine = 1, sine = 0;  // of its turn, 0 to 90 degrees
  bool round = false;          // of stripes and checks: a disc or a square of them
  Colour colour{}, second{};

  // Whether it covers a point, and in its second colour.
  struct Cover {
    bool covers = false, second = false;
  };
  Cover at(float py, float px) const {
    const float dy = py - y, dx = px - x;
    const float v = (cosine * dy - sine * dx) / radius, u = (sine * dy + cosine * dx) / radius;
    const float square = std::max(std::abs(u), std::abs(v)), distance = u * u + v * v;
    const bool body = round ? distance < 1 : square < 0.87f;
    switch (kind) {
      case 1:
        return {distance < 1};
      case 2:
        return {square < 0.87f};
      case 3:
        return {v < 0.6f && v > 2 * std::abs(u) - 1.1f};
      case 4:
        return {distance < 1.1f && distance > 0.3f};
      case 5:
        return {body, wave(2.5f * u) < 0.5f};
      case 6:
        return {square < 1 && std::min(std::abs(u), std::abs(v)) < 0.3f};
      default:
        return {body, (wave(2 * u) < 0.5f) != (wave(2 * v) < 0.5f)};
    }
  }
};

class Shapes : public LabelledImages {
 public:
  explicit Shapes(const std::string& text) {
    const std::array keys = {NumberKey{"images", &spec_.images, 1, 10'000'000, false},
                             NumberKey{"classes", &spec_.classes, 2, std::ssize(all_names), false},
                             NumberKey{"height", &spec_.height, 8, 8192, true},
                             NumberKey{"width", &spec_.width, 8, 8192, true},
                             NumberKey{"hues", &spec_.hues, 0, 1, false},
                             NumberKey{"seed", &spec_.seed, 0, INT64_MAX, false}};
    id_ = to_hex(hash128(read_keys(text, "shapes", hint, keys)));
    names_.assign(all_names.begin(), all_names.begin() + spec_.classes.low);
  }

  std::int64_t count() const override { return spec_.images.low; }
  std::int64_t num_classes() const override { return spec_.classes.low; }
  const std::vector<std::string>& class_names() const override { return names_; }
  std::string name(std::int64_t i) const override {
    return fmt::format("shapes:seed={} image {}", spec_.seed.low, i);
  }
  std::string content_id() const override { return id_; }
  ImageSize size(std::int64_t i) const override {
    Draw draw = draw_of(i);
    return size_of_image(draw);
  }

  void read(std::int64_t i, LabelledImage& out) const override {
    Draw draw = draw_of(i);
    out.size = size_of_image(draw);
    const auto [height, width] = out.size;
    out.rgb.resize(height * width * 3);
    out.labels.resize(height * width);

    const auto side = static_cast<float>(std::min(height, width));
    const auto paint = [&](std::size_t kind) {
      return spec_.hues.low == 1 ? shade(draw, kind) : colour(draw);
    };
    const Colour ground = paint(0), second = paint(0);
    const float down = draw.between(-6, 6) / side, across = draw.between(-6, 6) / side;
    std::vector<Shape> shapes(3 + draw.from({0, 4}));
    for (Shape& s : shapes) {
      s.kind = static_cast<std::size_t>(draw.from({1, spec_.classes.low - 1}));
      s.y = draw.unit() * static_cast<float>(height);
      s.x = draw.unit() * static_cast<float>(width);
      s.radius = draw.between(0.12f, 0.3f) * side;
      const float t = draw.unit();  // tan of half the angle
      s.cosine = (1 - t * t) / (1 + t * t);
      s.sine = 2 * t / (1 + t * t);
      s.round = draw.unit() < 0.5f;
      s.colour = paint(s.kind);
      s.second = paint(s.kind);
    }
    std::array<std::int64_t, 4> margin{};  // top, bottom, left, right: not labelled
    for (auto& m : margin) m = std::max<std::int64_t>(0, draw.from({0, 5}) - 2);
    const float amplitude = draw.between(4, 24);
    const Philox noise(static_cast<std::uint64_t>(spec_.seed.low), Purpose::synthetic, 2,
                       static_cast<std::uint64_t>(i));

    for (std::int64_t y = 0; y < height; ++y)
      for (std::int64_t x = 0; x < width; ++x) {
        const float py = static_cast<float>(y) + 0.5f, px = static_cast<float>(x) + 0.5f;
        const float mix = 0.4f * wave(down * py + across * px);
        Colour c{};
        for (std::size_t k = 0; k < 3; ++k) c[k] = ground[k] + mix * (second[k] - ground[k]);
        std::size_t kind = 0;
        for (const Shape& s : shapes) {  // the last is on top
          const Shape::Cover cover = s.at(py, px);
          if (!cover.covers) continue;
          kind = s.kind;
          c = cover.second ? s.second : s.colour;
        }
        const std::int64_t at = y * width + x;
        const auto random = noise.block(static_cast<std::uint32_t>(at));
        for (std::size_t k = 0; k < 3; ++k) {
          const float value = c[k] + amplitude * (Philox::to_unit(random[k]) - 0.5f) + 0.5f;
          out.rgb[static_cast<std::size_t>(at * 3) + k] =
              static_cast<std::uint8_t>(std::clamp(value, 0.0f, 255.0f));
        }
        const bool labelled =
            y >= margin[0] && y < height - margin[1] && x >= margin[2] && x < width - margin[3];
        out.labels[at] = static_cast<std::uint8_t>(labelled ? kind + 1 : 0);
      }
  }

 private:
  Draw draw_of(std::int64_t i) const {
    WEFT_ASSERT(i >= 0 && i < count());
    return Draw(static_cast<std::uint64_t>(spec_.seed.low), i);
  }
  ImageSize size_of_image(Draw& draw) const {
    const std::int64_t height = draw.from(spec_.height);
    return {height, draw.from(spec_.width)};
  }

  Spec spec_;
  std::string id_;
  std::vector<std::string> names_;
};

}  // namespace

std::unique_ptr<LabelledImages> make_shapes(const std::string& path) {
  return std::make_unique<Shapes>(path.substr(std::string_view(shapes_prefix).size()));
}

}  // namespace weft
