"""weft train of segmentation models: it learns, two ranks share the statistics of batch norm, restarts are exact, sizes are
balanced, and what cannot be is refused."""

import struct
import unittest

from harness import WeftTest, read_safetensors

DECK = """
[run]
dir = "run"
seed = 7
threads = 1
[memory]
arena_gib = 0.5
[data]
path = "shapes:images=60,classes=3,height=40..72,width=40..72,hues=1"
short_sides = [32, 48]
max_side = 64
pad_label = -1
[model]
name = "segmentation"
encoder = "mobilenetv2dilated"
decoder = "c1_deepsup"
num_classes = 3
[train]
steps = 6
batch_size = 2
micro_batches = 2
bn_momentum = 0.1
checkpoint_every = 3
skip_saves = false
"""


class Segmentation(WeftTest):
    def setUp(self):
        super().setUp()
        (self.dir / "d.toml").write_text(DECK)

    def train(self, run, *options, ranks=1, expect=0):
        return self.weft("train", "d.toml", f"run.dir={run}", *options, ranks=ranks, expect=expect)

    def test_it_learns(self):
        options = ("train.lr_encoder=0.05", "train.lr_decoder=0.05")
        self.train("one", "train.steps=40", *options)
        losses = self.losses("one")
        self.assertLess(sum(losses[-5:]), 0.8 * sum(losses[:5]))
        terms = self.metrics("one")[-1]["terms"]
        self.assertEqual(set(terms), {"accuracy", "main_loss", "aux_loss"})
        self.assertAlmostEqual(terms["main_loss"] + 0.4 * terms["aux_loss"], losses[-1], delta=1e-5 * losses[-1])
        self.assertTrue(0 <= terms["accuracy"] <= 1)
        rates = [m["lr"] for m in self.metrics("one")]
        self.assert_close(rates, [0.05 * (1 - s / 40) ** 0.9 for s in range(40)], 1e-6)

    def test_two_ranks_share_statistics_and_a_restart_is_exact(self):
        constant = "train.lr_power=0"  # else the rate depends on train.steps
        whole = self.train("whole", constant, ranks=2)
        self.assertIn("batch norm over 2 ranks", whole.err + whole.out)
        self.train("parts", constant, "train.steps=4", ranks=2)
        self.train("parts", constant, ranks=2)
        self.assert_same_run("whole", "parts")

    def test_ranks_recompute_alike_whatever_their_sizes(self):
        # Batches of the original's policy differ between the ranks; only the largest do not fit without recomputation.
        options = ("data.size_policy=original", "data.short_sides=[16,48]", "train.steps=8")
        self.train("whole", *options, ranks=2)
        peak = max(m["memory"]["arena_peak_bytes"] for m in self.metrics("whole"))
        job = self.train("tight", *options, f"memory.arena_gib={0.8 * peak / 2**30}", ranks=2)
        self.assertIn("recompute", job.err + job.out)
        self.assertEqual(self.losses("tight"), self.losses("whole"))

    def test_statistics_of_one_rank_go_on_with_two(self):
        self.train("run", "train.steps=6")
        self.train("run", "train.steps=7", ranks=2)
        weights = self.exported("run")
        iterations = [struct.unpack("<f", bytes(v))[0] for n, (_, _, v) in weights.items() if n.endswith("_running_iter")]
        self.assertTrue(iterations)
        # Those of a new run would be 1.9 after a step.
        self.assertTrue(all(abs(i - 10) < 1e-3 for i in iterations), iterations)

    def test_ranks_by_themselves_have_the_same_statistics_in_the_end(self):
        self.train("run", "train.sync_bn=false", "parallel.check_every=1", ranks=2)
        self.train("again", "train.sync_bn=false", "parallel.zero=0", ranks=2)
        self.assert_close(self.losses("again"), self.losses("run"), 1e-5)

    def test_fixed_statistics_stay(self):
        self.train("first")
        self.weft("export", "first", "w.safetensors", ranks=0)
        self.train("fixed", "train.fix_bn=true", "model.weights=w.safetensors")
        self.weft("export", "fixed", "v.safetensors", ranks=0)
        before, after = (read_safetensors(self.dir / f"{n}.safetensors") for n in "wv")
        self.assertEqual(set(before), set(after))
        same = {name for name in before if bytes(before[name][2]) == bytes(after[name][2])}
        statistics = {name for name in before if "running_" in name}
        self.assertEqual(statistics - same, set())
        # A norm whose gradient is below its weights' last bit may stay as well.
        self.assertLess(len(same - statistics), 0.02 * len(before), same - statistics)

    def test_both_size_policies_see_images_alike(self):
        for policy in ("balanced", "original"):
            self.train(policy, f"data.size_policy={policy}", "train.epochs=2", "train.epoch_steps=2", ranks=2)
            self.assertEqual(len(self.losses(policy)), 4)
        self.assertNotEqual(self.samples("balanced"), self.samples("original"))

    def test_what_cannot_be_is_refused(self):
        for options, what in ((("data.label_rate=4",), "data.label_rate"),
                              (("data.path=synthetic:clips=4",), "holds clips"),
                              (("model.encoder=hrnetv2",), "does not fit"),
                              (("model.encoder=resnet18dilated", "model.decoder=upernet"), "upernet"),
                              (("model.num_classes=2",), "3 classes"),
                              (("data.pad_label=3",), "data.pad_label"),
                              (("model.weights_encoder=none.safetensors",), "none.safetensors")):
            job = self.train("refused", *options, ranks=0, expect=None)
            self.assertIn(job.process.returncode, (2, 3), options)
            self.refused(job, job.process.returncode, what)
        self.refused(self.train("odd", "train.micro_batches=3", ranks=2, expect=None), 2, "train.micro_batches")
        self.refused(self.train("odd", "train.bn_ranks=4", ranks=2, expect=None), 2, "train.bn_ranks")


if __name__ == "__main__":
    unittest.main()
