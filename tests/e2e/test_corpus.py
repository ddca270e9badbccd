"""Files that released versions wrote (tests/corpus/VERSION): each is read, trained from, resumed or taken as finished."""

import json
import shutil
import tarfile
import unittest

from harness import REPOSITORY, WeftTest, read_safetensors

CORPUS = REPOSITORY / "tests" / "corpus"
VERSIONS = sorted(p.parent.name for p in CORPUS.glob("*/expected.json"))
# Relative, of losses: sums in another order, as AVX2 has them in place of AVX-512.
TOLERANCE = 1e-4
# Absolute, of accuracy and IoU of random weights: a pixel may change its class.
SCORE_TOLERANCE = 0.02


class OldFiles:
    """What each version's files must do; self.version is set below."""

    def setUp(self):
        super().setUp()
        shutil.copytree(CORPUS / self.version, self.dir, dirs_exist_ok=True)
        with tarfile.open(self.dir / "run.tar.xz") as tar:
            tar.extractall(self.dir)
        self.expected = json.loads((self.dir / "expected.json").read_text())

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
        shutil.copytree(self.dir / "run", self.dir / "again", symlinks=True)
        for run, ranks in (("run", 2), ("again", 1)):
            job = self.weft("train", "train.toml", f"run.dir={run}", ranks=ranks)
            self.assertNotIn("step 1/6", job.err)
            self.assertNotIn("is not what", job.err)
            losses = self.losses(run)
            self.assertEqual(losses[:3], self.expected["train"][:3])  # what it had done before
            self.assert_close(losses, self.expected["train"], TOLERANCE)
            self.assertEqual(self.latest(run), "step_6")

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
    name = "Version_" + version.replace(".", "_")
    globals()[name] = type(name, (OldFiles, WeftTest), {"version": version})


class Corpus(unittest.TestCase):
    def test_there_is_one_and_it_is_small(self):
        self.assertIn("0.1.0", VERSIONS)
        for version in VERSIONS:
            self.assertLess(sum(p.stat().st_size for p in (CORPUS / version).rglob("*")), 1e6)


if __name__ == "__main__":
    unittest.main()
