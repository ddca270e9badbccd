"""What a first look meets, on a system with little on it: `make` without column, the converter without PyTorch, what
tools/run_animate.sh hands to weft, and job scripts without Slurm. No weft is run."""
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

    def job(self, script, *words, **variables):
        """A job script with stand-ins for Slurm's programs and weft, which does one step further each time and asks to be started again."""
        weft = self.program("weft", """for word in "$@"; do
  case $word in run.dir=*) run=${word#run.dir=}; run=${run#\\"}; run=${run%\\"} ;; esac
done
[ "$1" = train ] || exit 0
mkdir -p "$run"; old=$(readlink "$run/latest"); old=${old#step_}
ln -sfn "step_$((${old:-0} + 1))" "$run/latest"
exit 75""")
        self.program("bin/srun", 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"')
        self.program("bin/scontrol", "exit 0")
        self.program("bin/squeue", "exit 1")
        return run("bash", ROOT / "jobscripts" / f"{script}.sbatch", *words, cwd=self.dir,
                   env={"PATH": f"{self.dir}/bin:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "1",
                        "SLURM_JOB_NAME": "job", "SLURM_JOB_NODELIST": "n1", "WEFT": str(weft), **variables})

    def test_a_job_is_requeued_by_the_run_folder_that_it_is_given(self):
        for script in ("smoke", "train_1node", "train_16nodes", "train_vae", "restart_chain", "segmentation"):
            for number, word in enumerate((f"run.dir={script} 1", f'run.dir="{script} 2"')):
                done = self.job(script, "run.dir=other", "train.lr=1", word, RUN="elsewhere")
                self.assertEqual(done.returncode, 75, done.stdout + done.stderr)
                self.assertIn(f"1 steps further: 1 saved in {script} {number + 1}\n", done.stdout)
                self.assertIn("queued again", done.stdout.splitlines()[-1])
        self.assertIn("saved in elsewhere\n", self.job("train_1node", RUN="elsewhere").stdout)
        self.assertFalse((self.dir / "other").exists())

    def test_a_job_from_another_folder_or_without_weft(self):
        for script in (ROOT / "jobscripts").glob("*.sbatch"):
            done = self.job(script.stem, SLURM_SUBMIT_DIR=str(self.dir))
            self.assertEqual((done.returncode, done.stderr), (2, "ERROR: submit from the folder that holds jobscripts/\n"))
        done = self.job("smoke", WEFT="build/weft")
        self.assertEqual(done.returncode, 2)
        self.assertIn("WEFT=build/weft is no program. HINT: make build, or WEFT=PREFIX/bin/weft", done.stderr)


if __name__ == "__main__":
    unittest.main()
