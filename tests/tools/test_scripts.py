"""What a first look meets, on a system with little on it: `make` without column, the converter without PyTorch, and what
tools/run_animate.sh hands to weft. No weft is run."""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*command, **options):
    return subprocess.run([*map(str, command)], capture_output=True, text=True, **options)


class Scripts(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = pathlib.Path(folder.name)

    def program(self, name, text):
        path = self.dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    def test_make_lists_its_targets_without_column(self):
        (self.dir / "bin").mkdir()
        for name in ("awk", "make", "sh"):
            (self.dir / "bin" / name).symlink_to(shutil.which(name))
        made = run("make", "-C", ROOT, "--no-print-directory", "help", env={"PATH": str(self.dir / "bin")})
        self.assertEqual(made.returncode, 0, made.stderr)
        self.assertNotIn("##", made.stdout)
        self.assertRegex(made.stdout, "(?m)^  make run +footage")
        texts_begin = {re.match("  make [a-z-]+ +", line).end() for line in made.stdout.splitlines()}
        self.assertEqual(len(texts_begin), 1, made.stdout)

    def test_the_converter_says_what_to_install(self):
        script = ROOT / "validation/convert_weights.py"
        self.assertTrue(os.access(script, os.X_OK))
        done = run(sys.executable, "-I", "-S", script, "a.pth", "b.safetensors")  # without packages
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 1)
        self.assertIn("pip install torch numpy", done.stderr)

    def animate(self, *words, root):
        """What the script starts, in a copy of the repository of which it needs a deck alone."""
        for name in ("tools/run_animate.sh", "inputs/animate_demo.toml"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
        weft = self.program("weft", "exit 1")
        self.program("bin/mpirun", f'printf "%s\\n" "$@" >{self.dir}/arguments')
        done = run(root / "tools/run_animate.sh", *words, cwd=self.dir,
                   env={**os.environ, "WEFT": str(weft), "PATH": f"{self.dir}/bin:{os.environ['PATH']}"})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("random", done.stdout)
        arguments = (self.dir / "arguments").read_text().splitlines()
        option = {name: arguments[arguments.index(name) + 1] for name in ("--picture", "--speech")}
        landmarks, = (a.removeprefix("animate.landmarks=") for a in arguments if a.startswith("animate.landmarks="))
        points = [[float(n) for n in line.split(",")] for line in (root / landmarks).read_text().splitlines()]
        self.assertEqual([len(points), {len(p) for p in points}], [68, {2}])
        return option, points

    def test_a_face_and_speech_are_made(self):
        option, points = self.animate(root=self.dir / "a copy")
        for path in option.values():
            self.assertGreater((self.dir / "a copy" / path).stat().st_size, 500)
        self.assertTrue(all(0 < n < 256 for p in points for n in p))

    def test_a_picture_and_speech_of_one_s_own(self):
        run("ffmpeg", "-loglevel", "error", "-f", "lavfi", "-i", "testsrc=size=320x200", "-frames:v", "1", self.dir / "my face.png")
        (self.dir / "speech.wav").write_bytes(b"anything")
        option, points = self.animate("my face.png", "speech.wav", root=self.dir / "copy")
        self.assertEqual(option, {"--picture": f"{self.dir}/my face.png", "--speech": f"{self.dir}/speech.wav"})
        self.assertTrue(all(90 <= x <= 230 and 30 <= y <= 190 for x, y in points))


if __name__ == "__main__":
    unittest.main()
