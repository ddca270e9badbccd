"""weft score on a small network with random weights and small videos: the same table at any number of ranks and after a kill,
and what becomes of files that are not as they should be."""

import contextlib
import csv
import io
import json
import os
import shutil
import subprocess
import time
import unittest

from harness import WeftTest, make_video, write_safetensors
from test_evaluate import png, read_png

# Each frame takes some hundredths of a second.
DECK = """
[run]
threads = 1
[model]
name = "dbnet"
backbone = "resnet18"
asf = false
[score]
weights = "random:3"
side = 64
"""


class Score(WeftTest):
    def setUp(self):
        super().setUp()
        (self.dir / "deck.toml").write_text(DECK)

    def score(self, table, output, *overrides, ranks=0, expect=0, **options):
        return self.weft("score", "deck.toml", f"score.input={table}", f"score.output={output}", *overrides, ranks=ranks,
                         expect=expect, **options)

    def pictures(self, count):
        """`count` different small pictures; their names."""
        (self.dir / "p").mkdir(exist_ok=True)
        names = [f"p/{i}.png" for i in range(count)]
        for i, name in enumerate(names):
            (self.dir / name).write_bytes(
                png(24, 20, lambda x, y: ((37 * i + 11 * x * y) % 256, (x * (i + 3)) % 256, (y * i * 7) % 256)))
        return names

    def table(self, name, paths):
        (self.dir / name).write_text("id,path\n" + "".join(f"{i},{p}\n" for i, p in enumerate(paths)))

    def rows(self, output):
        with open(self.dir / output, newline="") as f:
            return list(csv.DictReader(f))

    def report(self, output):
        return json.loads((self.dir / f"{output}.parts/score_report.json").read_text())

    def lines(self, output):
        return {j["name"]: j for file in (self.dir / f"{output}.parts").glob("score*.jsonl")
                for j in map(json.loads, file.read_text().splitlines()) if "name" in j}


class Tables(Score):
    def test_any_number_of_ranks_gives_the_same_table(self):
        for i in range(3):
            make_video(self.dir / f"{i}.mp4", f"testsrc2=duration=1:rate={12 + i}:size=96x64")
        shutil.copy(self.dir / "1.mp4", self.dir / "copy.MOV")
        paths = ["0.mp4", *self.pictures(5), "1.mp4", "0.mp4", "copy.MOV", "2.mp4"]
        text = "\ufeffnote,path\r\n" + "".join(f'"a, ""{i}""\nb",{p}\r\n' for i, p in enumerate(paths))
        (self.dir / "in.csv").write_bytes(text.encode())
        said = self.score("in.csv", "one.csv")
        for ranks in (2, 3):
            self.score("in.csv", f"{ranks}.csv", ranks=ranks)
            self.assertEqual((self.dir / f"{ranks}.csv").read_bytes(), (self.dir / "one.csv").read_bytes())
            took = self.summary(f"{ranks}.csv.parts")
            self.assertEqual((took["speed"]["unit"], took["speed"]["items"], took["ranks"]), ("file", 9, ranks))
            self.assertEqual(list(took["parts"]), ["network", "network_waited", "idle", "other"])
        self.assertEqual(self.cited("one.csv.parts/cite.bib"), ["weft", "resnet", "dbnet"])
        # What was in the table is as it was.
        out = (self.dir / "one.csv").read_bytes().decode()
        found = list(csv.reader(io.StringIO(out, newline="")))
        self.assertEqual([row[:-1] for row in found], list(csv.reader(io.StringIO(text, newline=""))))
        self.assertEqual(found[0], ["\ufeffnote", "path", "ocr"])
        counts = dict(zip(paths, (int(row[-1]) for row in found[1:])))
        self.assertGreater(len(set(counts.values())), 2, "counts that are alike tell little")
        self.assertEqual(counts["copy.MOV"], counts["1.mp4"])
        self.assertEqual(len(self.lines("one.csv")), 9)  # 0.mp4 once
        self.assertIn("bounds the job", said.out)
        report = self.report("one.csv")
        self.assertEqual(report["feed"]["frames"], 9)
        self.assertIn(report["feed"]["bound"], ("network", "decode", "resize", "post-processing"))
        self.assertIn("10 rows", said.out)
        self.assertEqual(sum(rows for _, rows in self.page_data("one.csv.html")["bins"]), 10)
        # Nothing is left to do, but what is asked of the table may change.
        again = self.score("in.csv", "one.csv", f"score.maximum={sorted(counts.values())[3]}")
        self.assertIn("9 scored before", again.err)
        kept = [row["path"] for row in self.rows("one.csv")]
        self.assertEqual(kept, [p for p in paths if counts[p] <= sorted(counts.values())[3]])
        (self.dir / "one.csv.html").write_text("mine")
        self.refused(self.score("in.csv", "one.csv", expect=None), 3, "one.csv.html is not a page of weft")

    def test_json_lines_as_csv(self):
        paths = self.pictures(4)
        self.table("in.csv", paths)
        (self.dir / "in.jsonl").write_text("".join(json.dumps({"path": p, "ocr": 7.5, "n": i}) + "\n"
                                                   for i, p in enumerate(paths)))
        self.score("in.csv", "out.csv")
        self.score("in.jsonl", "out.jsonl", ranks=2)
        found = [json.loads(line) for line in (self.dir / "out.jsonl").read_text().splitlines()]
        self.assertEqual(found, [{"path": r["path"], "ocr": int(r["ocr"]), "n": i}
                                 for i, r in enumerate(self.rows("out.csv"))])

    def test_columns_and_pictures(self):
        paths = self.pictures(3)
        self.table("in.csv", [paths[0], paths[0], *paths[1:]])
        self.score("in.csv", "out.csv", 'score.columns=["area","boxes","scores","fault"]', "score.pictures=3")
        for row in self.rows("out.csv"):
            boxes, scores = json.loads(row["ocr_boxes"]), json.loads(row["ocr_scores"])
            self.assertEqual(len(boxes), int(row["ocr"]))
            self.assertEqual(len(scores), int(row["ocr"]))
            self.assertTrue(all(s > 0.3 for s in scores))
            self.assertTrue(all(len(b) == 8 for b in boxes))
            self.assertTrue(0 <= float(row["ocr_area"]) <= 1)
            self.assertEqual(row["ocr_fault"], "")
        self.assertTrue(any(int(row["ocr"]) > 0 for row in self.rows("out.csv")))
        drawn = sorted((self.dir / "out.csv.parts/pictures").iterdir())
        self.assertEqual([p.name for p in drawn], ["00000_0.png", "00001_1.png"])  # of the first three rows
        width, height, pixels, _ = read_png(drawn[0])
        self.assertEqual((width, height), (64, 64))
        self.assertIn((255, 40, 40), [p for row in pixels for p in row])
        self.assertEqual((self.dir / "out.csv.html").read_text().count("data:image/png;base64,"), 2)
        # A picture that is gone is drawn again.
        drawn[1].unlink()
        self.assertIn("3 files, 2 scored before", self.score("in.csv", "out.csv",
                      'score.columns=["area","boxes","scores","fault"]', "score.pictures=3").err)
        self.assertTrue(drawn[1].exists())

    def test_shards_are_the_table_in_pieces(self):
        paths = self.pictures(7)
        self.table("in.csv", paths + paths[:2])
        self.score("in.csv", "all.csv")
        rows = []
        for k in (1, 2, 3):
            self.score("in.csv", f"{k}.csv", f"score.shard={k}/3", ranks=2 if k == 2 else 0)
            rows += self.rows(f"{k}.csv")
        self.assertEqual(rows, self.rows("all.csv"))
        self.refused(self.score("in.csv", "x.csv", "score.shard=5/4", expect=None), 2, "score.shard")

    def test_several_frames_count_the_most(self):
        make_video(self.dir / "a.mp4", "testsrc2=duration=2:rate=10:size=96x64")
        self.table("in.csv", ["a.mp4"])
        single = []
        for frame in (0, 7, 19):
            self.score("in.csv", f"{frame}.csv", f"score.frame={frame}")
            single.append(int(self.rows(f"{frame}.csv")[0]["ocr"]))
        self.score("in.csv", "all.csv", "score.frames=[0, 7, 19]")
        self.assertEqual(int(self.rows("all.csv")[0]["ocr"]), max(single))
        self.score("in.csv", "last.csv", "score.frame=1000")
        self.assertEqual(int(self.rows("last.csv")[0]["ocr"]), single[2])

    def test_folders_globs_and_files(self):
        self.pictures(3)
        make_video(self.dir / "p/a.mpg", "testsrc2=duration=1:rate=25:size=96x64")
        (self.dir / "p/notes.txt").write_text("no picture")
        self.table("in.csv", ["p/0.png", "p/1.png", "p/2.png", "p/a.mpg"])
        self.score("in.csv", "out.csv")
        wanted = [(r["path"], r["ocr"]) for r in self.rows("out.csv")]
        job = self.score("p", "folder.csv", ranks=2)
        self.assertIn("left out of p: 1 file (.txt 1)", job.err)
        self.assertEqual([(r["path"], r["ocr"]) for r in self.rows("folder.csv")], wanted)
        self.score("p/*.png", "glob.csv")
        self.assertEqual([(r["path"], r["ocr"]) for r in self.rows("glob.csv")], wanted[:3])
        self.score("p/a.mpg", "one.jsonl")
        self.assertEqual([json.loads(line) for line in (self.dir / "one.jsonl").read_text().splitlines()],
                         [{"path": "p/a.mpg", "ocr": int(wanted[3][1])}])
        # A shard's members; of the folder in which results lie they are no inputs.
        subprocess.run(["tar", "-cf", "s.tar", "-C", "p", "0.png", "a.mpg"], cwd=self.dir, check=True)
        self.score("s.tar", "s.csv", ranks=2)
        self.assertEqual([(r["path"], r["ocr"]) for r in self.rows("s.csv")],
                         [("s.tar/0.png", wanted[0][1]), ("s.tar/a.mpg", wanted[3][1])])
        for _ in range(2):
            self.score("p", "p/o.csv", "score.pictures=4")
            self.assertEqual(len(self.rows("p/o.csv")), 4)

    def test_paths_begin_in_the_tables_folder(self):
        """In score and in the ingest that joins its table, wherever the output lies and the job is started."""
        names = self.pictures(3)
        self.table("p/in.csv", ["0.png", "../p/1.png", self.dir / "p/2.png"])
        self.score("p/in.csv", "p/out.csv")
        self.assertEqual([r["path"] for r in self.rows("p/out.csv")], ["0.png", "../p/1.png", str(self.dir / "p/2.png")])
        self.score("p/in.csv", "elsewhere/out.csv")
        self.assertEqual([r["path"] for r in self.rows("elsewhere/out.csv")], [str(self.dir / n) for n in names])
        for table in ("p/out.csv", "elsewhere/out.csv"):
            job = self.weft("ingest", "deck.toml", "ingest.inputs=p/in.csv", f"ingest.scores=['{table}']", "ingest.frames=[1]",
                            "--max-ocr=1000", "--plan")
            self.assertIn("has scores of 3 of 3 items", job.err)
            self.weft("ingest", "deck.toml", f"ingest.inputs={table}", "ingest.frames=[1]", "--plan")
        self.table("in.csv", ["gone.png", *names])
        self.assertIn("WARN: 1 of 4 files is not there: gone.png", self.score("in.csv", "out.csv", expect=3).err)
        self.table("in.csv", ["0.png"])
        self.refused(self.score("in.csv", "out.csv", expect=None), 3, "1 of 1 file is not there: 0.png", "folder of score.input")

    def test_an_empty_table(self):
        (self.dir / "in.csv").write_text("path,n\n")
        self.score("in.csv", "out.csv", ranks=2)
        self.assertEqual((self.dir / "out.csv").read_text(), "path,n,ocr\n")


class BadInput(Score):
    def test_files_that_are_not_as_they_should_be(self):
        good = self.pictures(2)
        make_video(self.dir / "whole.mp4", "testsrc2=duration=1:rate=20:size=96x64")
        (self.dir / "folder").mkdir()
        (self.dir / "text.mp4").write_text("no video")
        (self.dir / "zero.mp4").touch()
        (self.dir / "cut.png").write_bytes((self.dir / good[0]).read_bytes()[:60])
        (self.dir / "one.png").write_bytes(png(1, 1, lambda x, y: (9, 9, 9)))
        (self.dir / "wide.png").write_bytes(png(30000, 3, lambda x, y: (x % 256, 0, y)))
        paths = [good[0], "missing.png", "folder", "text.mp4", "whole.mp4", "zero.mp4", "cut.png", "one.png", "",
                 "wide.png", "missing.mp4", "lavfi:testsrc2", "/dev/zero", good[1]]
        self.table("in.csv", paths)
        job = self.score("in.csv", "out.csv", 'score.columns=["fault"]', ranks=2, expect=3)
        rows = self.rows("out.csv")
        self.assertEqual([r["path"] for r in rows], paths)
        by_path = {r["path"]: r for r in rows}
        for path in (good[0], good[1], "whole.mp4", "one.png", "wide.png"):
            self.assertEqual(by_path[path]["ocr_fault"], "")
            self.assertRegex(by_path[path]["ocr"], "^[0-9]+$")
        for path in ("missing.png", "folder", "cut.png", "", "lavfi:testsrc2", "/dev/zero"):
            self.assertEqual(by_path[path]["ocr"], "", path)
            self.assertNotEqual(by_path[path]["ocr_fault"], "")
        for path in ("text.mp4", "zero.mp4", "missing.mp4"):  # a black frame, as in the original
            self.assertRegex(by_path[path]["ocr"], "^[0-9]+$")
            self.assertIn("stands in", by_path[path]["ocr_fault"])
            self.assertIn(path, job.err)
        self.assertIn("9 of 14 files failed", job.err)
        self.assertEqual(len({by_path[p]["ocr"] for p in ("text.mp4", "zero.mp4", "missing.mp4")}), 1)
        # The next start tries them again, and only them.
        shutil.copy(self.dir / good[1], self.dir / "missing.png")
        job = self.score("in.csv", "out.csv", 'score.columns=["fault"]', expect=3)
        self.assertIn("5 scored before", job.err)
        self.assertIn("8 of 14 files failed", job.err)
        again = {r["path"]: r for r in self.rows("out.csv")}
        self.assertEqual(again["missing.png"]["ocr"], again[good[1]]["ocr"])
        self.assertEqual(again.pop("missing.png")["ocr_fault"], "")
        by_path.pop("missing.png")
        self.assertEqual(again, by_path)

    def test_refusals(self):
        self.table("in.csv", self.pictures(1))
        (self.dir / "none.csv").write_text("file,n\na,1\n")
        (self.dir / "quote.csv").write_text('path\n"a\n')
        (self.dir / "folder").mkdir()
        write_safetensors(self.dir / "other.safetensors", {"encoder.conv1.weight": ("F32", (1,), bytes(4))})
        for table, output, overrides, code, said in (
                ("none.csv", "out.csv", [], 3, "no column `path`, but: file, n"),
                ("quote.csv", "out.csv", [], 3, "a quote is not closed"),
                ("missing.csv", "out.csv", [], 3, "cannot open missing.csv"),
                ("folder", "out.csv", [], 3, "folder folder has no videos and no pictures"),
                ("in.csv", "out.jsonl", [], 2, "score.output = out.jsonl"),
                ("in.txt", "out.csv", [], 3, "in.txt is not a list"),
                ("in.csv", "folder", [], 2, "is a folder"),
                ("in.csv", "in.csv", [], 2, "a result would replace the input in.csv"),
                ("in.csv", "none.csv/out.csv", [], 3, "none.csv/out.csv.parts"),
                ("in.csv", "out.csv", ["score.side=100"], 2, "score.side = 100"),
                ("in.csv", "out.csv", ['score.columns=["text"]'], 2, 'unknown column "text"'),
                ("in.csv", "out.csv", ["score.frames=[3,-1]"], 2, "score.frames"),
                ("in.csv", "out.csv", ["model.name=segmentation"], 2, "text detector"),
                ("in.csv", "out.csv", ["score.weights=none.safetensors"], 3, "none.safetensors"),
                ("in.csv", "out.csv", ["score.weights=other.safetensors"], 3, "other.safetensors"),
                ("in.csv", "out.csv", ["memory.arena_gib=0.0001"], 2, "a frame of 64x64 needs")):
            with self.subTest(said=said):
                self.refused(self.score(table, output, *overrides, expect=None), code, said)
                self.assertFalse((self.dir / "out.csv").exists())


class Restarts(Score):
    def test_killed_it_gives_the_same_table(self):
        """A table, whose parts are joined at the end. Stops: tests/jobs/engine, test_generate.py."""
        self.table("in.csv", self.pictures(60) + ["missing.png"])
        self.score("in.csv", "one.csv", expect=3)
        job = self.start("score", "deck.toml", "score.input=in.csv", "score.output=two.csv", ranks=2)
        found = 0
        while found < 20 and job.process.poll() is None:
            with contextlib.suppress(FileNotFoundError):
                found = sum(p.read_bytes().count(b'{"name"') for p in (self.dir / "two.csv.parts").glob("score*.jsonl"))
            time.sleep(0.002)
        job.kill()
        job.wait()
        job = self.score("in.csv", "two.csv", ranks=2, expect=3)
        self.assertIn("scored before", job.err)
        self.assertEqual((self.dir / "two.csv").read_bytes(), (self.dir / "one.csv").read_bytes())


class Threads(Score):
    def test_more_ranks_than_cores_share_them(self):
        paths = self.pictures(40)
        self.table("in.csv", paths)
        self.score("in.csv", "one.csv")
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, sorted(cores)[:2])  # a large host would start hundreds of ranks
        self.addCleanup(os.sched_setaffinity, 0, cores)
        self.score("in.csv", "many.csv", "run.threads=0", ranks=4)
        self.assertEqual((self.dir / "many.csv").read_bytes(), (self.dir / "one.csv").read_bytes())
        report = self.report("many.csv")
        self.assertEqual(report["feed"]["cores"], 4, "each rank has a thread at least")
        self.assertEqual(report["feed"]["frames"], 40)
        self.assertEqual(sum(r["files"] for r in report["ranks"]), 40)


if __name__ == "__main__":
    unittest.main()
