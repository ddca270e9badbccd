"""packaging/: the Spack package asks for what tools/debian-packages.txt lists, in the same versions; versions agree everywhere;
the tarball and the recipes that name it; the list of licences."""
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import types
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import debian_licences  # noqa: E402
import sbom  # noqa: E402

VERSION = re.search(r"project\(weft VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())[1]
EASYCONFIG = f"weft-{VERSION}-foss-2024a.eb"
EASYCONFIG_CUDA = f"weft-{VERSION}-foss-2024a-CUDA-12.6.0.eb"
# Of the list, what a package of weft alone does not need: the base system, layout of the source, the bundle, a program of FFmpeg's.
TOOLS = {"gcc", "gmake", "llvm", "patchelf", "zstd"}
# Beside the list: compilers, the virtual MPI, CUDA's libraries, which Debian has no packages of.
MORE = {"c", "cxx", "mpi", "cuda", "nccl", "cudnn"}


def recipe(name, folder=ROOT / "packaging/spack"):
    """What the package of that name says, run with a stand-in for Spack: {directive: [arguments]}."""
    said = {}

    def directive(word):
        return lambda *values, **options: said.setdefault(word, []).append((values, options))

    def decorator(*_, **__):
        return lambda function: function
    spack = types.ModuleType("spack.package")
    words = ("version", "variant", "depends_on", "conflicts", "license")
    vars(spack).update({word: directive(word) for word in words}, run_after=decorator, on_package_attributes=decorator)
    modules = {"spack": types.ModuleType("spack"), "spack.package": spack}
    for parent in ("spack_repo", "spack_repo.builtin", "spack_repo.builtin.build_systems"):
        modules[parent] = types.ModuleType(parent)
    for system, base in (("cmake", "CMakePackage"), ("cuda", "CudaPackage"), ("autotools", "AutotoolsPackage")):
        module = modules[f"spack_repo.builtin.build_systems.{system}"] = types.ModuleType(system)
        setattr(module, base, type(base, (), {"define": staticmethod(lambda name, value: (name, value)),
                                              "define_from_variant": staticmethod(lambda name, variant: (name, variant))}))
    path = folder / "packages" / name / "package.py"
    with mock.patch.dict(sys.modules, modules):
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

    def test_every_variant_is_told_to_cmake(self):
        said, package = recipe("weft")
        weft = package()
        weft.run_tests = False
        weft.spec = types.SimpleNamespace(satisfies=lambda _: True, variants={"cuda_arch": types.SimpleNamespace(value=("80", "90"))})
        args = dict(weft.cmake_args())
        self.assertEqual(args.pop("WEFT_CUDA_ARCHITECTURES"), ["80", "90"])
        self.assertEqual(args, {"WEFT_TESTS": False, "WEFT_CUDA": "cuda"} |
                         {f"WEFT_{variant.upper()}": variant for (variant,), _ in said["variant"]})
        self.assertLessEqual(set(args), options_of_cmake())

    def test_onednn_is_that_of_easybuild(self):
        said, package = recipe("onednn")
        other = easyconfig(next((ROOT / "packaging/easybuild").glob("oneDNN-*.eb")))
        self.assertEqual(said["version"], [((other["version"],), {"sha256": other["checksums"][0]})])
        self.assertEqual({f"-D{name}={'OMP' if value == 'OMP' else 'OFF'}" for name, value in package().cmake_args()},
                         set(other["configopts"].split()))

    def test_what_spack_lacks_is_here(self):
        for name in ("gumbo-parser", "onednn", "polyclipping", "tomlplusplus"):
            said, package = recipe(name)
            (version, options), = [(v[0], o) for v, o in said["version"]]
            self.assertRegex(options["sha256"], r"^[0-9a-f]{64}$")
            self.assertIn(version, package.url)


def options_of_cmake():
    return set(re.findall(r'(?:option\(|set\()(WEFT_\w+)(?= "| all CACHE)', (ROOT / "CMakeLists.txt").read_text()))


def easyconfig(path):
    """The parameters of an easyconfig, which is Python over some constants of EasyBuild's."""
    names = {"SHLIB_EXT": "so", "SOURCE_TAR_GZ": "NAME.tar.gz", "SOURCELOWER_TAR_GZ": "name.tar.gz", "SYSTEM": {}}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names


class EasyBuild(unittest.TestCase):
    def test_names_versions_and_checksums(self):
        files = {path.name: easyconfig(path) for path in (ROOT / "packaging/easybuild").glob("*.eb")}
        for name, said in files.items():
            with self.subTest(name):
                chain = said["toolchain"]
                cuda = next((d[1] for d in said.get("dependencies", []) if d[0] == "CUDA"), None)
                suffix = said.get("versionsuffix", "").replace("%(cudaver)s", cuda or "?")
                self.assertEqual(name, f"{said['name']}-{said['version']}-{chain['name']}-{chain['version']}{suffix}.eb")
                for checksum in said["checksums"]:
                    self.assertRegex(checksum or "0" * 64, "^[0-9a-f]{64}$")
        weft = files[EASYCONFIG]
        for needed in ("oneDNN", "gumbo-parser", "polyclipping", "fmt"):  # which EasyBuild lacks in this version
            self.assertIn((needed, weft_version(weft, needed)), {(f["name"], f["version"]) for f in files.values()})

    def test_the_one_with_cuda_differs_in_cuda_alone(self):
        cpu, gpu = (easyconfig(ROOT / "packaging/easybuild" / name) for name in (EASYCONFIG, EASYCONFIG_CUDA))
        for said in (cpu, gpu):
            said.pop("__builtins__")
        self.assertEqual({d[0] for d in gpu.pop("dependencies") if d not in cpu["dependencies"]}, {"CUDA", "NCCL", "cuDNN"})
        self.assertEqual(gpu.pop("configopts"),
                         cpu["configopts"].replace("=OFF", "=ON").replace("TESTS=ON", "TESTS=OFF")
                         + ' -DWEFT_CUDA_ARCHITECTURES="%(cuda_cc_cmake)s"')
        self.assertEqual({key for key in gpu if gpu[key] != cpu.get(key)}, {"versionsuffix", "cuda_compute_capabilities"})
        for said in (cpu, gpu):
            self.assertLessEqual(set(re.findall(r"-D(WEFT_\w+)", said.get("configopts", ""))), options_of_cmake())

    def test_every_library_of_the_list(self):
        """By Spack's names, which are EasyBuild's but for these."""
        names = {"icu4c": "icu", "nlohmann-json": "nlohmann_json"}
        weft = easyconfig(ROOT / "packaging/easybuild" / EASYCONFIG)
        there = {d[0].lower() for d in weft["dependencies"] + weft["builddependencies"]}
        said, _ = recipe("weft")
        # The toolchain's; at run time and in tests; in a clone; not among EasyBuild's.
        without = {"c", "cxx", "mpi", "openmpi", "git", "python", "cuda", "nccl", "cudnn"}
        for values, options in said["depends_on"]:
            name = re.match(r"[\w-]+", values[0])[0]
            if name not in without and options.get("type") != "test":
                self.assertIn(names.get(name, name), there)


def weft_version(parameters, name):
    return next(d[1] for d in parameters["dependencies"] if d[0] == name)


class Versions(unittest.TestCase):
    def test_one_version_everywhere(self):
        citation = (ROOT / "CITATION.cff").read_text()
        self.assertIn(f"version: {VERSION}\n", citation)
        sections = dict(re.findall(r"(?m)^## \[(\d\S*)\](?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text()))
        self.assertGreater(len(sections), 1)
        self.assertTrue(all(sections.values()), sections)
        self.assertIn(f"date-released: {sections[VERSION]}\n", citation)
        self.assertEqual({p.name for p in (ROOT / "packaging/easybuild").glob("weft-*.eb")}, {EASYCONFIG, EASYCONFIG_CUDA})

    def test_presets_are_in_the_docs(self):
        presets = json.loads((ROOT / "CMakePresets.json").read_text())
        options = set(re.findall(r"(?:option\(|set\()(WEFT_\w+)", (ROOT / "CMakeLists.txt").read_text()))
        text = (ROOT / "docs/install.md").read_text()
        for preset in presets["configurePresets"]:
            self.assertIn(f"| `{preset['name']}` | `{preset['binaryDir'].removeprefix('${sourceDir}/')}` |", text)
            self.assertLessEqual({key for key in preset["cacheVariables"] if key.startswith("WEFT_")}, options)

    def test_options_of_cmake_are_in_the_docs(self):
        options, text = options_of_cmake(), (ROOT / "docs/install.md").read_text()
        self.assertGreaterEqual(len(options), 7)
        for option in options:
            self.assertTrue(f"| `{option}` |" in text, f"docs/install.md lacks the option {option}")

    def test_the_container_builds_with_what_is_here(self):
        text = (ROOT / "packaging/apptainer/weft.def").read_text()
        for tool in re.findall(r"tools/\w+\.sh", text):
            self.assertTrue((ROOT / tool).exists(), tool)
        for section in ("%files", "%post", "%environment", "%runscript", "%test"):
            self.assertIn(f"\n{section}\n", text)
        for section in ("post", "runscript", "test"):
            script = re.search(rf"(?ms)^%{section}\n(.*?)(?=^%|\Z)", text)[1]
            subprocess.run(["sh", "-n"], input=script, text=True, check=True)
        # A tag beside it is refused by some versions.
        self.assertRegex(text, r"(?m)^From: debian@sha256:[0-9a-f]{64}$")
        # The source does not stay in the image, and only the tarball goes in.
        self.assertEqual(re.search(r"(?ms)^%files\n(.*?)(?=^%)", text)[1].split(), ["{{", "TARBALL", "}}", "/opt/weft.tar.gz"])
        self.assertRegex(text, r"(?m)^    rm -rf /opt/weft.tar.gz /opt/weft-source ")


class Dist(unittest.TestCase):
    """make dist, in a clone with the files of packaging/ as they are now."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.clone = pathlib.Path(folder.name) / "clone"
        if ("Format" not in (ROOT / "packaging/commit").read_text() or not shutil.which("git")
                or subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True).returncode != 0):
            self.skipTest("no clone: a tarball is not packed again")
        self.git("clone", "--quiet", "--depth", "1", ROOT.as_uri(), self.clone)
        for name in ("packaging", "tools", "CMakeLists.txt", ".gitattributes"):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, self.clone / name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copyfile(source, self.clone / name)
        self.git("-C", self.clone, "add", "-A")
        self.git("-C", self.clone, "-c", "user.name=test", "-c", "user.email=test", "commit", "--quiet", "--allow-empty", "-m", "now")

    def git(self, *words):
        return subprocess.run(["git", *map(str, words)], check=True, capture_output=True, text=True).stdout.strip()

    def dist(self, version=VERSION):
        done = subprocess.run([self.clone / "tools/dist.sh"], capture_output=True, text=True, env={**os.environ, "REF": ""})
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return (self.clone / f"build/weft-{version}.tar.gz").read_bytes()

    def test_a_commit_without_the_tag_is_named(self):
        commit = self.git("-C", self.clone, "rev-parse", "HEAD")
        version = f"{VERSION}-g{commit[:8]}"
        sha256 = hashlib.sha256(self.dist(version)).hexdigest()
        self.assertEqual(list((self.clone / "build").glob(f"weft-{VERSION}.*")), [])
        recipes = self.clone / f"build/weft-{version}-recipes"
        self.assertEqual(recipe("weft", recipes / "spack")[0]["version"], [((version,), {"sha256": sha256})])
        for name in (EASYCONFIG, EASYCONFIG_CUDA):
            said = easyconfig(recipes / "easybuild" / name.replace(VERSION, version))
            self.assertEqual((said["version"], said["checksums"]), (version, [sha256]))

    def test_tarball_and_recipes(self):
        self.git("-C", self.clone, "tag", f"v{VERSION}")
        packed = self.dist()
        self.git("-C", self.clone, "config", "tar.umask", "0077")
        self.assertEqual(self.dist(), packed, "another configuration gives other bytes")
        sha256 = hashlib.sha256(packed).hexdigest()
        build = self.clone / "build"
        self.assertEqual((build / f"weft-{VERSION}.tar.gz.sha256").read_text(), f"{sha256}  weft-{VERSION}.tar.gz\n")
        with tarfile.open(build / f"weft-{VERSION}.tar.gz") as tar:
            self.assertEqual({name.split("/")[0] for name in tar.getnames()}, {f"weft-{VERSION}"})
            commit = tar.extractfile(f"weft-{VERSION}/packaging/commit").read().decode().strip()
        self.assertEqual(commit, self.git("-C", self.clone, "rev-parse", "HEAD"))

        recipes = build / f"weft-{VERSION}-recipes"
        said, package = recipe("weft", recipes / "spack")
        self.assertEqual(said["version"], [((VERSION,), {"sha256": sha256})])
        self.assertEqual(package.url, (build / f"weft-{VERSION}.tar.gz").as_uri())
        self.assertFalse(hasattr(package, "git"))
        environment = (recipes / "spack/spack.yaml").read_text()
        self.assertIn(f"- weft@{VERSION} ~cuda\n", environment)
        for gone in ("path:", "checkout", "packaging/"):
            self.assertNotIn(gone, environment)
        for name in (EASYCONFIG, EASYCONFIG_CUDA):
            self.assertEqual(easyconfig(recipes / "easybuild" / name)["checksums"], [sha256])

    def test_a_tarball_is_not_packed_again(self):
        (self.clone / "packaging/commit").write_text("0123456789abcdef0123456789abcdef01234567\n")
        done = subprocess.run([self.clone / "tools/dist.sh"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("HINT", done.stderr)


COPYRIGHT = """Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Source: https://example.org

Files: *
Copyright: 2001 A
License: LGPL-2.1+

Files: a.c
 b.c
Copyright: 2002 B
License: GPL-2+ or Expat, and odd

Files: tests/*
Copyright: 2003 C
License: GPL-3+ with Autoconf exception

Files: debian/*
Copyright: 2004 D
License: GPL-1

License: odd
 Whoever reads this may keep it.
 .
 That is all.
"""


class Licences(unittest.TestCase):
    def test_expression_of_a_copyright_file(self):
        expression, texts = debian_licences.licences("libodd+", COPYRIGHT)
        self.assertEqual(expression, "LGPL-2.1-or-later AND ((GPL-2.0-or-later OR MIT) AND LicenseRef-libodd--odd) AND "
                                     "GPL-3.0-or-later WITH Autoconf-exception-3.0")
        self.assertEqual(list(texts), ["LicenseRef-libodd--odd"])
        self.assertIn("may keep it", texts["LicenseRef-libodd--odd"])

    def test_names(self):
        for name, spdx in (("GPL-2", "GPL-2.0-only"), ("LGPL-3.0+", "LGPL-3.0-or-later"), ("AGPL-3", "AGPL-3.0-only"), ("Expat", "MIT"),
                           ("BSD-3-clause", "BSD-3-Clause"), ("Apache-2.0", "Apache-2.0"), ("GPL-2+ with OpenSSL exception", None),
                           ("public-domain", None), ("GPL", None)):
            self.assertEqual(debian_licences.identifier(name), spdx)

    def test_a_text_without_form_is_one_licence(self):
        text = "This package was debianized by E.\n\nLicense: do as you like\n"
        self.assertEqual(debian_licences.licences("libold", text), ("LicenseRef-libold", {"LicenseRef-libold": text}))

    def test_document(self):
        def made():
            document = sbom.Document("weft", f"weft {VERSION} (commit 0123abcd, g++ 12.2.0)\n"
                                     "  library       found                    compiled against\n"
                                     "  MPI           Open MPI v4.1.4          Open MPI v4.1.4\n"
                                     "  CUDA runtime  13.0                     13.0\n"
                                     "  cuBLASLt      13.1.0                   13.1.1\n"
                                     "  cuDNN         none                     9.19.0\n"
                                     "  CPU: AMD EPYC, 2 of 2 cores, AVX-512\n")
            packages = [debian_licences.Package("libodd+", "1:2.0+ds-1", "amd64", "odd", "1:2.0+ds-1"),
                        debian_licences.Package("libbare", "1", "amd64", "bare", "1")]
            document.add_debian(packages, "DYNAMIC_LINK", text_of={"libodd+": COPYRIGHT}.get)
            document.add_debian(packages[:1], "DEPENDS_ON", text_of={}.get)
            document.add_files(["/opt/cuda/lib/libcublasLt.so.13"], "DYNAMIC_LINK")
            document.add_cuda()
            return document.text()
        with mock.patch.dict(os.environ, SOURCE_DATE_EPOCH="86400"):
            text = made()
            self.assertEqual(text, made())
        document = json.loads(text)
        self.assertEqual(document["creationInfo"]["created"], "1970-01-02T00:00:00Z")
        names = [p["SPDXID"] for p in document["packages"]]
        self.assertEqual(len(names), len(set(names)))
        self.assertEqual([(p["name"], p.get("versionInfo")) for p in document["packages"]], [
            ("weft", VERSION), ("libodd+", "1:2.0+ds-1"), ("libbare", "1"), ("libcublasLt.so.13", "13.1.1"),
            ("CUDA runtime", "13.0"), ("cuDNN", "9.19.0")])
        self.assertEqual(document["packages"][1]["externalRefs"][0]["referenceLocator"].split("?")[0],
                         "pkg:deb/debian/libodd%2B@1%3A2.0%2Bds-1")
        for relation in document["relationships"]:
            self.assertLessEqual({relation["spdxElementId"], relation["relatedSpdxElement"]}, {*names, "SPDXRef-DOCUMENT"})
        used = {ref for p in document["packages"] for ref in re.findall(r"LicenseRef-[\w.-]+", p["licenseDeclared"])}
        self.assertEqual(used, {t["licenseId"] for t in document["hasExtractedLicensingInfos"]})


if __name__ == "__main__":
    unittest.main()
