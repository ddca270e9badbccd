#include "media/download.h"

#include <array>
#include <filesystem>
#include <span>

#include "core/clock.h"
#include "core/error.h"
#include "core/file.h"
#include "media/ffmpeg.h"
#include "media/video_reader.h"

namespace weft {
namespace {

// Closes the connection on every exit path.
struct Stream {
  AVIOContext* io = nullptr;
  ~Stream() { avio_closep(&io); }
};

// When to give up. FFmpeg polls this while it waits.
struct Budget {
  const MediaAccess& access;
  double begin = now_seconds();
  bool late = false, stopped = false;

  bool is_over() {
    const double limit = access.limits.timeout;
    late = late || (limit > 0 && now_seconds() - begin > limit);
    stopped = stopped || (access.stop && access.stop());
    return late || stopped;
  }
};

void fetch(const std::string& address, const std::string& part, const MediaAccess& access) {
  Budget budget{access};
  const auto check = [&](int code) {
    if (budget.is_over()) {
      WEFT_CHECK(!budget.stopped, Exit::stopped, "run the same command to go on",
                 "stopped on request while {} was fetched", address);
      throw Error(Exit::data,
                  fmt::format("{} takes longer to fetch than media.timeout = {} s", address,
                              access.limits.timeout),
                  "download it before, and name the file", __FILE__, __LINE__);
    }
    WEFT_CHECK(code >= 0, Exit::data,
               "can this node reach the address? Compute nodes often cannot: download it before, "
               "and name the file",
               "cannot fetch {}: {}", address, ff::reason(code));
  };
  Stream from;
  AVDictionary* options = nullptr;
  av_dict_set(&options, "rw_timeout", "30000000", 0);  // microseconds without a byte
  av_dict_set(&options, "protocol_whitelist", "http,https,ftp,tcp,tls", 0);
  const AVIOInterruptCB interrupt = {
      [](void* b) { return static_cast<Budget*>(b)->is_over() ? 1 : 0; }, &budget};
  const int opened = avio_open2(&from.io, address.c_str(), AVIO_FLAG_READ, &interrupt, &options);
  av_dict_free(&options);
  check(opened);
  const auto most = static_cast<std::uint64_t>(access.limits.max_download_mib * (1 << 20));
  const std::int64_t promised = avio_size(from.io);
  const auto check_size = [&](std::uint64_t bytes) {
    WEFT_CHECK(bytes <= most, Exit::data, "name something smaller, or raise media.max_download_mib",
               "{} is larger than media.max_download_mib = {}", address,
               access.limits.max_download_mib);
  };
  check_size(static_cast<std::uint64_t>(std::max<std::int64_t>(promised, 0)));
  File to = File::create(part, Exit::data);
  std::array<unsigned char, 1 << 16> block;
  std::uint64_t written = 0;
  for (int n = 0; (n = avio_read(from.io, block.data(), block.size())) != AVERROR_EOF;) {
    check(n);
    const auto bytes = static_cast<std::size_t>(n);
    check_size(written + bytes);
    to.write(std::as_bytes(std::span(block).first(bytes)), written);
    written += bytes;
  }
  WEFT_CHECK(written > 0 && (promised <= 0 || written == static_cast<std::uint64_t>(promised)),
             Exit::data, "start the job again", "cannot fetch {}: {} of {} bytes came", address,
             written, promised);
  to.close();
}

}  // namespace

bool is_address(const std::string& name) {
  return name.starts_with("http://") || name.starts_with("https://") || name.starts_with("ftp://");
}

void download(const std::string& address, const std::string& path, const MediaAccess& access) {
  ff::quiet();
  WEFT_CHECK(access.limits.max_download_mib > 0, Exit::data,
             "download it before, and name the file; or set media.max_download_mib",
             "{} is not fetched: media.max_download_mib = 0", address);
  const std::filesystem::path part = path + ".part";
  std::error_code none;
  std::filesystem::remove(part, none);
  try {
    fetch(address, part, access);
    try {
      // Open it once under its temporary name: only files that are read as media get their final
      // name.
      VideoReader({part, MediaTrust::untrusted}, {.access = access});
    } catch (const Error& e) {
      throw Error(e.code(), fmt::format("what {} holds is not read: {}", address, e.what()),
                  e.hint(), __FILE__, __LINE__);
    }
    rename_file(part, path, Exit::data);
  } catch (...) {
    std::filesystem::remove(part, none);
    throw;
  }
}

}  // namespace weft
