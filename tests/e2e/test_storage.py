"""Storage that is slow or stalls: reads of clips that take seconds, by a library between weft and the system (tests/shim)."""

import unittest

from harness import WeftTest

HANG = 7


class Storage(WeftTest):
    def setUp(self):
        super().setUp()
        self.ingest(seconds=12, size=16)

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


if __name__ == "__main__":
    unittest.main()
