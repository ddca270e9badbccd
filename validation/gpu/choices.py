#!/usr/bin/env python3
"""choices.py MATMUL.txt OUT.md: what a run measured and chose (kernels/matmul/ways.cu), as a table.

Each line of the file is a choice: GPU, work, the way that was chosen, microseconds. The work
names its product as rows x columns x inner size, or two products (kernels/matmul/matmul.cu): a layer's gradients of weights and
input, in the better order. A gradient of weights has f32 results of bf16 operands.
"""
import re
import sys

rows, beyond = [], 0
with open(sys.argv[1], encoding="utf-8") as lines:
    for line in lines:
        _, work, option, microseconds = line.rstrip("\n").split("\t")
        beyond += option not in ("0", "fused", "in turn", "seven", "bf16")
        operations = sum(2 * int(m) * int(n) * int(k) for m, n, k in re.findall(r"(\d+)x(\d+)x(\d+)", work))
        kind = ""
        if re.match("linear_(gelu_)?backward ", work):
            kind = "both gradients"
        elif "bf16->f32" in work:
            kind = "gradient of weights"
        rows.append((kind, float(microseconds), work, option,
                     f"{operations / float(microseconds) * 1e-6:.0f}" if operations and float(microseconds) else ""))
rows.sort(key=lambda row: (-len(row[0]), -row[1]))
with open(sys.argv[2], "w", encoding="utf-8") as out:
    out.write(f"\n{sys.argv[1].rsplit('/', 1)[-1]}:\n\n| | work | way | us | TFLOP/s |\n|---|---|---|---:|---:|\n")
    out.writelines(f"| {kind} | {work} | {option} | {time:.1f} | {rate} |\n" for kind, time, work, option, rate in rows)
print(f"{len(rows)} choices, {beyond} of them not the first way")
