#!/usr/bin/env python3
"""Lays weft and everything it needs into one folder that runs from anywhere; tools/bundle.sh calls it.

    bin/            weft, mpirun: small scripts that say where the rest is; for GPUs also weft_kernels and weft_probe, with which
                    validation/gpu/check.sh checks them
    libexec/        weft-cpu and weft-cuda (the same program linked without and with the CUDA side), weft_kernels-cuda ...
    lib/            shared libraries
    mpi/            the Open MPI that weft was built with: orterun, orted, plugins, help texts, PMIx
    inputs/ docs/ jobscripts/   as in the repository
    licences/       of every package that something was taken from, also as SPDX; MANIFEST lists every file

What belongs to the machine stays there: glibc, the NVIDIA driver and CUDA libraries, the drivers of fabrics.
"""
import argparse
import os
import pathlib
import platform
import re
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from bundle_icu import make_data  # noqa: E402
from bundle_stand_ins import defined_symbols, make_stand_in, run, wanted_symbols  # noqa: E402
from debian_licences import copyright_file, described, packages_of  # noqa: E402
from sbom import HEADERS, Document  # noqa: E402

# Never carried: they must fit the kernel, the driver or the loader of the machine.
NODE = re.compile(r"^(ld-linux.*|lib(c|m|dl|rt|pthread|resolv|util|nsl|anl|mvec|nss_.*)\.so\.\d+|linux-vdso.*"
                  r"|lib(cuda|nvidia-.*|cudart|cublas|cublasLt|nccl|cudnn.*|nvrtc.*)\.so.*"
                  r"|lib(ibverbs|rdmacm|mlx[45]|efa|fabric|psm2|psm_infinipath)\.so.*)$")
CUDA = re.compile(r"^lib(cudart|cublas|cublasLt|nccl|cudnn.*|nvrtc.*)\.so")
# Carried. Any other library that a carried file needs gets a stand-in (bundle_stand_ins.py).
CARRIED = re.compile(
    r"^lib(mpi|mpi_cxx|open-pal|open-rte|mca_common_.*|hwloc|event_core|event_pthreads|pmix|munge|udev|numa|nl-3|nl-route-3"  # MPI
    r"|ucp|ucs|uct|ucm|dnnl|OpenCL|hdf5.*|sz|aec|xxhash|fmt|tomlplusplus|stdc\+\+|gcc_s|gomp"
    # FFmpeg with the codecs that footage comes in: H.264, HEVC, MPEG-x, ProRes, VP8, VP9 are its own; AV1 is dav1d's.
    r"|avformat|avcodec|avfilter|avdevice|avutil|swscale|swresample|postproc|x264|dav1d|webp|webpmux|openjp2"
    r"|jxl|jxl_threads|hwy|brotli(common|dec|enc)|lcms2|z|bz2|lzma|snappy|zimg"
    # asked as soon as FFmpeg lists its codecs, or guesses the format of any file
    r"|aom|vpx|x265|openmpt|mpg123|vorbisfile|vorbis|ogg|gme"
    # or opens every stream of a broadcast to see what it is
    r"|zvbi|png16"
    # images
    r"|jpeg"
    # text in pictures
    r"|opencv_core|opencv_imgproc|tbb|polyclipping"
    # WebDataset shards: plain tar only, so that its compressors and ACLs are never called
    r"|archive"
    # T5's prompts: cleaning and tokenizer
    r"|sentencepiece|icuuc|icudata|pcre2-8|gumbo)[-.]")
# Open MPI's own plugins, less OpenSHMEM, tracing, retired fabrics and other launchers' stubs.
PLUGINS_LEFT_OUT = re.compile(r"mca_(atomic|memheap|scoll|spml|sshmem)_|monitoring|mca_btl_openib|mca_mtl_psm\.|_flux|_jsm"
                              r"|mca_vprotocol|_simulator|libompi_dbg")
HELP = re.compile(r"help-.*\.txt$|.*\.ini$|amca-param-sets")


def fail(text):
    raise SystemExit("bundle: " + text)


def resolved(path):
    """soname -> file of everything that the loader would bring in for `path`, as ldd says."""
    found = {}
    for line in run("ldd", str(path)).splitlines():
        if match := re.match(r"\s*(\S+) => (/\S.*) \(0x", line):
            found[match[1]] = match[2]
        elif match := re.match(r"\s*(\S+) => not found", line):
            found.setdefault(match[1], None)
    return found


def dynamic(path, tag):
    return re.findall(rf"\({tag}\).*\[(.*)\]", run("readelf", "-d", "-W", str(path)))


def is_elf(path):
    with open(path, "rb") as f:
        return f.read(4) == b"\x7fELF"


class Bundle:
    def __init__(self, root):
        self.root = root
        self.files = {}      # path in the bundle -> where it comes from
        self.known = {}      # soname -> file on this machine
        self.stand_ins = {}  # soname -> symbols

    def put(self, source, place):
        """Copies a file and remembers where its libraries are."""
        target = self.root / place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        executable = os.access(source, os.X_OK) or is_elf(source)
        target.chmod(0o755 if executable else 0o644)
        self.files[place] = os.path.realpath(source)
        if is_elf(source):
            for soname, file in resolved(source).items():
                if file:
                    self.known.setdefault(soname, file)
        return target

    def elves(self):
        return [p for p in self.files if is_elf(self.root / p)]

    def drop_unused(self, place, soname):
        """Takes a library off a program's list of needs if none of its symbols is used: what links MPI names its C++ bindings
        too, which a site's Open MPI seldom has."""
        if soname not in dynamic(self.root / place, "NEEDED") or not self.known.get(soname):
            return
        exported = defined_symbols(self.known[soname])
        if not any(name in exported for name, _, _ in wanted_symbols(self.root / place)[0]):
            run("patchelf", "--remove-needed", soname, str(self.root / place))

    def carry_libraries(self):
        """Brings in what the carried files need, until nothing is missing or left to stand in for."""
        mpi = re.compile(r"^lib(mpi|open-|mca_common_|pmix)")
        while True:
            have = {os.path.basename(p) for p in self.files}
            missing = {s for p in self.elves() for s in dynamic(self.root / p, "NEEDED")}
            missing -= have | {s for s in missing if NODE.match(s)} | set(self.stand_ins)
            carried = sorted(s for s in missing if CARRIED.match(s))
            if not carried:
                break
            for soname in carried:
                if soname not in self.known:
                    fail(f"{soname} is needed, but the loader does not find it here")
                if soname.startswith("libicudata.so"):
                    make_data(soname, self.known[soname], self.root / "lib" / soname)
                    self.files["lib/" + soname] = os.path.realpath(self.known[soname])
                    continue
                self.put(self.known[soname], ("mpi/lib/" if mpi.match(soname) else "lib/") + soname)
        for soname in sorted(missing):
            if soname not in self.known:
                fail(f"{soname} is needed, but the loader does not find it here")
        wanted = {p: wanted_symbols(self.root / p) for p in self.elves()}
        for soname in sorted(missing):
            needing = [p for p in wanted if soname in dynamic(self.root / p, "NEEDED")]
            if in_mpi := [p for p in needing if not p.startswith("lib/lib")]:
                fail(f"{in_mpi[0]} needs {soname}: only what FFmpeg and HDF5 need may be left out. "
                     "HINT: add it to CARRIED in tools/bundle.py")
            consumers = [wanted[p] for p in needing]
            self.stand_ins[soname] = make_stand_in(soname, self.known[soname], consumers, self.root / "lib" / soname)

    def set_paths(self):
        """DT_RPATH, which goes before LD_LIBRARY_PATH: a module that somebody loaded must not change the program."""
        for place in self.elves():
            up = os.path.relpath(self.root / "lib", (self.root / place).parent)
            mpi = os.path.relpath(self.root / "mpi/lib", (self.root / place).parent)
            paths = [f"$ORIGIN/{up}".replace("/.", "") if up == "." else f"$ORIGIN/{up}"]
            if place.startswith("mpi/"):  # weft itself finds MPI by LD_LIBRARY_PATH, so that a site's can take its place
                paths.append(f"$ORIGIN/{mpi}" if mpi != "." else "$ORIGIN")
            run("patchelf", "--force-rpath", "--set-rpath", ":".join(paths), str(self.root / place))

    def newest_glibc(self):
        found = set()
        for place in self.elves():
            found |= {tuple(map(int, v.split("."))) for v in
                      re.findall(r"Name: GLIBC_(\d+\.\d+)", run("readelf", "-V", "-W", str(self.root / place)))}
        return ".".join(map(str, max(found)))


def carry_mpi(bundle):
    """Open MPI as OPAL_PREFIX expects it: the folders keep their places relative to the prefix."""
    if not shutil.which("ompi_info"):
        fail("ompi_info is missing: the bundle carries Open MPI only. HINT: apt-get install openmpi-bin")
    if "libmpi.so.40" not in bundle.known:
        fail("weft is built with another MPI, but the bundle carries Open MPI only. HINT: build it with Open MPI (docs/mpi.md)")
    paths = {}
    for line in run("ompi_info", "--parsable", "--path", "all").splitlines():
        f = line.strip().split(":")
        if len(f) >= 3 and f[0] == "path":
            paths[f[1]] = f[2]
    prefix = paths["prefix"]
    for folder in "pkglibdir", "pkgdatadir":
        if not paths[folder].startswith(prefix + "/"):
            fail(f"Open MPI's {folder} {paths[folder]} is not under its prefix {prefix}, so it cannot move")
    for name in "orterun", "orted":
        bundle.put(os.path.realpath(shutil.which(name)), f"mpi/bin/{name}")
    plugins, texts = pathlib.Path(paths["pkglibdir"]), pathlib.Path(paths["pkgdatadir"])
    for file in sorted(plugins.glob("*.so")):
        if not PLUGINS_LEFT_OUT.search(file.name):
            bundle.put(file, f"mpi/{file.relative_to(prefix)}")
    for file in sorted(p for p in texts.rglob("*") if p.is_file() and HELP.search(str(p))):
        bundle.put(file, f"mpi/{file.relative_to(prefix)}")
    # PMIx and UCX bring plugins of their own.
    if pmix := bundle.known.get("libpmix.so.2"):
        home = pathlib.Path(os.path.realpath(pmix)).parent
        for file in sorted(home.glob("pmix/*.so")):
            bundle.put(file, f"mpi/pmix/lib/pmix/{file.name}")
        for file in sorted(home.parent.glob("share/pmix/help-*.txt")):
            bundle.put(file, f"mpi/pmix/share/pmix/{file.name}")
    if ucs := bundle.known.get("libucs.so.0"):
        for file in sorted(pathlib.Path(os.path.realpath(ucs)).parent.glob("ucx/*.so.0")):
            bundle.put(file, f"lib/ucx/{file.name}")


def carry_licences(bundle, version):
    """The copyright file of every Debian package that a carried file belongs to, which version it was, and the same as SPDX."""
    packages, unowned = packages_of(set(bundle.files.values()))
    (bundle.root / "licences").mkdir(exist_ok=True)
    for package in packages:
        if file := copyright_file(package.name):
            shutil.copyfile(os.path.realpath(file), bundle.root / "licences" / package.name)
    (bundle.root / "licences/PACKAGES").write_text(
        "".join(f"{p.name} {p.version} source {p.source} {p.source_version}\n" for p in packages))
    document = Document("weft-bundle", version)
    document.add_debian(packages, "CONTAINS")
    document.add_debian(described(HEADERS), "CONTAINS", "headers, compiled in")
    # Libraries of /usr/local and the like; weft's own files come from the build and from this repository.
    document.add_files([f for f in unowned if re.search(r"\.so[.\d]*$", f) and is_elf(f)], "CONTAINS")
    document.add_cuda()
    (bundle.root / "licences/weft.spdx.json").write_text(document.text())
    return packages


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", required=True, help="weft linked without the CUDA side")
    parser.add_argument("--cuda", help="weft linked with it")
    parser.add_argument("--checks", nargs="*", default=[], help="programs that check GPUs, linked with it: weft_kernels ...")
    parser.add_argument("--output", required=True, help="the folder to make")
    a = parser.parse_args()
    repository = pathlib.Path(__file__).resolve().parent.parent
    root = pathlib.Path(a.output).resolve()
    shutil.rmtree(root, ignore_errors=True)
    bundle = Bundle(root)

    # 1. The program, MPI's side of it, and what both need.
    if cuda := [s for s in dynamic(a.cpu, "NEEDED") if CUDA.match(s)]:
        fail(f"{a.cpu} needs {', '.join(cuda)}: it is not the CPU program")
    (root / "lib").mkdir(parents=True)
    run("strip", str(bundle.put(a.cpu, "libexec/weft-cpu")))
    if a.cuda:
        run("strip", str(bundle.put(a.cuda, "libexec/weft-cuda")))
        for program in map(pathlib.Path, a.checks):
            run("strip", str(bundle.put(program, f"libexec/{program.name}-cuda")))
        (root / "libexec/cuda-libraries").write_text(
            "".join(s + "\n" for s in dynamic(a.cuda, "NEEDED") if CUDA.match(s)))
        (root / "libexec/cuda-libraries-on-demand").write_text("libcudnn.so.9\n")
    for program in [p for p in bundle.files if p.startswith("libexec/weft")]:
        bundle.drop_unused(program, "libmpi_cxx.so.40")
    carry_mpi(bundle)
    bundle.carry_libraries()
    carry_mpi(bundle)  # again, now that the libraries of plugins are known
    bundle.carry_libraries()
    bundle.set_paths()

    # 2. What a person starts and reads.
    for script in "weft", "mpirun", "orted":
        bundle.put(repository / "tools/bundle" / script, f"bin/{script}")
    for program in map(pathlib.Path, a.checks):
        bundle.put(repository / "tools/bundle/weft", f"bin/{program.name}")
    bundle.put(repository / "tools/bundle/environment.sh", "libexec/environment.sh")
    bundle.put(repository / "tools/bundle/openmpi-mca-params.conf", "mpi/etc/openmpi-mca-params.conf")
    for link in "mpiexec", "orterun":
        os.symlink("mpirun", root / "bin" / link)
    for folder in "inputs", "docs", "jobscripts":
        for file in sorted((repository / folder).rglob("*")):
            if file.is_file():
                bundle.put(file, f"{folder}/{file.relative_to(repository / folder)}")
    bundle.put(repository / "docs/bundle.md", "README.md")
    bundle.put(repository / "LICENSE", "LICENSE")
    glibc = bundle.newest_glibc()
    (root / "libexec/glibc").write_text(glibc + "\n")

    # 3. What it is made of.
    version = run(a.cpu, "--version").strip()
    packages = carry_licences(bundle, run(a.cuda or a.cpu, "--version"))
    machine = platform.machine()
    lines = [version, f"needs glibc {glibc} or newer, {'x86-64-v3' if machine == 'x86_64' else machine}", ""]
    lines += [f"{place}\t{source if source.startswith('/usr') else 'weft'}" for place, source in sorted(bundle.files.items())]
    lines += ["", "Left out; a stand-in ends the program with a message if one is called (docs/bundle.md):",
              *[f"lib/{s}" for s in sorted(bundle.stand_ins)]]
    (root / "MANIFEST").write_text("\n".join(lines) + "\n")
    size = sum(p.stat().st_size for p in root.rglob("*") if p.is_file() and not p.is_symlink())
    print(f"bundle: {version}: {len(bundle.files)} files of {len(packages)} packages, {len(bundle.stand_ins)} libraries left "
          f"out, {size / 2**20:.1f} MiB; glibc {glibc} or newer")


if __name__ == "__main__":
    main()
