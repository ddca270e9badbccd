"""weft generate with Wan on tiny models: from umT5 and its negative prompt over the solver to the VAE's frames, on any number of
ranks; what it cannot make."""

import json
import struct
import unittest

from harness import WeftTest, read_safetensors
from tiny_models import TINY_WAN_DECK, write_t5


class GenerateWan(WeftTest):
    def setUp(self):
        super().setUp()
        (self.dir / "deck.toml").write_text(TINY_WAN_DECK)
        (self.dir / "prompts.txt").write_text("a cat\na dog on a roof\n")
        write_t5(self.dir / "t5", umt5=True)

    def generate(self, *overrides, ranks=0, expect=0):
        return self.weft("generate", "deck.toml", "generate.prompt_file=prompts.txt", "t5.weights=t5", *overrides,
                         ranks=ranks, expect=expect)

    def clips(self, output="out"):
        lines = (self.dir / output / "generated.jsonl").read_text().splitlines()
        return {line["name"]: line for line in map(json.loads, lines)}

    def pixels(self, output="out"):
        return {name: line["pixels"] for name, line in self.clips(output).items()}

    def latents(self, output, name="sample_0000"):
        values = read_safetensors(self.dir / output / f"{name}.safetensors")["latent_0"][2]
        return struct.unpack(f"<{len(values) // 4}f", values)

    def test_clips_from_texts(self):
        self.generate("generate.tensors=true")
        one = self.pixels()
        self.assertEqual(len(set(one.values())), 2)
        for line in self.clips().values():
            self.assertEqual((line["frames"], line["height"], line["width"]), (5, 32, 48))
        # Two prompts and the model's own negative prompt; no score is appended.
        self.assertEqual(len(read_safetensors(self.dir / "out" / "text_features.safetensors")), 3)
        self.generate("generate.output=two", ranks=2)
        self.assertEqual(self.pixels("two"), one)
        self.generate("generate.output=sp", "generate.tensors=true", "parallel.sp=2", ranks=2)
        a, b = self.latents("out"), self.latents("sp")
        self.assertLess(max(abs(x - y) for x, y in zip(a, b)), 1e-4 * max(map(abs, a)))
        # Each of these is another clip.
        seen = set(one.values())
        for i, other in enumerate(["generate.negative_prompt=blue", "sampler.solver=euler", "sampler.solver=dpm++",
                                   "sampler.shift=3", "sampler.cfg_scale=2"]):
            self.generate(other, f"generate.output=other{i}")
            self.assertTrue(seen.isdisjoint(self.pixels(f"other{i}").values()), other)
            seen.update(self.pixels(f"other{i}").values())

    def test_pictures_and_a_step_cache(self):
        log = self.generate("generate.num_frames=1", "generate.batch_size=2", "sampler.cache=easycache",
                            "sampler.cache_threshold=1000").err
        self.assertTrue((self.dir / "out" / "sample_0001.png").exists())
        self.assertIn("1 of 4 steps skipped", log)

    def test_what_it_cannot_make_is_refused(self):
        def refused(*said, overrides=()):
            self.refused(self.generate(*overrides, expect=None), 2, *said)

        refused("makes no clip of 4 frames", "ask for 1 frames or for 5", overrides=["generate.num_frames=4"])
        refused("multiples of 16, such as generate.image_size = [32, 32]", overrides=["generate.image_size=[32, 40]"])
        refused("cannot begin with given frames", overrides=["generate.loop=2"])
        refused("Wan has no null caption", overrides=["t5.weights="])
        refused("no published coefficients for Wan",
                overrides=["sampler.cache=teacache", "sampler.cache_threshold=0.1"])

    def test_plan(self):
        said = self.weft("plan", "deck.toml", "--job", "generate", "--gpus", "2", "--memory", "8", "--fabric", "8x400",
                         "t5.weights=t5", "generate.prompt_file=prompts.txt").out
        self.assertIn("5x32x48", said)


if __name__ == "__main__":
    unittest.main()
