"""What the machine does to a job: disks that are full, ranks that are killed."""

import os
import re
import resource
import shutil
import signal
import subprocess
import unittest

from harness import WeftTest


class KilledRank(WeftTest):
    def test_one_rank_in_the_middle_of_many_saves(self):
        for rank in (0, 1):
            run = f"run{rank}"
            job = self.start("train", "deck.toml", f"run.dir={run}", "train.steps=100000", "train.checkpoint_every=1")
            self.wait_for_a_save(job, run)
            os.kill(job.ranks()[rank], signal.SIGKILL)
            self.assertNotIn(job.wait(60), (0, 75), job.err)
            self.assert_gone(job)
            self.assertIn("steps done", self.train(run, "train.steps=1").err)

    def test_mpiexec_itself(self):
        """No rank goes on alone, and none keeps the run directory."""
        job = self.start("train", "deck.toml", "run.dir=run", "train.steps=100000")
        self.wait_for_a_save(job, "run")
        job.process.kill()
        job.wait()
        self.assert_gone(job)
        done = self.latest("run").removeprefix("step_")
        self.assertIn(f"{done} of", self.train("run", "train.steps=1").err)


class FullDisk(WeftTest):
    def small_disk(self, megabytes):
        """A file system of its own; skips where this user may not mount one."""
        disk = self.dir / "disk"
        disk.mkdir()
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}M", "tmpfs", disk],
                              capture_output=True, text=True)
        if made.returncode != 0:
            self.skipTest(f"needs to mount a small disk: {made.stderr.strip()}")
        self.addCleanup(subprocess.run, ["umount", "-l", disk], check=False)
        return disk

    @staticmethod
    def fill(disk):
        with open(disk / "filler", "wb", buffering=0) as filler:
            for size in (1 << 16, 1 << 12, 1 << 8, 1):
                try:
                    while filler.write(b"\0" * size) == size:
                        pass
                except OSError:
                    pass

    def begin(self, run):
        """A run that saves only when asked, has done so, and does not end by itself: no clock decides what it saves.

        Its shards are larger than all lines of metrics that it writes until a test is done."""
        job = self.start("train", "deck.toml", f"run.dir={run}", "train.steps=100000",
                         "train.checkpoint_every=0", "model.hidden_size=64")
        self.until(job, lambda: (self.dir / run / "metrics.jsonl").exists())
        (self.dir / run / "save").touch()
        self.wait_for_a_save(job, run)
        return job

    def saved(self, run):
        return int(self.latest(run).removeprefix("step_"))

    @staticmethod
    def failed(err):
        """The steps of the saves that failed."""
        return [int(step) for step in re.findall(r"ERROR: checkpoint \S*step_(\d+) .*was not saved", err)]

    def ask_for_a_save_that_fails(self, job, run):
        before = len(self.failed(job.err_so_far()))
        (self.dir / run / "save").touch()
        self.until(job, lambda: len(self.failed(job.err_so_far())) > before)

    def test_full_for_a_while(self):
        """The run goes on, the older checkpoint stays, later saves succeed, nothing is lost."""
        disk = self.small_disk(40)
        job = self.begin("disk/run")
        kept = self.saved("disk/run")
        self.fill(disk)
        self.ask_for_a_save_that_fails(job, "disk/run")
        self.assertEqual(self.saved("disk/run"), kept)
        (disk / "filler").unlink()
        (disk / "run" / "save").touch()
        self.until(job, lambda: self.saved("disk/run") > kept)
        (disk / "run" / "stop").touch()
        self.assertEqual(job.wait(), 75, job.err)
        errors = job.errors()
        self.assertEqual(len(errors), 1, job.err)
        self.assertIn("No space left on device", errors[0])
        shutil.copytree(disk / "run", self.dir / "copied", symlinks=True)
        self.train("whole", "model.hidden_size=64", f"train.steps={self.saved('copied')}")
        self.assert_same_run("whole", "copied")

    def test_too_small_for_one_checkpoint(self):
        """Known before the first step."""
        self.small_disk(2)
        job = self.train("disk/run", "model.hidden_size=64", expect=None)
        self.refused(job, 4, "a checkpoint of disk/run takes", "its file system has")

    def test_no_save_succeeds_any_more(self):
        """Exit 4 at the end, the older checkpoint loads. By a limit on file sizes: needs no rights."""
        job = self.begin("run")
        kept = self.saved("run")
        limit = min(p.stat().st_size for p in (self.dir / "run/latest").glob("shard_*")) - 1  # the metrics may grow to this
        for pid in job.ranks().values():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, limit))
        for _ in range(2):
            self.ask_for_a_save_that_fails(job, "run")
        (self.dir / "run" / "stop").touch()
        self.assertEqual(job.wait(), 4, job.err)
        done = len(self.metrics("run"))
        failed = self.failed(job.err)
        self.assertEqual(len(failed), 3, job.err)
        self.assertEqual(failed[-1], done)
        for said in (f"(step {done})", "File too large", "could not be written", "HINT:"):
            self.assertIn(said, job.err)
        self.assertEqual(self.saved("run"), kept)
        self.assertNotIn(f"step_{done}", os.listdir(self.dir / "run"))
        steps = ("model.hidden_size=64", f"train.steps={done}")
        self.assertIn(f"{kept} of {done} steps done", self.train("run", *steps).err)
        self.train("whole", *steps)
        self.assert_same_run("whole", "run")


if __name__ == "__main__":
    unittest.main()
