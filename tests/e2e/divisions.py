"""Runs whose work is divided in different ways, and how close they come to a run that is not divided."""

import array
import math

from harness import WeftTest

# Two shapes, so that ranks get different work; an epsilon under which AdamW does not turn the sign of a rounding error into a
# whole step.
DECK = ["data.path=synthetic:clips=12,frames=3,height=16,width=16;clips=12,frames=2,height=16,width=24",
        "train.steps=6", "train.checkpoint_every=3", "train.adam_eps=1e-5"]
ALL, SMALL = "parallel.bucket_mib=1024", "parallel.bucket_mib=0.001"
# Relative: losses, and the weights' distance over the distance that they have gone.
LOSS, WEIGHTS = 2e-6, 2e-5
WIRE_LOSS, WIRE_WEIGHTS = 1e-4, 2e-2  # gradients rounded to bf16, 8 bits of mantissa


class DivisionTest(WeftTest):
    def run_of(self, name, *overrides, ranks=1):
        return self.train(name, *DECK, *overrides, ranks=ranks)

    def flat(self, run, *options):
        weights = self.exported(run, *options)
        found = []
        for name in sorted(weights):
            dtype, _, data = weights[name]
            self.assertEqual(dtype, "F32")
            found += array.array("f", data).tolist()
        return found

    def distance(self, a, b):
        return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b)))

    def reference(self, name="reference", *overrides):
        """One rank, nothing sharded, one bucket; and how far its weights went."""
        self.run_of(name, "parallel.zero=0", ALL, *overrides)
        self.run_of(name + "_start", "parallel.zero=0", "train.steps=1", "train.lr=0", *overrides)
        weights = self.flat(name)
        return {"losses": self.losses(name), "samples": self.samples(name), "weights": weights,
                "ema": self.flat(name, "--ema"),
                "gone": self.distance(weights, self.flat(name + "_start"))}

    def assert_equal_run(self, run, reference, loss=LOSS, weights=WEIGHTS):
        self.assertEqual(self.samples(run), reference["samples"])
        self.assert_close(self.losses(run), reference["losses"], loss)
        self.assertGreater(reference["gone"], 0)
        for key, options in (("weights", []), ("ema", ["--ema"])):
            off = self.distance(self.flat(run, *options), reference[key]) / reference["gone"]
            self.assertLessEqual(off, weights, f"{key} of {run}")
