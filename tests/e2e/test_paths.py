"""Names and files that lead elsewhere: links, pipes and directories in place of a run's files, names of tensors that are paths.
Each is refused or replaced; nothing waits for a pipe, nothing is written outside the run directory."""

import os
import shutil
import struct
import unittest
import unittest.mock

from harness import WeftTest, write_safetensors

DATA, CHECKPOINT = 3, 4
OUTSIDE = "not weft's"


class Paths(WeftTest):
    def setUp(self):
        super().setUp()
        (self.dir / "outside").mkdir()
        (self.dir / "outside" / "file").write_text(OUTSIDE)
        self.before = sorted(p.name for p in self.dir.iterdir())

    def put(self, path, kind):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
            (path / "file").touch()
        else:
            path.symlink_to(self.dir / "outside" / kind)

    def assert_nothing_outside(self, *new):
        self.assertEqual([p.name for p in (self.dir / "outside").iterdir()], ["file"])
        self.assertEqual((self.dir / "outside" / "file").read_text(), OUTSIDE)
        self.assertEqual(sorted([*self.before, *new]),
                         sorted(p.name for p in self.dir.iterdir() if not p.name.startswith("ompi")))

    def test_in_place_of_a_file_of_the_run(self):
        kinds = (("pipe", "a pipe"), ("directory", "a directory"), ("file", "a link"), ("absent", "a link"))
        # One way of opening serves all names.
        for i, name in enumerate(("lock", "deck.toml", "run.json", "metrics.jsonl", "metrics.jsonl.tmp", "trace.json.tmp")):
            for kind, said in (kinds if name == "metrics.jsonl" else kinds[i % 3:i % 3 + 2]):
                with self.subTest(name=name, kind=kind):
                    (self.dir / "run").mkdir()
                    self.put(self.dir / "run" / name, kind)
                    self.refused(self.train("run", "train.steps=1", ranks=0, expect=None), CHECKPOINT, f"run/{name}", said)
                    self.assert_nothing_outside("run")
                    shutil.rmtree(self.dir / "run")

    def test_in_place_of_latest(self):
        self.train("good", "train.steps=10", ranks=1)
        for kind in ("pipe", "file", "absent", "directory"):
            with self.subTest(kind=kind):
                shutil.copytree(self.dir / "good", self.dir / "run", symlinks=True)
                self.put(self.dir / "run" / "latest", kind)
                job = self.train("run", "train.steps=12", ranks=0, expect=None)
                if kind in ("pipe", "directory"):
                    self.refused(job, CHECKPOINT, f"run/latest is a {kind}")
                else:
                    self.assertEqual(job.process.returncode, 0, job.err)
                    self.assertIn("which is no checkpoint here", job.err)
                    self.assertIn("10 of 12 steps done", job.err)
                    self.assertEqual(self.latest("run"), "step_12")
                self.assert_nothing_outside("good", "run")
                shutil.rmtree(self.dir / "run")

    def test_in_place_of_a_part_of_a_checkpoint(self):
        self.train("good", "train.steps=10", ranks=1)
        for name, kinds in (("shard_0000.bin", ("pipe", "directory", "file")), ("manifest.json", ("pipe", "file")),
                            ("verified", ("directory",))):
            for kind in kinds:
                with self.subTest(name=name, kind=kind):
                    shutil.copytree(self.dir / "good", self.dir / "run", symlinks=True)
                    self.put(self.dir / "run" / "step_10" / name, kind)
                    job = self.train("run", "train.steps=12", ranks=0)
                    self.assertRegex(job.err, rf"WARN: .*run/step_10 .*{name}")
                    self.assertIn("5 of 12 steps done", job.err)
                    self.assertEqual(self.latest("run"), "step_12")
                    self.assert_nothing_outside("good", "run")
                    shutil.rmtree(self.dir / "run")

    def test_in_place_of_a_checkpoint_that_is_to_be_written(self):
        for name in ("step_1", "step_1.tmp", "step_1.old", "latest.tmp"):
            with self.subTest(name=name):
                (self.dir / "run").mkdir()
                (self.dir / "run" / name).symlink_to(self.dir / "outside")
                self.train("run", "train.steps=1")
                self.assertEqual(self.latest("run"), "step_1")
                self.assertFalse((self.dir / "run" / "step_1").is_symlink())
                self.assert_nothing_outside("run")
                shutil.rmtree(self.dir / "run")

    def test_what_the_shell_left(self):
        """~/ is the home directory and another $ or ~ refused, in decks and on the command line."""
        usage, home = 2, self.dir / "home"
        home.mkdir()
        with unittest.mock.patch.dict(os.environ, HOME=str(home)):
            deck = (self.dir / "deck.toml").read_text()
            (home / "deck.toml").write_text(deck.replace('dir = "run"', 'dir = "~/run"'))
            self.weft("train", "~/deck.toml", "train.steps=1", ranks=0)
            self.weft("export", "~/run", "~/w.safetensors", ranks=0)
            self.weft("status", "~/run", ranks=0)
            self.weft("report", "~/run", ranks=0)
            self.assertTrue((home / "w.safetensors").is_file())
            for arguments in (("train", "$S/deck.toml"), ("export", "~/run", "${S}/w.safetensors"), ("inspect", "~ada/w"),
                              ("status", "$S"), ("plan", "deck.toml", "--rates", "$S/r.json"),
                              ("train", "deck.toml", "run.dir=$S/run")):
                self.refused(self.weft(*arguments, ranks=0, expect=None), usage, "is not replaced here")
            (home / "deck.toml").write_text(deck.replace('dir = "run"', 'dir = "$S/run"'))
            self.refused(self.weft("train", home / "deck.toml", ranks=0, expect=None), usage, 'deck.toml:3: run.dir = "$S/run"')
        self.assertFalse((self.dir / "~").exists())

    def test_a_directory_that_everybody_may_write_to(self):
        (self.dir / "run").mkdir()
        (self.dir / "run").chmod(0o777)
        said = "WARN: run can be written by every user"
        job = self.train("run", "train.steps=1")
        self.assertEqual([line for line in job.err.splitlines() if said in line and "warned" not in line].__len__(), 1,
                         job.err)
        (self.dir / "run").chmod(0o755)
        self.assertNotIn(said, self.train("run", "train.steps=2").err)

    def test_names_of_tensors_are_never_paths(self):
        names = ["../../x", "/outside/x", "..", "a\0b", "line\nbreak", "outside/file"]
        write_safetensors(self.dir / "w.safetensors",
                          {n: ("F32", [1], struct.pack("<f", 1)) for n in names})
        shown = self.weft("inspect", "w.safetensors", ranks=0).out
        self.assertIn("../../x", shown)
        self.assertIn(r"a\x00b", shown)
        self.assertIn(r"line\nbreak", shown)
        self.assertNotIn("\0", shown)
        job = self.weft("train", "deck.toml", "model.weights=w.safetensors", expect=None)
        self.refused(job, DATA, "w.safetensors")
        self.assertNotIn("\0", job.err)
        (self.dir / "w.safetensors").unlink()
        self.assert_nothing_outside("run")


if __name__ == "__main__":
    unittest.main()
