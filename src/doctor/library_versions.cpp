#include "doctor/library_versions.h"

#include <fmt/format.h>
#include <hdf5.h>
#include <mpi.h>

#include <dnnl.hpp>
#include <map>

extern "C" {
#include <libavformat/avformat.h>
#include <libavutil/avutil.h>
}

#include "core/version.h"
#include "tensor/device.h"
#include "tensor/device_inventory.h"

namespace weft {
namespace {

// mpi.h of the MPIs that people use; others do not say.
std::string mpi_of_header() {
#if defined(OPEN_MPI)
  return fmt::format("Open MPI v{}.{}.{}", OMPI_MAJOR_VERSION, OMPI_MINOR_VERSION,
                     OMPI_RELEASE_VERSION);
#elif defined(I_MPI_VERSION)
  return fmt::format("Intel MPI {}", I_MPI_VERSION);
#elif defined(MVAPICH2_VERSION)
  return fmt::format("MVAPICH2 {}", MVAPICH2_VERSION);
#elif defined(MPICH_VERSION)
  return fmt::format("MPICH {}", MPICH_VERSION);
#else
  return "";
#endif
}

std::string mpi_of_process() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(text, &length);
  const std::string all = text;
  return all.substr(0, all.find_first_of(",\n"));
}

std::string dotted(unsigned version) {  // as FFmpeg packs it
  return fmt::format("{}.{}.{}", version >> 16, version >> 8 & 255, version & 255);
}

}  // namespace

LibraryVersion mpi_version() { return {"MPI", mpi_of_process(), mpi_of_header()}; }

std::vector<LibraryVersion> library_versions() {
  unsigned major = 0, minor = 0, release = 0;
  H5get_libversion(&major, &minor, &release);
  const dnnl_version_t* dnnl = dnnl_version();
  std::vector<LibraryVersion> all = {
      mpi_version(),
      {"HDF5", fmt::format("{}.{}.{}", major, minor, release),
       fmt::format("{}.{}.{}", H5_VERS_MAJOR, H5_VERS_MINOR, H5_VERS_RELEASE)},
      {"oneDNN", fmt::format("{}.{}.{}", dnnl->major, dnnl->minor, dnnl->patch),
       fmt::format("{}.{}.{}", DNNL_VERSION_MAJOR, DNNL_VERSION_MINOR, DNNL_VERSION_PATCH)},
      {"FFmpeg", av_version_info(), ""},
      {"libavformat", dotted(avformat_version()), dotted(LIBAVFORMAT_VERSION_INT)}};
  std::map<std::string, std::string> built;
  if (&add_cuda_headers != nullptr) add_cuda_headers(built);
  const std::map<std::string, std::string> found = cuda_library_versions();
  for (const auto& [name, version] : found) all.push_back({name, version, built[name]});
  for (const auto& [name, version] : built)
    if (!version.empty() && found.count(name) == 0) all.push_back({name, "", version});
  return all;
}

std::string version_text() {
  std::string text = version_line() + "\n";
  const auto line = [&](const auto&... columns) {
    text += fmt::format("  {:<13} {:<24} {}", columns...);
    text.erase(text.find_last_not_of(' ') + 1);
    text += '\n';
  };
  line("library", "found", "compiled against");
  for (const LibraryVersion& l : library_versions())
    line(l.name, l.found.empty() ? "not found" : l.found, l.built);
  text += fmt::format("  CPU: {}\n", describe_cpu());
  std::string why;
  const std::vector<GpuFacts> gpus = inventory_gpus(why);
  for (std::size_t i = 0; i < gpus.size(); ++i)
    text += fmt::format("  GPU {}: {}, {:.1f} GiB, driver {}\n", i, gpus[i].name,
                        gpus[i].memory_gib, gpus[i].driver);
  if (gpus.empty()) text += fmt::format("  no GPU: {}\n", why);
  return text;
}

}  // namespace weft
