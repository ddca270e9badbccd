#include "report/page.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <iterator>
#include <span>
#include <string_view>

#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "core/log.h"
#include "data/lists/folders.h"

namespace weft::report_page {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view mark_of_one = "<meta name=\"generator\" content=\"weft\">";
constexpr std::string_view mark_of_several =
    "<meta name=\"generator\" content=\"weft, several jobs\">";

constexpr std::uint64_t largest_file = 16u << 20;
constexpr std::uint64_t largest_page = 64u << 20;  // of all files together

// Text as HTML.
std::string escape(std::string_view text) {
  std::string out;
  for (const char c : printable(text, text.size(), "\n\t")) switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      default:
        out += c;
    }
  return out;
}

// As what is within a script: nothing in it ends the script or begins a comment.
std::string script_data(const Json& data) {
  std::string out;
  for (const char c : dump_json(data, -1, ' ', false, Json::error_handler_t::replace))
    if (c == '<')
      out += "\\u003c";
    else
      out += c;
  return out;
}

// "": a kind that no browser shows.
std::string kind_of(const std::string& file) {
  const std::string extension = ending_of(file);
  if (extension == ".png") return "image/png";
  if (extension == ".jpg" || extension == ".jpeg") return "image/jpeg";
  return extension == ".mp4" ? "video/mp4" : "";
}

}  // namespace

std::string page_html(const Json& data, const std::string& text) {
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">{0}"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">"
      "<title>{1} - weft</title><style>{2}</style></head>\n<body><main><noscript><h1>{1}</h1>"
      "<p>Tables, charts and pictures need JavaScript, which is off.</p><pre>{3}</pre>"
      "</noscript></main>\n<script type=\"application/json\" id=\"data\">{4}</script>\n"
      "<script>{5}</script></body></html>\n",
      data.value("several", false) ? mark_of_several : mark_of_one, escape(data.value("title", "")),
      page_style(), escape(text), script_data(data), page_script());
}

PageOwner owner_of(const fs::path& page) {
  std::error_code none;
  const fs::file_type type = fs::symlink_status(page, none).type();
  if (type == fs::file_type::not_found) return PageOwner::nobody;
  // A link is another's too: what it points at is kept, but so is the link.
  if (type != fs::file_type::regular) return PageOwner::other;
  std::string head(64 << 10, '\0');
  std::ifstream in(page, std::ios::binary);
  in.read(head.data(), static_cast<std::streamsize>(head.size()));
  const auto holds = [&](std::string_view mark) { return head.find(mark) != std::string::npos; };
  if (holds(mark_of_several)) return PageOwner::weft_for_several_jobs;
  return holds(mark_of_one) ? PageOwner::weft : PageOwner::other;
}

void check_owner(const fs::path& page) {
  WEFT_CHECK(owner_of(page) != PageOwner::other, Exit::data,
             "rename it or remove it, then run the same command again",
             "{} is not a page of weft: it is left as it is", page.string());
}

void write_page(const fs::path& page, const std::string& html) {
  check_owner(page);
  replace_file(page, html, Exit::data, Durable::no);
}

Json Embedder::media(const fs::path& folder, const std::string& file) {
  const fs::path path = folder / file;
  const std::string name =
      fs::absolute(path).lexically_relative(fs::absolute(base_)).generic_string();
  try {
    // No links: the page may be passed on, and with it what they point at.
    const File in = File::open(path, Exit::data, false);
    const std::uint64_t size = in.size();
    const std::string kind = kind_of(file);
    if (kind.empty() || size > largest_file || total_ + size > largest_page)
      return {{"name", name}, {"link", percent_encoded(name)}, {"bytes", size}};
    std::string bytes(size, '\0');
    in.read(std::as_writable_bytes(std::span(bytes)), 0);
    total_ += size;
    return {{"data", "data:" + kind + ";base64," + base64(bytes)}};
  } catch (const Error&) {
    return {{"lost", name}};
  }
}

bool stays_inside(const std::string& file) {
  const fs::path path = file;
  return !file.empty() && !path.is_absolute() &&
         std::ranges::none_of(path, [](const fs::path& p) { return p == ".."; });
}

std::string percent_encoded(const std::string& path) {
  std::string url;
  for (const char c : path) {
    const auto u = static_cast<unsigned char>(c);
    const bool plain =
        std::isalnum(u) != 0 || std::string_view("-._~/").find(c) != std::string_view::npos;
    url += plain ? std::string(1, c) : fmt::format("%{:02X}", u);
  }
  return url;
}

bool is_plain_word(const std::string& text) {
  return std::ranges::all_of(text, [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
           std::string_view("@%+=:,./_-").find(c) != std::string_view::npos;
  });
}

std::string name_of(const fs::path& path) {
  const fs::path plain = fs::absolute(path).lexically_normal();
  return (plain.has_filename() ? plain : plain.parent_path()).filename().string();
}

std::ifstream open_regular(const fs::path& path) {
  std::ifstream in;
  std::error_code none;
  if (fs::is_regular_file(fs::symlink_status(path, none))) in.open(path, std::ios::binary);
  return in;
}

std::string read_text(const fs::path& path) {
  std::ifstream in = open_regular(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::string base64(const std::string& bytes) {
  constexpr const char* digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  out.reserve((bytes.size() + 2) / 3 * 4);
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    std::uint32_t group = 0;
    for (std::size_t k = i; k < i + 3; ++k)
      group = group << 8 | (k < bytes.size() ? static_cast<unsigned char>(bytes[k]) : 0u);
    for (std::size_t k = 0; k < 4; ++k)
      out += i + k <= bytes.size() ? digits[group >> (18 - 6 * k) & 63] : '=';
  }
  return out;
}

}  // namespace weft::report_page
