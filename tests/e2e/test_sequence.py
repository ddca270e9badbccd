"""Training and generating with the tokens of a clip shared by several ranks: losses and clips are those of one rank."""

import array
import os
import unittest

from harness import AVX512, TINY_WAN_DECK, WeftTest, read_safetensors

USAGE = 2


DEVICE = os.environ.get("WEFT_TEST_DEVICE", "cpu")


class SequenceParallelTest(WeftTest):
    # Frames of 5 x 3 or 5 x 7 patches and 3 frames: nothing divides evenly among 2 or 4 ranks.
    DATA = ("data.path=synthetic:clips=8,frames=3,height=10,width=6", f"device.kind={DEVICE}")
    CLIPS = ("generate.image_size=[10,14]", "generate.num_frames=3", "generate.num_samples=3", "generate.tensors=true",
             "generate.references=['lavfi:testsrc2=duration=1:size=64x64:rate=10']", "generate.mask_strategies=['0']")

    def setUp(self):
        super().setUp()
        self.train("run", *self.DATA, "train.steps=3", ranks=1)

    def generate(self, out, *overrides, ranks, expect=0):
        return self.weft("generate", "deck.toml", *self.DATA, *self.CLIPS, "run.dir=run", "sampler.steps=3",
                         f"generate.output={out}", *overrides, ranks=ranks, expect=expect)

    def assert_same(self, made, wanted, what):
        if AVX512:
            self.assertEqual(made.read_bytes(), wanted.read_bytes(), what)
            return
        made, wanted = read_safetensors(made), read_safetensors(wanted)
        self.assertEqual(made.keys(), wanted.keys(), what)
        for name, (dtype, shape, data) in wanted.items():
            self.assertEqual(made[name][:2], (dtype, shape), what)
            values = [array.array("f", d) for d in (made[name][2], data)]
            scale = max(map(abs, values[1]))
            self.assertLess(max(abs(a - b) for a, b in zip(*values)), 1e-4 * scale, what)

    def test_clips_are_those_of_one_rank(self):
        self.generate("alone", ranks=1)
        # One group of all ranks; two groups, which share the three clips.
        for ranks, sp in ((2, 2), (3, 3), (4, 2)) if DEVICE == "cpu" else ((3, 3),):
            out = f"shared_{ranks}_{sp}"
            self.generate(out, f"parallel.sp={sp}", ranks=ranks)
            written = sorted(p.name for p in (self.dir / out).glob("*.safetensors"))
            self.assertEqual(written, [f"sample_0000-{i}.safetensors" for i in range(3)])
            for name in written:
                self.assert_same(self.dir / out / name, self.dir / "alone" / name,
                                 f"{name} on {ranks} ranks in groups of {sp}")

    def test_training_with_fewer_frames_than_ranks(self):
        # Images: one rank has nothing to do in spatial blocks, and must still join all sums in the order of the other. On GPUs
        # one stream carries the sums and the exchanges, and two orders would hang.
        images = (self.DATA[0] + ";clips=8,frames=1,height=8,width=10", *self.DATA[1:], "train.steps=3",
                  "mask.random=0.4", "parallel.bucket_mib=0.05")
        self.train("one", *images, ranks=1)
        self.train("two", *images, "parallel.sp=2", ranks=2)
        for key in ("loss", "grad_norm"):
            for one, two in zip(self.metrics("one"), self.metrics("two")):
                self.assertLess(abs(two[key] / one[key] - 1), 1e-5, key)

    def test_groups_that_cannot_be_formed_are_refused(self):
        self.refused(self.generate("x", "parallel.sp=2", ranks=3, expect=None), USAGE, "3 ranks", "parallel.sp = 2")
        self.refused(self.generate("x", "parallel.sp=4", "model.patch_size=[1,10,6]", "generate.weights=random:1", ranks=4,
                                   expect=None), USAGE, "10x14", "3 tokens a frame", "parallel.sp = 4")


class SequenceParallelWan(WeftTest):
    """All tokens of a clip attend to each other. Three ranks share three heads; two, and four, share the queries."""

    def setUp(self):
        super().setUp()
        (self.dir / "deck.toml").write_text(TINY_WAN_DECK)

    def test_training(self):
        steps = ("train.steps=3", "parallel.bucket_mib=0.05", f"device.kind={DEVICE}")
        self.train("one", *steps, ranks=1)
        for ranks in (2, 3, 4):
            run = f"on{ranks}"
            self.train(run, *steps, f"parallel.sp={ranks}", ranks=ranks)
            for key in ("loss", "grad_norm"):
                for one, other in zip(self.metrics("one"), self.metrics(run)):
                    self.assertLess(abs(other[key] / one[key] - 1), 1e-5, f"{key} on {ranks} ranks")

    def test_what_cannot_be_shared_is_refused(self):
        few = "data.path=synthetic:latent=1,clips=24,frames=3,height=2,width=6"
        self.refused(self.train("x", few, "parallel.sp=4", ranks=4, expect=None), USAGE, "parallel.sp = 4", "3 tokens a frame")
        odd = "data.path=synthetic:latent=1,clips=24,frames=3,height=5,width=6"
        self.refused(self.train("x", odd, ranks=1, expect=None), USAGE, "5x6", "model.patch_size")
        self.refused(self.train("x", "mask.random=0.4", ranks=1, expect=None), USAGE, "[mask]")


if __name__ == "__main__":
    unittest.main()
