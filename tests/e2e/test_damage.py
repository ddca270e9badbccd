"""Flipped bits in what weft writes: weights, text features, a run's files. Each is named, or changes nothing.

Every bit: tests/checkpoint, of stores tests/data.
"""

import json
import random
import unittest

from harness import WeftTest

DATA = 3


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

    def test_other_programs_read_the_file(self):
        """The format's own rules: texts in the metadata, nothing else beside the tensors."""
        self.weft("export", "run", "w.safetensors", ranks=0)
        data = (self.dir / "w.safetensors").read_bytes()
        header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
        texts = header.pop("__metadata__")
        self.assertTrue(all(isinstance(v, str) for v in texts.values()))
        self.assertEqual({k[5:] for k in texts if k.startswith("xxh3:")}, set(header))


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
