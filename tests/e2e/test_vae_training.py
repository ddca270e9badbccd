"""weft train of a VAE: it learns, two ranks agree with one, a restart is exact, and what cannot be is refused."""

import json
import unittest

from harness import WeftTest, read_safetensors, write_safetensors
from tiny_models import TINY_VAE

DECK = """
[run]
dir = "run"
seed = 7
threads = 1
[data]
path = "synthetic:clips=12,frames=5,height=24,width=24"
""" + TINY_VAE + """[train]
steps = 6
batch_size = 1
micro_batches = 2
lr = 2e-3
grad_clip = 100.0
checkpoint_every = 3
skip_saves = false
"""
ADVERSARIAL = ("vae_train.discriminator=patchgan", "vae_train.discriminator_start=1", "vae_train.freeze_spatial=true",
               "vae_train.lecam_weight=10", "vae_train.gradient_penalty_weight=1")
LATENTS = ("vae_train.pixel_loss=false", "vae_train.latent_loss=true", "vae_train.identity_loss=true",
           "vae_train.image_share=0.5", "vae_train.random_length=false")
VALUES = 24 * 24 * 3  # of a frame


class VaeTraining(WeftTest):
    def setUp(self):
        super().setUp()
        (self.dir / "vae.toml").write_text(DECK)

    def vae(self, run, *options, ranks=1, expect=0):
        return self.weft("train", "vae.toml", f"run.dir={run}", *options, ranks=ranks, expect=expect)

    def test_pixels_of_two_ranks_and_a_restart(self):
        job = self.vae("one", "train.steps=16", "train.log_every=1")
        losses = self.losses("one")
        self.assertLess(sum(losses[-4:]) / 4, 0.8 * losses[0])
        terms = self.metrics("one")[-1]["terms"]
        mae = terms.pop("mae")  # the line of the step has it
        self.assertAlmostEqual(mae, 127.5 * terms["pixel"] / VALUES, delta=1e-4 * mae)
        self.assertRegex(job.err, rf"step +16/16  loss {losses[-1]:.5f}  MAE {mae:.2f}/255  grad")
        self.assertAlmostEqual(sum(v for t, v in terms.items() if t != "discriminator"), losses[-1], delta=1e-4 * losses[-1])
        self.assertGreater(terms["pixel"], 0)
        self.assertEqual(terms["latent"], 0)
        self.vae("two", ranks=2)
        self.assertEqual(self.samples("two"), self.samples("one")[:6])
        self.assert_close(self.losses("two"), losses[:6], 1e-4)
        self.vae("parts", "train.steps=4", ranks=2)
        self.assertIn("resuming from", self.vae("parts", ranks=2).err)
        self.assert_same_run("two", "parts")

    def test_the_discriminator_and_its_averages_are_in_the_checkpoint(self):
        self.vae("whole", *ADVERSARIAL)
        terms = [m["terms"] for m in self.metrics("whole")]
        self.assertEqual(terms[0]["discriminator"], 0)
        self.assertNotEqual(terms[1]["discriminator"], terms[-1]["discriminator"])
        for name in ("adversarial", "lecam", "gradient_penalty", "logit_real", "logit_made"):
            self.assertEqual(terms[0][name], 0)
            self.assertNotEqual(terms[-1][name], 0, name)
        # The averages' effect on what comes is small, but the runs below are compared to the bit.
        notes = json.loads((self.dir / "whole/step_6/manifest.json").read_text())["notes"]
        expected = [0.0, 0.0]
        for m in terms[1:]:
            expected = [0.999 * a + 0.001 * m[n] for a, n in zip(expected, ("logit_real", "logit_made"))]
        word, *averages = notes["task"].split()
        self.assertEqual(word, "lecam")
        self.assert_close([float.fromhex(a) for a in averages], expected, 1e-4)
        self.vae("parts", "train.steps=3", *ADVERSARIAL)
        self.vae("parts", *ADVERSARIAL)
        self.assertEqual(self.losses("whole"), self.losses("parts"))
        self.assertEqual(terms, [m["terms"] for m in self.metrics("parts")])

    def test_latents(self):
        self.vae("run", *LATENTS, "train.steps=4")
        terms = [m["terms"] for m in self.metrics("run")]
        self.assertTrue(all(t["latent"] > 0 and t["pixel"] == 0 for t in terms))
        self.assertTrue(any(t["identity"] > 0 for t in terms))

    def test_a_frozen_2d_vae_starts_from_its_own_file_and_is_found_again(self):
        def tensors(run, name):
            self.weft("export", run, name, ranks=0)
            return read_safetensors(self.dir / name)

        # Weights of the 2D VAE alone, under the names that it has by itself; the temporal one starts at random.
        self.vae("first", "train.steps=1")
        prefix = "spatial_vae.module."
        spatial = {name.removeprefix(prefix): (d, shape, bytes(v)) for name, (d, shape, v) in
                   tensors("first", "first.safetensors").items() if name.startswith(prefix)}
        write_safetensors(self.dir / "2d.safetensors", spatial)
        stage1 = ("vae.weights=2d.safetensors", "vae_train.freeze_spatial=true", "train.steps=1", "run.seed=8")
        self.assertIn(": the 2D VAE alone", self.vae("stage1", *stage1).err)
        # A run that froze it is found by commands whose deck does not say so, and so is what export makes of it.
        trained = tensors("stage1", "stage1.safetensors")
        self.assertEqual({name: bytes(trained[prefix + name][2]) for name in spatial},
                         {name: v for name, (_, _, v) in spatial.items()})
        self.assertTrue(any(name.startswith("temporal_vae.") and any(bytes(v)) for name, (_, _, v) in trained.items()))
        figures = []
        for i, weights in enumerate(("stage1", "stage1.safetensors")):
            self.weft("reconstruct", "vae.toml", f"vae.weights={weights}", f"reconstruct.output=out{i}", "generate.ema=false",
                      "reconstruct.inputs=['lavfi:testsrc2=duration=1:rate=5:size=24x24']")
            figures.append(json.loads((self.dir / f"out{i}/reconstruct.json").read_text())["latent"])
        self.assertEqual(*figures)

    def test_what_cannot_be_is_refused(self):
        for options, what in ((("vae_train.pixel_loss=false",), "learns nothing"),
                              (("data.path=synthetic:clips=4,frames=5,height=25,width=24",), "25x24 pixels"),
                              (("data.path=synthetic:clips=4,frames=5,height=8,width=8,latent=1",), "holds latents"),
                              (("model.weights=a.safetensors",), "vae.weights"),
                              (("vae_train.lecam_weight=1",), "there is none"),
                              (("model.name=sadtalker",), "no task")):
            job = self.vae("refused", *options, ranks=0, expect=2)
            self.assertIn(what, job.err)
        self.assertIn("parallel.sp", self.vae("refused", "parallel.sp=2", ranks=2, expect=2).err)


if __name__ == "__main__":
    unittest.main()
