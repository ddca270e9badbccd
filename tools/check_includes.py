#!/usr/bin/env python3
"""Checks that includes run downward only, that the step loop has no barrier, and that no folder has too many files.

docs/architecture.md describes the folders of src/ and what each may include; the tables below say the same.
Prints file:line for every violation; exit status 1 if there is one.
"""
import os
import pathlib
import re
import sys

# Each folder may include those to the right of it.
CHAIN = ["cli", "plan bench doctor", "report", "jobs", "models", "train", "checkpoint", "nn", "parallel", "ops", "tensor", "core"]
# Folders outside the chain; all above checkpoint may include them.
BESIDE = {"config": {"core"}, "media": {"config", "tensor", "core"}, "data": {"media", "config", "tensor", "core"},
          "text": {"config", "core"}}


def allowed_table():
    table, below = {"main.cpp": {"cli"}}, set()
    for step in reversed(CHAIN):
        level = set(step.split())
        beside = set() if level <= {"nn", "parallel", "ops", "tensor", "core"} else set(BESIDE)
        for folder in level:
            table[folder] = below | beside
        below |= level
    return table | BESIDE | {"checkpoint": table["checkpoint"] - {"media", "data", "text"}}


ALLOWED = allowed_table()

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
CUDA = re.compile(r"^\s*#\s*include\s+[<\"](cuda|nccl|cublas|cudnn|nvtx)")
CUDA_HOMES = re.compile(r"^(tensor/device|parallel/nccl)")
BARRIER = re.compile(r"\bMPI_I?[Bb]arrier\s*\(")
# At a barrier all ranks wait for the slowest in every step: none is allowed here.
STEP_LOOP = ("train/trainer*.cpp", "train/step*.cpp", "parallel/*")

MOST_FILES = 25


def breaches_of_includes(src):
    for path in sorted(p for p in src.rglob("*") if p.suffix in {".cpp", ".h"}):
        relative = path.relative_to(src)
        folder = relative.parts[0]
        if folder not in ALLOWED:
            yield f"{path}:1: folder '{folder}' is unknown: add it to tools/check_includes.py and docs/architecture.md"
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if CUDA.match(line) and not CUDA_HOMES.match(relative.as_posix()):
                yield f"{path}:{number}: CUDA headers belong to tensor/device*, parallel/nccl* and kernels/"
            match = INCLUDE.match(line)
            if not match:
                continue
            target = match[1]
            if not (src / target).is_file():
                yield f'{path}:{number}: "{target}" is not a file under src/ (write the path from src/)'
                continue
            other = target.split("/")[0]
            if other not in ALLOWED[folder] | {folder}:
                yield f"{path}:{number}: {folder} must not include {other} (\"{target}\")"


def barriers(src):
    for pattern in STEP_LOOP:
        for path in sorted(src.glob(pattern)):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if BARRIER.search(line.split("//")[0]):
                    yield f"{path}:{number}: MPI_Barrier in the step loop"


def too_many_files():
    """Folders of more than 25 files (tools/check_format.sh counts their lines)."""
    for top in ("src", "kernels"):
        folders = {}
        for path in sorted(p for p in pathlib.Path(top).rglob("*") if p.is_file() and p.suffix != ".ttf"):
            folders[path.parent] = folders.get(path.parent, 0) + 1
        for folder, files in folders.items():
            if files > MOST_FILES:
                yield f"{folder}: {files} files, at most {MOST_FILES}: merge small files, or make a subfolder"


def main():
    os.chdir(pathlib.Path(__file__).resolve().parent.parent)
    src = pathlib.Path("src")
    found = [*breaches_of_includes(src), *barriers(src), *too_many_files()]
    for line in found:
        print(line)
    print(f"includes: {len(found)} violations" if found else "includes: all run downward, no folder has too many files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
