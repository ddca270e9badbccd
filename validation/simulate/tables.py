#!/usr/bin/env python3
"""The tables of docs/scaling.md, simulated again by build/weft_simulate, as Markdown.

    simulate/tables.py [--weft build/weft] [--only uniform stages placement variation network] [--tiny]

What they were on the page: ../results/simulation.md names commits and commands.
"""
import json
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import common

RANKS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 1024)
CLIPS = {"51 frames of 480p, 5 a micro-batch": (
             'data.path="synthetic:name=480p-51-0.56,latent=1,frames=15,height=60,width=106,clips=100000"',
             'train.batch_sizes=["480p-51=5"]'),
         "16 frames of 256x256, 1 a micro-batch": (
             'data.path="synthetic:name=256-16,latent=1,frames=4,height=32,width=32,clips=100000"', 'train.batch_sizes=["256-16=1"]')}
UNIFORM = "51 frames of 480p, 5 a micro-batch"


class Simulator:
    def __init__(self, args, folder):
        self.weft, self.report, self.tiny = pathlib.Path(args.weft), folder / "out.json", args.tiny

    def __call__(self, deck, ranks, per_gpu, *words, fabrics=("8x400",), steps=10):
        """{fabric: results by ranks}."""
        ranks = [n for n in ranks if not self.tiny or n <= 8]
        common.run([self.weft.with_name("weft_simulate"), common.ROOT / "inputs" / f"{deck}.toml", *words, "--gpus", ",".join(map(str, ranks)),
                    "--per-gpu", per_gpu, "--fabric", ",".join(fabrics), "--steps", 2 if self.tiny else steps, "--json", self.report])
        return {case["fabric"]: case["results"] for case in json.loads(self.report.read_text())["cases"]}


def percent(x):
    return f"{100 * x:.1f} %"


def curves(found):
    """Efficiency by ranks: a column for each of `found`."""
    yield "ranks", *found
    for rows in zip(*found.values()):
        yield rows[0]["ranks"], *(percent(r["efficiency"]) for r in rows)


def uniform(simulate):
    found = simulate("stage2", RANKS, 8, *CLIPS[UNIFORM], fabrics=("8x400", "1x200"))
    return curves({f"uniform, {fabric}": results for fabric, results in found.items()})


def stages(simulate):
    return curves({f"stage{s}, {fabric}": results for s in (1, 2, 3)
                   for fabric, results in simulate(f"stage{s}", RANKS, 8, fabrics=("8x400", "1x200")).items()})


def placement(simulate):
    counts = (1, 2, 4, 8, 12, 16)
    yield "micro-batches a rank", *counts
    for s in (1, 2, 3):
        runs = [simulate(f"stage{s}", (8 if simulate.tiny else 128,), n, "--cv", 0)["8x400"][0] for n in counts]
        for what, key in ((f"inputs/stage{s}.toml: spread", "spread"), ("worst step", "placed_spread_worst"), ("efficiency", "efficiency")):
            yield what, *(percent(r[key]) for r in runs)


def variation(simulate):
    yield "variation", "8 ranks", "96", "128", "1 / (1 + cv m) at 128"
    for cv in (0, 0.02, 0.05):
        results = simulate("stage2", (8, 96, 128), 8, "--cv", cv, steps=20)["8x400"]
        yield percent(cv), *(percent(r["efficiency"]) for r in results), percent(1 / (1 + cv * 2.59))  # docs/plan.md


def network(simulate):
    yield "micro-batches", "fabric", "overlapped: step", "exposed", "not: step", "exposed"
    for clips, per_gpu in ((list(CLIPS)[1], 1), (list(CLIPS)[1], 16), (UNIFORM, 1)):
        both = [simulate("stage2", (8 if simulate.tiny else 128,), per_gpu, *CLIPS[clips], f"parallel.overlap={overlap}", "--cv", 0,
                         fabrics=("8x400", "1x200")) for overlap in ("true", "false")]
        for fabric in both[0]:
            yield f"{per_gpu} of {clips}", fabric, *(
                cell for found in both for cell in (f"{found[fabric][0]['step_seconds'] * 1e3:.0f} ms",
                                                    percent(found[fabric][0]["exposed_share"])))


TABLES = {f.__name__: f for f in (uniform, stages, placement, variation, network)}


def main():
    parser = common.parser(__doc__)
    parser.add_argument("--only", nargs="+", default=list(TABLES), choices=list(TABLES))
    parser.add_argument("--tiny", action="store_true", help="few ranks and steps: does it all work?")
    args = common.parse(parser)
    tables = {}
    with tempfile.TemporaryDirectory() as folder:
        simulate = Simulator(args, pathlib.Path(folder))
        for name in args.only:
            tables[name] = [list(map(str, row)) for row in TABLES[name](simulate)]
            lines = ["| " + " | ".join(row) + " |" for row in tables[name]]
            print(f"{name}\n\n{lines[0]}\n|{' --- |' * len(tables[name][0])}\n" + "\n".join(lines[1:]) + "\n", flush=True)
    common.write(args, common.about(args), {"tables": tables})
    return 0


if __name__ == "__main__":
    sys.exit(main())
