#!/usr/bin/env python3
"""Does a scoring that is killed at random moments, and started again until it is done, write the same table to the byte?

    check_kill_score.py FILES.csv [--weft build/weft] [--kills 10] [--ranks 1 2 3] [--side 64] [--lose 3] [--seed 1] [--json FILE]

FILES.csv: a table of some hundred files, such as make_score_videos.py makes. The network is a ResNet-18 with random weights on
small frames, so that it takes a minute, and gives most files another count. For each number of ranks: one undisturbed job; then jobs
whose processes are all killed at once, at a random moment between their first finished file and their end, and which are started
again with whatever stands, until there were --kills kills; a job that ends is compared and begun anew. Then, with two ranks
or more, --lose jobs of which one rank is killed: the others must finish with the same table. Exit status 1 if anything differs.
"""
import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
DECK = """
[model]
name = "dbnet"
backbone = "resnet18"
asf = false
[device]
kind = "cpu"
[score]
columns = ["area", "boxes", "scores"]
"""


class Scoring:
    """The job and its results in a folder of its own."""

    def __init__(self, args, folder, ranks):
        self.folder, self.ranks = folder, ranks
        (folder / "deck.toml").write_text(DECK)
        self.words = ["score", "deck.toml", f"score.input={args.table}", "score.output=out.csv", "score.weights=random:1",
                      f"score.side={args.side}"]

    def start(self):
        from harness import Job
        return Job(self.words, self.ranks, self.folder)

    def finish(self, job, seconds=900):
        """The table's bytes, once the job has ended well."""
        if job.wait(seconds) != 0:
            sys.exit(f"weft score ended with {job.process.returncode}\n{job.err[-3000:]}")
        return self.table()

    def table(self):
        return (self.folder / "out.csv").read_bytes()

    def made(self):
        """Files that are finished, as far as manifests say; parts of ranks and what was gathered."""
        found = 0
        for path in (self.folder / "out.csv.parts").glob("score*.jsonl"):
            try:
                found += path.read_bytes().count(b"\n")
            except OSError:
                pass  # gathered in this moment
        return found

    def clear(self):
        (self.folder / "out.csv").unlink(missing_ok=True)
        shutil.rmtree(self.folder / "out.csv.parts", ignore_errors=True)


def wait_until(job, done):
    while job.process.poll() is None and not done():
        time.sleep(0.005)


def kill_and_restart(scoring, kills, files, rng):
    """Jobs killed and restarted; tables of all that ended, and how much stood after each kill."""
    tables, stood = [], []
    scoring.clear()
    while len(stood) < kills:
        before = scoring.made()
        job = scoring.start()
        # So many more finished files until the kill: a random share of what is left.
        target = before + max(1, round(rng.random() ** 2 * (files - before)))
        wait_until(job, lambda: scoring.made() >= target)
        job.kill()
        job.process.wait()
        job.wait()
        if job.process.returncode == 0:  # it came too late
            tables.append(scoring.table())
            scoring.clear()
            continue
        stood.append(scoring.made())
        print(f"  kill {len(stood)}: {stood[-1]} of {files} files finished", file=sys.stderr, flush=True)
    tables.append(scoring.finish(scoring.start()))
    return tables, stood


def lose_a_rank(scoring, files, rng):
    """One rank killed amid the work; the table that the others wrote, or None where the kill came too late."""
    scoring.clear()
    os.environ["OMPI_MCA_orte_abort_on_non_zero_status"] = "0"  # an mpirun that lets the others go on
    job = scoring.start()
    del os.environ["OMPI_MCA_orte_abort_on_non_zero_status"]
    target = rng.uniform(0.05, 0.6) * files
    wait_until(job, lambda: scoring.made() >= target)
    victim = job.ranks().get(rng.randrange(scoring.ranks))
    if victim:
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            pass
    code = job.wait(900)
    if code == 0:
        return None
    report = json.loads((scoring.folder / "out.csv.parts" / "score_report.json").read_text())
    if code != 128 + signal.SIGKILL or not report.get("lost"):
        sys.exit(f"a job that lost a rank ended with {code}\n{job.err[-3000:]}")
    return scoring.table()


def first_difference(wanted, found):
    """Of two tables, with how many lines differ."""
    wanted, found = wanted.splitlines(), found.splitlines()
    lines = [i for i, (a, b) in enumerate(zip(wanted, found)) if a != b]
    if not lines:
        return f"{len(found)} lines instead of {len(wanted)}"
    a, b = wanted[lines[0]], found[lines[0]]
    at = next((k for k in range(min(len(a), len(b))) if a[k] != b[k]), min(len(a), len(b)))
    return (f"{len(lines)} lines differ, first line {lines[0] + 1}, {a.split(b',')[0].decode()}: at column {at + 1} "
            f"{a[at:at + 40]!r} became {b[at:at + 40]!r}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=pathlib.Path)
    parser.add_argument("--weft", default=HERE.parent / "build" / "weft", type=pathlib.Path)
    parser.add_argument("--kills", default=10, type=int)
    parser.add_argument("--ranks", nargs="+", default=[1, 2, 3], type=int)
    parser.add_argument("--side", default=64, type=int)
    parser.add_argument("--lose", default=3, type=int, help="jobs that lose a rank")
    parser.add_argument("--seed", default=1, type=int)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    if not args.weft.is_file():
        sys.exit(f"{args.weft} is not there. HINT: make build, or --weft PATH")
    os.environ["WEFT_BIN"], args.table = str(args.weft.resolve()), args.table.resolve()
    os.environ.setdefault("WEFT_MPIEXEC", "mpirun")
    sys.path.insert(0, str(HERE.parent / "tests" / "e2e"))
    files = len(set(line.split(b",")[0] for line in args.table.read_bytes().splitlines()[1:]))
    rng, rows, reference = random.Random(args.seed), [], None
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory(prefix="weft-kill-") as folder:
            scoring = Scoring(args, pathlib.Path(folder), ranks)
            undisturbed = scoring.finish(scoring.start())
            reference = reference or undisturbed
            tables, stood = kill_and_restart(scoring, args.kills, files, rng)
            lost = [] if ranks < 2 else [t for t in (lose_a_rank(scoring, files, rng) for _ in range(args.lose)) if t is not None]
            different = 0
            for what, found in [("undisturbed", [undisturbed]), ("killed", tables), ("lost a rank", lost)]:
                for table in found:
                    if table != reference:
                        different += 1
                        print(f"  {what}: {first_difference(reference, table)}", flush=True)
            rows.append({"ranks": ranks, "files": files, "kills": len(stood), "finished_at_kills": stood,
                         "tables_after_kills": len(tables), "jobs_that_lost_a_rank": len(lost), "different_tables": different})
            print(f"{ranks} ranks, {files} files: {len(stood)} kills (with {', '.join(map(str, stood))} files finished), {len(lost)} "
                  f"jobs lost a rank: {'the same table' if different == 0 else f'{different} DIFFERENT TABLES'}", flush=True)
    if args.json:
        import compare_step
        version = subprocess.run([args.weft, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
        args.json.write_text(json.dumps({"weft": version, "processor": compare_step.hardware()["cpu"], "side": args.side,
                                         "date": time.strftime("%Y-%m-%d"), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 1 if any(r["different_tables"] for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
