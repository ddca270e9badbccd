"""`cmake --install` into a folder, and under DESTDIR: the program runs from there with its inputs, and all files are there. What
`weft --version` says, and a launcher of another MPI."""

import os
import pathlib
import re
import subprocess
import unittest
from unittest import mock

import harness
from harness import REPOSITORY, WEFT, WeftTest

BUILD = pathlib.Path(WEFT).parent


class Install(WeftTest):
    def install(self, *options, **environment):
        done = subprocess.run(["cmake", "--install", str(BUILD), *map(str, options)], env={**os.environ, **environment},
                              capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def names(self, folder):
        return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}

    def test_a_prefix_and_destdir(self):
        prefix, stage = self.dir / "prefix", self.dir / "stage"
        self.install("--prefix", prefix)
        there = self.names(prefix)
        for part, source in (("share/weft/inputs", "inputs"), ("share/weft/jobscripts", "jobscripts"), ("share/doc/weft/docs", "docs")):
            for name in self.names(REPOSITORY / source):
                self.assertIn(f"{part}/{name}", there)
        for name in ("bin/weft", "share/doc/weft/LICENSE", "share/doc/weft/CITATION.cff", "share/weft/python/weft_files.py",
                     "share/weft/python/convert_weights.py", "share/man/man1/weft.1", "share/man/man5/weft-deck.5",
                     "share/weft/examples/own_model.cpp", "include/weft/models/interfaces.h",
                     "share/bash-completion/completions/weft", "share/zsh/site-functions/_weft",
                     "share/fish/vendor_completions.d/weft.fish"):
            self.assertIn(name, there)
        for name in ("share/weft/reframe/weft.py", "share/weft/reframe/local.py", "share/doc/weft/SECURITY.md"):
            self.assertIn(name, there)
        for name in ("python/convert_weights.py", "jobscripts/pipeline.sh"):
            self.assertTrue(os.access(prefix / "share/weft" / name, os.X_OK), name)
        release = re.search(r"project\(weft VERSION (\S+)", (REPOSITORY / "CMakeLists.txt").read_text())[1]
        modules = [f"share/weft/modulefiles/weft/{release}{ending}" for ending in (".lua", "")]
        for module in modules:
            text = (prefix / module).read_text()
            self.assertRegex(text, rf'prefix (= )?"{prefix}"\n')
            self.assertIn(release, text)
            self.assertRegex(text, r"MANPATH.*share/man")
            self.assertNotIn("@", text)
        pages = sorted((prefix / "share/doc/weft").rglob("*.md"))
        self.assertIn("(validation/results/cudnn_h200.md of the source)", (prefix / "share/doc/weft/docs/gpu.md").read_text())
        for page in pages:
            for target in re.findall(r"\]\(([^)\s#]+)", page.read_text()):
                with self.subTest(f"{page.name}: {target}"):
                    self.assertTrue(re.match("[a-z]+:", target) or (page.parent / target).exists())

        self.install("--prefix", "/opt/weft", DESTDIR=str(stage))
        self.assertEqual({f"opt/weft/{name}" for name in there}, self.names(stage))
        self.assertFalse(pathlib.Path("/opt/weft").exists())
        self.assertIn('"/opt/weft"', (stage / "opt/weft" / modules[0]).read_text())

        program = harness.WEFT
        try:
            harness.WEFT = str(stage / "opt/weft/bin/weft")
            version = self.weft("--version", ranks=0).out
            self.assertRegex(version, r"^weft \d+\.\d+\.\d+ \(commit ")
            self.weft("train", stage / "opt/weft/share/weft/inputs/smoke.toml", "run.dir=run", "train.steps=2")
            self.assertEqual(len(self.losses("run")), 2)
        finally:
            harness.WEFT = program
        self.assertEqual(re.match(r"weft (\S+)", version)[1], release)

    def test_a_model_of_ones_own(self):
        """examples/, built with the installed libraries: from a video to clips."""
        prefix, program = self.dir / "prefix", harness.WEFT
        self.install("--prefix", prefix)
        for command in (["cmake", "-S", REPOSITORY / "examples", "-B", self.dir / "own", f"-DCMAKE_PREFIX_PATH={prefix}"],
                        ["cmake", "--build", self.dir / "own"]):
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600)
            self.assertEqual(done.returncode, 0, done.stdout[-3000:] + done.stderr[-3000:])
        deck = REPOSITORY / "examples/own_model.toml"
        small = ["own.heads=1", "own.depth=1", "train.steps=2", "train.ema_decay=0.5"]
        try:
            harness.WEFT = str(self.dir / "own/own_model")
            self.weft("ingest", deck, "ingest.inputs=lavfi:testsrc2=size=256x144:rate=8:duration=4", ranks=0)
            self.weft("train", deck, *small, ranks=2)
            self.weft("train", deck, *small, "run.dir=alone", "train.steps=1", ranks=1)
            self.weft("train", deck, *small, "run.dir=alone", ranks=1)
            self.assertEqual(self.losses("runs/own"), self.losses("alone"))
            self.weft("generate", deck, *small, "sampler.steps=2", ranks=2)
            self.assertEqual(len(list((self.dir / "runs/own/clips").glob("*.mp4"))), 2)
            self.assertIn("own model", self.weft("plan", deck, *small, "--gpus", "8", "--gpu", "h100", ranks=0).out)
            self.refused(self.weft("train", deck, *small, "own.patch=10", "run.dir=no", ranks=0, expect=None), 2, "multiples of 10")
        finally:
            harness.WEFT = program

    def test_lines_that_reframe_looks_for(self):
        """packaging/reframe/weft.py judges a training by what it prints."""
        self.weft("init", "smoke", "smoke.toml", ranks=0)
        said = self.weft("train", "smoke.toml", "train.log_every=1", ranks=2).err
        source = (REPOSITORY / "packaging/reframe/weft.py").read_text().split("class WeftTraining")[1]
        patterns = re.findall(r"\(rf?'(.*?)', self\.stdout", source)
        self.assertEqual(len(patterns), 4)
        for pattern in patterns:
            pattern = pattern.replace("{self.num_tasks}", "2").replace("{self.steps}", "20")
            with self.subTest(pattern):
                self.assertEqual(len(re.findall("(?m)" + pattern, said)), 20 if pattern.startswith("^step") else 1)

    def test_a_launcher_of_another_mpi(self):
        """It says how many it started, and MPI knows of one."""
        with mock.patch.dict(os.environ, PMI_SIZE="4"):
            said = self.train("alone", "train.steps=1", ranks=0).err
            self.assertIn("4 tasks were started (PMI_SIZE), but MPI sees 1 rank", said)
            self.assertNotIn("tasks were started", self.weft("inspect", "alone", ranks=0).err)
        with mock.patch.dict(os.environ, PMI_SIZE="1"):
            self.assertNotIn("tasks were started", self.train("one", "train.steps=1", ranks=0).err)
        self.assertNotIn("tasks were started", self.train("two", "train.steps=1", ranks=2).err)

    def test_version_names_libraries(self):
        text = self.weft("--version", ranks=0).out
        rows = {line.split()[0]: line for line in text.splitlines()[1:]}
        for name in ("MPI", "HDF5", "oneDNN", "FFmpeg", "libavformat"):
            self.assertRegex(rows[name], r"\d+\.\d+")
        # Debian's libraries are those of the headers.
        for name in ("HDF5", "oneDNN", "libavformat"):
            words = rows[name].split()
            self.assertEqual(words[1], words[2])
        self.assertIn("CPU: ", text)
        self.assertRegex(text, r"(?m)^  (GPU 0: |no GPU: )")
        # It is for people; the first line is what runs and checkpoints carry.
        self.train("run", "train.steps=1", ranks=1)
        self.assertIn(text.splitlines()[0], (self.dir / "run/run.json").read_text())


if __name__ == "__main__":
    unittest.main()
