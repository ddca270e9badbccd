"""Folders of results: one job at a time, a folder that goes away, names and links that are in them already, stale results, file
systems without locks."""

import csv
import json
import os
import shutil
import unittest

from harness import WeftTest, make_video
from test_evaluate import DECK as SEGMENTATION_DECK, png

SCORE = ("score", "score.toml", "score.input=table.csv", "score.output=out.csv")
SCORE_DECK = """
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


class Folders(WeftTest):
    def setUp(self):
        super().setUp()
        (self.dir / "seg.toml").write_text(SEGMENTATION_DECK)
        (self.dir / "score.toml").write_text(SCORE_DECK)

    def pictures(self, names):
        for n, name in enumerate(names):
            path = self.dir / "in" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(20 + n, 16, lambda x, y: (6 * x % 256, 8 * y, (x * y + n) % 256)))

    def segment(self, *options, ranks=0, expect=0, **more):
        return self.weft("segment", "seg.toml", "segment.inputs=['in']", "segment.output=out", *options, ranks=ranks,
                         expect=expect, **more)

    def begin(self, last, ranks=1):
        """A job that is at work, and waits with picture `last` until release()."""
        self.go = self.dir / "go"
        self.go.unlink(missing_ok=True)
        job = self.start("segment", "seg.toml", "segment.inputs=['in']", "segment.output=out", ranks=ranks,
                         shim=f"held_names={self.go}:in/{last}")
        self.until(job, lambda: list((self.dir / "out").glob("segment.rank*.jsonl")))
        return job

    def release(self):
        self.go.touch()

    def made(self):
        lines = (self.dir / "out/segment.jsonl").read_text().splitlines()
        return sorted(json.loads(line)["name"] for line in lines)


class Owner(Folders):
    def test_a_second_job_is_refused_and_told_who_is_there(self):
        self.pictures([f"{i}.png" for i in range(12)])
        first = self.begin("9.png", ranks=2)
        second = self.segment(ranks=2, expect=None)
        self.refused(second, 4, "output folder out is in use by another job: host ", " process ", "segment.output")
        self.release()
        self.assertEqual(first.wait(), 0, first.err)
        self.assertEqual(len(self.made()), 12)
        self.assertFalse((self.dir / "out/.lock").exists())

    def test_what_a_killed_job_has_locked_is_taken_over(self):
        self.pictures([f"{i}.png" for i in range(12)])
        first = self.begin("9.png")
        first.kill()
        first.wait()
        self.assertTrue((self.dir / "out/.lock").exists())
        again = self.segment()
        self.assertIn("taking over the stale lock of output folder out (host ", again.err)
        self.assertEqual(len(self.made()), 12)

    def test_two_that_write_one_store(self):
        make_video(self.dir / "a.mp4", "testsrc2=duration=1:size=64x64:rate=10")
        options = ("ingest", "deck.toml", "ingest.inputs=a.mp4", "ingest.output=c.h5", "ingest.frames=[3]",
                   "ingest.height=32", "ingest.width=32")
        self.go, lock = self.dir / "go", self.dir / "c.h5.lock"
        first = self.start(*options, ranks=1, shim=f"held_writes={self.go}:c.h5.tmp")
        self.until(first, lambda: lock.exists() and lock.read_text())  # the holder is written when the lock is held
        self.refused(self.weft(*options, ranks=1, expect=None), 4, "store c.h5 is in use by another job: host ")
        self.release()
        self.assertEqual(first.wait(), 0, first.err)


class GoneUnderWay(Folders):
    def test_it_ends_the_job(self):
        self.pictures([f"{i:02d}.png" for i in range(40)])
        for attack in ("renamed", "removed"):
            job = self.begin("39.png", ranks=2)
            if attack == "renamed":
                (self.dir / "out").rename(self.dir / "elsewhere")
            else:  # again while the job, at work, puts files into what is being emptied
                self.until(job, lambda: shutil.rmtree(self.dir / "out", ignore_errors=True) or
                           not (self.dir / "out").exists())
            self.release()
            self.assertEqual(job.wait(60), 3, f"{attack}\n{job.err}")
            self.assertIn("is gone: the folder was removed or renamed while the job ran", job.err)
            self.assert_gone(job)
            shutil.rmtree(self.dir / "out", ignore_errors=True)


class NamesAndLinks(Folders):
    def test_results_that_are_called_like_the_jobs_own_files(self):
        names = ["a.png", "segment.rankings.png", "b.partial.png", "segment.jsonl/c.png", "status.json/d.png",
                 "segment.rank0.jsonl/e.png", "stop/f.png", "g/status.json/h.png", "cite.bib/i.png"]
        self.pictures(names)
        for _ in range(2):
            self.segment()
            made = self.made()
            for name in made:
                self.assertTrue((self.dir / "out" / f"{name}.png").is_file(), name)
            for name in ("a", "segment.rankings", "b.partial", "_segment.jsonl/c", "_status.json/d",
                         "_segment.rank0.jsonl/e", "_stop/f", "g/status.json/h", "_cite.bib/i"):
                self.assertIn(name, made)

    def test_files_of_others_stay(self):
        self.pictures(["a.png"])
        (self.dir / "out").mkdir()
        others = ["segment.rankings.txt", ".notes.partial.txt", ".other.png.partial", "segment.rank.jsonl", "segment.rank1.txt"]
        for name in others:
            (self.dir / "out" / name).write_text("mine")
        (self.dir / "out/.a.png.partial").write_text("of a killed job")
        self.segment()
        for name in others:
            self.assertEqual((self.dir / "out" / name).read_text(), "mine")
        self.assertFalse((self.dir / "out/.a.png.partial").exists())

    def test_links_are_not_written_through(self):
        self.pictures(["a.png", "sub/b.png"])
        victim, folder = self.dir / "victim", self.dir / "others"
        victim.write_text("precious")
        folder.mkdir()
        (self.dir / "out").mkdir()
        for name in ("segment_report.json", "segment_report.json.tmp", "segment.jsonl.tmp", "status.json", "status.json.tmp",
                     "a.png", ".a.png.partial"):
            (self.dir / "out" / name).symlink_to(victim)
        self.segment()
        self.assertEqual(victim.read_text(), "precious")
        self.assertFalse((self.dir / "out/a.png").is_symlink())
        (self.dir / "out/segment.rank0.jsonl").symlink_to(victim)
        shutil.rmtree(self.dir / "out/sub")
        (self.dir / "out/sub").symlink_to(folder)
        self.refused(self.segment(expect=None), 3, "out/sub", "a link stands in its place")
        self.assertEqual(victim.read_text(), "precious")
        self.assertEqual(os.listdir(folder), [])


class Inputs(Folders):
    def test_results_never_replace_what_is_read(self):
        self.pictures(["a.png"])
        (self.dir / "table.csv").write_text("path\nin/a.png\n")
        before = {p: (self.dir / p).read_bytes() for p in ("in/a.png", "score.toml", "table.csv")}
        for output in ("in/a.png", "score.toml", "table.csv", "./in/../in/a.png"):
            job = self.weft("score", "score.toml", "score.input=table.csv", f"score.output={output}", ranks=0, expect=None)
            self.refused(job, 2, "a result would replace the input", "score.output")
        os.symlink("in", self.dir / "link")
        job = self.weft("score", "score.toml", "score.input=table.csv", "score.output=link/a.png", ranks=0, expect=None)
        self.refused(job, 2, "a result would replace the input in/a.png")
        for path, content in before.items():
            self.assertEqual((self.dir / path).read_bytes(), content, path)


class Stale(Folders):
    def test_an_evaluation_of_fewer_images(self):
        for images in (7, 3):
            self.weft("evaluate", "seg.toml", "evaluate.output=out",
                      f"evaluate.data=shapes:images={images},classes=6,height=33..60,width=40..70,seed=2", ranks=1)
            for folder in ("pictures", "predictions"):
                self.assertEqual(len(os.listdir(self.dir / "out" / folder)), images, folder)


class WithoutLocks(Folders):
    """NFS, Lustre and DVS may have none: ENOLCK (37) or EOPNOTSUPP (95)."""

    def test_every_job_does_its_work(self):
        self.pictures(["a.png", "b.png"])
        (self.dir / "table.csv").write_text("path\nin/a.png\nin/b.png\n")
        make_video(self.dir / "a.mp4", "testsrc2=duration=1:size=64x64:rate=10")
        (self.dir / "a.txt").write_text("a test picture")
        ingest = ("ingest.frames=[3]", "ingest.height=32", "ingest.width=32")
        for reason in (95,):
            shim = f"no_locks={reason}"
            job = self.weft("ingest", "deck.toml", "ingest.inputs=a.mp4", f"ingest.output={reason}.h5", *ingest, shim=shim)
            self.assertEqual(job.err.count("WARN"), 1, job.err)
            self.assertIn("on a file system without locks", job.err)
            job = self.weft("train", "deck.toml", f"run.dir=run{reason}", "train.steps=2", f"data.path={reason}.h5", shim=shim)
            self.assertEqual(job.err.count("WARN"), 1, job.err)
            self.assertIn("on a file system without locks", job.err)
            job = self.weft("score", "score.toml", "score.input=table.csv", f"score.output={reason}.csv", ranks=1, shim=shim)
            self.assertEqual(job.err.count("WARN: output folder"), 1, job.err)
            self.assertIn("on a file system without locks", job.err)
            with open(self.dir / f"{reason}.csv", newline="") as f:
                self.assertEqual(len(list(csv.DictReader(f))), 2)

    def test_a_job_of_this_host_is_still_noticed(self):
        self.pictures([f"{i}.png" for i in range(12)])
        first = self.begin("9.png")
        second = self.segment(expect=None, shim="no_locks=37")
        self.refused(second, 4, "is in use by another job", "if that process is no weft")
        self.release()
        self.assertEqual(first.wait(), 0, first.err)


if __name__ == "__main__":
    unittest.main()
