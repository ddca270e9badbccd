#include "report/embed.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <iterator>
#include <span>
#include <string_view>

#include "core/error.h"
#include "core/file.h"
#include "report/html.h"

namespace weft::report_page {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t largest_file = 16u << 20;
constexpr std::uint64_t largest_page = 64u << 20;  // of all files together

// "": a kind that no browser shows.
std::string kind_of(const std::string& file) {
  std::string extension = fs::path(file).extension().string();
  std::transform(extension.begin(), extension.end(), extension.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  if (extension == ".png") return "image/png";
  if (extension == ".jpg" || extension == ".jpeg") return "image/jpeg";
  return extension == ".mp4" ? "video/mp4" : "";
}

// The header of a PNG begins with its size, big-endian, at byte 16.
bool is_wide_png(const std::string& bytes) {
  if (bytes.size() < 24 || !bytes.starts_with("\x89PNG")) return false;
  const auto word = [&](std::size_t at) {
    std::uint64_t v = 0;
    for (std::size_t i = 0; i < 4; ++i) v = v << 8 | static_cast<unsigned char>(bytes[at + i]);
    return v;
  };
  return word(16) > 2 * word(20);
}

std::string url_of(const std::string& path) {
  std::string url;
  for (const char c : path) {
    const auto u = static_cast<unsigned char>(c);
    const bool plain =
        std::isalnum(u) != 0 || std::string_view("-._~/").find(c) != std::string::npos;
    url += plain ? std::string(1, c) : fmt::format("%{:02X}", u);
  }
  // A name such as "a:b" would be another protocol.
  return "./" + url;
}

}  // namespace

std::string Embedder::content(const fs::path& base, const Shown& shown, bool& wide) {
  const std::string kind = kind_of(shown.file);
  const fs::path path = shown.folder / shown.file;
  const std::string name =
      fs::absolute(path).lexically_relative(fs::absolute(base)).generic_string();
  std::uint64_t size = 0;
  try {
    // No links: the page may be passed on, and with it what they point at.
    const File file = File::open(path, Exit::data, false);
    size = file.size();
    if (!kind.empty() && size <= largest_file && total_ + size <= largest_page) {
      std::string bytes(static_cast<std::size_t>(size), '\0');
      file.read(std::as_writable_bytes(std::span(bytes)), 0);
      total_ += size;
      wide = wide || is_wide_png(bytes);
      const std::string data = base64(bytes);
      if (kind != "video/mp4")
        return fmt::format("<img alt=\"{}\" src=\"data:{};base64,{}\">", escape(shown.alt), kind,
                           data);
      return fmt::format(
          "<video controls{} playsinline preload=\"auto\" "
          "src=\"data:video/mp4;base64,{}\"></video>",
          shown.sound ? "" : " loop muted", data);
    }
  } catch (const Error&) {
    return fmt::format("<div class=\"linked\">{} cannot be read</div>", escape(name));
  }
  ++linked_;
  return fmt::format(
      "<div class=\"linked\"><span>{:.1f} MB, not in this page:<br>"
      "<a href=\"{}\">{}</a></span></div>",
      static_cast<double>(size) / 1e6, url_of(name), escape(name));
}

std::string Embedder::figure(const fs::path& base, const Shown& shown) {
  bool wide = shown.wide;
  const std::string inner = content(base, shown, wide);
  // Wide pictures want the width of the page.
  return fmt::format("<figure{}>{}<figcaption>{}</figcaption></figure>\n",
                     wide ? " class=\"wide\"" : "", inner, shown.caption);
}

std::string picture_section(const fs::path& folder,
                            const std::vector<std::pair<std::string, std::string>>& pictures,
                            const std::string& note, bool wide) {
  if (pictures.empty()) return "";
  Embedder embedder;
  std::string body = "<div class=\"media\">";
  for (const auto& [name, file] : pictures)
    body += embedder.figure(
        folder,
        {folder, file, name, fmt::format("{} ({})", escape(name), escape(file)), false, wide});
  return section("Pictures", note, body + "</div>");
}

bool stays_inside(const std::string& file) {
  const fs::path path = file;
  if (file.empty() || path.is_absolute()) return false;
  return std::none_of(path.begin(), path.end(), [](const fs::path& p) { return p == ".."; });
}

std::string read_text(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::string base64(const std::string& bytes) {
  constexpr const char* digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  out.reserve((bytes.size() + 2) / 3 * 4);
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    const std::size_t n = std::min<std::size_t>(3, bytes.size() - i);
    std::uint32_t group = 0;
    for (std::size_t k = 0; k < 3; ++k)
      group = group << 8 | (k < n ? static_cast<unsigned char>(bytes[i + k]) : 0u);
    for (std::size_t k = 0; k < 4; ++k) out += k <= n ? digits[group >> (18 - 6 * k) & 63] : '=';
  }
  return out;
}

}  // namespace weft::report_page
