"""parallel.zero = 3: weights, gradients and optimizer in parts. The same bits as zero = 1 where each rank has one
micro-batch, the same checkpoints, and what goes with a run: restarts, validation, LoRA, faults, refusals."""

import json
import os
import shutil
import unittest
from unittest import mock

from divisions import SMALL, DivisionTest
from harness import TINY_WAN_DECK
from tiny_models import TINY_VAE


class Zero3(DivisionTest):
    # SMALL buckets have a block each: more than the two that a rank holds.

    def same_weights(self, one, other):
        """Losses, and weights and averages by name: the layout of the state differs."""
        self.assertEqual(self.samples(one), self.samples(other))
        self.assertEqual(self.losses(one), self.losses(other))
        for options in ([], ["--ema"]):
            self.assertEqual(self.exported(one, *options), self.exported(other, *options))

    def test_the_bits_of_zero_1(self):
        for name, ranks, overrides in (("f32", 2, ["train.micro_batches=2"]),
                                       ("bf16", 3, ["train.micro_batches=3", "model.dtype=bf16", "model.recompute=0.6",
                                                    "train.layer_norms_every=2", "parallel.check_every=2"]),
                                       ("sp", 2, ["train.micro_batches=1", "parallel.sp=2", "parallel.wire=bf16"])):
            with self.subTest(name):
                for zero in (1, 3):
                    job = self.run_of(f"{name}{zero}", SMALL, f"parallel.zero={zero}", *overrides, ranks=ranks)
                    self.assertEqual("zero = 3  4 buckets of blocks" in job.err, zero == 3, job.err)
                self.same_weights(name + "1", name + "3")

    def test_the_bits_of_zero_1_of_wan(self):
        (self.dir / "deck.toml").write_text(TINY_WAN_DECK)
        for name, overrides in (("f32", ["train.micro_batches=2"]),
                                ("bf16", ["train.micro_batches=2", "model.dtype=bf16", "model.recompute=0.5"]),
                                ("sp", ["train.micro_batches=1", "parallel.sp=2"])):
            with self.subTest(name):
                for zero in (1, 3):
                    self.run_of(f"{name}{zero}", SMALL, f"parallel.zero={zero}", "model.in_channels=3", *overrides, ranks=2)
                self.same_weights(name + "1", name + "3")

    def test_any_division_and_each_restart(self):
        """Ranks with one, two and no micro-batches; then a run whose every step has another form."""
        reference = self.reference()
        for ranks, overrides in ((3, []), (2, ["parallel.overlap=false"])):
            self.run_of(f"r{ranks}", "parallel.zero=3", SMALL, *overrides, ranks=ranks)
            self.assert_equal_run(f"r{ranks}", reference)
        forms = [(2, 3), (1, 3), (3, 1), (3, 3), (1, 0), (2, 3)]
        for step, (ranks, zero) in enumerate(forms, 1):
            self.run_of("run", f"parallel.zero={zero}", SMALL, "train.checkpoint_every=1", f"train.steps={step}",
                        ranks=ranks)
        self.assert_equal_run("run", reference)

    def test_a_restart_and_a_change_of_stage_keep_the_bits(self):
        one = ["train.micro_batches=2", SMALL]
        self.run_of("whole", *one, "parallel.zero=3")
        for name, first, second in (("same", 3, 3), ("down", 3, 1), ("up", 1, 3)):
            with self.subTest(name):
                self.run_of(name, *one, f"parallel.zero={first}", "train.steps=3")
                self.run_of(name, *one, f"parallel.zero={second}")
                self.same_weights(name, "whole")
        self.assert_same_run("same", "whole")

    def test_killed_and_resumed(self):
        overrides = ["parallel.zero=3", SMALL, "train.steps=60", "train.checkpoint_every=5"]
        self.train("whole", *overrides)
        job = self.start("train", "deck.toml", "run.dir=run", *overrides)
        self.wait_for_steps(job, "run", 12)
        self.wait_for_a_save(job, "run")
        job.kill()
        job.wait()
        self.train("run", *overrides)
        self.assert_same_run("whole", "run")

    def test_held_out_clips(self):
        """Ranks with more and fewer of them, by the weights of the training; nothing of it is in the training."""
        held = ["data.path=synthetic:clips=12,frames=3,height=16,width=16;clips=8,frames=1,height=24,width=16",
                "validation.share=0.25", "validation.timesteps=2", "train.micro_batches=3", SMALL]
        lines = {}
        for zero, every in ((1, 2), (3, 2), (3, 0)):
            run = f"z{zero}e{every}"
            self.train(run, *held, f"parallel.zero={zero}", f"validation.every={every}", "train.steps=6", ranks=3)
            if every:
                lines[zero] = [json.loads(line)["loss"]
                               for line in (self.dir / run / "validation.jsonl").read_text().splitlines()]
        self.assertEqual(len(lines[1]), 3)
        self.assertEqual(lines[1], lines[3])
        self.same_weights("z1e2", "z3e2")
        self.assert_same_run("z3e2", "z3e0")

    def test_nan_of_the_machine_and_of_the_data(self):
        with mock.patch.dict(os.environ, WEFT_FAULT="nan:1:2:1"):
            self.refused(self.train("run", "parallel.zero=3", SMALL, ranks=3, expect=6), 6, "step 3: ", "rank 1 on ")
        shutil.rmtree(self.dir / "run")
        with mock.patch.dict(os.environ, WEFT_FAULT="nan:1:2:0"):
            self.refused(self.train("run", "parallel.zero=3", SMALL, ranks=3, expect=5), 5, "step 3: ", "rank 1 on ",
                         "gradient of ")

    def test_adapters_are_as_with_zero_1(self):
        self.train("base", "train.steps=2")
        self.weft("export", "base", self.dir / "base.safetensors", ranks=0)
        for zero in (1, 3):
            job = self.train(f"lora{zero}", f"model.weights={self.dir}/base.safetensors", "lora.rank=2", "train.steps=3",
                             f"parallel.zero={zero}", SMALL)
        self.assertIn("shards as zero = 1 here", job.err)
        self.assert_same_run("lora1", "lora3")

    def test_what_is_refused(self):
        self.refused(self.train("run", "parallel.zero=2", expect=None), 2, "parallel.zero = 2", "take 1, or 3")
        (self.dir / "vae.toml").write_text(
            '[run]\ndir = "run"\n[data]\npath = "synthetic:clips=4,frames=5,height=24,width=24"\n' + TINY_VAE)
        self.refused(self.weft("train", "vae.toml", "parallel.zero=3", expect=None), 2, "used one after the other",
                     "set parallel.zero = 1")


if __name__ == "__main__":
    unittest.main()
