"""Compares two checkpoints, stores or files of weights: what one of them lacks, and how far apart the others' values are.

    weft-diff A B [--tolerance 1e-6] [--all]

A and B: run directories or checkpoints, stores of clips or latents (.h5), or safetensors files, indices or folders. A line for each
tensor, or bucket of clips, that differs: elements that differ, the largest difference, and the L2 norm of the differences over that
of A. Exit status 0 where nothing differs by more than the tolerance (relative, in the L2 norm), 1 where something does, 2 for
files that cannot be read.
"""
import argparse
import pathlib
import sys

import numpy as np

import weft_files


class Difference:
    """Of two arrays of one shape, added up piece by piece."""

    def __init__(self):
        self.elements = self.differ = 0
        self.largest = self.squares = self.of_first = 0.0

    def add(self, a, b):
        a, b = (np.asarray(values).astype(np.float64) for values in (a, b))
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        apart = np.where(same, 0, a - b)
        self.elements += a.size
        self.differ += a.size - int(same.sum())
        self.largest = float(np.maximum(self.largest, np.abs(apart).max(initial=0)))  # NaN stays
        self.squares += float(np.square(apart).sum())
        self.of_first += float(np.square(np.nan_to_num(a)).sum())

    @property
    def relative(self):
        return 0.0 if self.squares == 0 else float(np.sqrt(self.squares / self.of_first)) if self.of_first else float("inf")


class Facts:
    """What a path holds: `of` {name: (shape, pieces)}, where pieces() yields arrays; `notes` {name: text}."""

    def __init__(self, path):
        self.of, self.notes = {}, {}
        path = pathlib.Path(path)
        if (path / "manifest.json").exists() or (path / "latest").is_symlink():
            self.add_checkpoint(weft_files.read_checkpoint(path))
        elif path.suffix in (".h5", ".hdf5"):
            self.add_store(weft_files.read_store(path))
        else:
            for name, values in weft_files.read_weights(path).items():
                self.of[name] = values.shape, lambda values=values: [values]

    def add_checkpoint(self, checkpoint):
        self.notes = {"step": str(checkpoint.step), "deck": checkpoint.deck}
        trained = sum(int(np.prod(shape)) for shape in checkpoint.shapes.values())
        for array, elements in checkpoint.arrays.items():
            if array == "fixed" or elements < trained:  # tensors that have no names here
                self.of[array] = (elements,), lambda array=array: [checkpoint.array(array)]
                continue
            for name, shape in checkpoint.shapes.items():
                self.of[f"{array}: {name}"] = shape, lambda name=name, array=array: [checkpoint.tensor(name, array)]

    def add_store(self, store):
        for name, bucket in store.items():
            self.of[f"{name}: {bucket.kind}"] = bucket.clips.shape, lambda b=bucket: (b.clip(i) for i in range(len(b)))
            self.notes |= {f"{name}: sources": "\n".join(bucket.sources), f"{name}: captions": "\n".join(bucket.captions),
                           f"{name}: frames a second": str(bucket.fps.tolist())}
            rows = [bucket.text_features(i) for i in range(len(bucket))]
            if any(r is not None for r in rows):
                shape = sum(len(r) for r in rows), rows[0].shape[1]
                self.of[f"{name}: text features"] = shape, lambda rows=rows: rows


def lines_of_notes(a, b):
    for name in dict.fromkeys([*a.notes, *b.notes]):
        one, other = (f.notes.get(name, "").splitlines() for f in (a, b))
        if one == other:
            continue
        if len(one) <= 1 and len(other) <= 1:
            yield f"{name}: {''.join(one) or 'none'} and {''.join(other) or 'none'}"
        else:
            apart = [i for i in range(max(len(one), len(other))) if one[i:i + 1] != other[i:i + 1]]
            yield f"{name}: {len(apart)} of {max(len(one), len(other))} lines differ, the first in line {apart[0] + 1}"


def compare(a, b, tolerance=0.0, show_all=False):
    """Prints what differs between two Facts; how many tensors do by more than the tolerance, or are in one of them alone."""
    bad = 0
    for line in lines_of_notes(a, b):
        print(line)
    for name in [n for n in a.of if n not in b.of] + [n for n in b.of if n not in a.of]:
        print(f"{name}: only in {'A' if name in a.of else 'B'}")
        bad += 1
    for name, (shape, pieces) in a.of.items():
        if name not in b.of:
            continue
        if tuple(shape) != tuple(b.of[name][0]):
            print(f"{name}: {list(shape)} in A, {list(b.of[name][0])} in B")
            bad += 1
            continue
        d = Difference()
        others = 0  # of another length: the features of other captions
        for one, other in zip(pieces(), b.of[name][1]()):
            if np.shape(one) == np.shape(other):
                d.add(one, other)
            else:
                others += 1
        if others:
            print(f"{name}: {others} of another shape")
            bad += 1
            continue
        bad += not d.relative <= tolerance
        if d.differ or show_all:
            print(f"{name} {list(shape)}: {d.differ} of {d.elements} differ, at most {d.largest:.3g}, relative {d.relative:.3g}")
    print(f"{len(a.of)} tensors in A, {len(b.of)} in B; {bad} differ" + (f" by more than {tolerance:g}" if tolerance else ""))
    return bad


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B")
    parser.add_argument("--tolerance", type=float, default=0.0, help="relative, in the L2 norm (0)")
    parser.add_argument("--all", action="store_true", help="a line for each tensor, not only for those that differ")
    options = parser.parse_args()
    try:
        a, b = Facts(options.a), Facts(options.b)
        return 1 if compare(a, b, options.tolerance, options.all) else 0
    except (OSError, ValueError, KeyError) as error:
        print(f"weft-diff: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
