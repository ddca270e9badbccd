# SPDX-License-Identifier: Apache-2.0
from spack.package import *
from spack_repo.builtin.build_systems.cmake import CMakePackage


class Polyclipping(CMakePackage):
    """Clipper 6: polygons grown and cut, for the outlines of text. Not among Spack's own packages."""

    homepage = "https://sourceforge.net/projects/polyclipping"
    url = "https://sourceforge.net/projects/polyclipping/files/clipper_ver6.4.2.zip"

    license("BSL-1.0")

    version("6.4.2", sha256="a14320d82194807c4480ce59c98aa71cd4175a5156645c4e2b3edd330b930627")

    depends_on("cxx", type="build")
    depends_on("cmake@3", type="build")  # it asks for the behaviour of CMake 2.6, which CMake 4 refuses

    root_cmakelists_dir = "cpp"
