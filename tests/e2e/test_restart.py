"""Restart is exact: killed, stopped and moved to other rank counts, a run goes on as if nothing had been."""

import os
import random
import shutil
import signal
import time
import unittest
from unittest import mock

from harness import TINY_WAN_DECK, WeftTest


class Kill(WeftTest):
    def test_sigkill_of_all_ranks_at_random_moments(self):
        """Three times, each time later; the first before there is a checkpoint."""
        self.train("whole")
        moments = random.Random(1)
        for steps in (2, *sorted(moments.sample(range(5, 20), 2))):
            job = self.start("train", "deck.toml", "run.dir=killed")
            self.wait_for_steps(job, "killed", steps)
            time.sleep(moments.uniform(0, 0.03))  # anywhere in a step, or in a save
            job.kill()
            job.wait()
            self.assert_gone(job)
        self.train("killed")
        self.assert_same_run("whole", "killed")


class OfWan:
    """The same with another model."""

    def setUp(self):
        super().setUp()
        (self.dir / "deck.toml").write_text(TINY_WAN_DECK)


class KillOfWan(OfWan, Kill):
    pass


class RankCounts(WeftTest):
    def test_checkpoint_of_two_ranks_on_one_and_three(self):
        self.train("two", "train.steps=10")
        shutil.copytree(self.dir / "two", self.dir / "half", symlinks=True)
        self.train("two")
        for ranks in (1, 3):
            with self.subTest(ranks=ranks):
                run = f"on{ranks}"
                shutil.copytree(self.dir / "half", self.dir / run, symlinks=True)
                job = self.train(run, ranks=ranks)
                self.assertIn("10 of 20 steps done", job.err)
                self.assertEqual(self.samples(run), self.samples("two"))
                self.assert_close(self.losses(run), self.losses("two"))

    def test_more_ranks_than_micro_batches(self):
        waiting = "WARN: train.micro_batches = 1"
        self.assertNotIn(waiting, self.train("one", "train.micro_batches=1", "train.steps=6", ranks=1).err)
        self.assertIn(waiting, self.train("three", "train.micro_batches=1", "train.steps=6", ranks=3).err)
        self.assertEqual(self.samples("three"), self.samples("one"))
        self.assert_close(self.losses("three"), self.losses("one"))


class RankCountsOfWan(OfWan, RankCounts):
    test_more_ranks_than_micro_batches = None  # of the trainer, whatever the model


class Stop(WeftTest):
    def begin(self):
        """A run that does not end by itself."""
        return self.start("train", "deck.toml", "run.dir=stopped", "train.steps=100000")

    def goes_on(self, job):
        """The job ended as promised; it goes on like a run that nobody stopped."""
        self.assertEqual(job.wait(), 75, job.err)
        self.assert_gone(job)
        done = len(self.metrics("stopped"))
        self.assertEqual(self.latest("stopped"), f"step_{done}")
        self.assertIn(f"stopped on request after step {done}", job.err)
        steps = f"train.steps={done + 5}"
        self.assertIn(f"{done} of {done + 5} steps done", self.train("stopped", steps).err)
        self.train("whole", steps)
        self.assert_same_run("whole", "stopped")

    def test_sigterm_to_one_rank(self):
        """SIGUSR1 to mpiexec: test_report.py."""
        job = self.begin()
        self.wait_for_steps(job, "stopped", 7)
        os.kill(job.ranks()[1], signal.SIGTERM)
        self.goes_on(job)
        self.assertGreaterEqual(len(self.metrics("whole")), 12)

    def test_sigterm_during_start_up(self):
        """As soon as weft runs a request to stop is honoured: exit 75, and the same command goes on."""
        job = self.begin()
        until = time.monotonic() + 60
        while not (self.dir / "stopped" / "lock").exists() and time.monotonic() < until:
            time.sleep(0.001)  # the lock is taken before anything is loaded
        os.kill(job.ranks()[1], signal.SIGTERM)
        self.goes_on(job)

    def test_a_signal_while_mpi_starts(self):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            with self.subTest(signal=number):
                # Heeded: one step, saved.
                run = f"run{int(number)}"
                job = self.weft("train", "deck.toml", f"run.dir={run}", ranks=0, expect=75,
                                shim=f"init_signal={int(number)}")
                self.assertEqual(self.latest(run), f"step_{len(self.metrics(run))}")
                self.assertIn(f"asked to stop by {number.name}", job.err)
        # A command that saves nothing ends by it.
        self.weft("help", "deck", ranks=0, expect=-number, shim=f"init_signal={int(number)}")

    def test_computing_threads_never_take_a_stop_signal(self):
        # oneDNN's sgemm keeps data where a handler's stack frame would go: one thread, which computes nothing, takes them.
        job = self.start("train", "deck.toml", "run.dir=run", "train.steps=100000", ranks=1)
        self.wait_for_steps(job, "run", 2)
        rank = job.ranks()[0]
        wanted = sum(1 << (s - 1) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))

        def one_takes_them():
            blocked = {}
            for thread in os.listdir(f"/proc/{rank}/task"):
                try:
                    with open(f"/proc/{rank}/task/{thread}/status") as f:
                        mask = next(line.split()[1] for line in f if line.startswith("SigBlk:"))
                except OSError:
                    continue  # a writer of a checkpoint that has ended
                blocked[int(thread)] = int(mask, 16) & wanted == wanted
            self.assertTrue(blocked[rank], "the thread that computes takes stop signals")
            return False in blocked.values()
        self.until(job, one_takes_them)  # it may not have run yet

    @staticmethod
    def computed(process):
        """Seconds of processor time: what a crowded host does not stretch."""
        with open(f"/proc/{process}/stat") as f:
            fields = f.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @staticmethod
    def waits_for(process, signal_number):
        """Whether the signal was sent to the process and not yet taken."""
        with open(f"/proc/{process}/status") as f:
            pending = next(line.split()[1] for line in f if line.startswith("ShdPnd:"))
        return int(pending, 16) >> (signal_number - 1) & 1

    def test_a_second_sigterm_ends_at_once(self):
        # Steps of an hour: the first signal alone could not end the job.
        job = self.start("train", "deck.toml", "run.dir=run", "model.hidden_size=384",
                         "model.depth=6", "model.num_heads=6", "train.micro_batches=10000",
                         "data.path=synthetic:clips=20000,frames=5,height=64,width=64",
                         "train.checkpoint_every=0")
        until = time.monotonic() + 60
        while "\nkernels" not in job.err_so_far() and time.monotonic() < until:
            time.sleep(0.05)
        rank = job.ranks()[0]
        planned = self.computed(rank)
        while self.computed(rank) < planned + 1:  # the first step is under way
            time.sleep(0.05)
        os.kill(rank, signal.SIGTERM)
        # Signals that wait do not count: the second is one only when the first has been taken.
        while self.waits_for(rank, signal.SIGTERM):
            time.sleep(0.01)
        self.assertIsNone(job.process.poll(), "the first signal must finish the step")
        os.kill(rank, signal.SIGTERM)
        self.assertEqual(job.wait(60), 64 + signal.SIGTERM, job.err)
        self.assert_gone(job)
        self.assertFalse((self.dir / "run" / "latest").exists())


class Clocks(WeftTest):
    """Clocks on the wall that are set while a run goes on, or differ between hosts: tests/shim moves them."""

    def numbers(self, value):
        if isinstance(value, dict):
            value = list(value.values())
        return [n for v in value for n in self.numbers(v)] if isinstance(value, list) else [value]

    def ends_in(self, seconds):
        """The environment of a Slurm job that ends then, by rank 0's clock."""
        return mock.patch.dict(os.environ, SLURM_JOB_END_TIME=str(int(time.time()) + seconds))

    def test_jumps_of_an_hour_change_nothing(self):
        self.train("whole", "parallel.deterministic=true")
        for seconds in (3600, -3600):
            with self.subTest(seconds=seconds):
                run, jumps = f"moved{seconds}", self.dir / f"jumps{seconds}"
                # An hour more would be the end of the Slurm job, and of the watchdog's patience.
                with self.ends_in(3000):
                    job = self.weft("train", "deck.toml", f"run.dir={run}", "parallel.deterministic=true", "train.keep=10",
                                    "parallel.hang_timeout=600",
                                    shim=f"wall_clock={seconds}:20:{jumps}:{self.dir / run / 'step_5'}")
                seen = [line.split() for line in jumps.read_text().splitlines()]
                for rank in range(2):
                    mine = [int(s) for r, s in seen if int(r) == rank]
                    self.assertGreaterEqual(len(mine), 4)
                    self.assertEqual(mine, [seconds if n % 2 == 0 else -seconds for n in range(len(mine))])
                for text in ("no progress", "did not end", "SLURM_JOB_END_TIME"):
                    self.assertNotIn(text, job.err)
                self.assert_same_run("whole", run)
                for m in self.metrics(run):
                    times = [m["seconds"], *self.numbers(m["split"]),
                             *(n for key in ("rank_busy", "rank_wait", "rank_data_wait") for n in self.numbers(m.get(key, [])))]
                    self.assertGreaterEqual(min(times), 0, m)
                    # No wait of an hour either.
                    self.assertLess(max(times), 3000, m)

    def test_rank_0_alone_judges_the_time_that_is_left(self):
        # Rank 1 believes that the end has passed, then that it is a day away.
        with self.ends_in(7200):
            job = self.weft("train", "deck.toml", "run.dir=run", shim="wall_clock_of_ranks=86400")
        self.assertNotIn("SLURM_JOB_END_TIME", job.err)
        self.assertEqual(len(self.metrics("run")), 20)
        for seconds in (-86400, 30):
            with self.subTest(seconds=seconds):
                run = f"stopped{seconds}"
                # Two seconds before the margin begins, at which a slow host has done less.
                with self.ends_in(1002):
                    job = self.weft("train", "deck.toml", f"run.dir={run}", "run.stop_margin=1000", "train.steps=1000000",
                                    expect=75, shim=f"wall_clock_of_ranks={seconds}")
                self.assertEqual(job.err.count("asked to stop by "), 1, job.err)
                self.assertIn("asked to stop by the end of the Slurm job in ", job.err)
                done = len(self.metrics(run))
                self.assertIn(f"stopped on request after step {done}", job.err)
                self.assertEqual(self.latest(run), f"step_{done}")
                self.weft("inspect", f"{run}/step_{done}", ranks=0)
                self.assertIn(f"{done} of {done + 2} steps done", self.train(run, f"train.steps={done + 2}").err)

    def test_max_hours_stops_a_run_that_goes_on_exactly(self):
        job = self.weft("train", "deck.toml", "run.dir=run", "run.max_hours=0.003", "run.stop_margin=5", "train.steps=1000000",
                        expect=75)
        self.assertIn("(run.max_hours; ", job.err)
        done = len(self.metrics("run"))
        self.train("run", f"train.steps={done + 2}")
        self.train("whole", f"train.steps={done + 2}")
        self.assert_same_run("run", "whole")

    def test_so_many_steps_more(self):
        self.train("run", "train.steps=5")
        job = self.weft("train", "deck.toml", "run.dir=run", 'train.steps="+6"', "run.max_hours=1e-9", expect=75)
        self.assertIn("until 11: train.steps = \"+6\", and 5 are done", job.err)
        # The same command goes on to the same step, and then further.
        job = self.train("run", "train.steps=+6")
        self.assertIn("until 11: train.steps = \"+6\", as before", job.err)
        self.assertEqual(len(self.metrics("run")), 11)
        self.assertIn("until 17", self.train("run", "train.steps=+6").err)
        self.assertEqual(len(self.metrics("run")), 17)
        self.train("whole", "train.steps=17")
        self.assert_same_run("run", "whole")
        for value in ("+0", "+x", "many"):
            job = self.weft("train", "deck.toml", f'train.steps="{value}"', expect=2, ranks=1)
            self.assertIn("a whole number, or so many more in quotes", job.err)


if __name__ == "__main__":
    unittest.main()
