# CMake's toolchain file for 64-bit Arm from another machine, by Debian's cross compiler:
#   cmake -S . -B build/aarch64 -DCMAKE_TOOLCHAIN_FILE=tools/aarch64.cmake -DWEFT_SYSROOT=DIR
# DIR holds Debian's arm64 packages, unpacked; tools/test_aarch64.sh fills it. Tests run under qemu as a processor without SVE.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES WEFT_SYSROOT)
set(CMAKE_SYSROOT ${WEFT_SYSROOT})
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static -cpu neoverse-n1 -L ${WEFT_SYSROOT})

set(CMAKE_FIND_ROOT_PATH ${WEFT_SYSROOT})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
foreach(kind LIBRARY INCLUDE PACKAGE)
  set(CMAKE_FIND_ROOT_PATH_MODE_${kind} ONLY)
endforeach()
set(libraries ${WEFT_SYSROOT}/usr/lib/aarch64-linux-gnu)
set(ENV{PKG_CONFIG_SYSROOT_DIR} ${WEFT_SYSROOT})
set(ENV{PKG_CONFIG_LIBDIR} ${libraries}/pkgconfig:${WEFT_SYSROOT}/usr/share/pkgconfig)
# mpicxx and h5cc of this machine would name its own libraries.
set(MPI_CXX_LIB_NAMES mpi CACHE STRING "")
set(MPI_mpi_LIBRARY ${libraries}/openmpi/lib/libmpi.so CACHE FILEPATH "")
set(MPI_CXX_COMPILER_INCLUDE_DIRS ${libraries}/openmpi/include CACHE STRING "")
set(HDF5_C_COMPILER_EXECUTABLE /bin/false CACHE FILEPATH "")
