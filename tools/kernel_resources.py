#!/usr/bin/env python3
"""Registers, shared memory and spills of every kernel, as ptxas reported them in the last build (*.cu.o.log files).

    kernel_resources.py [--build build] [--all] [--write | --check]

Prints a table, one line per kernel and architecture. --write writes it to validation/results/kernels_resources.md. --check
compares that page with it, for the architectures that were built by the same nvcc, and passes if there are none. Without
--all only the hot kernels are shown. Exit status 1 if a hot kernel spills registers, if a hot pattern matches no kernel, or if
the page is out of date.
"""
import argparse
import pathlib
import re
import subprocess
import sys

# Kernels that dominate a training step. Helpers that run once per step on a few KB are not among them.
HOT = [r"modulate", r"gate", r"gelu", r"flash", r"temporal", r"qk_norm", r"AdamwRule", r"sum_of_squares|squares",
       r"convert", r"add", r"group_norm|moments|gradient_sums", r"phases", r"relative", r"softmax|probabilities", r"rms_rope", r"norm_rows", r"channel_norm"]
ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "validation/results/kernels_resources.md"

ENTRY = re.compile(r"Compiling entry function '([^']+)' for '(sm_\w+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
DEFINITION = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\(")


def objects(build):
    """The objects that nvcc made in this build. A folder may also contain old objects, of other groups of files."""
    commands = build / "compile_commands.json"
    made = re.findall(r" -o (\S+\.cu\.o)\b", commands.read_text(encoding="utf-8")) if commands.exists() else []
    return sorted(build / path for path in made if log_of(build / path).exists())


def log_of(path):
    return path.with_name(path.name + ".log")


def read(build):
    """(mangled, architecture) -> (registers, static shared bytes, stack, spill stores, spill loads)"""
    kernels = {}
    for path in objects(build):
        key, spills = None, (0, 0, 0)
        for line in log_of(path).read_text(encoding="utf-8", errors="replace").splitlines():
            if m := ENTRY.search(line):
                key, spills = (m[1], m[2]), (0, 0, 0)
            elif (m := SPILLS.search(line)) and key:
                spills = tuple(int(x) for x in m.groups())
            elif (m := USED.search(line)) and key:
                kernels[key] = (int(m[1]), int(m[2] or 0), *spills)
                key = None
    return kernels


def homes(folder):
    """Kernel's name -> file that defines it. An object may contain many files, so kernels are identified by unique names."""
    found = {}
    for path in sorted(p for p in folder.rglob("*.cu*") if p.suffix in (".cu", ".cuh")):
        for name in DEFINITION.findall(path.read_text(encoding="utf-8")):
            if found.setdefault(name, path.name) != path.name:
                sys.exit(f"kernel_resources: {name} is defined in {found[name]} and in {path.name}: rename one")
    return found


def plain_names(mangled):
    out = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True).stdout
    names = {}
    for raw, name in zip(mangled, out.splitlines()):
        name = re.sub(r"^void ", "", name).replace("weft::kernels::", "").replace("weft::ops::cuda::", "")
        name = name.replace("(anonymous namespace)::", "").replace("__nv_bfloat16", "bf16")
        depth, cut = 0, len(name)
        for i, c in enumerate(name):  # the parameter list begins at the first parenthesis outside <>
            depth += (c == "<") - (c == ">")
            if c == "(" and depth == 0:
                cut = i
                break
        names[raw] = re.sub(r"\((?:int|bool|weft::\w+)\)", "", name[:cut])
    return names


def compiler(build):
    """The release of the nvcc that CMake found for this build, or "unknown"."""
    for path in build.glob("CMakeFiles/*/CMakeCUDACompiler.cmake"):
        if m := re.search(r'set\(CMAKE_CUDA_COMPILER_VERSION "([\d.]+)"\)', path.read_text(encoding="utf-8")):
            return m[1]
    return "unknown"


def page_of(rows, version):
    by_kernel = {}
    for file, name, arch, regs, _, spills, _ in rows:
        by_kernel.setdefault((file, name), {})[arch] = f"{regs}" + (f" ({spills} B spilled)" if spills else "")
    archs = sorted({r[2] for r in rows}, key=lambda a: int(re.sub(r"\D", "", a)))
    lines = ["# Registers of the kernels", "",
             f"Registers a thread and spilled bytes, as ptxas of CUDA {version} reports them. Written by",
             "`tools/kernel_resources.py --write`; do not edit.", "",
             "| file | kernel | " + " | ".join(archs) + " |", "|---|---|" + "---|" * len(archs)]
    lines += [f"| {file} | `{name}` | " + " | ".join(by.get(a, "") for a in archs) + " |"
              for (file, name), by in sorted(by_kernel.items())]
    return "\n".join(lines) + "\n"


def cells(page):
    """(file, kernel, architecture) -> text of the cell"""
    table = [[c.strip() for c in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    return {(row[0], row[1], arch): cell for row in table[2:] for arch, cell in zip(table[0][2:], row[2:])}


def stale(page, wanted):
    version = re.search(r"ptxas of CUDA ([\d.]+|unknown)", page)
    if not version or f"ptxas of CUDA {version[1]} " not in wanted:
        return []  # another compiler: its numbers say nothing about the page
    have, want = cells(page), cells(wanted)
    both = {a for _, _, a in have} & {a for _, _, a in want}
    keys = {k for k in have.keys() | want.keys() if k[2] in both}
    return sorted(k for k in keys if have.get(k, "") != want.get(k, ""))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build", type=pathlib.Path)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    kernels = read(args.build)
    if not kernels and args.check:
        print("kernel_resources: not checked, nothing was built with nvcc")
        return 0
    if not kernels:
        sys.exit(f"kernel_resources: no *.cu.o.log under {args.build}: build with nvcc first")
    names = plain_names(sorted({k for k, _ in kernels}))
    home = homes(ROOT / "kernels")
    rows = sorted({(home[re.match(r"(?:\w+::)*(\w+)", names[raw])[1]], names[raw], arch, regs, shared, stores + loads, stack)
                   for (raw, arch), (regs, shared, stack, stores, loads) in kernels.items()})
    hot = [r for r in rows if any(re.search(p, r[1]) for p in HOT)]
    unknown = [p for p in HOT if not any(re.search(p, r[1]) for r in rows)]
    shown = rows if args.all else hot
    print(f"{'file':<26} {'kernel':<70} {'arch':<8} {'regs':>5} {'shared B':>8} {'spill B':>8} {'stack B':>8}")
    for file, name, arch, regs, shared, spills, stack in shown:
        print(f"{file:<26} {name:<70} {arch:<8} {regs:>5} {shared:>8} {spills:>8} {stack:>8}")
    page = page_of(rows, compiler(args.build))
    if args.write:
        PAGE.write_text(page, encoding="utf-8")
    old = stale(PAGE.read_text(encoding="utf-8"), page) if args.check else []
    spilling = [r for r in hot if r[5] > 0]
    for file, name, arch, regs, shared, spills, stack in spilling:
        print(f"kernel_resources: {name} ({file}, {arch}) spills {spills} bytes", file=sys.stderr)
    for file, name, arch in old:
        print(f"kernel_resources: validation/results/{PAGE.name} is out of date: {name} ({file}, {arch}); run with --write", file=sys.stderr)
    for p in unknown:
        print(f"kernel_resources: no kernel matches the hot pattern {p}", file=sys.stderr)
    print(f"{len(rows)} kernels, {len(hot)} hot, {len(spilling)} of them spill")
    return 1 if spilling or unknown or old else 0


if __name__ == "__main__":
    sys.exit(main())
