#!/usr/bin/env python3
"""Registers, shared memory and spills of every kernel, as ptxas told the last build (build/**/*.cu.o.log).

    kernel_resources.py [--build build] [--markdown FILE] [--all]

Prints a table, one line a kernel and architecture; with --markdown also writes it between the markers of FILE
(docs/kernels.md). Without --all only the hot kernels are shown. Exit status 1 if a hot kernel spills registers, or if
a hot pattern names no kernel at all.
"""
import argparse
import pathlib
import re
import subprocess
import sys

# Kernels that a training step lives in. Helpers that run once a step on a few KB are not among them.
HOT = [r"modulate", r"gate", r"gelu", r"flash", r"temporal", r"qk_norm", r"adamw", r"sum_of_squares|squares",
       r"convert", r"add", r"group_norm|moments|gradient_sums", r"phases", r"relative", r"softmax|probabilities"]
BEGIN, END = "<!-- ptxas table: tools/kernel_resources.py --markdown writes it -->", "<!-- end of ptxas table -->"

ENTRY = re.compile(r"Compiling entry function '([^']+)' for '(sm_\w+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


def read(build):
    """(mangled, architecture) -> (file, registers, static shared bytes, stack, spill stores, spill loads)"""
    kernels = {}
    for log in sorted(build.rglob("*.cu.o.log")):
        key, spills = None, (0, 0, 0)
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            if m := ENTRY.search(line):
                key, spills = (m[1], m[2]), (0, 0, 0)
            elif (m := SPILLS.search(line)) and key:
                spills = tuple(int(x) for x in m.groups())
            elif (m := USED.search(line)) and key:
                kernels[key] = (log.name[:-len(".o.log")], int(m[1]), int(m[2] or 0), *spills)
                key = None
    return kernels


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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build", type=pathlib.Path)
    parser.add_argument("--markdown", type=pathlib.Path)
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    kernels = read(args.build)
    if not kernels:
        sys.exit(f"kernel_resources: no *.cu.o.log under {args.build}: build with nvcc first")
    names = plain_names(sorted({k for k, _ in kernels}))
    rows = sorted((file, names[raw], arch, regs, shared, stores + loads, stack)
                  for (raw, arch), (file, regs, shared, stack, stores, loads) in kernels.items())
    hot = [r for r in rows if any(re.search(p, r[1]) for p in HOT)]
    unknown = [p for p in HOT if not any(re.search(p, r[1]) for r in rows)]
    shown = rows if args.all else hot
    print(f"{'file':<26} {'kernel':<70} {'arch':<8} {'regs':>5} {'shared B':>8} {'spill B':>8} {'stack B':>8}")
    for file, name, arch, regs, shared, spills, stack in shown:
        print(f"{file:<26} {name:<70} {arch:<8} {regs:>5} {shared:>8} {spills:>8} {stack:>8}")
    if args.markdown:
        by_kernel = {}
        for file, name, arch, regs, shared, spills, stack in rows:
            by_kernel.setdefault((file, name), {})[arch] = f"{regs}" + (f" ({spills} B spilled)" if spills else "")
        archs = sorted({r[2] for r in rows}, key=lambda a: int(re.sub(r"\D", "", a)))
        table = ["| file | kernel | " + " | ".join(archs) + " |", "|---|---|" + "---|" * len(archs)]
        table += [f"| {file} | `{name}` | " + " | ".join(by.get(a, "") for a in archs) + " |"
                  for (file, name), by in sorted(by_kernel.items())]
        text = args.markdown.read_text(encoding="utf-8")
        head, rest = text.split(BEGIN)
        args.markdown.write_text(head + BEGIN + "\n\n" + "\n".join(table) + "\n\n" + END + rest.split(END)[1],
                                 encoding="utf-8")
    spilling = [r for r in hot if r[5]]
    for file, name, arch, regs, shared, spills, stack in spilling:
        print(f"kernel_resources: {name} ({file}, {arch}) spills {spills} bytes", file=sys.stderr)
    for p in unknown:
        print(f"kernel_resources: no kernel matches the hot pattern {p}", file=sys.stderr)
    print(f"{len(rows)} kernels, {len(hot)} hot, {len(spilling)} of them spill")
    return 1 if spilling or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
