#include "media/download.h"

#include <array>
#include <filesystem>

#include "core/error.h"
#include "media/ffmpeg.h"

namespace weft {
namespace {

// Closes what is open on every way out.
struct Stream {
  AVIOContext* io = nullptr;
  ~Stream() { avio_closep(&io); }
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
               "cannot fetch {} into {}: {}", address, path, ff::reason(code));
  };
  const std::filesystem::path part = path + ".part";
  try {
    Stream from, to;
    AVDictionary* options = nullptr;
    av_dict_set(&options, "rw_timeout", "30000000", 0);  // microseconds
    const int opened = avio_open2(&from.io, address.c_str(), AVIO_FLAG_READ, nullptr, &options);
    av_dict_free(&options);
    check(opened);
    check(avio_open(&to.io, part.c_str(), AVIO_FLAG_WRITE));
    const std::int64_t promised = avio_size(from.io);
    std::array<unsigned char, 1 << 16> block;
    std::int64_t written = 0;
    for (int n = 0; (n = avio_read(from.io, block.data(), block.size())) != AVERROR_EOF;) {
      check(n);
      avio_write(to.io, block.data(), n);
      written += n;
    }
    WEFT_CHECK(written > 0 && (promised <= 0 || written == promised), Exit::data,
               "start the job again", "cannot fetch {}: {} of {} bytes came", address, written,
               promised);
    avio_flush(to.io);
    check(to.io->error);
    check(avio_closep(&to.io));
    std::error_code failed;
    std::filesystem::rename(part, path, failed);
    WEFT_CHECK(!failed, Exit::data, "check the folder", "cannot write {}: {}", path,
               failed.message());
  } catch (...) {
    std::error_code none;
    std::filesystem::remove(part, none);
    throw;
  }
}

}  // namespace weft
