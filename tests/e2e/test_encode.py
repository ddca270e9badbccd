"""weft encode and training from what it makes."""

import json
import math
import os
import re
import shutil
import struct
import subprocess
import time
import unittest

import harness
import tiny_models

VAE = """
[vae]
spatial_channels = [8, 8, 8, 8]
spatial_res_blocks = 1
spatial_groups = 4
filters = 8
num_res_blocks = 1
channel_multipliers = [1, 1, 1, 1]
num_groups = 4
"""


class Encode(harness.WeftTest):
    def setUp(self):
        super().setUp()
        deck = self.dir / "deck.toml"
        deck.write_text(deck.read_text().replace("in_channels = 3", "in_channels = 4") + VAE)

    def encode(self, output, *overrides, ranks=2, expect=0, **how):
        return self.weft("encode", "deck.toml", "data.path=clips.h5", f"encode.output={output}",
                         "encode.text=false", *overrides, ranks=ranks, expect=expect, **how)

    @staticmethod
    def made(parts):
        """Clips in the ranks' manifests; none once the job has taken them away."""
        try:
            return sum(m.read_bytes().count(b'{"name"') for m in parts.glob("encoded.rank*.jsonl"))
        except FileNotFoundError:
            return 0

    def test_latents_are_the_same_at_any_rank_count_and_after_a_kill(self):
        self.ingest(seconds=30, frames=3)
        self.encode("one.h5", "vae.weights=random:1", ranks=1)
        one = (self.dir / "one.h5").read_bytes()
        said = self.weft("inspect", "one.h5", ranks=0).out
        self.assertIn("moments (means, log variances) of 3x32x32 footage", said)
        self.assertIn("every hash verified", said)
        self.assertFalse((self.dir / "one.h5.parts").exists())
        self.assertEqual(self.cited("one.h5.cite.bib"), ["weft", "opensora"])

        # Killed in the middle, with a torn line at the end of a manifest: the rest is made, nothing twice.
        parts = self.dir / "two.h5.parts"
        made = 0
        for _ in range(10):  # until a kill does not come too late
            (self.dir / "two.h5").unlink(missing_ok=True)
            shutil.rmtree(parts, ignore_errors=True)
            job = self.start("encode", "deck.toml", "data.path=clips.h5", "encode.output=two.h5",
                             "encode.text=false", "vae.weights=random:1", ranks=2)
            while job.process.poll() is None and self.made(parts) < 3:
                time.sleep(0.002)
            job.kill()
            job.wait()
            self.assert_gone(job)
            made = self.made(parts)
            if made >= 3 and not (self.dir / "two.h5").exists():
                break
        self.assertGreaterEqual(made, 3)
        self.assertFalse((self.dir / "two.h5").exists(), "every kill came too late to test anything")
        manifests = sorted(parts.glob("encoded.rank*.jsonl"))
        with open(manifests[0], "ab") as manifest:
            manifest.write(b'{"name":"32x')
        self.refused(self.encode("two.h5", "vae.weights=random:2", expect=None, replace=False), 4, "another job",
                     "random:1", "random:2")
        again = self.encode("two.h5", "vae.weights=random:1", ranks=3)
        self.assertIn(f"{made} made before", again.err)
        self.assertEqual((self.dir / "two.h5").read_bytes(), one)
        # Once more: nothing to do, but for other settings.
        again = self.encode("two.h5", "vae.weights=random:1", ranks=1)
        self.assertIn("two.h5 is up to date", again.err)
        self.assertNotIn("frames/s", again.err)
        # A finished store of another request stays, unless it is to be replaced.
        self.refused(self.encode("two.h5", "vae.weights=random:2", ranks=1, expect=None, replace=False), 4,
                     "two.h5 holds 1 finished result of another request", "--replace")
        self.assertEqual((self.dir / "two.h5").read_bytes(), one)
        self.assertIn("replaces 1 finished result", self.encode("two.h5", "vae.weights=random:2", ranks=1).err)
        self.assertNotEqual((self.dir / "two.h5").read_bytes(), one)
        os.link(self.dir / "clips.h5", self.dir / "other_name.h5")
        self.refused(self.encode("other_name.h5", "vae.weights=random:1", ranks=1, expect=None), 2,
                     "data.path itself")

    def test_a_picture_beside_videos_leaves_them_their_micro_batch(self):
        data = "data.path=synthetic:clips=2,frames=6,height=32,width=32;clips=1,frames=1,height=32,width=32"
        job = self.encode("both.h5", "vae.weights=random:1", data, ranks=1)
        self.assertIn(", 4 frames at once", job.err)
        self.assertNotIn("micro-batch reduced", job.err)
        pictures = self.encode("picture.h5", "vae.weights=random:1", data.split(";")[0].replace("frames=6", "frames=1"), ranks=1)
        self.assertIn(", 1 frame at once", pictures.err)
        self.assertNotIn("micro-batch reduced", pictures.err)
        planned = float(re.search(r"memory +[0-9.]+ MiB at the peak \(([0-9.]+) planned\)", job.err)[1])
        less = self.encode("less.h5", "vae.weights=random:1", data, f"memory.arena_gib={planned * 0.8 / 1024}", ranks=1)
        self.assertRegex(less.err, r"micro-batch reduced to [123] frames? \(asked: 4\) to fit")

    def test_a_clip_that_fails_leaves_the_others(self):
        """One clip's pixels are damaged: it is named, the others are made, and alone it is made when it is whole again."""
        self.ingest(seconds=30, frames=3)
        self.encode("one.h5", "vae.weights=random:1", ranks=1)
        store = self.dir / "clips.h5"
        good = store.read_bytes()
        subprocess.run(["h5dump", "-d", "/clips/32x32-3/frames", "-b", "LE", "-o", "raw", "clips.h5"],
                       cwd=self.dir, check=True, capture_output=True)
        raw = (self.dir / "raw").read_bytes()
        clip = raw[:3 * 32 * 32 * 3]
        self.assertEqual(good.count(clip), 1)
        times = store.stat()
        at = good.index(clip) + len(clip) // 2

        def write(byte):
            with open(store, "r+b") as f:
                f.seek(at)
                f.write(bytes([byte]))
            os.utime(store, ns=(times.st_atime_ns, times.st_mtime_ns))  # the same store, as the job knows it
        write(good[at] ^ 1)
        job = self.encode("two.h5", "vae.weights=random:1", expect=3)
        self.assertRegex(job.err, r"ERROR: 1 of \d+ clips failed")
        self.assertIn("failed    32x32-3/0: ", job.err)
        self.assertFalse((self.dir / "two.h5").exists())
        report = json.loads((self.dir / "two.h5.parts" / "encode_report.json").read_text())
        self.assertEqual((report["made"], len(report["failures"])), (report["wanted"] - 1, 1))
        write(good[at])
        again = self.encode("two.h5", "vae.weights=random:1")
        self.assertIn(f"1 made, {report['made']} finished before", again.err)
        self.assertEqual((self.dir / "two.h5").read_bytes(), (self.dir / "one.h5").read_bytes())

    def test_captions_and_measured_constants(self):
        tiny_models.write_t5(self.dir / "t5")
        (self.dir / "deck.toml").write_text(tiny_models.TINY_GENERATE_DECK)
        captions = ["a cat", "", "two dogs, running", "a cat"]
        for i in range(len(captions)):
            harness.make_video(self.dir / f"{i}.mp4", f"testsrc2=duration=0.6:size=64x64:rate=10,hue=h={30 * i}")
        (self.dir / "list.jsonl").write_text("".join(
            json.dumps({"path": f"{i}.mp4", "text": text}) + "\n" for i, text in enumerate(captions)))
        self.weft("ingest", "deck.toml", "ingest.inputs=['list.jsonl']", "ingest.output=clips.h5",
                  "ingest.frames=[3]", "ingest.height=32", "ingest.width=32")
        job = self.weft("encode", "deck.toml", "data.path=clips.h5", "encode.output=latents.h5",
                        "encode.dtype=f32", "t5.weights=t5", "vae.scale=[]", "vae.shift=[]")
        self.assertIn("vae.shift=[", job.err)
        self.assertEqual(self.cited("latents.h5.cite.bib"), ["weft", "opensora", "t5"])
        said = self.weft("inspect", "latents.h5", ranks=0).out
        shift, scale = ([float(x) for x in re.search(name + r"=\[([^]]*)", job.err)[1].split(",")]
                        for name in ("vae.shift", "vae.scale"))
        self.assertIn("to be drawn with vae.shift=[", said)
        # Generation takes them from the store.
        unknown = ("generate", "deck.toml", "vae.scale=[]", "vae.shift=[]", "t5.weights=t5", "generate.prompts=['a cat']",
                   "generate.output=clips")
        self.assertIn("scale and shift of latents.h5", self.weft(*unknown, "data.path=latents.h5").err)
        self.refused(self.weft(*unknown, expect=None), 2, "vae.scale and vae.shift are empty", "data.path")
        # Rows of all clips lie one behind the other, in their order.
        (self.dir / "captions.txt").write_text("a cat\ntwo dogs, running\n")
        self.weft("text", "deck.toml", "captions.txt", "t5.weights=t5", "--features=features")
        rows = {text: value[2] for text, value in zip(
            ("a cat", "two dogs, running"), map(harness.read_safetensors(self.dir / "features").get, "01"))}
        self.assertEqual(len(rows["a cat"]), 7 * 16 * 4)  # letters, word marks, the end
        expected = b"".join(2 * rows.get(text, b"") for text in captions)
        self.assertEqual((self.dir / "latents.h5").read_bytes().count(expected), 1)
        # The constants are mean and deviation of latents drawn from all posteriors.
        subprocess.run(["h5dump", "-d", "/clips/32x32-3/latents", "-b", "LE", "-o", "raw", "latents.h5"],
                       cwd=self.dir, check=True, capture_output=True)
        raw = (self.dir / "raw").read_bytes()
        values = struct.unpack(f"<{len(raw) // 4}f", raw)
        self.assertEqual(len(values), 8 * 8 * 16)
        for c in range(4):
            channel = [(values[(clip * 8 + c) * 16 + i], values[(clip * 8 + 4 + c) * 16 + i])
                       for clip in range(8) for i in range(16)]
            mean = sum(m for m, _ in channel) / 128
            variance = sum(m * m + math.exp(v) for m, v in channel) / 128 - mean * mean
            self.assertAlmostEqual(shift[c], mean, delta=1e-3)
            self.assertAlmostEqual(scale[c], math.sqrt(variance), delta=1e-3)

    def test_training_from_latents_is_training_with_the_vae_in_the_loop(self):
        self.ingest(seconds=6, frames=3)
        # The VAE's file comes from a training of one step.
        self.weft("train", "deck.toml", "model.name=vae", "data.path=clips.h5", "run.dir=vae",
                  "train.steps=1", "train.batch_size=1", "train.micro_batches=2")
        self.weft("export", "vae", "vae.safetensors", ranks=0)
        vae = "vae.weights=vae.safetensors"
        self.encode("latents.h5", vae, "encode.dtype=f32")
        common = ("train.steps=6", "train.batch_size=2", "train.micro_batches=2")
        self.train("online", "data.path=clips.h5", vae, *common)
        self.train("stored", "data.path=latents.h5", *common)
        self.assert_close(self.losses("stored"), self.losses("online"), 1e-4)
        self.assertGreater(max(self.losses("stored")) - min(self.losses("stored")), 0.01)
        # Half numbers are near, and a drawn sample trains as well.
        self.encode("half.h5", vae)
        self.train("half", "data.path=half.h5", *common)
        self.assert_close(self.losses("half"), self.losses("online"), 1e-2)
        self.encode("drawn.h5", vae, "encode.latents=sampled")
        self.train("drawn", "data.path=drawn.h5", *common, "train.steps=1")

        # The released constants are not this VAE's: what was measured goes along where the store is named.
        self.assertIn("WARN: scale and shift are those of the released VAE",
                      self.weft("export", "vae", "again.safetensors", ranks=0).err)
        job = self.encode("measured.h5", vae, "vae.scale=[]", "vae.shift=[]")
        job_export = self.weft("export", "vae", "own.safetensors", "--latents=measured.h5", ranks=0)
        self.assertNotIn("WARN", job_export.err)
        exported = harness.read_safetensors(self.dir / "own.safetensors")
        for name in ("scale", "shift"):
            said = [float(x) for x in re.search(rf"vae\.{name}=\[([^]]*)", job.err)[1].split(",")]
            for a, b in zip(struct.unpack("<4f", exported[name][2]), said):
                self.assertAlmostEqual(a, b, delta=1e-3 * max(1, abs(b)))
        self.refused(self.weft("export", "vae", "x.safetensors", "--latents=clips.h5", ranks=0, expect=None), 3,
                     "clips.h5 tells no scale and shift")
        self.refused(self.weft("export", "stored", "x.safetensors", "--latents=measured.h5", ranks=0, expect=None), 2,
                     "--latents is for VAEs")

        # Generation with another VAE than the latents', and from other latents than the model's.
        own = ("vae.weights=vae", "vae.scale=[]", "vae.shift=[]")
        self.encode("own.h5", *own)
        self.train("own", "data.path=own.h5", *own, *common, "train.steps=1")
        generate = ("generate", "deck.toml", "run.dir=own", "data.path=own.h5", *own, "generate.image_size=[32,32]",
                    "generate.num_frames='3'", "sampler.steps=1")
        self.assertNotIn("data.path", self.weft(*generate).err)
        self.weft("train", "deck.toml", "model.name=vae", "data.path=clips.h5", "run.dir=vae",
                  "train.steps=2", "train.batch_size=1", "train.micro_batches=2")
        self.refused(self.weft(*generate, expect=None), 3,
                     "data.path = own.h5 was encoded with another checkpoint than vae.weights = vae")
        self.encode("own.h5", *own)
        self.refused(self.weft(*generate, expect=None), 3,
                     "data.path = own.h5 is not the data that EMA of own/step_1 was trained on")

        self.refused(self.encode("x.h5", vae, "data.path=latents.h5", expect=None), 2,
                     "latents already")
        self.refused(self.train("pixels", "data.path=clips.h5", expect=None), 2, "3 channels")


if __name__ == "__main__":
    unittest.main()
