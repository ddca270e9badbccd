#!/usr/bin/env python3
"""steps.py OUT TOLERANCE PLAIN [WAY ...]: the results of `weft bench step --json OUT/NAME.json` of one micro-batch, computed in
several ways. Fails if a loss of a way is further from PLAIN's than TOLERANCE (relative), if a step on the GPU of
results/h100.md takes a tenth longer than in validation/gpu/before.txt, or if a way in a name's end (step_fp8) that was tried
was never taken because it is wrong.
"""
import json
import pathlib
import re
import statistics
import sys

out, tolerance, names = pathlib.Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
runs = {name: json.loads((out / f"{name}.json").read_text()) for name in names}
before = {}
for line in pathlib.Path("validation/gpu/before.txt").read_text().splitlines():
    if found := re.match(r"(step_\w+): (\d+\.\d+) s", line):
        before[found[1]] = float(found[2])
failed, worst, plain = [], 0.0, runs[names[0]]["loss"]
for name, run in runs.items():
    apart = max(abs(a - b) / abs(a) for a, b in zip(plain, run["loss"], strict=True))
    worst = max(worst, apart)
    seconds = statistics.median(run["seconds"])
    print(f"{name}: {seconds:.4f} s, loss {apart:.1e} from {names[0]}'s; ways: {run['ways'] or 'the tested ones'}")
    if not apart <= tolerance:  # NaN too
        failed.append(f"{name}: losses {apart:.1e} apart")
    if "H100" in run["device"] and seconds > 1.1 * before.get(name, 1e9):
        failed.append(f"{name}: {seconds:.4f} s, {before[name]} s before")
    if run["tried"] and not run["ways"]:
        failed.append(f"{name}: {', '.join(run['tried'])} not measured")
    if "wrong" in run["ways"]:
        failed.append(f"{name}: {run['ways']}")
for text in failed:
    print("FAILED:", text)
print(f"{len(runs)} ways, losses {worst:.1e} apart at most (tolerance {tolerance:g})")
sys.exit(bool(failed))
