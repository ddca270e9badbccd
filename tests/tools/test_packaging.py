"""packaging/: the Spack package asks for what tools/debian-packages.txt lists, in the same versions; versions agree everywhere."""
import pathlib
import re
import sys
import types
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Of the list, what a package of weft alone does not need: the base system, layout of the source, the bundle, a program of FFmpeg's.
TOOLS = {"gcc", "gmake", "llvm", "patchelf", "zstd"}
# Beside the list: compilers, the virtual MPI, CUDA's libraries, which Debian has no packages of.
MORE = {"c", "cxx", "mpi", "cuda", "nccl", "cudnn"}


def recipe(name):
    """What the package of that name says, run with a stand-in for Spack: {directive: [arguments]}."""
    said = {}

    def directive(word):
        return lambda *values, **options: said.setdefault(word, []).append((values, options))

    def decorator(*_, **__):
        return lambda function: function
    spack = types.ModuleType("spack.package")
    words = ("version", "variant", "depends_on", "conflicts", "license")
    vars(spack).update({word: directive(word) for word in words}, run_after=decorator, on_package_attributes=decorator)
    for base in ("CMakePackage", "CudaPackage", "AutotoolsPackage"):
        setattr(spack, base, type(base, (), {}))
    path = ROOT / "packaging/spack/packages" / name / "package.py"
    with mock.patch.dict(sys.modules, {"spack": types.ModuleType("spack"), "spack.package": spack}):
        names = {"__file__": str(path)}
        exec(compile(path.read_text(), str(path), "exec"), names)
    class_name = "".join(word.capitalize() for word in name.split("-"))
    return said, names[class_name]


class Spack(unittest.TestCase):
    def test_dependencies_are_those_of_the_list(self):
        wanted = set()
        for line in (ROOT / "tools/debian-packages.txt").read_text().splitlines():
            if not line.startswith("#") and line.strip():
                spec = re.split(r"  +", line.split("#")[1].strip(), maxsplit=1)[1]
                if spec != "-" and re.match(r"[\w-]+", spec)[0] not in TOOLS:
                    wanted.add(spec)
        said, package = recipe("weft")
        found = {values[0] for values, _ in said["depends_on"]}
        # Any HDF5 serves the package; the list names the smallest.
        self.assertEqual({s.replace(" ~mpi", "") for s in wanted}, {s for s in found if re.match(r"[\w-]+", s)[0] not in MORE})
        self.assertEqual(pathlib.Path(package.git.removeprefix("file://")), ROOT)

    def test_what_spack_lacks_is_here(self):
        for name in ("gumbo-parser", "polyclipping"):
            said, package = recipe(name)
            (version, options), = [(v[0], o) for v, o in said["version"]]
            self.assertRegex(options["sha256"], r"^[0-9a-f]{64}$")
            self.assertIn(version, package.url)


class Versions(unittest.TestCase):
    def test_one_version_everywhere(self):
        version = re.search(r"project\(weft VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())[1]
        self.assertIn(f"version: {version}\n", (ROOT / "CITATION.cff").read_text())
        self.assertIn(f"## [{version}]", (ROOT / "CHANGELOG.md").read_text())

    def test_options_of_cmake_are_in_the_docs(self):
        options = re.findall(r'(?:option\(|set\()(WEFT_\w+)(?= "| all CACHE)', (ROOT / "CMakeLists.txt").read_text())
        self.assertEqual(set(options), {"WEFT_TESTS", "WEFT_CUDA", "WEFT_CCACHE", "WEFT_UNITY", "WEFT_CUDA_ARCHITECTURES"})
        for option in options:
            self.assertIn(f"| `{option}` |", (ROOT / "docs/install.md").read_text())

    def test_the_container_builds_with_what_is_here(self):
        text = (ROOT / "packaging/apptainer/weft.def").read_text()
        for tool in re.findall(r"tools/\w+\.sh", text):
            self.assertTrue((ROOT / tool).exists(), tool)
        for section in ("%files", "%post", "%environment", "%runscript", "%test"):
            self.assertIn(f"\n{section}\n", text)


if __name__ == "__main__":
    unittest.main()
