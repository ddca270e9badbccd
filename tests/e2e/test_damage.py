"""Flipped bits in what weft writes: weights, text features, a run's files. Each is named, or changes nothing.

WEFT_FLIPS=1000 for more of them than the usual number. Stores: tests/data; checkpoints: tests/checkpoint, test_bad_input.py.
"""

import json
import os
import random
import shutil
import unittest

from harness import WeftTest, read_safetensors

DATA = 3
FLIPS = int(os.environ.get("WEFT_FLIPS", "0"))


def flipped(data, at, bit):
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1:]


class Weights(WeftTest):
    def setUp(self):
        super().setUp()
        self.train("run", "train.steps=1", ranks=1)

    def test_exported_weights(self):
        self.weft("export", "run", "weights.safetensors", "--shard-size", "0.00003", ranks=0)
        shards = sorted(self.dir.glob("weights-*.safetensors"))
        self.assertGreater(len(shards), 1)
        dice = random.Random(1)
        for path in dice.sample(shards, 2):
            good = path.read_bytes()
            header = 8 + int.from_bytes(good[:8], "little")
            for at in (dice.randrange(8, header), dice.randrange(header, len(good))):
                with self.subTest(path=path.name, at=at):
                    path.write_bytes(flipped(good, at, dice.randrange(8)))
                    job = self.weft("train", "deck.toml", "run.dir=next",
                                    "model.weights=weights.safetensors.index.json", expect=None)
                    self.refused(job, DATA, path.name, *(["is damaged"] if at >= header else []))
            path.write_bytes(good)
        self.weft("train", "deck.toml", "run.dir=next", "train.steps=1",
                  "model.weights=weights.safetensors.index.json")

    def test_many_flips(self):
        """Through `weft inspect`, which reads what a loader reads."""
        if not FLIPS:
            self.skipTest("WEFT_FLIPS is not set")
        self.weft("export", "run", "w.safetensors", ranks=0)
        good = (self.dir / "w.safetensors").read_bytes()
        tensors = read_safetensors(self.dir / "w.safetensors")
        dice, named = random.Random(2), 0
        for _ in range(FLIPS):
            (self.dir / "w.safetensors").write_bytes(
                flipped(good, dice.randrange(len(good)), dice.randrange(8)))
            job = self.weft("inspect", "w.safetensors", ranks=0, expect=None)
            if job.process.returncode == DATA:
                named += 1
                self.assertIn("w.safetensors", job.err)
            else:
                self.assertEqual(job.process.returncode, 0, job.err)
                self.assertEqual(read_safetensors(self.dir / "w.safetensors"), tensors)
        print(f"{FLIPS} flips of weights: {named} named, {FLIPS - named} without effect")

    def test_other_programs_read_the_file(self):
        """The format's own rules: texts in the metadata, nothing else beside the tensors."""
        self.weft("export", "run", "w.safetensors", ranks=0)
        data = (self.dir / "w.safetensors").read_bytes()
        header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
        texts = header.pop("__metadata__")
        self.assertTrue(all(isinstance(v, str) for v in texts.values()))
        self.assertEqual({k[5:] for k in texts if k.startswith("xxh3:")}, set(header))


class Checkpoints(WeftTest):
    def test_many_flips(self):
        """Each is named when the checkpoint is read; every 50th also by a start, which takes the older one."""
        if not FLIPS:
            self.skipTest("WEFT_FLIPS is not set")
        self.train("run", "train.steps=10", ranks=1)
        files = sorted((self.dir / "run" / "step_10").iterdir())
        dice = random.Random(4)
        counts = {p.name: 0 for p in files}
        fell_back = 0
        for i in range(FLIPS):
            # A third of them each, or the shard would take nearly all.
            path = files[i % len(files)]
            good = path.read_bytes()
            path.write_bytes(flipped(good, dice.randrange(len(good)), dice.randrange(8)))
            job = self.weft("inspect", "run/step_10", ranks=0, expect=None)
            with self.subTest(flip=i, path=path.name):
                self.assertEqual(job.process.returncode, 4, job.err)
                self.assertIn(path.name, job.err)
                counts[path.name] += 1
                if i % 50 == 0:
                    shutil.copytree(self.dir / "run", self.dir / "start", symlinks=True)
                    job = self.train("start", "train.steps=6", ranks=0)
                    self.assertRegex(job.err, rf"WARN: checkpoint start/step_10 is not usable: .*{path.name}")
                    self.assertIn("resuming from start/step_5 ", job.err)
                    fell_back += 1
                    shutil.rmtree(self.dir / "start")
            path.write_bytes(good)
        print(f"{FLIPS} flips of a checkpoint: all named, {counts}; {fell_back} starts took the older one")


class RunFiles(WeftTest):
    def test_a_restart_says_what_is_damaged(self):
        self.train("run", "train.steps=4", ranks=1)
        for name, said in (("deck.toml", "deck.toml is damaged"),
                           ("run.json", "run.json is damaged"),
                           ("metrics.jsonl", "metrics.jsonl, line 1 is damaged")):
            path = self.dir / "run" / name
            good = path.read_bytes()
            digit = next(i for i, c in enumerate(good) if chr(c).isdigit())
            path.write_bytes(flipped(good, digit, 0))
            job = self.train("run", "train.steps=4", ranks=1)
            self.assertIn(f"WARN: run/{said}", job.err)
        # Of the line that was left out only the gap is told.
        said = self.train("run", "train.steps=4", ranks=1).err
        self.assertRegex(said, r"WARN: run/metrics\.jsonl has no line of 1 of the 4 steps done")
        self.assertEqual(said.count("WARN"), 1)


if __name__ == "__main__":
    unittest.main()
