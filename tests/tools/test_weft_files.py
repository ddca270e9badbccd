"""tools/python/weft_files.py and weft_diff.py on files that weft writes here, against weft's own export, h5py and JSON."""
import contextlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
# A Python with numpy and h5py: this one, or Debian's own.
if not any(os.path.exists(python) and subprocess.run([python, "-c", "import h5py, numpy"], capture_output=True).returncode == 0
           for python in (sys.executable, "/usr/bin/python3")):
    print("no Python with numpy and h5py here: apt-get install python3-h5py")
    sys.exit(77)
try:
    import h5py
except ImportError:
    os.execv("/usr/bin/python3", ["/usr/bin/python3", "-B", *sys.argv])
import numpy as np  # noqa: E402

for folder in ("tests/e2e", "tools/python"):
    sys.path.insert(0, str(ROOT / folder))
import harness  # noqa: E402
import tiny_models  # noqa: E402
import weft_diff  # noqa: E402
import weft_files  # noqa: E402


class Files(harness.WeftTest):
    def compare_weights(self, run, array, *options):
        """The run's trained parameters are those that weft exports, to the bit."""
        out = self.dir / "exported.safetensors"
        self.weft("export", run, out, "--replace", *options, ranks=0)
        exported, checkpoint = weft_files.read_weights(out), weft_files.read_checkpoint(self.dir / run)
        self.assertGreater(len(checkpoint.shapes), 20)
        for name, shape in checkpoint.shapes.items():
            self.assertEqual(exported[name].shape, shape)
            np.testing.assert_array_equal(checkpoint.tensor(name, array), exported[name], name)
        return checkpoint

    def test_checkpoints_of_several_ranks(self):
        self.train("run", "train.steps=7", "parallel.bucket_mib=0.02", ranks=3)
        checkpoint = self.compare_weights("run", "master")
        self.compare_weights("run", "ema", "--ema")
        self.assertEqual(checkpoint.step, 7)
        self.assertIn("steps = 7", checkpoint.deck)
        self.assertGreater(len(checkpoint.manifest["shards"]), 1)
        self.assertEqual(set(checkpoint.arrays), {"master", "exp_avg", "exp_avg_sq", "ema", "fixed"})
        self.assertGreater(checkpoint.array("exp_avg_sq").min(), -1e-30)
        self.assertFalse(np.array_equal(checkpoint.array("master"), checkpoint.array("ema")))
        older = weft_files.read_checkpoint(self.dir / "run" / "step_5")
        self.assertEqual(older.step, 5)
        self.assertFalse(np.array_equal(older.array("master"), checkpoint.array("master")))

    def test_metrics(self):
        self.train("run", "train.steps=3")
        columns = weft_files.read_metrics(self.dir / "run")
        lines = self.metrics("run")
        self.assertEqual(columns["step"].tolist(), [0, 1, 2])
        self.assertEqual(columns["loss"].tolist(), [m["loss"] for m in lines])
        self.assertEqual(columns["split.compute"].tolist(), [m["split"]["compute"] for m in lines])
        self.assertEqual(columns["rank_busy"], [m["rank_busy"] for m in lines])
        # A run at work: its last line is not whole yet; and a member that some steps have.
        with open(self.dir / "run/metrics.jsonl", "a") as f:
            f.write(json.dumps({"step": 3, "loss": 1.0, "terms": {"l1": 2.0}}) + "\n{\"step\": 4, \"lo")
        columns = weft_files.read_metrics(self.dir / "run/metrics.jsonl")
        self.assertEqual(columns["step"].tolist(), [0, 1, 2, 3])
        self.assertTrue(np.isnan(columns["terms.l1"][:3]).all() and columns["terms.l1"][3] == 2.0)

    def test_stores_of_pixels_latents_and_features(self):
        captions = ["a small cat", "the other: ü, and \"quotes\""]
        for i in range(2):
            harness.make_video(self.dir / f"v{i}.mp4", f"testsrc2=duration=3:rate=10:size={64 + 32 * i}x64")
        (self.dir / "list.jsonl").write_text("".join(json.dumps({"path": f"v{i}.mp4", "text": text}) + "\n"
                                                     for i, text in enumerate(captions)))
        self.weft("ingest", "deck.toml", 'ingest.inputs=["list.jsonl"]', "ingest.frames=[17]", "ingest.height=32",
                  "ingest.width=32", "ingest.output=clips.h5", ranks=1)
        os.rename(self.dir / "v1.mp4", os.fsencode(self.dir) + b"/caf\xe9.mp4")  # a name that is not UTF-8
        self.weft("ingest", "deck.toml", "ingest.inputs=c*.mp4", "ingest.frames=[17]", "ingest.height=32", "ingest.width=32",
                  "ingest.output=named.h5", ranks=1)
        (named,) = weft_files.read_store(self.dir / "named.h5").values()
        self.assertTrue(named.sources[0].startswith("caf\\xe9.mp4 "), named.sources[0])
        store = weft_files.read_store(self.dir / "clips.h5")
        (name, bucket), = store.items()
        self.assertIn(name, self.weft("inspect", "clips.h5", ranks=0).out)
        self.assertEqual((bucket.kind, len(bucket), bucket.clip(0).shape), ("pixels", 2, (17, 32, 32, 3)))
        self.assertEqual(bucket.captions, captions)
        self.assertIn("v1.mp4", bucket.sources[1])
        self.assertEqual(bucket.fps.tolist(), [10, 10])
        self.assertIsNone(bucket.text_features(0))
        with h5py.File(self.dir / "clips.h5") as file:
            np.testing.assert_array_equal(bucket.clip(1), file["clips"][name]["frames"][1])
        with self.assertRaises(ValueError):
            bucket.latent(0)

        tiny_models.write_t5(self.dir / "t5")
        (self.dir / "gen.toml").write_text(tiny_models.TINY_GENERATE_DECK)
        encode = ("encode", "gen.toml", "data.path=clips.h5", "t5.weights=t5")
        for kind in ("moments", "sampled"):
            self.weft(*encode, "encode.dtype=f32", f"encode.latents={kind}", "vae.scale=[2,2,2,2]", "vae.shift=[0.1,0.2,0.3,0.4]",
                      f"encode.output={kind}.h5")
        moments, sampled = (weft_files.read_store(self.dir / f"{kind}.h5")[name] for kind in ("moments", "sampled"))
        self.assertEqual((moments.kind, sampled.kind), ("moments", "latents"))
        self.assertEqual(moments.clip(0).shape[0], 8)
        mean, deviation = moments.latent(0), np.exp(moments.clip(0)[4:] / 2) / 2
        np.testing.assert_allclose(mean[1], (moments.clip(0)[1] - np.float32(0.2)) / 2, rtol=1e-6)
        # The drawn sample lies about the mean, by the deviation that the moments tell.
        z = (sampled.latent(0) - mean) / deviation
        self.assertLess(abs(z.mean()), 0.5)
        self.assertTrue(0.6 < z.std() < 1.5, z.std())

        (self.dir / "captions.txt").write_text("\n".join(captions) + "\n")
        self.weft("text", "gen.toml", "captions.txt", "t5.weights=t5", "--features", "features.safetensors", ranks=1)
        features = weft_files.read_weights(self.dir / "features.safetensors")
        for i in range(2):
            self.assertEqual(moments.text_features(i).shape[1], 16)
            np.testing.assert_allclose(moments.text_features(i), features[str(i)], atol=1e-6)
        self.assertFalse(np.array_equal(moments.text_features(0)[0], moments.text_features(1)[0]))
        with self.assertRaises(ValueError):
            weft_files.read_store(self.made_file())

    def made_file(self):
        with h5py.File(self.dir / "other.h5", "w") as file:
            file["x"] = np.zeros(3)
        return self.dir / "other.h5"

    def test_weights_in_shards_and_in_bf16(self):
        self.train("run", "train.steps=2", ranks=1)
        self.weft("export", "run", "whole.safetensors", ranks=0)
        self.weft("export", "run", "half.safetensors", "--dtype", "bf16", "--shard-size", "0.0001", ranks=0)
        whole = weft_files.read_weights(self.dir / "whole.safetensors")
        index = self.dir / "half.safetensors.index.json"
        self.assertGreater(len(set(json.loads(index.read_text())["weight_map"].values())), 1)
        half = weft_files.read_weights(index)
        self.assertEqual(half.keys(), whole.keys())
        for name, values in whole.items():
            np.testing.assert_allclose(half[name], values, rtol=2 ** -8, atol=1e-30)
        # Folders, as weft reads them: an index before its shards, "model" before all.
        self.assertEqual(weft_files.read_weights(self.dir).keys(), whole.keys())
        (self.dir / "two").mkdir()
        for name in ("a", "b"):
            harness.write_safetensors(self.dir / f"two/{name}.safetensors", {name: ("F32", [1], b"\0\0\x80?")})
        with self.assertRaises(ValueError):
            weft_files.read_weights(self.dir / "two")
        os.rename(self.dir / "two/b.safetensors", self.dir / "two/model.safetensors")
        self.assertEqual(weft_files.read_weights(self.dir / "two")["b"].tolist(), [1])

    def diff(self, *arguments):
        """weft-diff's exit status and what it printed."""
        with mock.patch.object(sys, "argv", ["weft-diff", *map(str, arguments)]), contextlib.redirect_stdout(io.StringIO()) as out, \
                contextlib.redirect_stderr(io.StringIO()) as err:
            return weft_diff.main(), out.getvalue() + err.getvalue()

    def test_differences(self):
        self.train("run", "train.steps=7", ranks=2)
        os.chdir(self.dir)
        self.assertEqual(self.diff("run", "run/step_7")[0], 0)
        code, said = self.diff("run/step_5", "run", "--all")
        self.assertEqual(code, 1)
        self.assertIn("step: 5 and 7", said)
        self.assertRegex(said, r"master: \S+ \[.*\]: \d+ of \d+ differ, at most \S+, relative \S+")
        self.weft("export", "run", "whole.safetensors", ranks=0)
        self.weft("export", "run", "half.safetensors", "--dtype", "bf16", ranks=0)
        self.assertEqual(self.diff("whole.safetensors", "half.safetensors", "--tolerance", "4e-3")[0], 0)
        self.assertEqual(self.diff("whole.safetensors", "half.safetensors")[0], 1)
        tensors = harness.read_safetensors(self.dir / "whole.safetensors")
        name, (dtype, shape, data) = next(iter(tensors.items()))
        tensors[name] = dtype, shape, data[:-4] + b"\0\0\x80?"
        harness.write_safetensors(self.dir / "one.safetensors", tensors)
        code, said = self.diff("whole.safetensors", "one.safetensors")
        self.assertEqual((code, said.count("\n")), (1, 2), said)
        self.assertIn(f"{name} {list(shape)}: 1 of {len(data) // 4} differ", said)
        del tensors[name]
        harness.write_safetensors(self.dir / "less.safetensors", tensors)
        self.assertIn(f"{name}: only in A", self.diff("whole.safetensors", "less.safetensors")[1])

        harness.make_video(self.dir / "v.mp4", "testsrc2=duration=3:rate=10:size=64x64")
        self.weft("ingest", "deck.toml", "ingest.inputs=v.mp4", "ingest.frames=[9]", "ingest.height=32", "ingest.width=32",
                  "ingest.output=a.h5", ranks=0)
        (self.dir / "b.h5").write_bytes((self.dir / "a.h5").read_bytes())
        self.assertEqual(self.diff("a.h5", "b.h5")[0], 0)
        with h5py.File("b.h5", "r+") as file:
            (group,) = file["clips"].values()
            group["frames"][0, 0, 0, 0, 0] ^= 3
        code, said = self.diff("a.h5", "b.h5")
        self.assertEqual(code, 1)
        self.assertIn(" 1 of ", said)
        self.assertEqual(self.diff("a.h5", "nothing.h5")[0], 2)
        rows = [mock.Mock(of={"text features": ((3, 2), lambda n=n: map(np.ones, ((n, 2), (3 - n, 2))))}, notes={}) for n in (1, 2)]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            self.assertEqual(weft_diff.compare(*rows), 1)
        self.assertIn("text features: 2 of another shape", out.getvalue())
        shutil.copytree("run/step_5", "short")
        os.truncate("short/shard_0000.bin", 1000)
        code, said = self.diff("short", "run/step_5")
        self.assertEqual(code, 2)
        self.assertIn("shard_0000.bin has 1000 bytes, not ", said)

    def test_the_notebook(self):
        """Its cells on a run made here, where matplotlib is; anywhere else they must at least compile. It is kept without outputs."""
        notebook = json.loads((ROOT / "tools/python/look.ipynb").read_text())
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        self.assertGreater(len(cells), 5)
        for cell in cells:
            self.assertEqual((cell["outputs"], cell["execution_count"]), ([], None))
            compile("".join(cell["source"]), "look.ipynb", "exec")
        try:
            import matplotlib
        except ImportError:
            return
        matplotlib.use("Agg")
        self.train("run", "train.steps=5")
        self.ingest("clips.h5")
        with mock.patch.dict(os.environ, RUN=str(self.dir / "run"), STORE=str(self.dir / "clips.h5"), WEFT_PYTHON="."), \
                contextlib.redirect_stdout(io.StringIO()) as said:
            names = {}
            for cell in cells:
                exec(compile("".join(cell["source"]), "look.ipynb", "exec"), names)
        self.assertIn("step 5, ", said.getvalue())
        self.assertIn("pixels", said.getvalue())


if __name__ == "__main__":
    unittest.main()
