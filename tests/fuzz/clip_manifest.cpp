// The lines of finished clips, gathered and part, with a zero byte between them: gathering once more changes nothing.
#include "fuzz.h"
#include "jobs/manifest.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  const auto parts = fuzz::pieces_of(fuzz::text_of(data, size), 2);
  fuzz::put("generated.jsonl", parts[0]);
  fuzz::put("generated.rank0.jsonl", parts[1]);
  fuzz::accepts([&] {
    const auto once = ClipManifest::gather(fuzz::scratch());
    const auto twice = ClipManifest::gather(fuzz::scratch());
    fuzz::require(once.size() == twice.size(), "clips were lost");
    for (const auto& [name, clip] : once) {
      const FinishedClip& again = twice.at(name);
      fuzz::require(clip.key == again.key && clip.file == again.file && clip.seed == again.seed &&
                        clip.frames == again.frames && clip.bytes == again.bytes &&
                        clip.rank == again.rank,
                    "a clip has changed");
      is_finished(once, name, clip.key, fuzz::scratch());
    }
  });
  return 0;
}
