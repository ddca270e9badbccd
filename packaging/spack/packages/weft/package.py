# SPDX-License-Identifier: Apache-2.0
import pathlib

from spack.package import *
from spack_repo.builtin.build_systems.cmake import CMakePackage
from spack_repo.builtin.build_systems.cuda import CudaPackage


class Weft(CMakePackage, CudaPackage):
    """Training and running video and vision models as an MPI batch application."""

    # No homepage and no maintainers(), which takes names of GitHub: weft has no public address.

    license("Apache-2.0")

    # make dist: in build/weft-VERSION-recipes its tarball takes the place of the checkout that this file lies in.
    git = pathlib.Path(__file__).resolve().parents[4].as_uri()
    version("main", branch="main")

    variant("nccl", default=True, when="+cuda", description="Reductions between GPUs by NCCL")
    variant("cudnn", default=True, when="+cuda", description="Convolutions (VAEs) on GPUs")

    # The names and versions of tools/debian-packages.txt.
    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("cmake@3.22:", type="build")
    depends_on("ninja", type="build")
    depends_on("pkgconf", type="build")
    depends_on("git", type="build")
    depends_on("python@3.9:", type=("build", "test"))
    depends_on("py-numpy", type="test")
    depends_on("py-h5py", type="test")

    depends_on("mpi@3.1:")
    depends_on("openmpi@4.1:", when="^openmpi")
    depends_on("hdf5@1.10:")
    depends_on("onednn@2.6: cpu_runtime=omp")
    depends_on("xxhash@0.8:")
    depends_on("sentencepiece@0.1.97:")
    depends_on("icu4c@72:")
    depends_on("pcre2@10:")
    depends_on("gumbo-parser")
    depends_on("tomlplusplus@3:")
    depends_on("cli11@2:")
    depends_on("nlohmann-json@3.10:")
    depends_on("fmt@9:10")
    depends_on("ffmpeg@5: +libx264", type=("build", "link", "run"))
    depends_on("libjpeg-turbo")
    depends_on("libpng@1.6:")
    depends_on("libarchive@3:")
    depends_on("opencv@4: +imgproc")
    depends_on("polyclipping")
    depends_on("eigen@3.4:3")
    depends_on("googletest +gmock", type="test")
    depends_on("boost@1.74: +context", type="test")
    depends_on("simgrid@3.32:", type="test")

    depends_on("cuda@12.4:", when="+cuda")
    depends_on("nccl@2.18:", when="+nccl")
    depends_on("cudnn@9:", when="+cudnn")

    conflicts("%gcc@:11", msg="weft is C++20: g++ 12 or newer")
    conflicts("cuda_arch=none", when="+cuda", msg="name the GPUs: cuda_arch=80, 90, ...")

    def cmake_args(self):
        args = [
            self.define("WEFT_TESTS", self.run_tests),
            self.define_from_variant("WEFT_CUDA", "cuda"),
            self.define_from_variant("WEFT_NCCL", "nccl"),  # "" without CUDA
            self.define_from_variant("WEFT_CUDNN", "cudnn"),
        ]
        if self.spec.satisfies("+cuda"):
            args.append(self.define("WEFT_CUDA_ARCHITECTURES", list(self.spec.variants["cuda_arch"].value)))
        return args

    def setup_run_environment(self, env):
        env.set("WEFT", self.prefix.bin.weft)  # for the job scripts
        env.set("WEFT_SHARE", self.prefix.share.weft)
        env.prepend_path("PYTHONPATH", self.prefix.share.weft.python)

    @run_after("install")
    @on_package_attributes(run_tests=True)
    def check_smoke_run(self):
        with working_dir("spack-smoke", create=True):
            Executable(self.prefix.bin.weft)("train", join_path(self.prefix.share, "weft", "inputs", "smoke.toml"))

    def test_selftest(self):
        """run weft's checks on the installed program (spack test run weft)"""
        said = Executable(self.prefix.bin.weft)("selftest", output=str.split, error=str.split)
        assert "selftest: passed" in said
