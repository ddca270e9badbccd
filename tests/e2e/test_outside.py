"""What the machine does to a job: disks that are full, ranks that are killed."""

import os
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
        self.wait_for_steps(job, "run", 7)
        os.kill(job.ranks()[rank], signal.SIGKILL)
        killed = time.monotonic()
        code = job.wait(20)
        self.assertLess(time.monotonic() - killed, 10)
        self.assertNotIn(code, (0, 75), job.err)
        self.assert_gone(job, 10 - (time.monotonic() - killed))
        self.assertIn("steps done", self.train("run", "train.steps=1").err)

    def test_rank_0(self):
        self.kill_one(0)

    def test_rank_1(self):
        self.kill_one(1)

    def test_mpiexec_itself(self):
        """No rank goes on alone, and none keeps the run directory."""
        job = self.start("train", "deck.toml", "run.dir=run", "train.steps=100000")
        self.wait_for_steps(job, "run", 7)
        job.process.kill()
        job.wait(10)
        self.assert_gone(job, 10)
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

    def test_full_for_a_while(self):
        """The run goes on, the older checkpoint stays, later saves succeed, nothing is lost."""
        steps = ("train.steps=160", "train.checkpoint_every=40")
        self.train("whole", *steps)
        disk = self.small_disk(12)
        job = self.start("train", "deck.toml", "run.dir=disk/run", *steps)
        self.wait_for_steps(job, "disk/run", 42)
        self.fill(disk)
        until = time.monotonic() + 60
        while "was not saved" not in job.err_so_far() and time.monotonic() < until:
            self.assertIsNone(job.process.poll(), "the run must go on\n" + job.err_so_far())
            time.sleep(0.01)
        self.assertEqual(self.latest("disk/run"), "step_40")
        (disk / "filler").unlink()
        self.assertEqual(job.wait(60), 0, job.err)
        errors = [line for line in job.err.splitlines() if "ERROR:" in line]
        self.assertEqual(len(errors), 1, job.err)
        self.assertIn("No space left on device", errors[0])
        self.assertIn("step_80", errors[0])
        self.assertEqual(self.latest("disk/run"), "step_160")
        shutil.copytree(disk / "run", self.dir / "copied", symlinks=True)
        self.assert_same_run("whole", "copied")

    def test_no_save_succeeds_any_more(self):
        """Exit 4 at the end, the older checkpoint loads. By a limit on file sizes: needs no rights."""
        steps = ("train.steps=160", "train.checkpoint_every=40")
        self.train("whole", *steps)
        job = self.start("train", "deck.toml", "run.dir=run", *steps)
        self.wait_for_steps(job, "run", 42)
        for pid in job.ranks():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (200_000, 200_000))
        self.assertEqual(job.wait(60), 4, job.err)
        for said in ("step_80", "step_120", "step_160", "File too large", "could not be written",
                     "HINT:"):
            self.assertIn(said, job.err)
        self.assertEqual([p.name for p in (self.dir / "run").iterdir()
                          if p.name.startswith("step_")], ["step_40"])
        self.assertEqual(self.latest("run"), "step_40")
        self.assertEqual(len(self.metrics("run")), 160)
        self.assertIn("40 of 160 steps done", self.train("run", *steps).err)
        self.assert_same_run("whole", "run")


if __name__ == "__main__":
    unittest.main()
