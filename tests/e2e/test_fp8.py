"""model.dtype = "fp8": a bf16 model, some of whose products take operands in e4m3. Its losses beside bf16's, restarts, ranks,
ZeRO-3, changes from bf16 and back, clips, and models that have no such layers."""

import shutil
import unittest

from divisions import SMALL, DivisionTest
from harness import TINY_WAN_DECK

FP8 = "model.dtype=fp8"
# Of losses over ranks: the order of sums changes the last bit of a bf16 weight here and there, and that a byte of e4m3.
ORDER = 2e-3


class Fp8(DivisionTest):
    def test_losses_follow_bf16(self):
        for name, deck in (("stdit3", None), ("wan", TINY_WAN_DECK)):
            with self.subTest(name):
                if deck:
                    (self.dir / "deck.toml").write_text(deck)
                for dtype in ("bf16", "fp8"):
                    self.train(f"{name}_{dtype}", f"model.dtype={dtype}", "train.steps=40", ranks=1)
                one, other = self.losses(f"{name}_bf16"), self.losses(f"{name}_fp8")
                self.assertLess(sum(one[-10:]), 0.9 * sum(one[:10]), "nothing was learnt that could differ")
                self.assert_close(other, one, 0.03)
                self.assertNotEqual(one, other)

    def test_restarts_ranks_and_shards(self):
        one = [FP8, "train.micro_batches=2", "model.recompute=0.5", SMALL]
        self.run_of("whole", *one, ranks=2)
        self.run_of("run", *one, "train.steps=3", ranks=2)
        self.run_of("run", *one, ranks=2)
        self.assert_same_run("run", "whole")
        self.run_of("sharded", *one, "parallel.zero=3", ranks=2)
        self.assertEqual(self.losses("sharded"), self.losses("whole"))
        self.assertEqual(self.exported("sharded"), self.exported("whole"))
        for name, ranks, overrides in (("alone", 1, []), ("sp", 2, ["parallel.sp=2"])):
            self.run_of(name, *one, *overrides, ranks=ranks)
            self.assertEqual(self.samples(name), self.samples("whole"))
            self.assert_close(self.losses(name), self.losses("whole"), ORDER)

    def test_a_run_goes_on_in_another_format(self):
        self.run_of("run", "model.dtype=bf16", "train.steps=3")
        shutil.copytree(self.dir / "run", self.dir / "other", symlinks=True)
        job = self.run_of("run", FP8)
        self.assertIn('model.dtype "bf16" -> "fp8"', job.err)
        self.run_of("other", "model.dtype=bf16")
        self.assertEqual(self.losses("run")[:3], self.losses("other")[:3])
        self.assertNotEqual(self.losses("run")[3:], self.losses("other")[3:])
        self.assert_close(self.losses("run"), self.losses("other"), 0.03)
        self.run_of("run", "model.dtype=bf16", "train.steps=8")
        self.assertEqual(len(self.losses("run")), 8)

    def test_adapters(self):
        self.run_of("base")
        self.weft("export", "base", self.dir / "base.safetensors", ranks=0)
        lora = ["lora.rank=4", f"model.weights={self.dir / 'base.safetensors'}"]
        for dtype in ("bf16", "fp8"):
            self.run_of(dtype, *lora, f"model.dtype={dtype}")
        self.assert_close(self.losses("fp8"), self.losses("bf16"), 0.03)
        self.assertNotEqual(self.losses("fp8"), self.losses("bf16"))

    def test_clips(self):
        self.run_of("run")
        self.weft("export", "run", self.dir / "w.safetensors", ranks=0)
        for dtype in ("bf16", "fp8"):
            self.weft("generate", "deck.toml", "model.weights=w.safetensors", f"model.dtype={dtype}",
                      f"generate.output={dtype}", "generate.image_size=[16, 16]", "generate.num_frames=3",
                      "generate.num_samples=1", "sampler.steps=3", ranks=1)
        one, other = (sorted(p.name for p in (self.dir / dtype).iterdir()) for dtype in ("bf16", "fp8"))
        self.assertEqual(one, other)

    def test_plans_and_models_without_such_layers(self):
        plan = self.weft("plan", "deck.toml", FP8, "--gpus", "2", "--memory", "80", "--gpu", "h100", ranks=0)
        self.assertIn("products in fp8 count at the rate of bf16", plan.out + plan.err)
        for name in ("vae", "dbnet"):
            self.refused(self.train(f"no_{name}", FP8, f"model.name={name}", expect=None), 2, 'model.dtype = "fp8"', name,
                         "bf16")


if __name__ == "__main__":
    unittest.main()
