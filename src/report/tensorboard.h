// A training run's metrics for TensorBoard: event files, made by hand so that neither TensorFlow
// nor protobuf is needed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "report/data.h"

namespace weft::report_page {

// CRC-32C (Castagnoli) of the bytes.
std::uint32_t crc32c(std::string_view bytes);
// A file's content: loss, terms, gradient norm, rate, seconds and their parts, memory,
// spread of the ranks; each at the number of steps done.
std::string event_file(const Run& run);
// Writes DIR/NAME/events.out.tfevents.weft for each run, in place of an earlier one. Runs of the
// same name get numbers. Returns the paths; throws Exit::data when one cannot be written.
std::vector<std::filesystem::path> write_event_files(const std::filesystem::path& dir,
                                                     std::span<const Run> runs);

}  // namespace weft::report_page
