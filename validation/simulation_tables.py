#!/usr/bin/env python3
"""The tables of docs/scaling.md from the runs of weft simulate in results/, as Markdown on stdout.

    simulation_tables.py [--check ../docs/scaling.md]

With --check, exit status 1 if the page lacks any line of them.
"""
import argparse
import json
import pathlib
import sys

RESULTS = pathlib.Path(__file__).resolve().parent / "results"


def load(name):
    return json.loads((RESULTS / f"simulation_{name}.json").read_text())


def percent(x):
    return f"{100 * x:.1f} %"


def row(*cells):
    return "| " + " | ".join(map(str, cells)) + " |"


def curves(names):
    """Efficiency by ranks: a column for each file, style and fabric."""
    cases = [(name, c) for name in names for c in load(name)["cases"]]
    yield row("ranks", *(f"{name}, {c['style']}, {c['fabric']}" for name, c in cases))
    yield row("---:", *("---:" for _ in cases))
    for i, first in enumerate(cases[0][1]["results"]):
        yield row(first["ranks"], *(percent(c["results"][i]["efficiency"]) for _, c in cases))


def barrier_steps():
    stages = {s: {r["ranks"]: r["step_seconds"] for r in load(f"stage{s}")["cases"][1]["results"]} for s in (1, 2, 3)}
    yield row("stage", "1 rank", "8", "96", "128", "1,024", "8 over 96")
    yield row("---", *["---:"] * 6)
    for s, t in stages.items():
        yield row(s, *(f"{t[n]:.1f} s" for n in (1, 8, 96, 128, 1024)), percent(t[8] / t[96]))


def placement():
    runs = load("placement")["runs"]
    counts = sorted({r["arguments"].split()[3] for r in runs}, key=int)
    yield row("micro-batches a rank", *counts)
    yield row("---", *["---:"] * len(counts))
    for deck in sorted({r["deck"] for r in runs}):
        mine = [r["result"] for r in runs if r["deck"] == deck]
        yield row(f"{deck}: spread", *(percent(r["spread"]) for r in mine))
        yield row("worst step", *(percent(r["placed_spread_worst"]) for r in mine))
        yield row("efficiency", *(percent(r["efficiency"]) for r in mine))


def variation():
    yield row("variation", "8 ranks", "96", "128", "1 / (1 + cv m) at 128")
    yield row("---", *["---:"] * 4)
    expected_maximum = 2.59  # of 128 standard normals
    for cv, name in ((0, "stage2_cv0"), (0.02, "stage2_cv0.02"), (0.05, "stage2_cv0.05")):
        results = load(name)["cases"][0]["results"]
        yield row(percent(cv), *(percent(r["efficiency"]) for r in results), percent(1 / (1 + cv * expected_maximum)))


def network():
    yield row("micro-batches", "fabric", "overlapped: step", "exposed", "not: step", "exposed")
    yield row("---", "---", *["---:"] * 4)
    runs = load("network")["runs"]
    for r in runs:
        if not r["overlap"]:
            continue
        serial = next(q["result"] for q in runs
                      if not q["overlap"] and all(q[k] == r[k] for k in ("clips", "fabric", "per_gpu")))
        result = r["result"]
        yield row(f"{r['per_gpu']} of {r['clips']}", r["fabric"], f"{result['step_seconds'] * 1e3:.0f} ms",
                  percent(result["exposed_share"]), f"{serial['step_seconds'] * 1e3:.0f} ms",
                  percent(serial["exposed_share"]))


def real():
    yield row("ranks", "measured", "simulated", "difference")
    yield row(*["---:"] * 4)
    for r in json.loads((RESULTS / "simulation_cpu_2026-11-20.json").read_text())["ranks"]:
        yield row(r["ranks"], f"{r['measured_seconds'] * 1e3:.1f} ms", f"{r['simulated_seconds'] * 1e3:.1f} ms",
                  f"{100 * r['error']:+.1f} %")


TABLES = {"uniform": lambda: curves(["uniform"]), "stages": lambda: curves(["stage1", "stage2", "stage3"]),
          "barrier steps": barrier_steps, "placement": placement, "variation": variation, "network": network,
          "real ranks": real}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", type=pathlib.Path)
    args = parser.parse_args()
    page = args.check.read_text().splitlines() if args.check else []
    missing = 0
    for name, table in TABLES.items():
        lines = list(table())
        if not args.check:
            print(f"{name}\n\n" + "\n".join(lines) + "\n")
        for line in lines:
            if args.check and line not in page:
                missing += 1
                print(f"{args.check} lacks of table \"{name}\": {line}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
