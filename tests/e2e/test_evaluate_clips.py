"""weft evaluate of clips: columns against what the clips were made to have, the same table on any number of ranks and after a
kill, filters of weft ingest by it, and what becomes of rows that are not as they should be."""

import contextlib
import csv
import json
import math
import random
import shutil
import struct
import subprocess
import unittest

from harness import WeftTest, make_video, write_safetensors
from test_evaluate import png

DECK = """
[run]
threads = 1
[evaluate]
clips = "in.csv"
output = "out"
"""
# Frames of one level each: what changes from frame to frame is known.
LEVELS = [60, 90, 60, 90, 60, 90]


def write_clip(folder, seed=3):
    """The smallest CLIP that weft reads: pictures of 16x16 in four patches, one layer of 64 channels, 20 merges."""
    folder.mkdir(exist_ok=True)
    draw, tensors = random.Random(seed), {}

    def add(name, *shape):
        count, inner = math.prod(shape), math.prod(shape[1:])
        if "norm" in name:
            values = [1.0 if name.endswith("weight") else 0.0] * count
        else:
            values = [draw.uniform(-1, 1) * math.sqrt(3 / inner) for _ in range(count)]
        tensors[name] = ("F32", shape, struct.pack(f"<{count}f", *values))

    def both(name, *shape):
        add(name + ".weight", *shape)
        add(name + ".bias", shape[0])

    for tower in ("vision_model", "text_model"):
        layer = tower + ".encoder.layers.0."
        for q in "qkv":
            both(f"{layer}self_attn.{q}_proj", 64, 64)
        both(layer + "self_attn.out_proj", 64, 64)
        both(layer + "layer_norm1", 64)
        both(layer + "layer_norm2", 64)
        both(layer + "mlp.fc1", 64, 64)
        both(layer + "mlp.fc2", 64, 64)
    add("vision_model.embeddings.class_embedding", 64)
    add("vision_model.embeddings.patch_embedding.weight", 64, 3, 8, 8)
    add("vision_model.embeddings.position_embedding.weight", 5, 64)
    both("vision_model.pre_layrnorm", 64)
    both("vision_model.post_layernorm", 64)
    add("visual_projection.weight", 8, 64)
    add("text_model.embeddings.token_embedding.weight", 534, 64)
    add("text_model.embeddings.position_embedding.weight", 12, 64)
    both("text_model.final_layer_norm", 64)
    add("text_projection.weight", 8, 64)
    tensors["text_model.embeddings.position_ids"] = ("I64", (1, 12), struct.pack("<12q", *range(12)))
    write_safetensors(folder / "model.safetensors", tensors)
    letters = "abcdefghijklmnopqrst"
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in zip(letters, letters[1:] + "a")))
    head, tensors = {0: (1024, 8), 2: (128, 1024), 4: (64, 128), 6: (16, 64), 7: (1, 16)}, {}
    for number, shape in head.items():
        both(f"layers.{number}", *shape)
    write_safetensors(folder / "aesthetic.safetensors", tensors)


class EvaluateClips(WeftTest):
    def setUp(self):
        super().setUp()
        (self.dir / "deck.toml").write_text(DECK)

    def evaluate(self, *overrides, ranks=0, expect=0, **options):
        return self.weft("evaluate", "deck.toml", *overrides, ranks=ranks, expect=expect, **options)

    def grey(self, name, level=lambda x, y: 128, width=24, height=20):
        (self.dir / name).write_bytes(png(width, height, lambda x, y: (level(x, y),) * 3))
        return name

    def levels(self, name, levels):
        """A clip without loss whose frame t has the level levels[t] everywhere."""
        steps = "+".join(f"{level}*eq(N,{t})" for t, level in enumerate(levels))
        subprocess.run(["ffmpeg", "-v", "error", "-y", "-f", "lavfi", "-i", f"nullsrc=size=32x24:rate=10:duration={len(levels) / 10},"
                        f"format=gbrp,geq=r='{steps}':g='{steps}':b='{steps}'", "-c:v", "ffv1", str(self.dir / name)],
                       check=True, stdin=subprocess.DEVNULL)
        return name

    def table(self, rows, name="in.csv", columns=("id", "path", "reference", "text")):
        with open(self.dir / name, "w", newline="") as f:
            writer = csv.writer(f)
            writer.writerow(columns)
            writer.writerows(rows)

    def rows(self, output="out"):
        with open(self.dir / output / "scores.csv", newline="") as f:
            return list(csv.DictReader(f))


class Measures(EvaluateClips):
    def test_known_values(self):
        self.levels("a.mkv", LEVELS)
        self.levels("b.mkv", [v + 10 for v in LEVELS])
        self.levels("fade.mkv", [20, 40, 60, 80])
        self.grey("p.png")
        self.table([[0, "a.mkv", "b.mkv", ""], [1, "a.mkv", "a.mkv", ""], [2, "fade.mkv", "", ""], [3, "p.png", "", ""],
                    [4, "a.mkv", "b.mkv", ""], [5, "fade.mkv", "a.mkv", ""]])
        said = self.evaluate()
        self.assertEqual(self.cited("out/cite.bib"), ["weft", "ssim"])
        rows = self.rows()
        self.assertEqual([r["id"] for r in rows], list("012345"))
        self.assertEqual(list(rows[0])[4:], ["psnr", "ssim", "flicker", "reference_flicker", "motion", "reference_motion",
                                             "evaluation_fault"])
        self.assertAlmostEqual(float(rows[0]["psnr"]), 10 * math.log10(255 ** 2 / 10 ** 2), 9)
        c1 = 2.55 ** 2  # of level frames SSIM's first factor remains
        wanted = [(2 * v * (v + 10) + c1) / (v * v + (v + 10) ** 2 + c1) for v in (60, 90)]
        self.assertAlmostEqual(float(rows[0]["ssim"]), sum(wanted) / 2, 9)
        for name in ("flicker", "motion", "reference_flicker", "reference_motion"):
            self.assertEqual(float(rows[0][name]), 30)
        self.assertEqual((float(rows[1]["psnr"]), float(rows[1]["ssim"])), (100, 1))  # equal frames
        self.assertEqual((float(rows[2]["motion"]), float(rows[2]["flicker"])), (20, 0))
        self.assertEqual({rows[2][c] for c in ("psnr", "ssim", "reference_motion", "evaluation_fault")}, {""})
        self.assertEqual({v for k, v in rows[3].items() if k not in ("id", "path")}, {""})  # a picture has no changes
        self.assertEqual({k: v for k, v in rows[4].items() if k != "id"}, {k: v for k, v in rows[0].items() if k != "id"})
        self.assertEqual(float(rows[5]["reference_motion"]), 30)
        self.assertIn("5 clips", said.err)  # two rows are one clip
        self.assertIn("1 clip is not as long as its reference", said.out)
        summary = json.loads((self.dir / "out/scores.json").read_text())
        self.assertEqual((summary["rows"], summary["lengths_differ"]), (6, 1))
        self.assertEqual(summary["columns"]["psnr"]["rows"], 4)
        # Of the pairs alone, as the references' is.
        self.assertEqual([summary["columns"][c]["rows"] for c in ("motion", "reference_motion")], [4, 4])
        self.assertAlmostEqual(summary["columns"]["motion"]["mean"], (30 * 3 + 20) / 4)
        self.assertEqual(summary["without_reference"], 2)
        # Asked for by name, and a table beside the results keeps its paths.
        self.assertIn("5 evaluated before", self.evaluate().err)
        self.evaluate('evaluate.measures=["motion"]', "evaluate.output=other")
        self.assertEqual(list(self.rows("other")[0]), ["id", "path", "reference", "text", "motion", "reference_motion",
                                                       "evaluation_fault"])

    def test_folders_and_references_of_another_size(self):
        for folder, size in (("clips", "48x32"), ("real", "96x64")):
            (self.dir / folder / "x").mkdir(parents=True)
            for i in range(2):
                make_video(self.dir / folder / f"x/{i}.mp4",
                           f"nullsrc=duration=1:rate={8 + i}:size={size},format=gray,geq=lum='128+90*sin(6*X/W+N/4)'")
        self.evaluate("evaluate.clips=clips", "evaluate.references=real", ranks=2)
        rows = self.rows()
        self.assertEqual([r["path"] for r in rows], [str(self.dir / f"clips/x/{i}.mp4") for i in range(2)])
        for r in rows:
            self.assertGreater(float(r["psnr"]), 25)
            self.assertLess(float(r["psnr"]), 99)
            self.assertGreater(float(r["motion"]), 0)
            self.assertEqual(r["evaluation_fault"], "")
        # A clip that has none is counted, and is no failure.
        (self.dir / "real/x/1.mp4").unlink()
        said = self.evaluate("evaluate.clips=clips", "evaluate.references=real", "evaluate.output=fewer")
        self.assertIn("1 row without a reference", said.out)
        self.assertEqual([r["psnr"] == "" for r in self.rows("fewer")], [False, True])
        self.assertNotEqual(self.rows("fewer")[1]["motion"], "")
        self.refused(self.weft("report", "fewer", ranks=0, expect=None), 3, "evaluation of clips", "scores.csv")


class Clip(EvaluateClips):
    def media(self):
        """Rows of pictures and videos with captions."""
        rows = []
        for i in range(5):
            self.grey(f"{i}.png", lambda x, y, i=i: (37 * i + 11 * x * y) % 256)
            rows.append([i, f"{i}.png", "", ["abc", "a tall cat", "", "ba ba", "no (?)"][i]])
        for i in range(3):
            make_video(self.dir / f"{i}.mp4", f"testsrc2=duration={1 + i}:rate=10:size=64x48")
            rows.append([5 + i, f"{i}.mp4", "", "a test of tests"])
        return rows

    def test_scores_filters_ranks_and_restart(self):
        write_clip(self.dir / "clip")
        self.table(self.media())
        keys = ["clip.weights=clip", "clip.aesthetic=clip/aesthetic.safetensors"]
        self.evaluate(*keys)
        self.assertEqual(self.cited("out/cite.bib"), ["weft", "clip"])
        rows = self.rows()
        self.assertEqual(list(rows[0])[4:], ["flicker", "motion", "match", "aes", "evaluation_fault"])
        match = [float(r["match"]) if r["match"] else None for r in rows]
        aes = [float(r["aes"]) for r in rows]
        self.assertIsNone(match[2])  # no caption
        self.assertTrue(all(-100 <= m <= 100 for m in match if m is not None))
        self.assertEqual(len(set(match)), 8)
        self.assertEqual(len(set(aes)), 8)
        for ranks in (2, 3):
            self.evaluate(*keys, f"evaluate.output=out{ranks}", ranks=ranks)
            self.assertEqual((self.dir / f"out{ranks}/scores.csv").read_bytes(), (self.dir / "out/scores.csv").read_bytes())
        # A job that is killed goes on where it was.
        job = self.start("evaluate", "deck.toml", *keys, "evaluate.output=killed", ranks=2)

        def one_is_made():
            with contextlib.suppress(FileNotFoundError):  # the ranks' files are joined at the end
                if any(b'"match"' in p.read_bytes() for p in (self.dir / "killed").glob("clips.rank*.jsonl")):
                    return True
            return (self.dir / "killed/clips.jsonl").exists()
        self.until(job, one_is_made)
        job.kill()
        job.process.wait()
        self.evaluate(*keys, "evaluate.output=killed", ranks=2)
        self.assertEqual((self.dir / "killed/scores.csv").read_bytes(), (self.dir / "out/scores.csv").read_bytes())
        # Other weights are another job.
        self.assertIn("8 evaluated before", self.evaluate(*keys).err)
        write_clip(self.dir / "clip", seed=4)
        self.assertNotIn("evaluated before", self.evaluate(*keys).err)
        rows = self.rows()
        self.assertNotEqual([float(r["aes"]) for r in rows], aes)
        # Ingest takes its filters from this table.
        good = [r for r in rows if r["match"] and float(r["match"]) > 0]
        self.assertIn(len(good), range(1, 7), "a filter that keeps some")
        middle = sorted(float(r["aes"]) for r in rows)[4]
        self.assertGreater(middle, 0)
        for option, value, dropped in (("match", 1e-9, f"{8 - len(good)} dropped by min_match = 1e-09, 1 of them without a value"),
                                       ("aes", middle, "4 dropped by min_aes")):
            said = self.weft("ingest", "deck.toml", "ingest.inputs=in.csv", 'ingest.scores=["out/scores.csv"]',
                             "ingest.output=clips.h5", "--plan", f"--min-{option}", str(value), ranks=0)
            self.assertIn(dropped, said.out + said.err)

    def test_a_table_of_scores_is_a_list_with_them(self):
        write_clip(self.dir / "clip")
        self.table(self.media())
        self.evaluate("clip.weights=clip", 'evaluate.measures=["match"]')
        self.assertEqual(list(self.rows()[0]), ["id", "path", "reference", "text", "match", "evaluation_fault"])
        for row in self.rows():
            self.assertTrue(row["path"].startswith("/"))


class Faults(EvaluateClips):
    def test_rows_that_fail_and_others_that_do_not(self):
        self.levels("a.mkv", LEVELS)
        (self.dir / "broken.mp4").write_bytes(b"no video at all")
        self.table([[0, "a.mkv", "lost.mkv", ""], [1, "broken.mp4", "a.mkv", ""], [2, "a.mkv", "a.mkv", ""],
                    [3, "a.mkv", "broken.mp4", ""], [4, "", "", ""]])
        said = self.evaluate(expect=3)
        rows = self.rows()
        self.assertEqual([bool(r["evaluation_fault"]) for r in rows], [True, True, False, True, True])
        self.assertEqual([r["motion"] for r in rows], ["30.0", "", "30.0", "30.0", ""])
        self.assertEqual([r["psnr"] for r in rows], ["", "", "100.0", "", ""])
        self.assertIn("reference: ", rows[3]["evaluation_fault"])
        self.assertIn("4 of 5 clips failed", said.err)
        # The same command tries these again, and only these.
        shutil.copy(self.dir / "a.mkv", self.dir / "lost.mkv")
        self.assertIn("1 evaluated before", self.evaluate(expect=3).err)
        self.assertEqual([r["psnr"] for r in self.rows()], ["100.0", "", "100.0", "", ""])

    def test_bad_input(self):
        self.levels("a.mkv", LEVELS)
        self.table([[0, "a.mkv", "", ""]])
        (self.dir / "empty").mkdir()
        for code, words, *overrides in (
                (2, "evaluate.references=FOLDER", 'evaluate.measures=["psnr"]'),
                (2, "clip.weights", 'evaluate.measures=["match"]'),
                (2, 'evaluate.measures has "fvd"', 'evaluate.measures=["fvd"]'),
                (2, "more than once", 'evaluate.measures=["motion","motion"]'),
                (2, "is not a folder", "evaluate.references=a.mkv"),
                (3, "lost", "clip.weights=lost"),
                (3, "has no videos and no pictures", "evaluate.clips=empty"),
                (3, "vision_model.encoder.layers.0", 'evaluate.measures=["aes"]', "clip.weights=head.safetensors",
                 "clip.aesthetic=head.safetensors")):
            if overrides[-1].startswith("clip.aesthetic"):
                write_safetensors(self.dir / "head.safetensors", {"layers.0.bias": ("F32", (1,), struct.pack("<f", 1))})
            self.refused(self.evaluate(*overrides, expect=None), code, words)
        # A column of captions, but no tokenizer.
        write_clip(self.dir / "clip")
        (self.dir / "clip/merges.txt").unlink()
        self.table([[0, "a.mkv", "", "a"]])
        self.refused(self.evaluate("clip.weights=clip", ranks=2, expect=None), 2, "clip.merges")
        # Results must not replace an input.
        self.table([[0, "a.mkv", "", ""]], name="scores.csv")
        self.refused(self.evaluate("evaluate.clips=scores.csv", "evaluate.output=.", expect=None), 2, "evaluate.output")


if __name__ == "__main__":
    unittest.main()
