"""Files that released versions wrote, and the build before the next release (tests/corpus/VERSION): each is read, trained from,
resumed or taken as finished."""

import json
import shutil
import tarfile
import unittest

from harness import REPOSITORY, WeftTest, read_safetensors
from tiny_models import hash_of_weights

CORPUS = REPOSITORY / "tests" / "corpus"
VERSIONS = sorted(p.parent.name for p in CORPUS.glob("*/expected.json"))
# Relative, of losses: sums in another order, as AVX2 has them in place of AVX-512.
TOLERANCE = 1e-4
# Absolute, of accuracy and IoU of random weights: a pixel may change its class.
SCORE_TOLERANCE = 0.02


class Old:
    """The files of self.version, which is set below."""

    def setUp(self):
        super().setUp()
        shutil.copytree(CORPUS / self.version, self.dir, dirs_exist_ok=True)
        self.expected = json.loads((self.dir / "expected.json").read_text())

    def unpack(self, run):
        with tarfile.open(self.dir / f"{run}.tar.xz") as tar:
            tar.extractall(self.dir)

    def check_goes_on(self, run, expected):
        """On 2 ranks, and a copy on 1."""
        shutil.copytree(self.dir / run, self.dir / "again", symlinks=True)
        deck = "train.toml" if run == "run" else f"{run}.toml"
        for name, ranks in ((run, 2), ("again", 1)):
            job = self.weft("train", deck, f"run.dir={name}", ranks=ranks)
            self.assertNotIn("step 1/6", job.err)
            self.assertNotIn("is not the data that", job.err)
            losses = self.losses(name)
            self.assertEqual(losses[:3], expected[:3])  # what it had done before
            self.assert_close(losses, expected, TOLERANCE)
            self.assertEqual(self.latest(name), "step_6")


class OldModels(Old):
    """Runs of models other than STDiT3."""

    def check_model(self, run):
        self.unpack(run)
        self.assertIn("every byte matches its hash", self.weft("inspect", run, ranks=0).out)
        self.weft("export", run, "w.safetensors", ranks=0)
        self.assertEqual(hash_of_weights(self.dir / "w.safetensors"), self.expected[run]["weights"])
        self.check_goes_on(run, self.expected[run]["losses"])

    def test_vae(self):
        self.check_model("vae")

    def test_segmentation(self):
        self.check_model("segmentation")

    def test_dbnet(self):
        self.check_model("dbnet")


class OldFiles(Old):
    """What a release wrote beside these."""

    def setUp(self):
        super().setUp()
        self.unpack("run")

    def assert_scores(self, folder, expected):
        got = json.loads((self.dir / folder / "evaluation.json").read_text())
        for key in ("images", "pixels"):
            self.assertEqual(got[key], expected[key], key)
        for key in ("accuracy", "mean_iou"):
            self.assertAlmostEqual(got[key], expected[key], delta=SCORE_TOLERANCE, msg=key)

    def test_inspect(self):
        self.assertIn("every byte matches its hash", self.weft("inspect", "run", ranks=0).out)
        self.assertIn("every byte matches its hash", self.weft("inspect", "run/step_3", ranks=0).out)
        clips = self.weft("inspect", "clips.h5", ranks=0).out
        self.assertIn("every hash verified", clips)
        self.assertIn("a test picture, moving", clips)
        self.assertIn("every hash verified", self.weft("inspect", "latents.h5", ranks=0).out)
        self.assertIn("3 images", self.weft("inspect", "images.h5", ranks=0).out)
        self.assertIn("every tensor matches its hash", self.weft("inspect", "weights.safetensors", ranks=0).out)

    def test_a_run_goes_on(self):
        written = read_safetensors(self.dir / "weights.safetensors")
        self.assertEqual(self.exported("run"), written)
        self.check_goes_on("run", self.expected["train"])

    def test_stores_are_trained_from(self):
        self.weft("train", "latents.toml")
        self.assert_close(self.losses("latents_run"), self.expected["latents"], TOLERANCE)
        self.weft("train", "train.toml", "run.dir=fresh")
        self.assert_close(self.losses("fresh"), self.expected["train"], TOLERANCE)
        self.weft("evaluate", "evaluate.toml", "data.path=images.h5", "evaluate.output=of_images")
        self.assert_scores("of_images", self.expected["images"])

    def test_weights_start_a_run(self):
        self.weft("train", "train.toml", "run.dir=from_file", "model.weights=weights.safetensors", "train.lr=0",
                  "train.steps=1")
        self.assertEqual(self.exported("from_file"), read_safetensors(self.dir / "weights.safetensors"))

    def test_an_evaluation_is_finished(self):
        job = self.weft("evaluate", "evaluate.toml", ranks=1)
        self.assertIn("0 made, 3 finished before", job.err)
        self.assert_scores("evaluation", self.expected["evaluation"])


for version in VERSIONS:
    expected = json.loads((CORPUS / version / "expected.json").read_text())
    for key, tests in ("train", OldFiles), ("dbnet", OldModels):
        if key in expected:
            name = f"{tests.__name__}_{version.replace('.', '_')}"
            globals()[name] = type(name, (tests, WeftTest), {"version": version})


class Corpus(unittest.TestCase):
    def test_there_is_one_and_it_is_small(self):
        self.assertIn("0.1.0", VERSIONS)
        self.assertTrue(any(name.startswith("OldModels_") for name in globals()))
        for version in VERSIONS:
            self.assertLess(sum(p.stat().st_size for p in (CORPUS / version).rglob("*")), 1e6)


if __name__ == "__main__":
    unittest.main()
