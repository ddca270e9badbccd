// FFmpeg's sources as a deck names them: what passes has no character by which FFmpeg could read it
// otherwise, and none of the filters that open files.
#include "media/media_source.h"

#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  const std::string graph(fuzz::text_of(data, size));
  if (!fuzz::accepts([&] { check_source_graph(graph); })) return 0;
  fuzz::require(graph.find_first_of("'\"\\ \n\t") == graph.npos, "a quote or blank passed");
  // FFmpeg reads filters between commas and semicolons, behind labels in brackets.
  for (std::size_t at = 0; at <= graph.size();) {
    const std::size_t end = std::min(graph.find_first_of(",;", at), graph.size());
    std::string_view filter = std::string_view(graph).substr(at, end - at);
    while (filter.starts_with('['))
      filter.remove_prefix(std::min(filter.find(']'), filter.size() - 1) + 1);
    for (const char* opens_files : {"movie", "amovie", "lut3d", "drawtext", "metadata", "sendcmd",
                                    "zmq", "curves", "frei0r", "life", "cellauto", "subtitles"})
      fuzz::require(filter.substr(0, filter.find_first_of("=@[")) != opens_files, graph);
    at = end + 1;
  }
  return 0;
}
