#!/usr/bin/env python3
"""Does a job that is killed at random moments, and started again with the same command until it is done, write the same bytes?

    check_killed.py FILES.csv [--weft build/weft] [--kills 10] [--ranks 1 2 3] [--side 64] [--lose 3] [--seed 1] [--json FILE]

The job scores FILES.csv, a table of some hundred files such as make_score_videos.py makes, with a ResNet-18 of random weights on small
frames, so that it takes a minute and gives most files another count. For each number of ranks: one undisturbed job; then jobs whose
processes are all killed at once, at a random moment between their first finished file and their end, and which are started again
with whatever stands, until there were --kills kills. With two ranks or more, --lose jobs also lose one rank: the launcher must end
with an error, and the same command must finish the table. Tables are compared to the byte. Exit status 1 if anything differs.
"""
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time

import common

DECK = {"model": {"name": "dbnet", "backbone": "resnet18", "asf": False}, "device": {"kind": "cpu"},
        "score": {"columns": ["area", "boxes", "scores"]}}


class Scoring:
    """The job and its results in a folder of its own."""

    def __init__(self, args, folder, ranks):
        self.folder, self.ranks = folder, ranks
        (folder / "deck.toml").write_text(common.toml(DECK))
        self.words = ["score", "deck.toml", f"score.input={args.table}", "score.output=out.csv", "score.weights=random:1",
                      f"score.side={args.side}"]

    def start(self):
        from harness import Job
        return Job(self.words, self.ranks, self.folder)

    def finish(self, job=None):
        """The table's bytes, once the job, or a new one, has ended well; it is cleared away."""
        job = job or self.start()
        if job.wait(900) != 0:
            sys.exit(f"weft score ended with {job.process.returncode}\n{job.err[-3000:]}")
        table = (self.folder / "out.csv").read_bytes()
        (self.folder / "out.csv").unlink()
        shutil.rmtree(self.folder / "out.csv.parts")
        return table

    def finished(self):
        """Files that are finished, as far as manifests say."""
        found = 0
        for path in (self.folder / "out.csv.parts").glob("*.jsonl"):
            try:
                found += path.read_bytes().count(b"\n")
            except OSError:
                pass  # gathered in this moment
        return found

    def wait_for(self, job, files):
        while job.process.poll() is None and self.finished() < files:
            time.sleep(0.005)


def kill_and_restart(scoring, kills, files, rng):
    """Tables of all jobs that ended, and how many files were finished at each kill."""
    tables, at = [], []
    while len(at) < kills:
        before, job = scoring.finished(), scoring.start()
        # So many more finished files until the kill: a random share of what is left.
        scoring.wait_for(job, before + max(1, round(rng.random() ** 2 * (files - before))))
        job.kill()
        job.wait()
        if job.process.returncode == 0:  # the kill came too late
            tables.append(scoring.finish(job))
            continue
        at.append(scoring.finished())
        print(f"  kill {len(at)}: {at[-1]} of {files} files finished", file=sys.stderr, flush=True)
    return tables + [scoring.finish()], at


def lose_a_rank(scoring, files, rng):
    """The table that a second start wrote after one rank was killed amid the work, or None where the kill came too late."""
    job = scoring.start()
    scoring.wait_for(job, rng.uniform(0.05, 0.6) * files)
    victim = job.ranks().get(rng.randrange(scoring.ranks))
    try:
        if victim:
            os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if job.wait(900) == 0:
        scoring.finish(job)
        return None
    return scoring.finish()


def main():
    parser = common.parser(__doc__, kills=10, side=64, lose=3, seed=1)
    parser.add_argument("table", type=pathlib.Path)
    parser.add_argument("--ranks", nargs="+", default=[1, 2, 3], type=int)
    args = common.parse(parser)
    os.environ["WEFT_BIN"], args.table = str(args.weft), args.table.resolve()
    facts = common.about(args)
    files = len({line.split(b",")[0] for line in args.table.read_bytes().splitlines()[1:]})
    rng, rows, reference = random.Random(args.seed), [], None
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory(prefix="weft-kill-") as folder:
            scoring = Scoring(args, pathlib.Path(folder), ranks)
            undisturbed = scoring.finish()
            reference = reference or undisturbed
            tables, at = kill_and_restart(scoring, args.kills, files, rng)
            lost = [t for t in (lose_a_rank(scoring, files, rng) for _ in range(args.lose if ranks > 1 else 0)) if t is not None]
            different = sum(table != reference for table in [undisturbed, *tables, *lost])
            rows.append({"ranks": ranks, "files": files, "finished_at_kills": at, "jobs_that_lost_a_rank": len(lost),
                         "tables": 1 + len(tables) + len(lost), "different_tables": different})
            print(f"{ranks} ranks, {files} files: {len(at)} kills (with {', '.join(map(str, at))} files finished), {len(lost)} jobs lost "
                  f"a rank: {'the same table' if different == 0 else f'{different} DIFFERENT TABLES'}", flush=True)
    common.write(args, facts, {"rows": rows})
    return 1 if any(r["different_tables"] for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
