"""Where a training starts: partial weights, and adapters (LoRA) on a base: training, restart, export, clips."""

import array
import json
import re
import shutil
import struct
import unittest

from harness import TINY_WAN_DECK, WeftTest, read_safetensors, write_safetensors

USAGE, DATA, CHECKPOINT = 2, 3, 4
LORA = ("model.weights=base.safetensors", "lora.rank=2", "lora.alpha=6", 'lora.targets=["*.attn.*", "*.cross_attn.*", "*.fc?"]')
CLIPS = """
[generate]
image_size = [16, 16]
num_frames = "3"
num_samples = 2
tensors = true
[sampler]
steps = 3
"""


def floats(tensor):
    dtype, shape, data = tensor
    assert dtype == "F32"
    return struct.unpack(f"<{len(data) // 4}f", data)


class LoraCase(WeftTest):
    """With base.safetensors, of a few steps of the tiny model."""

    def setUp(self):
        super().setUp()
        deck = self.dir / "deck.toml"
        deck.write_text(deck.read_text() + CLIPS)
        self.make_base("base")

    def make_base(self, name, *overrides):
        self.train(name, "train.steps=5", *overrides)
        self.weft("export", name, f"{name}.safetensors", ranks=0)

    def clips(self, output, *overrides, expect=0):
        """The frames that weft generate makes, {file: bytes}."""
        job = self.weft("generate", "deck.toml", f"generate.output={output}", *overrides, expect=expect)
        if expect is None:
            return job
        found = {p.name: read_safetensors(p) for p in sorted((self.dir / output).glob("*.safetensors"))}
        self.assertEqual(len(found), 2)
        return found


class Partial(LoraCase):
    def test_what_fits_is_loaded_and_the_rest_is_listed(self):
        weights = read_safetensors(self.dir / "base.safetensors")
        partial = {n: t for n, t in weights.items() if not n.startswith("temporal_blocks.")}
        partial["y_embedder.y_embedding"] = ("F32", (6, 16), bytes(4 * 6 * 16))
        partial["pos_embed"] = ("F32", (3,), bytes(12))
        write_safetensors(self.dir / "spatial.safetensors", partial)
        job = self.train("strict", "model.weights=spatial.safetensors", expect=None)
        self.refused(job, DATA, "pos_embed")

        job = self.train("part", "model.weights=spatial.safetensors", "model.weights_partial=matching", "train.steps=1",
                         "train.lr=0")
        missing = sum(n.startswith("temporal_blocks.") for n in weights)
        self.assertIn(f"{len(weights) - missing - 1} loaded, {missing} missing, 1 skipped by shape, 1 unexpected", job.err)
        for kind, count, state in ((r"spatial_blocks\.\*\.attn\.qkv\.weight", 2, "loaded"),
                                   (r"temporal_blocks\.\*\.mlp\.fc1\.bias", 2, "missing"),
                                   (r"y_embedder\.y_embedding", 1, r"skipped: F32 \[6, 16\] in the file, \[4, 16\] in the model"),
                                   ("pos_embed", 1, "unexpected")):
            self.assertRegex(job.err, rf"weights +{kind} +{count}  {state}")
        # A type that weft does not read is no shape to skip.
        eight = {n: ("F8_E4M3", s, bytes(len(v) // 4)) if len(s) == 2 else (d, s, v) for n, (d, s, v) in weights.items()}
        write_safetensors(self.dir / "eight.safetensors", eight)
        self.refused(self.train("eight", "model.weights=eight.safetensors", "model.weights_partial=matching", expect=None), DATA,
                     "F8_E4M3", "convert_weights.py")
        # A training always says what it starts from.
        self.assertRegex(job.err, rf"weights +spatial\.safetensors, xxh3 [0-9a-f]{{32}}, {len(partial)} tensors")
        # lr = 0: what was loaded is the file's, the rest what a run without a file draws.
        self.train("drawn", "train.steps=1", "train.lr=0")
        got, drawn = self.exported("part"), self.exported("drawn")
        for name, tensor in weights.items():
            loaded = name in partial and partial[name][1] == tensor[1]
            self.assertEqual(got[name], tensor if loaded else drawn[name], name)


class AdaptersOfWan(WeftTest):
    def test_training_and_its_merged_export(self):
        # Captions of 1 to all 6 tokens: with the padding's key alone q and k would learn nothing.
        write_safetensors(self.dir / "text.safetensors",
                          {str(i): ("F32", (1 + i % 6, 16), array.array("f", (((i * 7 + j) % 13 - 6) / 6 for j in range(16 * (1 + i % 6)))).tobytes())
                           for i in range(24)})
        (self.dir / "deck.toml").write_text(TINY_WAN_DECK.replace("[data]", '[data]\ntext_features = "text.safetensors"'))
        self.train("base", "train.steps=5", "model.class_dropout_prob=0.3", "diffusion.weighting=shift")
        self.weft("export", "base", "base.safetensors", ranks=0)
        job = self.train("run", "model.weights=base.safetensors", "lora.rank=2", "lora.alpha=6", "train.steps=5",
                         "validation.share=0.25", "validation.every=5")
        self.assertIn("LoRA of rank 2", job.err)
        line = json.loads((self.dir / "run" / "validation.jsonl").read_text().splitlines()[-1])
        self.weft("export", "run", "merged.safetensors", "--merged", "--raw", ranks=0)
        base, merged = (read_safetensors(self.dir / f"{name}.safetensors") for name in ("base", "merged"))
        self.assertEqual(base.keys(), merged.keys())
        changed = {name for name in base if base[name] != merged[name]}
        self.assertEqual(changed, {f"blocks.{i}.{attn}_attn.{part}.weight"
                                   for i in (0, 1) for attn in ("self", "cross") for part in "qkvo"})
        # The loss of held-out clips, by the merged weights: they are what the training measured.
        self.weft("evaluate", "deck.toml", "model.weights=merged.safetensors", "run.dir=none", "validation.share=0.25",
                  "evaluate.output=measured")
        measured = json.loads((self.dir / "measured" / "evaluation.json").read_text())["loss"]
        self.assertAlmostEqual(measured, line["loss"], delta=1e-5 * line["loss"])


class Adapters(LoraCase):
    def test_samples_and_held_out_loss_while_training(self):
        """By base and adapters, as weft generate and weft evaluate have them; the training is what it was without."""
        more = ("samples.every=4", 'samples.prompts=["a", "b"]', "generate.num_samples=1", "validation.share=0.25", "validation.every=4")
        self.train("without", *LORA, "train.steps=4", "validation.share=0.25")
        self.train("run", *LORA, "train.steps=4", *more)
        self.assert_same_run("without", "run")
        found = {p.name: read_safetensors(p) for p in sorted((self.dir / "run" / "samples" / "4").glob("*.safetensors"))}
        self.assertEqual(found, self.clips("again", *LORA, "run.dir=run", 'generate.prompts=["a", "b"]', "generate.num_samples=1"))
        line = json.loads((self.dir / "run" / "validation.jsonl").read_text().splitlines()[-1])
        self.weft("evaluate", "deck.toml", *LORA, "run.dir=run", "validation.share=0.25", "evaluate.output=measured")
        measured = json.loads((self.dir / "measured" / "evaluation.json").read_text())["loss"]
        self.assertAlmostEqual(measured, line["loss"], delta=1e-5 * line["loss"])  # merged adapters round otherwise

    def test_training_saves_adapters_alone_and_restarts_exactly(self):
        job = self.train("whole", *LORA)
        losses = self.losses("whole")
        self.assertLess(sum(losses[-5:]), sum(losses[:5]))
        self.assertRegex(job.err, r"weights +base\.safetensors, xxh3 values:[0-9a-f]{32}, 89 tensors: the base of the adapters")
        self.assertIn("LoRA of rank 2", job.err)
        # What is saved: adapters, their moments and their average, nothing of the base.
        manifest = json.loads((self.dir / "whole" / "latest" / "manifest.json").read_text())
        self.assertTrue(all(".lora_" in t["name"] for t in manifest["tensors"]))
        sizes = {a["name"]: a["elements"] for a in manifest["arrays"]}
        self.assertEqual(sizes["fixed"], 0)
        self.assertEqual({sizes[n] for n in ("master", "exp_avg", "exp_avg_sq", "ema")}, {122880}, "one bucket")

        self.train("parts", *LORA, "train.steps=8")
        job = self.train("parts", *LORA)
        self.assertIn("8 of 20 steps done", job.err)
        self.assertRegex(job.err, r"base +base\.safetensors, xxh3 values:[0-9a-f]{32}")
        self.assert_same_run("whole", "parts")
        # Ranks, their groups and recomputation change no more than the order of sums.
        for name, ranks, extra in (("one", 1, ()), ("sp", 2, ("parallel.sp=2",)), ("three", 3, ("model.recompute=0.5",)),
                                   ("zero", 2, ("parallel.zero=0",))):
            with self.subTest(name):
                self.train(name, *LORA, *extra, ranks=ranks)
                self.assert_close(self.losses(name), losses)
        self.train("bf16", *LORA, "model.dtype=bf16")
        self.assert_close(self.losses("bf16"), losses, 0.05)

    def test_another_alpha_is_refused(self):
        """It would multiply what was learned at once."""
        self.train("run", *LORA, "train.steps=3", ranks=0)
        job = self.train("run", *LORA, "train.steps=5", "lora.alpha=12", ranks=0, expect=None)
        self.refused(job, USAGE, "lora.alpha = 12 would multiply", "by 2", "set lora.alpha = 6 again")
        job = self.train("run", *LORA, "train.steps=5", "train.lr=2e-3", ranks=0)
        self.assertRegex(job.err, r"WARN: resuming from run/step_3 with a changed deck: train.lr 0.001 -> 0.002\n")

    def test_another_base_is_refused(self):
        self.make_base("other", "run.seed=8")
        self.train("run", *LORA, "train.steps=5")
        arguments = ["model.weights=other.safetensors", *LORA[1:]]
        self.refused(self.train("run", *arguments, expect=None), DATA, "in run belong to another base than other.safetensors")
        self.assertEqual(self.latest("run"), "step_5")
        # An adapter on a base that is not its own, by hash; of another size, by shape.
        self.weft("export", "run", "adapter", ranks=0)
        for adapter in ("run", "adapter"):
            job = self.clips("none", "generate.weights=other.safetensors", f"generate.adapters=['{adapter}']", expect=None)
            self.refused(job, DATA, adapter, "belong to another base than other.safetensors")
        # Of a checkpoint, whose files are no weights, likewise.
        job = self.clips("none", "generate.weights=other", "generate.adapters=['adapter']", expect=None)
        self.refused(job, DATA, "adapter", "belong to another base than checkpoint other/")
        # Its own base stored otherwise: in shards, in bf16.
        (self.dir / "shards").mkdir()
        self.weft("export", "base", "shards/model.safetensors", "--dtype", "bf16", "--shard-size", "0.00003", ranks=0)
        self.train("run", "model.weights=shards", *LORA[1:], "train.steps=6")
        self.clips("from_shards", "generate.weights=shards", "generate.adapters=['adapter']")
        wide = ["model.hidden_size=48"]
        self.make_base("wide", *wide)
        path = self.dir / "adapter" / "adapter_model.safetensors"
        write_safetensors(path, read_safetensors(path))  # as PEFT writes it: without the hash of a base
        job = self.clips("none", *wide, "generate.weights=wide.safetensors", "generate.adapters=['adapter']", expect=None)
        self.refused(job, DATA, "made for a weight of [", "the model's has [")

    def test_bad_input(self):
        for overrides, code, *said in (
                ((*LORA[:3], 'lora.targets=["*.attn.qvk"]'), USAGE, '"*.attn.qvk" matches no linear layer', '"*.attn.qkv"'),
                (("lora.rank=2",), USAGE, "model.weights is empty"),
                ((*LORA, "model.weights_partial=matching"), USAGE, "model.weights_partial"),
                ((*LORA, "model.only_train_temporal=true"), USAGE, "only_train_temporal", "temporal_blocks.*"),
                ((*LORA, "lora.targets=[]"), USAGE, "lora.targets"),
                (("model.weights=none.safetensors", *LORA[1:]), DATA, "none.safetensors")):
            with self.subTest(overrides):
                self.refused(self.train("bad", *overrides, expect=None), code, *said)
        # A run of whole weights does not go on as one of adapters, nor the other way round.
        self.refused(self.train("base", *LORA, expect=None), CHECKPOINT, "lora_")
        self.train("run", *LORA, "train.steps=2")
        self.refused(self.train("run", *LORA, "lora.rank=3", expect=None), CHECKPOINT, "has shape [2,", "expects [3,")
        self.refused(self.train("run", *LORA[:3], 'lora.targets=["*.attn.*"]', expect=None), CHECKPOINT, "lora_A")
        self.weft("export", "run", "adapter", ranks=0)
        self.refused(self.train("bad", "model.weights=adapter", expect=None), DATA, "adapter holds an adapter", "model.adapters")
        self.refused(self.train("bad", "model.weights=base.safetensors", "model.adapters=['adapter']", expect=None), USAGE,
                     "model.adapters = [adapter] with lora.rank = 0")
        for arguments, said in ((("run", "adapter.safetensors"), "--merged"), (("base", "w", "--merged"), "leave --merged"),
                                (("run", "w", "--names", "kohya"), "NAME.safetensors"),
                                (("run", "w.safetensors", "--names", "comfy", "--merged"), "--merged gives whole weights"),
                                (("base", "w.safetensors", "--names", "comfy"), "a run of whole weights"),
                                (("run", "w", "--raw", "--ema"), "--raw and --ema"),
                                (("run", "w", "--base", "base.safetensors"), "--base is for --merged")):
            self.refused(self.weft("export", *arguments, ranks=0, expect=None), USAGE, said)
        for adapters, code, said in (("['nothing=0.5']", DATA, "nothing does not exist"), ("['=1']", USAGE, '"=1"'),
                                     ("['run=0,5']", USAGE, '"run=0,5"'),
                                     ("['base']", DATA, "holds a whole model")):
            job = self.clips("none", "generate.weights=base.safetensors", f"generate.adapters={adapters}", expect=None)
            self.refused(job, code, said)

    def test_exported_merged_and_added_to_the_base_are_the_same_clips(self):
        self.train("run", *LORA)
        # The average, as samples have it, unless asked otherwise; and never over what is there.
        said = self.weft("export", "run", "adapter", ranks=0).err
        self.assertRegex(said, r"adapters of 30 layers of step 20 \(moving average \(EMA\), f32\) in adapter: rank 2, alpha 6; base base\.saf")
        self.weft("export", "run", "merged.safetensors", "--merged", ranks=0)
        kept = (self.dir / "adapter" / "adapter_model.safetensors").read_bytes()
        for arguments in (("run", "adapter", "--raw"), ("run", "merged.safetensors", "--merged"), ("base", "base.safetensors")):
            self.refused(self.weft("export", *arguments, ranks=0, expect=None), CHECKPOINT, "is there already", "--replace")
        self.assertEqual((self.dir / "adapter" / "adapter_model.safetensors").read_bytes(), kept)
        for more in ((), ("--raw",), ("--ema-decay", "0.99")):
            self.weft("export", "run", "again", "--replace", *more, ranks=0)
            same = read_safetensors(self.dir / "again" / "adapter_model.safetensors") == \
                read_safetensors(self.dir / "adapter" / "adapter_model.safetensors")
            self.assertEqual(same, more != ("--raw",), more)
        self.refused(self.weft("export", "run", "x", "--ema-decay", "0.5", ranks=0, expect=None), USAGE, "0.99")

        # PEFT's names, and W + alpha/rank B A of the base's W.
        base, merged = (read_safetensors(self.dir / f"{n}.safetensors") for n in ("base", "merged"))
        halves = read_safetensors(self.dir / "adapter" / "adapter_model.safetensors")
        config = json.loads((self.dir / "adapter" / "adapter_config.json").read_text())
        self.assertEqual((config["peft_type"], config["r"], config["lora_alpha"]), ("LORA", 2, 6))
        self.assertEqual(len(halves), 2 * len(config["target_modules"]))
        self.assertEqual(merged.keys(), base.keys())
        for name, tensor in base.items():
            layer = name.removesuffix(".weight")
            if layer not in config["target_modules"]:
                self.assertEqual(merged[name], tensor, name)
        layer = "spatial_blocks.1.mlp.fc1"
        a, b = (halves[f"base_model.model.{layer}.lora_{x}.weight"] for x in "AB")
        self.assertEqual((a[1], b[1]), ((2, 32), (128, 2)))
        a, b, w, got = (floats(t) for t in (a, b, base[layer + ".weight"], merged[layer + ".weight"]))
        self.assertNotEqual(w, got)
        for o in range(128):
            for i in range(32):
                want = w[o * 32 + i] + 3 * sum(b[o * 2 + r] * a[r * 32 + i] for r in range(2))
                self.assertAlmostEqual(got[o * 32 + i], want, delta=1e-6)

        # Clips: of the run, of the base with the run or its export, of merged weights.
        clips = self.clips("of_run", "run.dir=run")
        weights = "generate.weights=base.safetensors"
        self.assertEqual(self.clips("a", weights, "generate.adapters=['run']"), clips)
        self.assertEqual(self.clips("b", weights, "generate.adapters=['adapter=1.0']"), clips)
        self.assertEqual(self.clips("c", "generate.weights=merged.safetensors"), clips)
        for names in ("comfy", "kohya"):
            self.weft("export", "run", f"{names}.safetensors", "--names", names, ranks=0)
            self.assertEqual(self.clips(names, weights, f"generate.adapters=['{names}.safetensors']"), clips)
        plain = self.clips("d", weights)
        self.assertNotEqual(plain, clips)
        self.assertEqual(self.clips("e", weights, "generate.adapters=['run=0']"), plain)
        # Several: halves of one are the whole, but for rounding; what is there is not made again for the same adapters.
        two = self.clips("f", weights, "generate.adapters=['run=0.5','adapter=0.5']")
        written = [p.stat().st_mtime_ns for p in sorted((self.dir / "f").glob("*.safetensors"))]
        self.assertEqual(self.clips("f", weights, "generate.adapters=['run=0.5','adapter=0.5']"), two)
        self.assertEqual([p.stat().st_mtime_ns for p in sorted((self.dir / "f").glob("*.safetensors"))], written)
        self.assertNotEqual(self.clips("f", weights, "generate.adapters=['run=0.5','adapter=0.25']"), two)
        for name, tensors in clips.items():
            for tensor, (_, _, data) in tensors.items():
                one, other = (struct.unpack(f"<{len(data) // 4}f", d) for d in (data, two[name][tensor][2]))
                self.assertLess(max(abs(x - y) for x, y in zip(one, other)), 1e-4 * max(map(abs, one)), tensor)

        # The base elsewhere: named by hash, found by --base.
        shutil.move(self.dir / "base.safetensors", self.dir / "moved.safetensors")
        self.refused(self.weft("export", "run", "again.safetensors", "--merged", ranks=0, expect=None), DATA,
                     "base.safetensors, does not exist", "--base")
        self.weft("export", "run", "again.safetensors", "--merged", "--base", "moved.safetensors", ranks=0)
        self.assertEqual(read_safetensors(self.dir / "again.safetensors"), merged)
        self.refused(self.clips("g", "run.dir=run", expect=None), DATA, "base.safetensors does not exist", "generate.adapters")

    def test_going_on_from_an_adapter(self):
        """Its A and B are where the next run starts: a folder, a run's average, scaled; on a base stored otherwise."""
        self.train("run", *LORA)
        self.weft("export", "run", "adapter", ranks=0)
        (self.dir / "shards").mkdir()
        self.weft("export", "base", "shards/model.safetensors", "--shard-size", "0.00003", ranks=0)
        at_start = read_safetensors(self.dir / "adapter" / "adapter_model.safetensors")
        still = ("train.lr=0", "train.steps=1", "train.weight_decay=0")
        for name, adapters, more in (("folder", "['adapter']", ()), ("of_run", "['run']", ()), ("bf16", "['run/latest']", ("model.dtype=bf16",)),
                                     ("zero", "['adapter']", ("parallel.zero=3", "model.weights=shards"))):
            with self.subTest(name):
                job = self.train(name, *LORA, f"model.adapters={adapters}", *still, *more)
                self.assertRegex(job.err, r"the base of the adapters; goes on from .*(adapter|run/step_20)")
                self.weft("export", name, f"{name}_out", "--raw", ranks=0)
                self.assertEqual(read_safetensors(self.dir / f"{name}_out" / "adapter_model.safetensors"), at_start)
        self.train("further", *LORA, "model.adapters=['adapter']")
        self.assertNotEqual(self.losses("further"), self.losses("run"))
        self.refused(self.train("bad", *LORA, "model.adapters=['adapter']", "lora.alpha=3", expect=None), USAGE, "alpha 6", "lora.alpha = 3")
        self.make_base("other", "run.seed=8")
        self.refused(self.train("bad", "model.weights=other.safetensors", *LORA[1:], "model.adapters=['adapter']", expect=None), DATA,
                     "belong to another base than other.safetensors")
        # Without a checkpoint evaluate takes what the training would start from.
        for name, extra in (("with", ("model.adapters=['adapter']",)), ("merged", ("generate.adapters=[]",))):
            weights = LORA[0] if name == "with" else "model.weights=merged.safetensors"
            if name == "merged":
                self.weft("export", "run", "merged.safetensors", "--merged", ranks=0)
            self.weft("evaluate", "deck.toml", weights, *LORA[1:], *extra, "run.dir=none", "validation.share=0.25", f"evaluate.output={name}")
        with_adapter, merged = (json.loads((self.dir / n / "evaluation.json").read_text())["loss"] for n in ("with", "merged"))
        self.assertEqual(with_adapter, merged)

    def test_inspect_and_plan_know_adapters(self):
        self.train("run", *LORA, "train.steps=2")
        self.weft("export", "run", "adapter", ranks=0)
        digits = re.search(r"xxh3 (values:[0-9a-f]{32})", self.weft("inspect", "adapter", ranks=0).out).group(1)
        self.assertIn(f"adapter  rank 2, alpha 6; base base.safetensors, xxh3 {digits}",
                      self.weft("inspect", "run/latest", ranks=0).out)
        file = self.weft("inspect", "adapter/adapter_model.safetensors", ranks=0).out
        self.assertIn("adapter of 30 layers: rank 2, alpha 6; base base.safetensors", file)
        plans = []
        for extra in ((), LORA):
            # Large enough that buckets' padding does not hide the difference.
            self.weft("plan", "deck.toml", "--gpus", "8", "--memory", "8", "--fabric", "8x400", "--json", "plan.json",
                      "model.hidden_size=512", *extra, ranks=0)
            plans.append(json.loads((self.dir / "plan.json").read_text()))
        full, lora = plans
        self.assertLess(lora["parameters"]["trained"], 0.02 * lora["parameters"]["all"])
        self.assertLess(lora["memory"]["gradients"], 0.05 * full["memory"]["gradients"])
        self.assertLess(lora["checkpoint"]["bytes"], 0.05 * full["checkpoint"]["bytes"])


if __name__ == "__main__":
    unittest.main()
