"""Held-out loss while training ([validation]): the same bits however it is run, no trace of it in the training, the best
checkpoint kept, early stopping; and what cannot be is refused."""

import json
import os
import random
import time
import unittest

from harness import WeftTest
from tiny_models import TINY_VAE

SHARE = ("validation.share=0.25", "data.path=synthetic:clips=12,frames=3,height=16,width=16;clips=8,frames=1,height=24,width=16")
EVERY = ("validation.every=2", "validation.timesteps=3")


class HeldOut(WeftTest):
    def lines(self, run):
        found = [json.loads(line) for line in (self.dir / run / "validation.jsonl").read_text().splitlines()]
        for line in found:
            line.pop("xxh3", None)
        return found

    def evaluate(self, deck, run, *options, ranks=1):
        self.weft("evaluate", deck, f"run.dir={run}", f"evaluate.output={run}/evaluation", *options, ranks=ranks)
        return json.loads((self.dir / run / "evaluation" / "evaluation.json").read_text())

    def test_nothing_of_it_is_in_the_training(self):
        """And it is told everywhere: its file, log, status, report, TensorBoard."""
        self.train("without", *SHARE)
        job = self.train("with", *SHARE, *EVERY)
        self.assert_same_run("without", "with")
        self.assertFalse((self.dir / "without" / "validation.jsonl").exists())
        lines = self.lines("with")
        self.assertEqual([m["step"] for m in lines], list(range(2, 21, 2)))
        for m in lines:
            self.assertEqual(set(m), {"step", "loss", "set", "buckets"})
            (name, a), (_, b) = m["buckets"].items()
            # 3 of 12 and 2 of 8 clips.
            self.assertAlmostEqual(m["loss"], (3 * a + 2 * b) / 5, delta=1e-9)
        self.assertLess(lines[-1]["loss"], lines[0]["loss"])
        seen = {s for step in self.samples("with") for s in step}
        self.assertEqual(len(seen), 15)
        self.assertRegex(job.err, r"held out  5 samples, measured every 2 steps")
        self.assertRegex(job.err, rf"held out  step 2: loss {lines[0]['loss']:.5f} of 5 samples \({name} ")
        status = json.loads(self.weft("status", "with", "--json", ranks=0).out)[0]
        self.assertEqual(status["validation_loss"], lines[-1]["loss"])
        self.weft("report", "with", ranks=0)
        self.assertAlmostEqual(self.page_data("with/report.html")["runs"][0]["held_out"]["last"], lines[-1]["loss"], 6)
        self.weft("report", "--tensorboard", "events", "with", ranks=0)
        self.assertIn(b"validation/loss", (self.dir / "events" / "with" / "events.out.tfevents.weft").read_bytes())

    def test_any_ranks_and_an_evaluation_give_the_same_bits(self):
        self.train("run", *SHARE, *EVERY)
        last = self.lines("run")[-1]
        for ranks in (1, 2, 3):
            with self.subTest(ranks=ranks):
                found = self.evaluate("deck.toml", "run", *SHARE, *EVERY, ranks=ranks)
                self.assertEqual((found["loss"], found["buckets"], found["clips"]), (last["loss"], last["buckets"], 5))
                took = self.summary("run/evaluation")
                self.assertEqual((took["speed"]["items"], took["ranks"], list(took["parts"])), (5, ranks, ["network", "idle", "other"]))
        shared = self.evaluate("deck.toml", "run", *SHARE, *EVERY, "parallel.sp=2", ranks=2)
        self.assert_close([shared["loss"]], [last["loss"]])
        other = self.evaluate("deck.toml", "run", *SHARE, *EVERY, "evaluate.ema=true")
        self.assertNotEqual(other["loss"], last["loss"])

    def test_bf16_in_shards(self):
        bf16 = ("model.dtype=bf16", "train.steps=4")
        self.train("run", *SHARE, *EVERY, *bf16)
        self.train("without", *SHARE, *bf16)
        self.assert_same_run("run", "without")
        self.assertEqual(self.evaluate("deck.toml", "run", *SHARE, *EVERY, *bf16)["loss"], self.lines("run")[-1]["loss"])

    def test_killed_and_stopped_it_goes_on_with_the_same_lines(self):
        self.train("whole", *SHARE, *EVERY, "train.keep_best=true")
        moments = random.Random(2)
        for steps in sorted(moments.sample(range(3, 20), 3)):
            job = self.start("train", "deck.toml", "run.dir=killed", "train.keep_best=true", *SHARE, *EVERY)
            self.wait_for_steps(job, "killed", steps)
            time.sleep(moments.uniform(0, 0.03))
            if steps % 2:
                job.kill()
            else:
                (self.dir / "killed" / "stop").touch()
            job.wait()
        self.train("killed", *SHARE, *EVERY, "train.keep_best=true")
        # As a job leaves it that dies between its last save and the link.
        (self.dir / "killed/best").unlink()
        (self.dir / "killed/best").symlink_to("step_2")
        self.train("killed", *SHARE, *EVERY, "train.keep_best=true")
        self.assert_same_run("whole", "killed")
        self.assertEqual((self.dir / "killed" / "validation.jsonl").read_bytes(),
                         (self.dir / "whole" / "validation.jsonl").read_bytes())
        for run in ("whole", "killed"):
            best = min(self.lines(run), key=lambda m: m["loss"])
            self.assertEqual(os.readlink(self.dir / run / "best"), f"step_{best['step']}")

    def test_the_best_is_kept_and_patience_ends_the_run(self):
        """With a rate of 0 no loss is smaller than the first."""
        options = (*SHARE, *EVERY, "train.lr=0", "train.keep_best=true", "train.checkpoint_every=1")
        job = self.train("run", *options, "validation.patience=3")
        self.assertIn("stopped early after step 8 of 20: 3 validations without a smaller held-out loss", job.err)
        kept = sorted(p.name for p in (self.dir / "run").glob("step_*"))
        self.assertEqual(kept, ["step_2", "step_7", "step_8"])
        self.assertEqual(os.readlink(self.dir / "run" / "best"), "step_2")
        again = self.train("run", *options, "validation.patience=3")
        self.assertIn("stopped early after step 8", again.err)
        self.assertEqual(len(self.metrics("run")), 8)
        self.train("run", *options)
        self.assertEqual(len(self.metrics("run")), 20)
        self.weft("export", "run/best", "best.safetensors", ranks=0)
        self.assertEqual(self.evaluate("deck.toml", "none", *SHARE, *EVERY, "model.weights=best.safetensors")["loss"],
                         self.lines("run")[0]["loss"])

    def test_other_samples_begin_a_new_best(self):
        """Nothing of the old ones counts: neither their best loss nor how long ago it was."""
        options = (*EVERY, "train.lr=0", "train.keep_best=true", "validation.patience=3", "validation.share=0.25")
        other = "data.path=synthetic:clips=8,frames=3,height=16,width=16,seed=9"
        self.train("run", *options, "train.steps=6", ranks=0)
        job = self.train("run", *options, other, "train.steps=10", ranks=0)
        said = [line for line in job.err.splitlines() if line.startswith("WARN: the held-out samples")]
        self.assertEqual(len(said), 1, job.err)
        self.assertIn(f"best {self.lines('run')[0]['loss']:.5f} at step 2", said[0])
        self.assertNotIn("stopped early", job.err)
        self.assertEqual([m["step"] for m in self.lines("run")], [2, 4, 6, 6, 8, 10])
        self.assertEqual(len({m["set"] for m in self.lines("run")}), 2)
        self.assertEqual(os.readlink(self.dir / "run" / "best"), "step_6")
        # A repeat of a finished run leaves its figures.
        before = (self.dir / "run" / "status.json").read_bytes()
        again = self.train("run", *options, other, "train.steps=10", ranks=0)
        self.assertNotIn("held-out samples (or", again.err)
        self.assertEqual((self.dir / "run" / "status.json").read_bytes(), before)
        self.train("run", *options, other, "train.steps=20", ranks=0)
        status = json.loads(self.weft("status", "run", "--json", ranks=0).out)[0]
        self.assertIn("stopped early after step 12 of 20", status["reason"])

    def test_a_store_of_its_own(self):
        """Of another shape than what is trained on; the loss of its clips is that of the same clips anywhere."""
        self.ingest("held.h5", seconds=1, size=24)
        self.train("run", "validation.path=held.h5", *EVERY, "train.steps=4")
        self.assertEqual(len(self.samples("run")[0]), 8)
        self.assertEqual([m["step"] for m in self.lines("run")], [2, 4])
        found = self.evaluate("deck.toml", "run", "evaluate.data=held.h5", *EVERY[1:], ranks=2)
        self.assertEqual(found["loss"], self.lines("run")[-1]["loss"])

    def test_of_a_vae(self):
        (self.dir / "vae.toml").write_text(f"""
            [run]
            seed = 7
            threads = 1
            [data]
            path = "synthetic:clips=8,frames=5,height=24,width=24"
            {TINY_VAE}
            [train]
            steps = 4
            lr = 2e-3
            [validation]
            share = 0.25
            every = 2
            """)
        self.weft("train", "vae.toml", "run.dir=with")
        self.weft("train", "vae.toml", "run.dir=without", "validation.every=0")
        self.assert_same_run("with", "without")
        last = self.lines("with")[-1]
        self.assertEqual(set(last["terms"]), {"pixel", "perceptual", "kl", "latent"})
        found = self.evaluate("vae.toml", "with", ranks=3)
        self.assertEqual((found["loss"], found["terms"]), (last["loss"], last["terms"]))

    def test_of_segmentation_and_text_detection(self):
        """As `weft evaluate` measures the newest checkpoint, on the same images."""
        for name, deck, score in (
                ("segmentation", """
                 [data]
                 path = "shapes:images=12,classes=3,height=40..72,width=40..72,hues=1"
                 short_sides = [32, 48]
                 max_side = 64
                 [model]
                 name = "segmentation"
                 encoder = "mobilenetv2dilated"
                 decoder = "c1_deepsup"
                 num_classes = 3
                 """, "mean_iou"),
                ("dbnet", """
                 [data]
                 path = "text:images=8,height=64,width=64,words=1,letters=8..9"
                 crop = 32
                 [model]
                 name = "dbnet"
                 backbone = "resnet18"
                 asf = false
                 [postprocess]
                 min_text_score = 0.05
                 mask_threshold = 0.05
                 [evaluate]
                 short_side = 0
                 """, "hmean")):
            with self.subTest(name):
                (self.dir / f"{name}.toml").write_text(deck + """
                    [run]
                    seed = 7
                    threads = 1
                    [memory]
                    arena_gib = 0.5
                    [train]
                    steps = 4
                    batch_size = 2
                    micro_batches = 2
                    [validation]
                    share = 0.25
                    every = 2
                    """)
                self.weft("train", f"{name}.toml", f"run.dir={name}")
                self.weft("train", f"{name}.toml", "run.dir=without", "run.resume=false", "validation.every=0")
                self.assert_same_run(name, "without")
                last = self.lines(name)[-1]
                self.assertEqual(last["step"], 4)
                found = self.evaluate(f"{name}.toml", name)
                self.assertEqual(found["images"], {"segmentation": 3, "dbnet": 2}[name])
                self.assertEqual(last["terms"][score], found[score])
                self.assertAlmostEqual(last["loss"], 1 - found[score], delta=1e-12)

    def test_what_cannot_be(self):
        for options, code, said in (
                (("validation.every=2",), 2, "neither validation.path nor validation.share"),
                (("validation.share=0.2", "validation.path=a.h5"), 2, "both set"),
                (("validation.share=0.001", "validation.every=2"), 2, "is not even one"),
                (("validation.path=gone.h5", "validation.every=2"), 3, "gone.h5"),
                (("validation.path=shapes:images=2,classes=2", "validation.every=2"), 2, "holds no clips"),
                (("validation.share=0.2", "validation.patience=2"), 2, "validation.patience is set"),
                (("train.keep_best=true",), 2, "train.keep_best is set"),
                (("validation.path=synthetic:clips=2,frames=99,height=64,width=64", "validation.every=2",
                  "memory.arena_gib=0.02"), 2, "a held-out clip of bucket")):
            with self.subTest(options=options):
                self.refused(self.train("bad", *options, expect=None), code, said)
        self.refused(self.weft("evaluate", "deck.toml", expect=None), 2, "no held-out clips")


if __name__ == "__main__":
    unittest.main()
