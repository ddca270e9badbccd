#!/usr/bin/env python3
"""Soak: does the memory of a long run stay where it was after step 100? Not part of ctest; prints figures.

    WEFT_BIN=build/weft python3 tests/e2e/soak.py [STEPS [CHECKPOINTS [section.key=value ...]]]

2,000 steps of the smoke deck's model with 50 checkpoints on 2 ranks, on clips of 16x16 so that a step is short.
Resident memory of both ranks is read from /proc once a step; the figures compare the medians of steps
100 to 200 and of the last 100. Exit 1 if either rank grew by 1 % or more.
"""

import json
import pathlib
import shutil
import statistics
import sys
import tempfile
import time

from harness import REPOSITORY, Job


def resident_bytes(pid):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no VmRSS of process {pid}")


def main(steps, checkpoints, overrides):
    directory = pathlib.Path(tempfile.mkdtemp(prefix="weft_soak_"))
    job = Job(["train", REPOSITORY / "inputs" / "smoke.toml", "run.dir=run", "run.threads=1",
               f"train.steps={steps}", f"train.checkpoint_every={steps // checkpoints}",
               "train.log_every=100", "data.path=synthetic:clips=64,frames=5,height=16,width=16",
               *overrides], 2, directory)
    try:
        metrics = directory / "run" / "metrics.jsonl"
        seen = [[], []]  # (step, bytes) of each rank
        ranks, lines, at = [], 0, 0
        while job.process.poll() is None:
            time.sleep(0.05)
            if not metrics.exists():
                continue
            ranks = ranks or [pid for _, pid in sorted(job.ranks().items())]
            with open(metrics, "rb") as f:
                f.seek(at)
                new = f.read()
            at += len(new)
            lines += new.count(b"\n")
            try:
                for rank, pid in enumerate(ranks):
                    seen[rank].append((lines, resident_bytes(pid)))
            except OSError:
                break  # the run has ended
        code = job.wait(60)
        if code != 0:
            print(job.err)
            return code
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        seen.append([(m["step"], m["memory"]["resident_bytes"]) for m in rows])
        print(f"{len(rows)} steps and {checkpoints} checkpoints in {job.seconds:.1f} s, "
              f"median step {statistics.median(m['seconds'] for m in rows):.4f} s, "
              f"loss {rows[0]['loss']:.3f} -> {rows[-1]['loss']:.3f}")
        worst = 0.0
        for name, points in zip(("rank 0 (/proc)", "rank 1 (/proc)", "rank 0 (metrics)"), seen):
            early = statistics.median(b for s, b in points if 100 <= s < 200)
            late = statistics.median(b for s, b in points if s >= steps - 100)
            peak = max(b for s, b in points if s >= 100)
            worst = max(worst, late / early - 1)
            print(f"{name:17} {early / 2**20:8.2f} MiB at steps 100-200, {late / 2**20:8.2f} MiB in the "
                  f"last 100 ({100 * (late / early - 1):+.2f} %), peak {peak / 2**20:8.2f} MiB "
                  f"({100 * (peak / early - 1):+.2f} %)")
        return 1 if worst >= 0.01 else 0
    finally:
        job.kill()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(main(int(arguments[0]) if arguments else 2000,
                  int(arguments[1]) if len(arguments) > 1 else 50, arguments[2:]))
