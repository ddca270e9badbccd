"""What belongs together (docs/architecture.md): for each row of that table a right partner, then a wrong one, which is refused."""

import json
import re
import shutil
import struct
import unittest

import tiny_models
from harness import REPOSITORY, WeftTest, make_video, read_safetensors, write_safetensors
from test_evaluate import png

USAGE, DATA, CHECKPOINT = 2, 3, 4
T5 = """
[t5]
weights = "t5"
d_model = 16
d_kv = 8
num_heads = 2
d_ff = 32
num_layers = 2
vocab_size = 144
max_length = 24
"""
VAE = """
[vae]
weights = "vae"
scale = []
shift = []
spatial_channels = [8, 8, 8, 8]
spatial_res_blocks = 1
spatial_groups = 4
filters = 8
num_res_blocks = 1
channel_multipliers = [1, 1, 1, 1]
num_groups = 4
"""
LORA = ("model.weights=base.safetensors", "lora.rank=2", "lora.alpha=6", 'lora.targets=["*.attn.*"]')
SEGMENTATION = """[run]
dir = "run"
threads = 1
[model]
name = "segmentation"
encoder = "mobilenetv2dilated"
decoder = "c1_deepsup"
num_classes = 2
[data]
path = "a.h5"
short_sides = [32]
max_side = 64
[train]
steps = 1
batch_size = 1
bn_momentum = 0.1
"""


def rows():
    """The first two columns of the table."""
    text = (REPOSITORY / "docs/architecture.md").read_text().split("## What belongs together")[1].split("\n## ")[0]
    table = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    return [(cells[0].removeprefix("| "), cells[1]) for cells in table]


def case_of(stored, bound):
    return "test_" + re.sub(r"\W+", "_", f"{stored} {bound}".replace("'s", "s"))


class Identities(WeftTest):
    def append(self, text):
        deck = self.dir / "deck.toml"
        deck.write_text(deck.read_text().replace("model_max_length = 4", "model_max_length = 24") + text)

    def one(self, *arguments, expect=0):
        return self.weft(*arguments, ranks=0, expect=expect, replace=False)

    def trains(self, run, *options, expect=0):
        return self.train(run, "train.steps=1", *options, ranks=0, expect=expect)

    def stores(self, captions=("a cat", "a dog")):
        """cat.h5 of "a cat": clips, all with that caption."""
        for caption in captions:
            name = caption.split()[-1]
            make_video(self.dir / f"{name}.avi", "testsrc2=duration=2:size=32x32:rate=10")
            (self.dir / f"{name}.csv").write_text(f"path,text\n{name}.avi,{caption}\n")
            self.one("ingest", "deck.toml", f"ingest.inputs=['{name}.csv']", f"ingest.output={name}.h5", "ingest.frames=[3]",
                     "ingest.height=16", "ingest.width=16")

    def encoders(self):
        for seed in (3, 4):
            tiny_models.write_t5(self.dir / ("t5" if seed == 3 else "other_t5"), seed=seed)

    def test_every_row_has_a_case(self):
        cases = {name for name in dir(self) if name.startswith("test_")} - {"test_every_row_has_a_case"}
        self.assertEqual({case_of(*row) for row in rows()}, cases)

    def test_text_features_the_captions_of_the_data(self):
        self.append(T5)
        self.encoders()
        self.stores()
        self.one("text", "deck.toml", "cat.h5", "--features", "cat.safetensors")
        self.trains("right", "data.path=cat.h5", "data.text_features=cat.safetensors")
        wrong = ("data.path=dog.h5", "data.text_features=cat.safetensors")
        self.refused(self.trains("wrong", *wrong, expect=None), DATA, "was made of other captions than those of dog.h5", "weft text")
        self.refused(self.one("evaluate", "deck.toml", "run.dir=right", *wrong, "validation.share=0.25", "evaluate.output=e",
                              expect=None), DATA, "was made of other captions")
        (self.dir / "two.txt").write_text("a cat\na cat\n")
        self.one("text", "deck.toml", "two.txt", "--features", "two.safetensors")
        job = self.trains("wrong", "data.path=cat.h5", "data.text_features=two.safetensors", expect=None)
        self.refused(job, DATA, "two.safetensors has 2 features for the ")
        # Without a hash, as others write it: counted, and a WARN.
        bare = {name: tensor for name, tensor in read_safetensors(self.dir / "cat.safetensors").items()}
        write_safetensors(self.dir / "bare.safetensors", bare)
        self.assertIn("WARN: cannot verify that data.text_features = bare.safetensors belongs to dog.h5",
                      self.trains("bare", "data.path=dog.h5", "data.text_features=bare.safetensors").err)

    def encoded(self, name, *options):
        self.one("encode", "deck.toml", f"data.path={name}.h5", f"encode.output={name}_latents.h5", "vae.weights=random:1", *options)

    def test_text_features_in_stores_one_text_encoder(self):
        self.append(T5 + VAE)
        self.encoders()
        self.stores()
        fixed = ("vae.scale=[1,1,1,1]", "vae.shift=[0,0,0,0]")
        self.encoded("cat", *fixed)
        self.encoded("dog", *fixed)
        mix = ('data.path=["cat_latents.h5","dog_latents.h5"]', "model.in_channels=4")
        self.trains("right", *mix)
        (self.dir / "dog_latents.h5").unlink()
        self.encoded("dog", "t5.weights=other_t5", *fixed)
        self.refused(self.trains("wrong", *mix, expect=None), DATA, "encoded by different text encoders")
        job = self.trains("wrong", "data.path=cat_latents.h5", "validation.path=dog_latents.h5", "model.in_channels=4", expect=None)
        self.refused(job, DATA, "encoded by different text encoders")

    def test_checkpoint_the_text_encoder_of_its_captions(self):
        self.append(T5)
        self.encoders()
        self.stores(["a cat"])
        self.one("text", "deck.toml", "cat.h5", "--features", "cat.safetensors")
        data = ("data.path=cat.h5", "data.text_features=cat.safetensors")
        self.trains("run", *data)
        clips = ("generate.image_size=[16,16]", "generate.num_frames='3'", "sampler.steps=1", "generate.prompts=['a cat']", "generate.aes=0")
        self.one("generate", "deck.toml", "run.dir=run", *clips)
        other = "t5.weights=other_t5"
        self.refused(self.one("generate", "deck.toml", "run.dir=run", "generate.output=o", *clips, other, expect=None), DATA,
                     "another text encoder")
        job = self.trains("samples", *data, *clips[:3], "samples.every=1", "samples.prompts=['a cat']", other, expect=None)
        self.refused(job, DATA, "another text encoder")
        self.one("text", "deck.toml", "cat.h5", "--features", "two.safetensors", other)
        job = self.train("run", "train.steps=2", data[0], "data.text_features=two.safetensors", ranks=0, expect=None)
        self.refused(job, DATA, "encoded by another text encoder")
        self.train("run", "train.steps=2", data[0], ranks=0)  # without texts, which is only a WARN
        self.refused(self.train("run", "train.steps=3", data[0], "data.text_features=two.safetensors", ranks=0, expect=None), DATA,
                     "encoded by another text encoder")

    def make_vae(self, steps):
        self.one("train", "deck.toml", "model.name=vae", "data.path=clips.h5", "run.dir=vae", f"train.steps={steps}",
                 "train.batch_size=1", "train.micro_batches=2", "vae.weights=")

    def test_latents_the_checkpoint_of_the_VAE(self):
        self.append(VAE)
        self.ingest(frames=3)
        self.make_vae(1)
        self.one("encode", "deck.toml", "data.path=clips.h5", "encode.output=latents.h5", "encode.text=false")
        own = ("data.path=latents.h5", "model.in_channels=4")
        self.trains("run", *own)
        clips = ("generate.image_size=[32,32]", "generate.num_frames='3'", "sampler.steps=1")
        self.one("generate", "deck.toml", "run.dir=run", *own, *clips)
        self.make_vae(2)
        job = self.one("generate", "deck.toml", "run.dir=run", "generate.output=o", *own, *clips, expect=None)
        self.refused(job, DATA, "latents.h5 was encoded with another checkpoint than vae.weights = vae")
        job = self.trains("samples", *own, *clips, "samples.every=1", "samples.prompts=['x']", expect=None)
        self.refused(job, DATA, "latents.h5 was encoded with another checkpoint")
        self.one("encode", "deck.toml", "data.path=clips.h5", "encode.output=other.h5", "encode.text=false")
        for pair in (('data.path=["latents.h5","other.h5"]',), ("data.path=latents.h5", "validation.path=other.h5")):
            job = self.trains("wrong", "model.in_channels=4", *pair, expect=None)
            self.refused(job, DATA, "latents.h5 and other.h5 were encoded by different checkpoints")

    def test_latents_in_a_mix_one_scale_and_shift(self):
        self.append(VAE)
        self.stores()
        for name, scale in (("cat", 1), ("dog", 1)):
            self.encoded(name, "encode.text=false", f"vae.scale=[{scale},1,1,1]", "vae.shift=[0,0,0,0]")
        mix = ('data.path=["cat_latents.h5","dog_latents.h5"]', "model.in_channels=4")
        self.trains("right", *mix)
        (self.dir / "dog_latents.h5").unlink()
        self.encoded("dog", "encode.text=false", "vae.scale=[2,1,1,1]", "vae.shift=[0,0,0,0]")
        self.refused(self.trains("wrong", *mix, expect=None), DATA, "different scales or shifts")

    def base(self, name="base", *options):
        self.trains(name, *options)
        self.one("export", name, f"{name}.safetensors")

    def test_weights_the_model_of_the_deck(self):
        self.base()
        self.trains("right", "model.weights=base.safetensors")
        for less in ("model.depth=1", "model.qk_norm=false"):
            with self.subTest(less):
                job = self.trains("wrong", "model.weights=base.safetensors", less, expect=None)
                self.refused(job, DATA, "base.safetensors", "q_norm" if "qk" in less else "blocks.1")

    def test_weights_of_a_run_the_model_of_the_deck(self):
        self.trains("run")
        clips = ("generate", "deck.toml", "run.dir=run", "generate.image_size=[16,16]", "generate.num_frames='3'", "sampler.steps=1")
        self.one(*clips)
        for less in ("model.depth=1", "model.qk_norm=false"):
            name = "q_norm" if "qk" in less else "blocks.1"
            for job in (self.one(*clips, "generate.output=o", less, expect=None), self.train("run", less, ranks=0, expect=None),
                        self.one("evaluate", "deck.toml", "run.dir=run", "validation.share=0.25", "evaluate.output=e", less, expect=None)):
                with self.subTest(less=less, said=job.err):
                    self.refused(job, CHECKPOINT, "step_1", name)

    def test_checkpoint_its_run(self):
        self.trains("run")
        self.trains("other", "run.seed=8")
        shutil.rmtree(self.dir / "run" / "step_1")
        shutil.copytree(self.dir / "other" / "step_1", self.dir / "run" / "step_1")
        self.refused(self.train("run", ranks=0, expect=None), CHECKPOINT, "is of another run")

    def test_checkpoint_the_data(self):
        data = "data.path=synthetic:clips=8,frames=3,height=16,width=16,seed={}"
        self.trains("run", data.format(1))
        said = "is not the data that run/step_1 was trained on"
        self.assertNotIn(said, self.train("run", "train.steps=2", data.format(1), ranks=0).err)
        self.assertRegex(self.train("run", "train.steps=3", data.format(2), ranks=0).err, "WARN: data.path = .* is not the data that run/step_2")

    def test_checkpoint_of_a_segmentation_the_names_of_its_classes(self):
        (self.dir / "s.toml").write_text(SEGMENTATION)
        for folder, pixel in (("pictures", lambda x, y: (90 * (x % 2),) * 3), ("labels", lambda x, y: (x % 2 + 1,))):
            (self.dir / folder).mkdir()
            for i in range(2):
                (self.dir / folder / f"{i}.png").write_bytes(png(64, 64, pixel))
        for store, names in (("a", "road\nsky\n"), ("b", "sky\nroad\n")):
            (self.dir / f"{store}.txt").write_text(names)
            self.one("ingest", "s.toml", "ingest.images=pictures", "ingest.labels=labels", f"ingest.output={store}.h5",
                     f"ingest.class_names={store}.txt", "ingest.num_classes=2")
        self.one("train", "s.toml")
        evaluate = ("evaluate", "s.toml", "evaluate.output=e")
        self.one(*evaluate)
        said = 'class 0 is "sky" in b.h5, and "road" in the data that'
        self.refused(self.one(*evaluate, "data.path=b.h5", expect=None), DATA, said)
        self.refused(self.one("train", "s.toml", "train.steps=2", "data.path=b.h5", expect=None), DATA, said)
        self.refused(self.one("segment", "s.toml", "segment.inputs=['pictures']", "segment.output=o", "data.path=b.h5", expect=None),
                     DATA, said)

    def test_best_checkpoint_the_held_out_samples(self):
        options = ("validation.every=1", "validation.share=0.25", "train.keep_best=true", "train.lr=0")
        data = "data.path=synthetic:clips=8,frames=3,height=16,width=16,seed={}"
        self.trains("run", *options, data.format(1))
        said = "WARN: the held-out samples"
        self.assertNotIn(said, self.train("run", "train.steps=2", *options, data.format(1), ranks=0).err)
        self.assertIn(said, self.train("run", "train.steps=3", *options, data.format(2), ranks=0).err)
        lines = [json.loads(line)["set"] for line in (self.dir / "run" / "validation.jsonl").read_text().splitlines()]
        self.assertEqual((lines[0] == lines[1], lines[1] == lines[-1]), (True, False))

    def test_adapter_its_base(self):
        self.base()
        self.base("other", "run.seed=8")
        self.trains("run", *LORA)
        self.train("run", "train.steps=2", *LORA, ranks=0)
        job = self.train("run", "train.steps=3", "model.weights=other.safetensors", *LORA[1:], ranks=0, expect=None)
        self.refused(job, DATA, "belong to another base than other.safetensors")

    def test_adapters_configuration_its_tensors(self):
        self.base()
        self.trains("run", *LORA)
        self.one("export", "run", "adapter")
        clips = ("generate", "deck.toml", "generate.weights=base.safetensors", "generate.adapters=['adapter']", "generate.image_size=[16,16]",
                 "generate.num_frames='3'", "sampler.steps=1")
        self.one(*clips, "generate.output=right")
        path = self.dir / "adapter" / "adapter_config.json"
        config = json.loads(path.read_text())
        for key, value in (("r", 3), ("lora_alpha", 7), ("use_rslora", "true")):
            with self.subTest(key):
                path.write_text(json.dumps(config | {key: value}))
                self.refused(self.one(*clips, f"generate.output={key}", expect=None), DATA, "adapter")

    def test_finished_results_the_request(self):
        clips = ("generate", "deck.toml", "generate.weights=random:1", "generate.image_size=[16,16]", "generate.num_frames='3'",
                 "sampler.steps=1", "generate.output=o")
        self.one(*clips)
        self.assertIn("1 finished before", self.one(*clips).err)
        self.refused(self.one(*clips, "run.seed=8", expect=None), CHECKPOINT, "1 finished result of another request", "--replace")
        self.assertIn("WARN: o: replaces 1 finished result", self.one(*clips, "run.seed=8", "--replace").err)

    def test_parts_of_a_store_of_latents_the_job(self):
        self.append(VAE)
        self.ingest(frames=3)
        (self.dir / "l.h5.parts").mkdir()
        (self.dir / "l.h5.parts" / "job").write_text("seed 1\n")
        job = self.one("encode", "deck.toml", "data.path=clips.h5", "encode.output=l.h5", "encode.text=false", "vae.weights=random:1", expect=None)
        self.refused(job, CHECKPOINT, "l.h5.parts holds the clips of another job")
        shutil.rmtree(self.dir / "l.h5.parts")
        self.one("encode", "deck.toml", "data.path=clips.h5", "encode.output=l.h5", "encode.text=false", "vae.weights=random:1")

    def test_bytes_what_was_written(self):
        self.base()
        path = self.dir / "base.safetensors"
        data = bytearray(path.read_bytes())
        self.trains("right", "model.weights=base.safetensors")
        begin = 8 + struct.unpack("<Q", data[:8])[0]
        data[(begin + len(data)) // 2] ^= 1
        path.write_bytes(data)
        self.refused(self.trains("wrong", "model.weights=base.safetensors", expect=None), DATA, "is damaged")


if __name__ == "__main__":
    unittest.main()
