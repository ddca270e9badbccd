"""Storage that is slow or stalls: reads of clips that take seconds, by a library between weft and the system (tests/shim). Copies
of stores on the nodes' own disks (data.stage); file systems with too little space."""

import fcntl
import os
import re
import signal
import unittest
from unittest import mock

from harness import WeftTest, rank_variable

USAGE, DATA, CHECKPOINT, HARDWARE, HANG = 2, 3, 4, 6, 7


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
                                "parallel.hang_timeout=2", expect=HANG)  # 20 seconds in data
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
        job = self.train_with_held_save(20, "train.steps=1000000", "train.keep=100000", "train.log_every=1000000")
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


class FreeSpace(WeftTest):
    """What is told before the first step."""

    def test_checkpoints_and_the_space_for_them(self):
        self.train("whole")
        one = sum(p.stat().st_size for p in (self.dir / "whole" / "step_20").glob("shard_*"))
        shim = f"free_space={2 * one}:weft_e2e_"
        job = self.weft("train", "deck.toml", "run.dir=run", shim=shim)
        mib = one / 2**20
        self.assertRegex(job.err, rf"WARN: the file system of run has {2 * mib:.2f} MiB left, and its checkpoints will take "
                                  rf"{3 * mib:.2f} MiB more: 3 of {mib:.2f} MiB \(train.keep = 2, and the one that is being "
                                  r"written\), of which 0 are there")
        # Of a run that goes on, two are there.
        self.assertNotIn("WARN", self.weft("train", "deck.toml", "run.dir=run", "train.steps=21", shim=shim).err)
        self.refused(self.weft("train", "deck.toml", "run.dir=full", shim=f"free_space={one - 1}:weft_e2e_", expect=None), CHECKPOINT,
                     f"a checkpoint of full takes {one} bytes, its file system has {one - 1} left")
        plan = ("plan", "deck.toml", "--gpus", "2", "--memory", "80", "--fabric", "8x400")
        said = self.weft(*plan, ranks=0, shim="free_space=1000:weft_e2e_").out
        self.assertRegex(said, r"(?m)^disk: \S+ [kM]B in run.dir = run, for train.keep = 2 and one that is being written; only 1.00 kB "
                               r"left there$")
        self.assertRegex(self.weft(*plan, ranks=0, shim="free_space=1000000000:weft_e2e_").out, r"(?m)^disk: .*; 1.00 GB left there$")


class Stage(WeftTest):
    """Two ranks as two nodes, each with a disk of its own: the folders 0 and 1."""

    def setUp(self):
        super().setUp()
        two_nodes = mock.patch.dict(os.environ, WEFT_SHIM="node_ranks=1")
        two_nodes.start()
        self.addCleanup(two_nodes.stop)
        self.ingest(seconds=12, size=16)
        self.stage = f"data.stage=${rank_variable()}"
        self.disks = [self.dir / "0", self.dir / "1"]
        for disk in self.disks:
            disk.mkdir()

    def staged(self, run, *overrides, expect=0, **how):
        return self.weft("train", "deck.toml", f"run.dir={run}", "data.path=clips.h5", "train.steps=4", self.stage, *overrides,
                         expect=expect, **how)

    def copies(self):
        return [sorted(disk.glob("weft-stores-*/*.h5")) for disk in self.disks]

    def test_training_reads_copies_that_stay(self):
        self.train("whole", "data.path=clips.h5", "train.steps=4")
        job = self.staged("run", "train.steps=2")
        bytes_ = (self.dir / "clips.h5").stat().st_size
        self.assertRegex(job.err, rf"stage     1 store, {bytes_ * 1e-9:.3f} GB, in 0/weft-stores-\d+ of 2 nodes: copied on 2, there "
                                  r"already on 0; \d+\.\d s, \d+\.\d\d GB/s a node")
        first = self.copies()
        self.assertEqual([len(c) for c in first], [1, 1])
        for copy, in first:
            self.assertEqual(copy.read_bytes(), (self.dir / "clips.h5").read_bytes())
            self.assertEqual(copy.parent.stat().st_mode & 0o777, 0o700)
        # Resumed elsewhere: node 0 still has its copy, node 1's was cut short by then, and is made again.
        kept, = first[0]
        before = kept.stat().st_mtime_ns
        damaged, = first[1]
        os.truncate(damaged, bytes_ - 1)
        job = self.staged("run")
        self.assertIn("2 of 4 steps done", job.err)
        self.assertIn("copied on 1, there already on 1", job.err)
        self.assertNotIn("changed deck", job.err)
        self.assertEqual(self.copies(), first)
        self.assertEqual(kept.stat().st_mtime_ns, before)
        self.assertEqual(damaged.read_bytes(), kept.read_bytes())
        self.assert_same_run("whole", "run")
        # Another store is copied beside them.
        self.ingest("other.h5", seconds=2, size=16)
        self.staged("other", 'data.path=["clips.h5", "other.h5"]', "train.steps=1", ranks=1)
        self.assertEqual([len(c) for c in self.copies()], [2, 1])
        job = self.staged("shapes", "data.path=synthetic:clips=8,frames=3,height=16,width=16", "train.steps=1")
        self.assertIn("stage     nothing to copy: data.path = synthetic:", job.err)
        job = self.staged("run", "data.stage=$NO_SUCH_DISK")
        self.assertIn("stage     nothing to copy: run has all 4 steps", job.err)

    def test_all_ranks_of_a_node_share_a_copy(self):
        os.environ["WEFT_SHIM"] = "node_ranks=2"
        job = self.staged("run", "train.steps=1")
        self.assertIn("of 1 node: copied on 1, there already on 0", job.err)
        self.assertEqual([len(c) for c in self.copies()], [1, 0])
        # Two nodes with one folder, which a test may have: the second waits for the first.
        os.environ["WEFT_SHIM"] = "node_ranks=1"
        (self.dir / "disk").mkdir()
        job = self.staged("run", "train.steps=2", "data.stage=disk")
        self.assertIn("of 2 nodes: copied on 1, there already on 1", job.err)

    def test_a_request_to_stop_while_another_job_copies(self):
        self.staged("run", "train.steps=1")
        lock, = self.disks[0].glob("weft-stores-*/lock")
        self.copies()[1][0].unlink()
        with open(lock, "r+b") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            job = self.start("train", "deck.toml", "run.dir=later", "data.path=clips.h5", "train.steps=1", self.stage)
            self.until(job, lambda: "waits for another job that copies to 0/weft-stores-" in job.err_so_far() and self.copies()[1])
            os.kill(job.ranks()[1], signal.SIGUSR1)  # rank 1 has its copy: it stops the other node
            self.assertEqual(job.wait(), 75, job.err)
        self.assertIn("stopped on request while stores were copied", job.err)
        self.assertEqual(os.listdir(self.dir / "later"), ["stopped_while_staging"])
        self.staged("later", "train.steps=1")

    def test_nodes_that_read_different_bytes(self):
        self.staged("run", "train.steps=1", ranks=1)  # to node 0
        store = self.dir / "clips.h5"
        data = bytearray(store.read_bytes())
        data[len(data) // 2] ^= 1  # of a clip, which opening does not read
        store.write_bytes(data)
        self.refused(self.staged("refused", expect=None), HARDWARE, "the nodes' copies of clips.h5 differ")

    def test_what_goes_wrong(self):
        size = (self.dir / "clips.h5").stat().st_size
        (self.disks[0] / f"weft-stores-{os.getuid()}").mkdir(mode=0o700)
        (self.disks[0] / f"weft-stores-{os.getuid()}" / "old.h5").write_bytes(bytes(3000000))
        for code, said, how in (
                (DATA, f"0/weft-stores-{os.getuid()} has 0.00 MiB left, and 1 store to copy has {size / 2**20:.2f} MiB; the copies "
                       "that are there have 2.86 MiB", {"shim": "free_space=3:0/weft-stores"}),
                (DATA, f"1/weft-stores-{os.getuid()} has {size / 2**20:.2f} MiB left, and 1 store to copy has "
                       f"{size / 2**20:.2f} MiB (rank 1 on ", {"shim": f"free_space={size - 1}:1/weft-stores"}),
                (HARDWARE, "the copy of clips.h5 in 1/weft-stores-", {"shim": "bad_writes=1/weft-stores"})):
            for copy in sum(self.copies(), []):
                if copy.name != "old.h5":  # the other node's, of the case before
                    copy.unlink()
            job = self.staged("refused", expect=None, **how)
            self.refused(job, code, said)
            self.assertFalse((self.dir / "refused").exists())
            self.assertEqual([p for disk in self.disks for p in disk.glob("*/*-tmp*")], [])
        for stage, code, said in (("$NO_SUCH_DISK/x", USAGE, 'data.stage = "$NO_SUCH_DISK/x": NO_SUCH_DISK is not set'),
                                  ("nowhere", DATA, "cannot make the folder nowhere/weft-stores-")):
            self.refused(self.staged("refused", f"data.stage={stage}", expect=None), code, said)
        self.staged("fits", shim=f"free_space={size}:/weft-stores")


if __name__ == "__main__":
    unittest.main()
