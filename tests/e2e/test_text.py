"""weft text: captions of a file, cleaned; and what it says about files and decks that do not fit."""

import unittest

from harness import WeftTest, read_safetensors, write_safetensors
from tiny_models import TINY_GENERATE_DECK, write_t5


class Text(WeftTest):
    def test_cleans_every_line(self):
        (self.dir / "in.txt").write_text("A  “Drone” shot — of www.foo.org\r\n\ncafé <b>bar</b> &amp; more\n", "utf-8")
        self.weft("text", "deck.toml", "in.txt", "--cleaned", "out.txt", ranks=1)
        self.assertEqual((self.dir / "out.txt").read_text("utf-8"), 'a "drone" shot - of\n\ncafé bar more\n')

    def test_cleans_as_the_model_wants(self):
        """umT5's texts keep their case and their signs."""
        (self.dir / "in.txt").write_text("A  “Drone” shot — of www.foo.org\nCAFÃ‰ &amp;lt;3 ﬁne \n", "utf-8")
        self.weft("text", "deck.toml", "in.txt", "--cleaned", "out.txt", "model.name=umt5", ranks=1)
        self.assertEqual((self.dir / "out.txt").read_text("utf-8"), 'A "Drone" shot — of www.foo.org\nCAFÉ <3 fine\n')

    def test_how_large_a_model_is(self):
        """Of a deck, without weights."""
        sizes = self.weft("inspect", "deck.toml", "model.name=umt5", ranks=1).out
        self.assertIn("text encoder  umT5: 5680910336 parameters in 242 tensors", sizes)
        self.assertNotIn("denoiser", sizes)
        sizes = self.weft("inspect", "deck.toml", ranks=1).out
        self.assertRegex(sizes, r"denoiser +STDiT3: \d+ parameters in \d+ tensors")
        self.assertIn("text encoder  T5: 4762310656 parameters in 219 tensors", sizes)
        self.refused(self.weft("inspect", "deck.toml", "model.name=sadtalker", ranks=1, expect=None), 2, "sadtalker")
        (self.dir / "x.safetensors").write_bytes(b"")
        self.refused(self.weft("inspect", "x.safetensors", "model.depth=2", ranks=1, expect=None), 2, "model.depth=2")

    def test_captions_that_are_cut_or_emptied_are_counted(self):
        (self.dir / "deck.toml").write_text(TINY_GENERATE_DECK)
        write_t5(self.dir / "t5")
        (self.dir / "in.txt").write_text("a cat\n" + "a dog " * 30 + "\n\u732b\u304c\u3044\u308b\nhttps://a.org\n\n", "utf-8")
        job = self.weft("text", "deck.toml", "in.txt", "--features", "f.safetensors", "t5.weights=t5", ranks=1)
        self.assertRegex(job.err, r"WARN: 1 of 5 texts have more than 24 tokens, and the encoder does not see the rest: 1 \(\d+ tokens, a dog")
        self.assertIn("WARN: cleaning leaves nothing of 1 of 5 texts, which are encoded as empty captions: 3 (https://a.org)", job.err)
        self.assertEqual(read_safetensors(self.dir / "f.safetensors")["1"][1], (24, 16))
        # Nothing of a diverged encoder is kept.
        weights = read_safetensors(self.dir / "t5" / "model.safetensors")
        name = next(n for n in weights if n.endswith("final_layer_norm.weight"))
        dtype, shape, data = weights[name]
        write_safetensors(self.dir / "t5" / "model.safetensors", weights | {name: (dtype, shape, b"\xff" * len(data))})
        job = self.weft("text", "deck.toml", "in.txt", "--features", "g.safetensors", "t5.weights=t5", ranks=1, expect=None)
        self.refused(job, 3, "final_layer_norm.weight has values that are not finite")
        self.assertFalse((self.dir / "g.safetensors").exists())

    def test_refuses_what_does_not_fit(self):
        (self.dir / "in.txt").write_bytes(b"fine\ncaf\xe9\n")
        self.refused(self.weft("text", "deck.toml", "in.txt", "--cleaned", "out.txt", ranks=2, expect=None), 3,
                     "in.txt, line 2", "byte 4 is 0xe9")
        (self.dir / "in.txt").write_text("fine\n")
        self.refused(self.weft("text", "deck.toml", "in.txt", ranks=1, expect=None), 2, "nothing is asked for")
        self.refused(self.weft("text", "deck.toml", "missing.txt", "--cleaned", "o", ranks=1, expect=None), 3, "missing.txt")
        self.refused(self.weft("text", "deck.toml", "in.txt", "--tokens", "o", "t5.tokenizer=none.model", ranks=1,
                               expect=None), 3, "none.model")


if __name__ == "__main__":
    unittest.main()
