# Which MPI weft is built with: Open MPI, or MPICH and what descends from it (docs/mpi.md). Sets `mpi_family`.

# FindMPI looks for the compiler and for the launcher apart. Where two MPIs are installed, a compiler of one's choice would come with
# the launcher of the other: it is looked for by the compiler's suffix (Debian's mpicxx.mpich, mpiexec.mpich) and in its folder first.
if(MPI_CXX_COMPILER AND NOT MPIEXEC_EXECUTABLE)
  get_filename_component(compiler_name ${MPI_CXX_COMPILER} NAME)
  get_filename_component(compiler_folder ${MPI_CXX_COMPILER} DIRECTORY)
  if(NOT MPI_EXECUTABLE_SUFFIX AND compiler_name MATCHES "^mpi[a-zA-Z+]+(\\.[a-z0-9]+)$")
    set(MPI_EXECUTABLE_SUFFIX ${CMAKE_MATCH_1})
  endif()
  if(compiler_folder)
    find_program(MPIEXEC_EXECUTABLE NAMES mpiexec${MPI_EXECUTABLE_SUFFIX} mpirun${MPI_EXECUTABLE_SUFFIX} PATHS ${compiler_folder}
      NO_DEFAULT_PATH)
  endif()
endif()
find_package(MPI REQUIRED COMPONENTS CXX)
# With which options a packager compiled MPI (-flto, -Werror=...), its compiler passes on; weft's files have their own.
set_property(TARGET MPI::MPI_CXX PROPERTY INTERFACE_COMPILE_OPTIONS)

include(CheckCXXSymbolExists)
set(CMAKE_REQUIRED_LIBRARIES MPI::MPI_CXX)
set(CMAKE_REQUIRED_DEFINITIONS -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX)
check_cxx_symbol_exists(OPEN_MPI mpi.h WEFT_OPEN_MPI)
if(NOT WEFT_OPEN_MPI)
  check_cxx_symbol_exists(MPICH_VERSION mpi.h WEFT_MPICH)
endif()
unset(CMAKE_REQUIRED_LIBRARIES)
unset(CMAKE_REQUIRED_DEFINITIONS)
# MPI's C interface alone: the C++ one is gone from most installations.
add_compile_definitions(OMPI_SKIP_MPICXX)
if(WEFT_OPEN_MPI)
  set(mpi_family "Open MPI")
else()
  set(mpi_family "MPI of an unknown family")
  if(WEFT_MPICH)
    set(mpi_family "MPICH")
  endif()
  set_property(TARGET MPI::MPI_CXX APPEND PROPERTY INTERFACE_COMPILE_DEFINITIONS MPICH_SKIP_MPICXX)
endif()

# Ranks that the launcher of the other family starts do not find each other.
if(MPIEXEC_EXECUTABLE)
  execute_process(COMMAND ${MPIEXEC_EXECUTABLE} --version OUTPUT_VARIABLE said ERROR_VARIABLE said TIMEOUT 20)
  set(launcher_of "")
  if(said MATCHES "Open MPI|OpenRTE|open-mpi|PRRTE|prterun")
    set(launcher_of "Open MPI")
  elseif(said MATCHES "HYDRA|MPICH|Intel|MVAPICH")
    set(launcher_of "MPICH")
  endif()
  if(launcher_of AND mpi_family MATCHES "^(Open MPI|MPICH)$" AND NOT launcher_of STREQUAL mpi_family)
    message(WARNING "weft is built with ${mpi_family}, but the launcher ${MPIEXEC_EXECUTABLE} belongs to ${launcher_of}: tests on several ranks "
      "will fail. Name its own: -DMPIEXEC_EXECUTABLE=PATH (docs/mpi.md)")
  endif()
endif()
