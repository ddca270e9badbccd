"""Wan2.1's VAE, tiny and random, through the jobs of clips: the same results on any number of ranks and for chunks of any size, and
clear refusals of what it cannot do."""

import json
import math
import shutil
import unittest

from harness import WeftTest

DECK = """
[run]
dir = "run"
threads = 1
[model]
name = "wan_vae"
[vae]
weights = "random:7"
filters = 4
num_res_blocks = 1
channel_multipliers = [1, 2, 2, 4]
[data]
path = "synthetic:clips=3,frames=11,height=24,width=32;clips=2,frames=1,height=32,width=40"
[encode]
output = "latents.h5"
text = false
dtype = "f32"
[reconstruct]
inputs = ["lavfi:testsrc2=duration=1:rate=11:size=32x29", "lavfi:smptebars=duration=1:rate=1:size=24x16"]
"""


class WanVae(WeftTest):
    def setUp(self):
        super().setUp()
        (self.dir / "wan.toml").write_text(DECK)

    def reconstructed(self, ranks, *overrides):
        shutil.rmtree(self.dir / "run/reconstructed", ignore_errors=True)  # what is finished would stay
        self.weft("reconstruct", "wan.toml", *overrides, ranks=ranks)
        return json.loads((self.dir / "run/reconstructed/reconstruct.json").read_text())

    def test_reconstruct(self):
        one, two = self.reconstructed(1), self.reconstructed(2)
        self.assertEqual(one["latent"], two["latent"])
        for a, b in zip(one["clips"], two["clips"]):
            for key in ("output", "frames", "height", "width", "latent_frames", "psnr", "ssim"):
                self.assertEqual(a[key], b[key], key)
            self.assertEqual(a["planned_bytes"], a["peak_bytes"])
        # Of 11 frames two are behind the last group of four; of 29 rows five behind the last eight.
        clip, picture = one["clips"]
        self.assertEqual([clip["frames"], clip["latent_frames"], clip["height"]], [9, 3, 24])
        self.assertEqual([picture["frames"], picture["latent_frames"]], [1, 1])
        self.assertEqual(len(one["latent"]["mean"]), 16)
        # The clip at once: the same but for rounding.
        whole = self.reconstructed(1, "vae.chunk_latents=0")
        for a, b in zip(one["latent"]["mean"], whole["latent"]["mean"]):
            self.assertTrue(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-6), (a, b))
        self.assertLess(abs(clip["psnr"] - whole["clips"][0]["psnr"]), 1e-3)
        self.assertGreater(whole["clips"][0]["peak_bytes"], clip["peak_bytes"])

    def test_encode(self):
        stores = []
        for ranks in (1, 2):
            self.weft("encode", "wan.toml", f"encode.output=of{ranks}.h5", ranks=ranks)
            stores.append((self.dir / f"of{ranks}.h5").read_bytes())
        self.assertEqual(*stores)
        said = self.weft("inspect", "of1.h5", ranks=0).out
        self.assertIn("every hash verified", said)
        # Means, normalised: another store, of half the channels.
        self.weft("encode", "wan.toml", "encode.output=means.h5", "encode.latents=mean", ranks=2)
        self.assertLess((self.dir / "means.h5").stat().st_size, len(stores[0]))
        self.weft("plan", "wan.toml", "--job", "encode", "--gpus", "2", "--memory", "8", ranks=0)

    def test_refusals(self):
        self.refused(self.weft("train", "wan.toml", ranks=1, expect=None), 2, "no task", "wan_vae")
        self.refused(self.weft("reconstruct", "wan.toml", "vae.z_channels=8", ranks=1, expect=None), 2, "vae.z_channels = 8", "16")
        self.refused(self.weft("reconstruct", "wan.toml", "vae.temporal_downsample=[true]", ranks=1, expect=None), 2,
                     "vae.temporal_downsample")
        self.refused(self.weft("reconstruct", "wan.toml", "vae.filters=3", "vae.channel_multipliers=[1, 1, 2, 2]", ranks=1,
                               expect=None), 2, "even")
        self.refused(self.weft("reconstruct", "wan.toml", "memory.arena_gib=0.0001", ranks=1, expect=None), 2, "memory.arena_gib")


if __name__ == "__main__":
    unittest.main()
