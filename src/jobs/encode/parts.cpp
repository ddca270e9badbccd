#include "jobs/encode/parts.h"

#include <fstream>
#include <sstream>

#include "core/error.h"
#include "core/hash.h"
#include "core/log.h"

namespace weft {

namespace fs = std::filesystem;

namespace {

void check_job(const fs::path& folder, const std::string& job) {
  const fs::path path = folder / "job";
  std::error_code none;
  if (!fs::exists(path, none)) {
    replace_file(path, job, Exit::data, Durable::no);
    return;
  }
  std::stringstream found, wanted(job);
  found << std::ifstream(path).rdbuf();
  for (std::string a, b;;) {
    const bool more_a = bool(std::getline(found, a)), more_b = bool(std::getline(wanted, b));
    if (!more_a && !more_b) break;
    WEFT_CHECK(more_a && more_b && a == b, Exit::usage,
               fmt::format("remove {} to begin anew, or encode as before", folder.string()),
               "{} holds clips of another job: it has \"{}\", this one \"{}\"", folder.string(),
               more_a ? a : "", more_b ? b : "");
  }
}

}  // namespace

void open_parts(const fs::path& folder, const std::string& job, MPI_Comm world) {
  if (log::rank() == 0) check_job(folder, job);
  MPI_Barrier(world);
}

void PartWriter::append(std::span<const std::byte> clip, nlohmann::ordered_json& line) {
  if (!file_) {
    int start = 0;
    const auto path = [&] { return folder_ / fmt::format("{}-{}.data", start, rank_); };
    // Every start writes a file of its own: lines in the manifest refer to the older ones.
    std::error_code none;
    while (fs::exists(path(), none)) ++start;
    file_.emplace(File::create(path(), Exit::data));
  }
  file_->write(clip, end_);
  line["file"] = file_->path().filename().string();
  line["offset"] = end_;
  line["bytes"] = clip.size();
  line["file_xxh3"] = to_hex(hash128(clip));
  end_ += clip.size();
}

void PartWriter::close() {
  if (!file_) return;
  file_->sync();
  file_->close();
  file_.reset();
}

void PartReader::read(const std::string& name, std::span<std::byte> clip) {
  const auto found = lines_.find(name);
  WEFT_ASSERT(found != lines_.end());
  const auto line = found->second.parsed();
  const auto file = line.at("file").get<std::string>();
  auto part = files_.find(file);
  if (part == files_.end())
    part = files_.emplace(file, File::open(folder_ / file, Exit::data)).first;
  const bool fits = line.at("bytes").get<std::uint64_t>() == clip.size();
  if (fits) part->second.read(clip, line.at("offset").get<std::uint64_t>());
  WEFT_CHECK(fits && to_hex(hash128(clip)) == line.at("file_xxh3").get<std::string>(), Exit::data,
             "start again: it is made anew", "clip {} in {} is damaged", name, folder_.string());
}

}  // namespace weft
