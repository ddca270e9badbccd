"""run.trace and RUN/dump_trace: one file of all ranks in Chrome's trace format, with clocks aligned; run.profile.

What is checked is what Perfetto needs: https://ui.perfetto.dev opens the file as it is.
"""

import json
import statistics
import unittest

from harness import WeftTest

LANES = ("step", "compute", "wait", "communication", "data", "checkpoint")
# Events are written in microseconds with three decimals; sums of two of them may differ by a nanosecond.
NANOSECOND = 1e-3


class Trace(WeftTest):
    def read(self, run, ranks):
        """Checks the file strictly; spans by rank and thread name, in order of their begins."""
        with open(self.dir / run / "trace.json") as f:
            document = json.load(f)
        self.assertEqual(set(document), {"traceEvents", "displayTimeUnit", "otherData"})
        self.assertFalse(list((self.dir / run).glob("trace.json.tmp")))
        processes, threads, spans, errors = {}, {}, {}, {}
        for e in document["traceEvents"]:
            self.assertIsInstance(e["name"], str)
            self.assertTrue(e["name"])
            self.assertIsInstance(e["pid"], int)
            self.assertIsInstance(e["tid"], int)
            self.assertIn(e["ph"], ("M", "X"))
            if e["ph"] == "M":
                if e["name"] == "process_name":
                    self.assertNotIn(e["pid"], processes)
                    processes[e["pid"]] = e["args"]["name"]
                elif e["name"] == "thread_name":
                    self.assertNotIn(e["tid"], threads, "thread numbers are unique in the file")
                    threads[e["tid"]] = (e["pid"], e["args"]["name"])
                else:
                    self.assertIsInstance(e["args"]["sort_index"], int)
                continue
            self.assertEqual(set(e) - {"args"}, {"name", "cat", "ph", "ts", "dur", "pid", "tid"})
            self.assertGreaterEqual(e["ts"], 0)
            self.assertGreaterEqual(e["dur"], 0)
            self.assertIn(e["cat"], LANES)
            for value in e.get("args", {}).values():
                self.assertIsInstance(value, int)
            pid, thread = threads[e["tid"]]  # named before its first event
            self.assertEqual(pid, e["pid"])
            self.assertEqual(thread.split(" ")[0], e["cat"])
            if e["name"] == "trace":
                self.assertEqual(e["ts"], 0)
                errors[pid] = e["args"]["clock_error_ns"]
                continue
            spans.setdefault((pid, thread), []).append(e)
        self.assertEqual(sorted(processes), list(range(ranks)))
        for rank, name in processes.items():
            self.assertRegex(name, rf"^rank {rank} on \S+$")
        self.assertEqual(list(errors), list(range(ranks)), "in the order of ranks")
        self.clock_error = max(errors.values()) * 1e-3  # in microseconds, as times are
        self.assertLess(self.clock_error, 1e6, "a rank that was asked many times answered once in time")
        for (rank, thread), events in spans.items():
            self.check_nesting(events, f"rank {rank}, {thread}")
        self.assertEqual(document["otherData"]["ranks"], str(ranks))
        return spans

    def check_nesting(self, events, where):
        """Spans of a thread come in order of their begins and nest or stand apart, as viewers want them."""
        open_ends = []
        before = 0
        for e in events:
            begin, end = e["ts"], e["ts"] + e["dur"]
            self.assertGreaterEqual(begin, before, where)
            before = begin
            while open_ends and open_ends[-1] <= begin + NANOSECOND:
                open_ends.pop()
            if open_ends:
                self.assertLessEqual(end, open_ends[-1] + NANOSECOND, f"{where}: {e}")
            open_ends.append(end)

    def steps_of(self, spans, rank):
        found = {}
        for e in spans[(rank, "step")]:
            if "step" in e.get("args", {}):
                found.setdefault(e["args"]["step"], e)
        return found

    def test_all_ranks_and_their_clocks(self):
        ranks = 2
        self.train("run", "run.trace=true", "train.steps=12", ranks=ranks)
        spans = self.read("run", ranks)
        steps = [self.steps_of(spans, rank) for rank in range(ranks)]
        for rank in range(ranks):
            self.assertEqual(sorted(steps[rank]), list(range(12)), f"rank {rank}")
            for lane in ("step", "compute", "communication"):
                self.assertIn((rank, lane), spans)
        # A rank can leave a step only when the other has brought its gradients: the same step of all ranks overlaps in
        # time once the clocks are aligned.
        for step in range(12):
            begin = max(s[step]["ts"] for s in steps)
            end = min(s[step]["ts"] + s[step]["dur"] for s in steps)
            self.assertLess(begin, end + 2 * self.clock_error, f"step {step}")
        # The steps of the trace are those of the metrics; between the two looks at the clock the host may do something else.
        off = [abs(steps[0][m["step"]]["dur"] * 1e-6 / m["seconds"] - 1) for m in self.metrics("run")]
        self.assertLess(statistics.median(off), 0.2, off)

    def test_three_ranks_and_off(self):
        self.train("run", "run.trace=true", "train.steps=3", ranks=3)
        self.read("run", 3)
        self.train("off", "train.steps=2")
        self.assertFalse((self.dir / "off" / "trace.json").exists())

    def test_a_running_job_writes_it_on_request(self):
        job = self.start("train", "deck.toml", "run.dir=run", "train.steps=100000",
                         "train.checkpoint_every=0")
        run = self.dir / "run"
        self.wait_for_steps(job, "run", 1)
        (run / "dump_trace").touch()
        self.until(job, (run / "trace.json").exists)
        self.assertFalse((run / "dump_trace").exists(), "the request is taken away")
        self.read("run", 2)
        (run / "stop").touch()
        self.assertEqual(job.wait(), 75)
        self.assertFalse((run / "trace.json.tmp").exists())

    def test_profile(self):
        job = self.train("run", "run.profile=operations", "train.steps=4")
        rows = {line.split()[0]: line.split() for line in job.out.splitlines() if line.rstrip().endswith("%")}
        self.assertIn("self_attention_forward", rows)
        self.assertEqual(rows["velocity_loss_forward"][1], rows["velocity_loss_backward"][1])
        totals = json.loads(next(line for line in job.out.splitlines() if line.startswith("profile: ")).removeprefix("profile: "))
        self.assertEqual(set(totals), {"seconds", "operations", "limit", "f32_products", "bf16_products", "copies"})
        self.assertGreater(min(totals.values()), 0)
        self.assertLess(totals["operations"], totals["seconds"])
        shapes = self.train("shapes", "run.profile=shapes", "train.steps=4")
        self.assertRegex(shapes.out, r"self_attention_forward \[\d+, ")
        failed = self.train("failed", "run.profile=operations", "data.path=none.h5", expect=None)
        self.refused(failed, 3, "none.h5")
        self.assertNotIn("profile: ", failed.out)


if __name__ == "__main__":
    unittest.main()
