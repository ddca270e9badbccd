#!/usr/bin/env python3
"""same_losses.py A/metrics.jsonl B/metrics.jsonl TOLERANCE: the losses of two runs, step by step, relative to the first's."""
import json
import sys


def losses(path):
    with open(path, encoding="utf-8") as f:
        return [json.loads(line)["loss"] for line in f]


a, b = losses(sys.argv[1]), losses(sys.argv[2])
worst = max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))
print(f"{len(a)} steps, losses {worst:.1e} apart at most (tolerance {sys.argv[3]})")
sys.exit(not (len(a) > 0 and worst <= float(sys.argv[3])))
