# SPDX-License-Identifier: Apache-2.0
from spack.package import *
from spack_repo.builtin.build_systems.autotools import AutotoolsPackage


class GumboParser(AutotoolsPackage):
    """An HTML5 parser in C, with which captions are cleaned. Not among Spack's own packages."""

    homepage = "https://github.com/google/gumbo-parser"
    url = "https://github.com/google/gumbo-parser/archive/v0.10.1.tar.gz"

    license("Apache-2.0")

    version("0.10.1", sha256="28463053d44a5dfbc4b77bcf49c8cee119338ffa636cc17fc3378421d714efad")

    depends_on("c", type="build")
    depends_on("autoconf", type="build")
    depends_on("automake", type="build")
    depends_on("libtool", type="build")

    def autoreconf(self, spec, prefix):
        Executable("./autogen.sh")()
