# SPDX-License-Identifier: Apache-2.0
from spack.package import *
from spack_repo.builtin.build_systems.cmake import CMakePackage


class Onednn(CMakePackage):
    """Matrix products and convolutions on CPUs. Spack's own package ends at 3.0, which weft was never tried with."""

    homepage = "https://uxlfoundation.github.io/oneDNN"
    url = "https://github.com/uxlfoundation/oneDNN/archive/refs/tags/v3.7.3.tar.gz"

    license("Apache-2.0")

    version("3.7.3", sha256="071f289dc961b43a3b7c8cbe8a305290a7c5d308ec4b2f586397749abdc88296")

    # Of the values of Spack's own package, the one that weft asks for.
    variant("cpu_runtime", default="omp", values=("omp",), multi=False, description="threads on the CPU")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("cmake@3.13:", type="build")

    def cmake_args(self):
        return [self.define("ONEDNN_CPU_RUNTIME", "OMP"), self.define("ONEDNN_BUILD_TESTS", False),
                self.define("ONEDNN_BUILD_EXAMPLES", False), self.define("ONEDNN_BUILD_DOC", False)]
