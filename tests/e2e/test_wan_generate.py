"""weft generate with Wan on tiny models: from umT5 and its negative prompt over the solver to the VAE's frames, on any number of
ranks; what it cannot make."""

import json
import struct
import unittest

from harness import WeftTest, read_safetensors, write_safetensors
from test_evaluate import png
from tiny_models import TINY_WAN_DECK, write_t5

I2V = ("model.variant=i2v", "model.in_channels=36", "model.out_channels=16")
TI2V = ("model.variant=ti2v", "model.in_channels=48", "vae.variant=2.2", "vae.z_channels=48", "vae.patch_size=2",
        "vae.decoder_filters=6")


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

    def test_clips_that_begin_with_a_picture(self):
        (self.dir / "wide.png").write_bytes(png(80, 40, lambda x, y: (3 * x, 5 * y, x * y % 256)))
        (self.dir / "other.png").write_bytes(png(80, 40, lambda x, y: (255 - 3 * x, 5 * y, 7)))
        given = 'generate.references=["wide.png", "other.png"]'
        for name, options, size in ("i2v", I2V, (16, 48)), ("ti2v", (*TI2V, "generate.image_size=[64,64]"), (32, 128)):
            with self.subTest(name):
                self.generate(*options, given, f"generate.output={name}")
                one = self.clips(name)
                self.assertEqual({(line["height"], line["width"]) for line in one.values()}, {size})
                for ranks in 2, 3:
                    self.generate(*options, given, f"generate.output={name}{ranks}", "parallel.sp=%d" % (ranks % 3 or 1),
                                  ranks=ranks)
                    self.assertEqual(self.pixels(f"{name}{ranks}"), self.pixels(name))
                # Another picture is another clip, and only where it is another.
                self.generate(*options, 'generate.references=["wide.png", "wide.png"]', f"generate.output={name}_same")
                same = self.pixels(f"{name}_same")
                self.assertEqual(same["sample_0000"], one["sample_0000"]["pixels"])
                self.assertNotEqual(same["sample_0001"], one["sample_0001"]["pixels"])
        self.generate(*TI2V, "generate.image_size=[32,32]", "generate.output=text")  # without a picture
        for options, what in (((*I2V,), "without a picture"), ((*I2V, given, "generate.loop=2"), "begins with one picture"),
                              ((*I2V, 'generate.references=["none.png", "wide.png"]'), "none.png")):
            job = self.generate(*options, "generate.output=refused", expect=None)
            self.refused(job, 3 if what == "none.png" else 2, what)

    def test_trainings_on_first_frames(self):
        self.weft("ingest", "deck.toml", 'ingest.inputs=["lavfi:testsrc2=size=96x64:rate=10:duration=6"]', "ingest.frames=[5]",
                  "ingest.height=64", "ingest.width=64", "ingest.output=px.h5", ranks=0)
        for name, options, channels in (("i2v", (*I2V, "diffusion.noise_range=[0.9,1]"), 36),
                                        ("ti2v", (*TI2V, "diffusion.first_frame=0.5"), 48)):
            with self.subTest(name):
                encode = ("encode", "deck.toml", *options, "data.path=px.h5", f"encode.output={name}.h5")
                if name == "i2v":
                    self.refused(self.weft(*encode, ranks=0, expect=None), 2, "encode.latents")
                self.weft(*encode, "encode.latents=mean", ranks=0)
                self.assertIn(f"[{channels},2,", self.weft("inspect", f"{name}.h5", ranks=0).out)

                def train(run, steps, *more, ranks=1):
                    self.weft("train", "deck.toml", *options, f"data.path={name}.h5", f"run.dir={run}", f"train.steps={steps}",
                              "train.batch_size=2", "train.micro_batches=2", "train.warmup_steps=0", *more, ranks=ranks)
                train(f"{name}1", 4)
                # With four ranks and two heads pairs share the heads, and the queries of one.
                for run, more, ranks in ("two", (), 2), ("sp", ("parallel.sp=2",), 2), ("sp4", ("parallel.sp=4",), 4):
                    train(name + run, 4, *more, ranks=ranks)
                    self.assert_close(self.losses(name + run), self.losses(f"{name}1"), 1e-5)
                if name == "i2v":  # it has one of the experts that clips would need
                    job = self.weft("train", "deck.toml", *options, f"data.path={name}.h5", "run.dir=no", "sampler.boundary=0.9",
                                    "samples.every=2", 'samples.prompts=["a"]', "t5.weights=t5", ranks=0, expect=None)
                    self.refused(job, 2, "sampler.boundary")
                train(f"{name}_parts", 2)
                train(f"{name}_parts", 4)
                self.assert_same_run(f"{name}_parts", f"{name}1")

    def test_guidance_on_two_ranks(self):
        self.generate()
        for name, options, ranks in (("cfg", (), 2), ("groups", (), 4), ("sp", ("parallel.sp=2",), 4)):
            self.generate("generate.cfg_ranks=2", *options, f"generate.output={name}", ranks=ranks)
            self.assertEqual(self.pixels(name), self.pixels())
        self.refused(self.generate("generate.cfg_ranks=2", "generate.output=no", expect=None), 2, "1 rank")
        for option in "sampler.cfg_scale=1", "sampler.cache=easycache":
            job = self.generate("generate.cfg_ranks=2", option, "sampler.cache_threshold=%d" % ("cache" in option),
                                "generate.output=no", ranks=2, expect=None)
            self.refused(job, 2, "generate.cfg_ranks")

    def test_two_experts(self):
        # Weights of one expert, as an export has them.
        self.weft("train", "deck.toml", "run.dir=one", "train.steps=1", "train.lr=0", "model.weights=",
                  "data.path=synthetic:clips=4,frames=2,height=4,width=6,channels=16,latent=1", ranks=0)
        self.weft("export", "one", "low.safetensors", ranks=0)
        low = read_safetensors(self.dir / "low.safetensors")
        draw = {"head.head.weight": 0.05, "head.head.bias": 0.5}

        def filled(name, value):
            return value[0], value[1], struct.pack(f"<{len(value[2]) // 4}f", *[draw[name]] * (len(value[2]) // 4))
        low = {name: filled(name, value) if name in draw else value for name, value in low.items()}
        high = low | {"head.head.bias": filled("head.head.weight", low["head.head.bias"])}
        for name, tensors in ("low", low), ("high", high):
            write_safetensors(self.dir / f"{name}.safetensors", tensors)
            folder = self.dir / "both" / f"{name}_noise_model"
            folder.mkdir(parents=True)
            write_safetensors(folder / "diffusion_pytorch_model.safetensors", tensors)
        experts = ("sampler.boundary=0.875", "sampler.cfg_scale=[2,3]", "sampler.shift=12")
        self.generate(*experts, "generate.weights=both", "generate.output=folder")
        self.generate(*experts, "generate.weights=low.safetensors", "generate.weights_high_noise=high.safetensors",
                      "generate.output=files", ranks=2)
        self.assertEqual(self.pixels("folder"), self.pixels("files"))
        seen = {*self.pixels("folder").values()}
        q = "diffusion_model.blocks.0.cross_attn.v."
        write_safetensors(self.dir / "lora.safetensors",
                          {q + "lora_down.weight": ("F32", [1, 32], struct.pack("<32f", *[0.5] * 32)),
                           q + "lora_up.weight": ("F32", [32, 1], struct.pack("<32f", *[0.5] * 32)),
                           q + "alpha": ("F32", [1], struct.pack("<f", 3))})
        few = ("sampler.boundary=0", "sampler.boundary_step=1", "sampler.solver=euler", "sampler.timesteps=[1000,500]",
               "sampler.cfg_scale=1")
        for i, other in enumerate([("generate.weights=high.safetensors", "generate.weights_high_noise=low.safetensors"),
                                   ('generate.adapters=["lora.safetensors"]',),
                                   ('generate.adapters_high_noise=["lora.safetensors=0.5"]',), few]):
            self.generate(*experts, "generate.weights=both", *other, f"generate.output=e{i}")
            self.assertTrue(seen.isdisjoint(self.pixels(f"e{i}").values()), other)
            seen.update(self.pixels(f"e{i}").values())
        # One in memory at a time, read again for each of two batches.
        job = self.generate(*experts, "generate.weights=both", 'generate.adapters_high_noise=["lora.safetensors=0.5"]',
                            "generate.experts=in_turn", "generate.output=turns")
        self.assertIn("in turn", job.err)
        self.assertEqual(self.pixels("turns"), self.pixels("e2"))
        for options, what in ((("generate.weights=low.safetensors",), "generate.weights_high_noise"),
                              (("generate.weights=random:1", "generate.experts=in_turn"), "generate.experts"),
                              (("sampler.boundary=0", "sampler.cfg_scale=1", "generate.weights_high_noise=high.safetensors"),
                               "sampler.boundary"),
                              (("generate.weights=random:1", 'generate.adapters_high_noise=["lora.safetensors"]'),
                               "generate.adapters_high_noise"),
                              (("sampler.boundary=0",), "sampler.cfg_scale"),
                              ((*few, "sampler.timesteps=[500,1000]"), "sampler.timesteps"),
                              ((*few, "sampler.solver=unipc"), "sampler.timesteps")):
            job = self.generate(*experts, "generate.weights=both", *options, "generate.output=refused", expect=None)
            self.refused(job, 2, what)

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

        def weights(experts):
            job = self.weft("plan", "deck.toml", "--job", "generate", "--gpus", "2", "--memory", "8", "--json", "plan.json",
                            "t5.weights=t5", "generate.prompt_file=prompts.txt", "sampler.boundary=0.9", f"generate.experts={experts}")
            self.assertEqual("one expert at a time" in job.out, experts == "in_turn")
            return json.loads((self.dir / "plan.json").read_text())
        self.assertEqual(*({k: v // n for k, v in weights(e).items() if "experts" in k} for e, n in (("auto", 2), ("in_turn", 1))))


if __name__ == "__main__":
    unittest.main()
