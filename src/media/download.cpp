#include "media/download.h"

#include <array>
#include <cstdio>
#include <filesystem>

#include "core/error.h"
#include "formats/file.h"
#include "media/ffmpeg.h"

namespace weft {
namespace {

// Closes the connection on every way out.
struct Connection {
  AVIOContext* io = nullptr;
  ~Connection() { avio_closep(&io); }
};

}  // namespace

bool is_address(const std::string& name) {
  return name.starts_with("http://") || name.starts_with("https://") || name.starts_with("ftp://");
}

void download(const std::string& address, const std::string& path) {
  ff::quiet();
  const auto check = [&](int code) {
    WEFT_CHECK(code >= 0, Exit::data,
               "can this node reach the address? Compute nodes often cannot: download it before, "
               "and name the file",
               "cannot fetch {}: {}", address, ff::reason(code));
    return code;
  };
  Connection from;
  AVDictionary* options = nullptr;
  av_dict_set(&options, "rw_timeout", "30000000", 0);  // microseconds
  const int opened = avio_open2(&from.io, address.c_str(), AVIO_FLAG_READ, nullptr, &options);
  av_dict_free(&options);
  check(opened);
  const std::int64_t promised = avio_size(from.io);
  const std::string part = path + ".part";
  std::remove(part.c_str());
  try {
    File file = File::create(part, Exit::data);
    std::array<std::uint8_t, 1 << 16> block;
    std::uint64_t written = 0;
    for (int n = 0; (n = avio_read(from.io, block.data(), block.size())) != AVERROR_EOF;) {
      check(n);
      file.write(std::as_bytes(std::span(block.data(), static_cast<std::size_t>(n))), written);
      written += static_cast<std::uint64_t>(n);
    }
    WEFT_CHECK(written > 0 && (promised <= 0 || written == static_cast<std::uint64_t>(promised)),
               Exit::data, "start the job again", "cannot fetch {}: {} of {} bytes came", address,
               written, promised);
    file.sync();
    file.close();
    rename_file(part, path, Exit::data);
  } catch (...) {
    std::remove(part.c_str());
    throw;
  }
}

}  // namespace weft
