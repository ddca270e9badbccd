"""Learning-rate schedules, several averages of the weights, and the gradient's norm by layer: keys of [train] on the real binary."""

import json
import math
import struct
import unittest

from harness import WeftTest

USAGE = 2


class Schedules(WeftTest):
    def test_cosine_with_warmup(self):
        self.train("run", "train.lr_scheduler=cosine", "train.warmup_steps=4", "train.min_lr_factor=0.1", "train.lr=2e-3")
        for step, m in enumerate(self.metrics("run")):
            x = (step - 4) / 16
            want = (step + 1) / 5 if step < 4 else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * x))
            self.assertAlmostEqual(m["lr"], 2e-3 * want, delta=1e-12)

    def test_refusals(self):
        for said, *overrides in (
                ("train.lr_power = 0.9 has no effect", "train.lr_scheduler=linear", "train.lr_power=0.9"),
                ("more than the run's 20 steps", "train.lr_scheduler=warmup_stable_decay", "train.lr_decay_steps=21"),
                ("names 0.9 twice", "train.ema_decay=[0.9, 0.9]")):
            self.refused(self.train("none", *overrides, expect=None), USAGE, said)


class Averages(WeftTest):
    def test_of_two_decays(self):
        """Beside the first, which keeps its bits; through a restart on other ranks; exported by decay."""
        self.train("one", "train.ema_decay=0.9")
        two = ("train.ema_decay=[0.9, 0.5]", "train.ema_start=3")
        self.train("two", *two)
        self.train("halves", *two, "train.steps=10")
        self.train("halves", *two)
        self.assert_same_run("two", "halves")
        self.assertEqual(self.losses("one"), self.losses("two"))
        self.assertEqual(self.exported("one"), self.exported("two"))

        first, second = self.exported("two", "--ema"), self.exported("two", "--ema-decay", "0.5")
        self.assertEqual(self.exported("two", "--ema-decay", "0.9"), first)
        self.assertNotEqual(first, second)
        self.refused(self.weft("export", "two", "none.safetensors", "--ema-decay", "0.99", ranks=0, expect=None),
                     USAGE, "no moving average of decay 0.99", "0.9, 0.5")
        # Before the start step the average is the weights.
        self.train("early", *two, "train.steps=3")
        self.assertEqual(self.exported("early", "--ema-decay", "0.5"), self.exported("early"))

        # The second recurrence by hand, from the weights of a checkpoint of every step.
        weights = []
        for steps in range(3, 7):
            self.train("each", *two, f"train.steps={steps}")
            weights.append(self.exported("each"))
        name = "final_layer.linear.weight"
        values = [struct.unpack(f"<{len(w[name][2]) // 4}f", w[name][2]) for w in weights]
        average = list(values[0])
        for w in values[1:]:
            average = [0.5 * a + 0.5 * b for a, b in zip(average, w)]
        got = self.exported("each", "--ema-decay", "0.5")[name][2]
        for a, b in zip(average, struct.unpack(f"<{len(got) // 4}f", got)):
            self.assertAlmostEqual(a, b, delta=1e-6)


class LayerNorms(WeftTest):
    def lines(self, run):
        return [json.loads(line) for line in (self.dir / run / "layer_norms.jsonl").read_text().splitlines()]

    def test_norms_add_up_and_change_nothing(self):
        self.train("without")
        self.assertFalse((self.dir / "without" / "layer_norms.jsonl").exists())
        every = "train.layer_norms_every=3"
        self.train("with", every, "train.steps=11")
        self.train("with", every)
        self.assert_same_run("without", "with")
        lines, metrics = self.lines("with"), self.metrics("with")
        self.assertEqual([line["step"] for line in lines], [2, 5, 8, 11, 14, 17])
        for line in lines:
            self.assertIn("spatial_blocks.0", line["norms"])
            self.assertIn("temporal_blocks.1", line["norms"])
            whole = math.sqrt(sum(n * n for n in line["norms"].values()))
            self.assertAlmostEqual(whole / metrics[line["step"]]["grad_norm"], 1, delta=1e-5)
        for ranks in (1, 3):  # the same but for the order of sums
            self.train(f"on{ranks}", every, ranks=ranks)
            for mine, theirs in zip(self.lines(f"on{ranks}"), lines):
                self.assertEqual(list(mine["norms"]), list(theirs["norms"]))
                for layer, norm in theirs["norms"].items():
                    self.assertAlmostEqual(mine["norms"][layer] / norm, 1, delta=1e-3)
        events = self.weft("report", "--tensorboard", "events", "with", ranks=0).out.split()
        self.assertIn(b"layer_norms/spatial_blocks.0", (self.dir / events[0]).read_bytes())


if __name__ == "__main__":
    unittest.main()
