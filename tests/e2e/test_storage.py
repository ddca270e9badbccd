"""Storage that is slow or stalls: reads of clips that take seconds, by a library between weft and the system (tests/shim)."""

import re
import unittest

from harness import WeftTest

HANG = 7


class Storage(WeftTest):
    def setUp(self):
        super().setUp()
        self.ingest(seconds=12, size=16)

    def wait_for_text(self, job, text):
        self.until(job, lambda: text in job.err_so_far())

    def train_slowly(self, shim, *overrides, expect=0):
        return self.weft("train", "deck.toml", "data.path=clips.h5", "train.steps=4",
                         *overrides, expect=expect, shim=shim)

    def test_waits_are_data_wait_and_nothing_else_changes(self):
        self.train("whole", "data.path=clips.h5", "train.steps=4", "parallel.deterministic=true")
        # On each rank the first read ends when the trainer has slept through 100 looks, 10 ms apart: it waits for this
        # clip, for a second at least, however the machine runs. The watchdog's limit is far above that.
        job = self.train_slowly("held_read=100:clips.h5", "run.dir=slow", "parallel.hang_timeout=300",
                                "parallel.deterministic=true")
        self.assertNotIn("no progress", job.err)
        self.assert_same_run("whole", "slow")
        first = self.metrics("slow")[0]
        self.assertEqual(len(first["rank_data_wait"]), 2)
        self.assertGreaterEqual(min(first["rank_data_wait"]), 0.99)
        self.assertGreaterEqual(first["split"]["data_wait"], 0.99)

    def test_a_stall_is_a_hang_in_data(self):
        job = self.train_slowly("slow_reads=3600000:9:clips.h5", "run.dir=stalled",
                                "parallel.hang_timeout=3", expect=HANG)
        self.assertRegex(job.err, r"in data( of step \d+)?")
        self.assert_gone(job)

    # Writes that stall until the test releases them: those of one rank's shard of the first save.
    def train_with_held_save(self, first_save, *overrides):
        self.release = self.dir / "release"
        self.shim = f"held_writes={self.release}:step_{first_save}.tmp/shard_0001"
        return self.start("train", "deck.toml", "train.skip_saves=true", f"train.checkpoint_every={first_save}",
                          *overrides, shim=self.shim)

    def test_training_goes_on_while_a_save_is_slower_than_its_interval(self):
        # Some 70 MB of state, so that a second copy of it would show.
        wide = ["model.hidden_size=256", "parallel.deterministic=true", "train.log_every=1000"]
        self.train("whole", "train.steps=24", "train.checkpoint_every=0", *wide)
        job = self.train_with_held_save(2, "train.steps=20", *wide)
        self.wait_for_steps(job, "run", 20)
        # All steps are done but the first save, for which the last one waits.
        self.assertIsNone(job.process.poll(), job.err_so_far())
        saves = [p.name for p in (self.dir / "run").iterdir() if p.name.startswith("step_")]
        self.assertEqual(saves, ["step_2.tmp"])
        self.release.touch()
        self.assertEqual(job.wait(), 0, job.err)
        skipped = re.findall(r"WARN.* step (\d+): not saved, the save of step (\d+) is still being written "
                             r"\(\d+\.\d s so far\); raise train\.checkpoint_every", job.err)
        self.assertEqual(skipped, [(str(n), "2") for n in range(4, 20, 2)])
        self.assertIn("8 of train.checkpoint_every were left out", job.err)
        resident = [m["memory"]["resident_bytes"] for m in self.metrics("run")]
        self.assertLess(max(resident) - resident[3], 10e6)
        self.assertEqual(self.latest("run"), "step_20")
        # The last save is complete, and going on from it is exact.
        self.weft("inspect", "run/step_20", ranks=0)
        on = self.train("run", "train.steps=24", "train.checkpoint_every=0", *wide)
        self.assertIn("resuming from run/step_20", on.err)
        self.assert_same_run("whole", "run")

    def test_a_save_that_is_asked_for_waits_and_happens(self):
        job = self.train_with_held_save(20, "train.steps=1000000", "train.keep=10", "train.log_every=1000000")
        self.wait_for_text(job, "step 40: not saved")
        (self.dir / "run" / "save").touch()
        self.wait_for_text(job, "asked to save")
        self.release.touch()
        saved = self.dir / "run"
        self.until(job, lambda: any(p.name.startswith("step_") and p.name != "step_20" and (p / "verified").exists()
                                         for p in saved.iterdir()))
        (self.dir / "run" / "stop").touch()
        self.assertEqual(job.wait(), 75, job.err)
        self.assertTrue((saved / "step_20" / "verified").exists())


if __name__ == "__main__":
    unittest.main()
