"""What the machine does to a job: disks that are full, ranks that are killed."""

import os
import re
import resource
import shutil
import signal
import subprocess
import time
import unittest

from harness import WeftTest


class KilledRank(WeftTest):
    def kill_one(self, rank, *overrides):
        job = self.start("train", "deck.toml", "run.dir=run", "train.steps=100000", *overrides)
        self.wait_for_a_save(job, "run")
        os.kill(job.ranks()[rank], signal.SIGKILL)
        self.assertNotIn(job.wait(60), (0, 75), job.err)
        self.assert_gone(job)
        self.assertIn("steps done", self.train("run", "train.steps=1").err)

    def test_rank_0(self):
        self.kill_one(0)

    def test_rank_1(self):
        self.kill_one(1)

    def test_mpiexec_itself(self):
        """No rank goes on alone, and none keeps the run directory."""
        job = self.start("train", "deck.toml", "run.dir=run", "train.steps=100000")
        self.wait_for_a_save(job, "run")
        job.process.kill()
        job.wait()
        self.assert_gone(job)
        done = self.latest("run").removeprefix("step_")
        self.assertIn(f"{done} of", self.train("run", "train.steps=1").err)

    def test_in_the_middle_of_many_saves(self):
        self.kill_one(1, "train.checkpoint_every=1")


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

    EVERY = 20

    def begin(self, run):
        """A run that has saved and does not end by itself."""
        job = self.start("train", "deck.toml", f"run.dir={run}", "train.steps=100000",
                         f"train.checkpoint_every={self.EVERY}")
        self.wait_for_a_save(job, run)
        return job

    def until(self, job, so, why):
        deadline = time.monotonic() + 60
        while not so():
            self.assertIsNone(job.process.poll(), f"the run must go on: {why}\n{job.err_so_far()}")
            self.assertLess(time.monotonic(), deadline, f"{why}\n{job.err_so_far()}")
            time.sleep(0.01)

    def saved(self, run):
        return int(self.latest(run).removeprefix("step_"))

    def until_a_save_fails(self, job, run):
        """The step of the first save that failed, and that of the newest checkpoint, which is the one before."""
        self.until(job, lambda: "was not saved" in job.err_so_far(), "a save that fails")
        failed = int(re.search(r"ERROR: checkpoint \S*step_(\d+) .*was not saved", job.err_so_far())[1])
        self.assertEqual(self.saved(run), failed - self.EVERY)
        return failed, failed - self.EVERY

    def test_full_for_a_while(self):
        """The run goes on, the older checkpoint stays, later saves succeed, nothing is lost."""
        disk = self.small_disk(12)
        job = self.begin("disk/run")
        self.fill(disk)
        failed, kept = self.until_a_save_fails(job, "disk/run")
        (disk / "filler").unlink()
        self.until(job, lambda: self.saved("disk/run") > failed, "later saves must succeed")
        (disk / "run" / "stop").touch()
        self.assertEqual(job.wait(), 75, job.err)
        errors = [line for line in job.err.splitlines() if "ERROR:" in line]
        for error in errors:
            self.assertIn("No space left on device", error)
        self.assertLess(kept, failed)
        shutil.copytree(disk / "run", self.dir / "copied", symlinks=True)
        self.train("whole", f"train.steps={self.saved('copied')}")
        self.assert_same_run("whole", "copied")

    def test_no_save_succeeds_any_more(self):
        """Exit 4 at the end, the older checkpoint loads. By a limit on file sizes: needs no rights."""
        job = self.begin("run")
        for pid in job.ranks():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (200_000, 200_000))
        failed, kept = self.until_a_save_fails(job, "run")
        self.until(job, lambda: f"step_{failed + self.EVERY} " in job.err_so_far(), "every save is tried")
        (self.dir / "run" / "stop").touch()
        self.assertEqual(job.wait(), 4, job.err)
        done = len(self.metrics("run"))
        for said in (f"step_{failed}", f"step_{failed + self.EVERY}", f"(step {done})", "File too large",
                     "could not be written", "HINT:"):
            self.assertIn(said, job.err)
        self.assertEqual(self.saved("run"), kept)
        self.assertNotIn(f"step_{done}", os.listdir(self.dir / "run"))
        steps = f"train.steps={done}"
        self.assertIn(f"{kept} of {done} steps done", self.train("run", steps).err)
        self.train("whole", steps)
        self.assert_same_run("whole", "run")


if __name__ == "__main__":
    unittest.main()
