"""weft bench scaling: rank counts agree, its files say what its table says, and a rank that computes something else is found."""

import json
import os
import unittest

from harness import WeftTest

DECK = """
[run]
seed = 7
threads = 1
[data]
path = "synthetic:latent=1,clips=3,frames=4,height=16,width=16;latent=1,clips=5,frames=1,height=16,width=16"
[model]
in_channels = 4
hidden_size = 32
depth = 2
num_heads = 2
caption_channels = 16
model_max_length = 4
[train]
batch_size = 1
batch_sizes = ["synthetic-latent-1-16x16=2"]
micro_batches = 2
checkpoint_every = 1
"""
QUICK = ["--rounds", "2", "--steps", "2", "--warmup", "1"]


class BenchScaling(WeftTest):
    def setUp(self):
        super().setUp()
        (self.dir / "deck.toml").write_text(DECK)

    def bench(self, *options, ranks=2, expect=0):
        return self.weft("bench", "scaling", "deck.toml", *QUICK, *options, ranks=ranks, expect=expect)

    def nothing_left(self):
        # The jobs' TMPDIR is this directory: run.dir of every training was there.
        self.assertEqual([p.name for p in self.dir.glob("weft_scaling*")], [])

    def test_weak_with_mixed_clips(self):
        job = self.bench("--no-overlap", "--json", "scaling.json", "--plot", "scaling.html")
        self.assertIn("all rank counts compute the same", job.out)
        found = json.loads((self.dir / "scaling.json").read_text())
        self.assertEqual((found["schema"], found["mode"], found["mix"]), ("weft-scaling-1", "weak", "mixed"))
        self.assertEqual(len(found["buckets"]), 2)
        for key in ("hardware", "commit", "date", "build", "deck"):
            self.assertTrue(found[key], key)
        self.assertLess(found["agreement"]["loss"], 1e-5)
        self.assertLess(found["agreement"]["weights"], 1e-4)
        one, two = found["points"]
        self.assertEqual((one["ranks"], two["ranks"]), (1, 2))
        self.assertEqual((one["speedup"], one["efficiency"], one["exposed"]), (1, 1, 0))
        for point in (one, two):
            self.assertGreater(point["seconds"], 0)
            self.assertEqual(len(point["rounds"]), 2)
        # Weak scaling: twice the work, so that the speed-up is twice the efficiency.
        self.assertAlmostEqual(two["speedup"], 2 * two["efficiency"])
        ratios = sorted(a["seconds"] / b["seconds"] for a, b in zip(one["rounds"], two["rounds"]))
        self.assertAlmostEqual(two["efficiency"], sum(ratios) / 2)
        self.assertGreater(two["without_overlap"]["exposed"], 0)
        self.assertIn(f"{two['seconds']:.4f}", job.out)
        # The form for results has the figures.
        self.assertIn(f"| 2 | {two['seconds']:.4f} | {two['speedup']:.3f} | {100 * two['efficiency']:.1f} % |", found["form"])
        self.assertIn(f"| hardware | {found['hardware']} |", found["form"])
        shown, = self.page_data("scaling.html")["scaling"]
        self.assertEqual([p["efficiency"] for p in shown["points"]], [p["efficiency"] for p in found["points"]])
        self.nothing_left()

    def test_strong_with_one_shape_on_three_ranks(self):
        self.bench("--mode", "strong", "--mix", "uniform", "--ranks", "3,1", "--json", "scaling.json", ranks=3)
        found = json.loads((self.dir / "scaling.json").read_text())
        self.assertEqual(found["buckets"], ["synthetic-latent-4-16x16"])
        one, three = found["points"]
        self.assertEqual((one["ranks"], three["ranks"]), (1, 3))
        self.assertAlmostEqual(three["efficiency"], three["speedup"] / 3)
        self.assertLess(found["agreement"]["weights"], 1e-4)

    def test_no_steps_are_refused(self):
        job = self.weft("bench", "scaling", "deck.toml", "--steps", "0", expect=2)
        self.assertIn("--steps 0 is out of range", job.err)

    def test_a_rank_that_computes_something_else_is_found(self):
        os.environ["WEFT_FAULT"] = "flip:1:2"  # after the last step that is checked nothing repairs it without sharding
        self.addCleanup(os.environ.pop, "WEFT_FAULT")
        job = self.bench("parallel.zero=0", expect=6)
        self.assertIn("2 ranks: after 3 steps not all of them hold the same weights", job.err)
        self.assertIn("HINT: run weft doctor", job.err)
        self.assertNotIn("efficiency", job.out)
        self.nothing_left()

    def test_refusals(self):
        for options, message in ((["--ranks", "1,4"], "--ranks 1,4 in a job of 2 ranks"),
                                 (["parallel.sp=2"], "--ranks 1,2 with parallel.sp = 2"),
                                 (["--mode", "middling"], "--mode"),
                                 (["--json", "none/x.json"], "cannot write none/x.json")):
            with self.subTest(options=options):
                job = self.bench(*options, expect=2)
                self.assertIn(message, job.err)
        self.nothing_left()


if __name__ == "__main__":
    unittest.main()
