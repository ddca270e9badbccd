"""weft bench step: any model that trains, its figures, a given batch, and what is refused."""

import array
import json
import math
import random
import unittest

from harness import WeftTest, read_safetensors, write_safetensors

STDIT3 = """
[model]
in_channels = 4
hidden_size = 32
depth = 1
num_heads = 2
caption_channels = 16
model_max_length = 6
[train]
lr = 1e-3
"""
WAN = """
[model]
name = "wan"
hidden_size = 256
depth = 1
num_heads = 2
ffn_dim = 64
text_dim = 16
text_len = 8
"""
VAE = """
[data]
path = "synthetic:clips=2,frames=5,height=16,width=16;clips=2,frames=5,height=32,width=32"
[model]
name = "vae"
[vae]
spatial_channels = [32, 32, 32, 32]
filters = 32
spatial_res_blocks = 1
num_res_blocks = 1
[vae_train]
lpips_weights = ""
"""
SEGMENTATION = """
[data]
path = "shapes:images=4,classes=3,height=64,width=64"
short_sides = [64]
[model]
name = "segmentation"
encoder = "resnet18dilated"
decoder = "c1"
num_classes = 3
[train]
batch_size = 2
"""
DBNET = """
[data]
path = "text:images=4,height=128,width=192,words=3,letters=10..14"
crop = 64
[model]
name = "dbnet"
backbone = "resnet18"
"""


class BenchStep(WeftTest):
    def bench(self, deck, *options, expect=0):
        (self.dir / "deck.toml").write_text(deck)
        steps = [] if "--steps" in options else ["--steps", "3"]
        return self.weft("bench", "step", "deck.toml", "run.threads=1", *steps, "--warmup", "1", *options, "--json", "step.json",
                         ranks=0, expect=expect)

    def report(self):
        return json.loads((self.dir / "step.json").read_text())

    def test_every_model(self):
        shape = ["--shape", "2x3x6x4"]
        for name, deck, options, bucket, clips in (
                ("stdit3", STDIT3, shape, "synthetic-latent-3-6x4", 2), ("wan", WAN, shape, "synthetic-latent-3-6x4", 2),
                ("vae", VAE, ["train.batch_size=1"], "synthetic-5-32x32", 1), ("segmentation", SEGMENTATION, [], None, 2),
                ("dbnet", DBNET, [], None, 1)):
            with self.subTest(name):
                job = self.bench(deck, *options, "--ceiling", "0.01")
                found = self.report()
                # Convolutions are no products, so a network of them has the rate of a large product as its ceiling.
                self.assertEqual(found["products_of_the_step"], name in ("stdit3", "wan"))
                self.assertIn("its products' alone" if found["products_of_the_step"] else "a plain product's", job.out)
                self.assertGreater(found["product_flops_per_second"], 1e6)
                self.assertEqual((len(found["seconds"]), len(found["loss"]), found["clips"]), (3, 4, clips))
                self.assertIn(f"bucket {found['bucket']}", job.out)
                if bucket:
                    self.assertEqual(found["bucket"], bucket)
                self.assertGreater(found["model_flops"], 1e6)
                self.assertGreater(min(found["seconds"]), 0)
                # The same micro-batch again and again, noise included: it is learnt.
                self.assertLess(found["loss"][-1], found["loss"][0])

    def test_captions_cost_what_they_do(self):
        peak = {}
        for tokens in ("1", "6"):
            self.bench(STDIT3, "--shape", "1x3x6x4", "--captions", tokens)
            peak[tokens] = self.report()["arena_peak_bytes"]
        self.assertGreater(peak["6"], peak["1"])

    def test_profile_and_weights(self):
        job = self.bench(STDIT3, "--shape", "1x3x6x4", "--profile", "--outputs", "after.safetensors")
        self.assertIn("linear_forward", job.out)
        totals = json.loads(job.out.splitlines()[-1].removeprefix("profile: "))
        self.assertGreater(min(totals.values()), 0)
        losses = self.report()["loss"]
        self.bench(STDIT3, "--shape", "1x3x6x4", "--weights", "after.safetensors")
        self.assertLess(self.report()["loss"][0], losses[-1])  # what all of its steps have learnt

    def test_a_given_batch(self):
        shapes = {"x": (2, 4, 3, 6, 4), "noise": (2, 4, 3, 6, 4), "y": (2, 1, 6, 16), "timestep": (2,), "fps": (2,), "height": (2,),
                  "width": (2,)}
        random.seed(1)
        batch = {name: array.array("f", (random.gauss(0, 1) for _ in range(math.prod(shape)))) for name, shape in shapes.items()}
        batch |= {name: array.array("f", values) for name, values in
                  (("timestep", [100, 900]), ("fps", [24, 24]), ("height", [48, 48]), ("width", [32, 32]))}
        write_safetensors(self.dir / "batch.safetensors", {name: ("F32", shapes[name], v.tobytes()) for name, v in batch.items()})
        # With weights of the last layer that are zero the loss is that of the target alone.
        self.bench(STDIT3, "--inputs", "batch.safetensors", "--outputs", "w.safetensors", "train.lr=0")
        weights = read_safetensors(self.dir / "w.safetensors")
        for name in ("final_layer.linear.weight", "final_layer.linear.bias"):
            dtype, shape, data = weights[name]
            weights[name] = (dtype, shape, bytes(len(data)))
        write_safetensors(self.dir / "w.safetensors", weights)
        self.bench(STDIT3, "--inputs", "batch.safetensors", "--weights", "w.safetensors", "train.lr=0")
        losses = self.report()["loss"]
        self.assertEqual(len(set(losses)), 1)
        target = sum((x - e) ** 2 for x, e in zip(batch["x"], batch["noise"])) / len(batch["x"])
        self.assertAlmostEqual(losses[0] / target, 1, delta=1e-5)
        self.refused(self.bench(WAN, "--inputs", "batch.safetensors", expect=None), 2, 'model.name is "wan"')

    def test_what_is_refused(self):
        for deck, options, text in (
                *((STDIT3, ["--shape", shape], "--shape 1x15x60x106") for shape in ("1x3x6", "1x3x6x4x1", "0x3x6x4", "1x3x6x", "a")),
                (STDIT3, ["--shape", "1x3x6x4", "--captions", "7"], "at most 6 tokens"),
                (SEGMENTATION, ["--shape", "1x3x6x4"], "segmentation does not train on latents"),
                (STDIT3, ["data.path=synthetic:clips=1"], "channels"),
                (STDIT3, ["--shape", "1x3x6x4", "--steps", "0"], "--steps 0 is out of range")):
            with self.subTest(options):
                self.refused(self.bench(deck, *options, expect=None), 2, text)


if __name__ == "__main__":
    unittest.main()
