"""What a first look meets, on a system with little on it: `make` without column, the converter without PyTorch, what
tools/run_animate.sh hands to weft, and job scripts without Slurm. No weft is run."""
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = sorted(p.stem for p in (ROOT / "jobscripts").glob("*.sbatch"))
TRAINING = ("smoke", "train_1node", "train_16nodes", "restart_chain", "segmentation")


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

    def test_the_gpu_checks_fit_into_calls_of_ten_minutes(self):
        done = run(ROOT / "validation/gpu/check.sh", "--list")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        rows = [line.split() for line in done.stdout.splitlines()]
        sums = {row[0]: int(row[3]) for row in rows if row[1] == "="}
        self.assertGreater(len(sums), 8)
        self.assertLess(max(sums.values()), 550)
        for group, total in sums.items():
            self.assertEqual(sum(int(row[2]) for row in rows if row[0] == group and row[1] != "="), total)
        names = [row[1] for row in rows if row[1] != "="]
        self.assertEqual(len(set(names)), len(names))

    def test_the_converter_says_what_to_install(self):
        script = ROOT / "tools/convert_weights.py"
        self.assertTrue(os.access(script, os.X_OK))
        done = run(sys.executable, "-I", "-S", script, "a.pth", "b.safetensors")  # without packages
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 1)
        self.assertIn("pip install torch numpy", done.stderr)

    def animate(self, *words, root):
        """What the script starts, in a copy of the repository of which it needs a deck alone."""
        for name in ("tools/run_animate.sh", "tools/mpi.sh", "inputs/animate_demo.toml"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
        weft = self.program("weft", "exit 1")
        self.program("bin/mpirun", f'printf "%s\\n" "$@" >{self.dir}/arguments')
        done = run(root / "tools/run_animate.sh", *words, cwd=self.dir,
                   env={**os.environ, "WEFT": str(weft), "MPIEXEC": "", "PATH": f"{self.dir}/bin:{os.environ['PATH']}"})
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

    def job(self, script, *words, deck="deck.toml", squeue="exit 1", site=ROOT, start=None, **variables):
        """A job script with stand-ins for Slurm's programs and weft, which does one step further each time and asks to be started
        again, and notes its arguments. `deck`: the first argument, unless there is one; `squeue`: what that program does;
        `start`: the file that is started, in place of the site's."""
        if deck and not (words and words[0].endswith(".toml")):
            words = (deck, *words)
        if script == "weft":
            words = ("train", *words)
        weft = self.program("weft", f"""printf "%s\\n" "$@" >>"{self.dir}/arguments"
for word in "$@"; do
  case $word in run.dir=*) run=${{word#run.dir=}}; run=${{run#\\"}}; run=${{run%\\"}} ;; esac
done
[ "$1" = train ] || exit 0
mkdir -p "$run"; old=$(readlink "$run/latest"); old=${{old#step_}}
ln -sfn "step_$((${{old:-0}} + 1))" "$run/latest"
exit 75""")
        for launcher in "srun", "mpirun":
            self.program(f"bin/{launcher}", f"""printf "%s\\n" {launcher} "$@" >"{self.dir}/launched"
while [ "${{1#-}}" != "$1" ]; do shift; done; exec "$@"
""")
        self.program("bin/scontrol", f'echo "$@" >>"{self.dir}/scontrol"')
        self.program("bin/squeue", squeue)
        (self.dir / "arguments").write_text("")
        environment = {"PATH": f"{self.dir}/bin:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(site), "SLURM_JOB_ID": "1",
                       "SLURM_JOB_NAME": "job", "SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "2", "WEFT": str(weft), **variables}
        return run("bash", start or site / "jobscripts" / f"{script}.sbatch", *words, cwd=self.dir,
                   env={name: value for name, value in environment.items() if value is not None})

    def started(self):
        """The arguments of what was started last."""
        return (self.dir / "arguments").read_text().splitlines()

    def test_a_job_is_requeued_by_the_run_folder_that_it_is_given(self):
        for script in (*TRAINING, "weft"):
            for number, word in enumerate((f"run.dir={script} 1", f'run.dir="{script} 2"')):
                done = self.job(script, "run.dir=other", "train.lr=1", word, RUN="elsewhere")  # which is the user's own business
                self.assertEqual(done.returncode, 75, done.stdout + done.stderr)
                self.assertIn(f"1 steps further: 1 saved in {script} {number + 1}\n", done.stdout)
                self.assertIn("queued again", done.stdout.splitlines()[-1])
        self.assertIn("saved in runs/deck-1\n", self.job("train_1node", RUN="elsewhere").stdout)
        self.assertFalse((self.dir / "other").exists())

    def test_a_job_from_another_folder_or_without_weft(self):
        for script in SCRIPTS:
            done = self.job(script, SLURM_SUBMIT_DIR=str(self.dir))
            self.assertEqual((done.returncode, self.started()), (2, []))
            self.assertIn("ERROR: submit from the folder that holds jobscripts/, or load the module weft", done.stderr)
        done = self.job("smoke", WEFT="build/weft")
        self.assertEqual(done.returncode, 2)
        self.assertIn("WEFT=build/weft is no program. HINT: make build, or WEFT=PREFIX/bin/weft", done.stderr)

    def test_a_job_of_the_installed_scripts(self):
        """Submitted from anywhere: sbatch $WEFT_SHARE/jobscripts/SCRIPT. The folder's own jobscripts/ would come first."""
        share = self.dir / "a prefix/share/weft"
        shutil.copytree(ROOT / "jobscripts", share / "jobscripts")
        (share / "jobscripts/weft.env").write_text("echo from the module\n")
        for script in SCRIPTS:
            array = {"SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "0"} if script == "scaling" else {}
            done = self.job(script, "score.shard=1/2", site=share, SLURM_SUBMIT_DIR=str(self.dir), WEFT_SHARE=str(share), **array)
            self.assertIn("from the module\n", done.stdout, done.stderr)
            self.assertTrue(self.started(), done.stderr)
        self.job("smoke", deck=None, site=share, SLURM_SUBMIT_DIR=str(self.dir), WEFT_SHARE=str(share))
        self.assertIn(f"{share}/inputs/smoke.toml", self.started())
        (self.dir / "jobscripts").symlink_to(ROOT / "jobscripts")
        done = self.job("train_1node", site=share, SLURM_SUBMIT_DIR=str(self.dir), WEFT_SHARE=str(share))
        self.assertNotIn("from the module", done.stdout)
        self.assertTrue(self.started())

    def test_any_command(self):
        weft = ROOT / "jobscripts/weft.sbatch"
        text = {p: p.read_text().split("\ncommon=")[0] for p in (weft, ROOT / "jobscripts/encode.sbatch")}
        resources = [[line for line in t.splitlines() if line.startswith("#SBATCH") and "job-name" not in line] for t in text.values()]
        self.assertEqual(*resources)
        for words in (("reconstruct", "a.toml", "x.y=1"), ("text", "a.toml", "captions.txt", "--tokens", "out"), ("segment", "a.toml")):
            done = self.job("", *words, deck=None, start=weft, SLURM_GPUS="1")
            self.assertEqual((done.returncode, self.started()), (0, [*words, "device.kind=cuda"]), done.stderr)
        for words in ((), ("train",), ("a.toml",), ("train", "x.y=1")):
            done = self.job("", *words, deck=None, start=weft)
            self.assertEqual((done.returncode, self.started()), (2, []))
            self.assertIn("no deck is named. HINT: sbatch jobscripts/weft.sbatch COMMAND DECK.toml ", done.stderr)
        # It goes on only with what can resume.
        stops = self.program("stops", "exit 75")
        for command, again in ("encode", True), ("evaluate", True), ("reconstruct", False):
            done = self.job("", command, "a.toml", deck=None, start=weft, WEFT=str(stops))
            self.assertEqual((done.returncode, "queued again" in done.stdout), (75, again), done.stderr)

    def test_a_list_job_that_makes_nothing_is_not_queued_for_ever(self):
        out = self.dir / "out"
        out.mkdir()
        nothing = self.program("nothing", f'echo "{{\\"begun\\": 1}} $SLURM_RESTART_COUNT" >>"{out}/generated.rank0.jsonl"; exit 75')
        clip = self.program("clip", f'echo "{{\\"name\\": 1}} $SLURM_RESTART_COUNT" >>"{out}/generated.rank0.jsonl"; exit 75')
        for weft, restarts, again in ((nothing, 0, True), (nothing, 1, False), (clip, 1, True), (nothing, 2, False)):
            done = self.job("generate", "a.toml", "generate.output=out", WEFT=str(weft), SLURM_RESTART_COUNT=str(restarts))
            self.assertEqual((done.returncode, "queued again\n" in done.stdout), (75, again), done.stderr)
            self.assertEqual("nothing more was made: not queued again" in done.stderr, not again)
        # What it cannot see it says.
        done = self.job("generate", "a.toml", WEFT=str(nothing), SLURM_RESTART_COUNT="1")
        self.assertIn("HINT: with generate.output=... after the deck this job can see its progress", done.stdout)
        self.assertIn("queued again\n", done.stdout)

    def test_the_deck_is_the_first_argument(self):
        for script in SCRIPTS:
            with self.subTest(script):
                array = {"SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "0"} if script == "scaling" else {}
                self.job(script, "my decks/$(touch x);a.toml", "train.steps=3", **array)
                words = [w for w in self.started() if w.endswith(".toml")]
                self.assertEqual(set(words), {"my decks/$(touch x);a.toml"})
                self.assertIn("train.steps=3", self.started())
                if script == "smoke":
                    continue
                for words in ((), ("train.steps=3",), ("--device", "cpu"), ("",)):
                    done = self.job(script, *words, deck=None, DECK="other.toml", **array)
                    self.assertEqual((done.returncode, self.started()), (2, []), done.stdout)
                    self.assertRegex(done.stderr, f"no deck is named. HINT: sbatch jobscripts/{script}.sbatch (COMMAND )?DECK.toml ")
        self.assertFalse((self.dir / "x").exists())
        self.job("smoke", deck=None)
        self.assertIn(f"{ROOT}/inputs/smoke.toml", self.started())
        (self.dir / "lr=1.toml").write_text("")  # a file of that name is a deck
        self.job("train_1node", "lr=1.toml")
        self.assertEqual(self.started()[1], "lr=1.toml")
        done = self.job("train_1node", "a.toml", MAX_RESTARTS="many")
        self.assertEqual((done.returncode, self.started()), (2, []))
        self.assertIn("MAX_RESTARTS=many is no number", done.stderr)

    def test_a_run_belongs_to_its_deck(self):
        for name in ("a.toml", "b.toml", "moved/a.toml"):
            (self.dir / name).parent.mkdir(exist_ok=True)
            (self.dir / name).write_text("")
        self.job("restart_chain", "a.toml")
        self.job("restart_chain", "b.toml")
        done = self.job("restart_chain", "a.toml")
        self.assertIn("1 steps further: 2 saved in runs/a\n", done.stdout)
        for words in (("b.toml", "run.dir=runs/a"), ("moved/a.toml",)):
            done = self.job("restart_chain", *words)
            self.assertEqual((done.returncode, self.started()), (2, []), done.stdout)
            self.assertIn(f"run.dir = 'runs/a' is a run of '{self.dir}/a.toml', not of '{self.dir}/{words[0]}'. HINT: another run.dir",
                          done.stderr)
        # Edited, by another name, moved along with the run; and a run of which nothing is known.
        (self.dir / "a.toml").write_text("# edited")
        (self.dir / "link.toml").symlink_to("a.toml")
        self.assertIn(": 3 saved", self.job("train_1node", "link.toml", "run.dir=runs/a").stdout)
        (self.dir / "a.toml").unlink()
        self.assertIn(": 4 saved", self.job("restart_chain", "moved/a.toml").stdout)
        (self.dir / "runs/a/deck_path").unlink()
        self.assertIn(": 5 saved", self.job("restart_chain", "b.toml", "run.dir=runs/a").stdout)
        # Each element of an array has its own, each job of the others.
        element = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
        self.assertIn(" saved in runs/b_2\n", self.job("restart_chain", "b.toml", **element).stdout)
        self.assertIn(" saved in runs/b-7_2\n", self.job("train_1node", "b.toml", **element).stdout)
        self.assertIn(" saved in runs/b-1\n", self.job("train_1node", "b.toml").stdout)
        # No link that lies in its place is followed.
        (self.dir / "planted").mkdir()
        (self.dir / "planted/deck_path").symlink_to(self.dir / "elsewhere")
        self.job("train_1node", "b.toml", "run.dir=planted")
        self.assertFalse((self.dir / "elsewhere").exists())

    def test_an_element_of_an_array_is_requeued_alone(self):
        element = {"SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "3"}
        now = "echo '1 1_3 2030-01-02T03:04:05'; echo '4 1_2 2040-01-02T03:04:05'"
        for squeue, variables, job in (("exit 1", {}, "1"), ("exit 1", element, "1_3"), (now, element, "1_3"),
                                       # The variables of the array's element that it was submitted from.
                                       ("echo '1 1 2030-01-02T03:04:05'", {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "2"}, "1")):
            (self.dir / "scontrol").unlink(missing_ok=True)
            done = self.job("train_1node", "a.toml", "run.dir=run %a", squeue=squeue, **variables)
            self.assertEqual((self.dir / "scontrol").read_text(), f"requeue {job}\n", done.stderr)
            self.assertIn(f" job {job}: ", done.stdout)
            self.assertIn("saved in run " + ("3" if job == "1_3" else "%a"), done.stdout)

    def test_parts_of_a_table_as_an_array(self):
        element = {"SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "3"}
        self.job("score", "a.toml", "score.shard=%a/8", "score.output=o_%a.csv", **element)
        self.assertEqual(self.started()[-2:], ["score.shard=3/8", "score.output=o_3.csv"])
        done = self.job("score", "a.toml", **element)
        self.assertEqual((done.returncode, self.started()), (2, []), done.stdout)
        self.assertIn("array", done.stderr)

    def test_gpus_asked_for_in_whichever_way_are_used(self):
        for asked in ({"SLURM_JOB_GPUS": "0"}, {"SLURM_JOB_GPUS": "0,1"}, {"SLURM_GPUS": "2"}, {"SLURM_GPUS_PER_TASK": "1"},
                      {"SLURM_GPUS_PER_NODE": "a100:4"}, {"SLURM_GPUS_PER_SOCKET": "1"}, {"SLURM_GPUS_ON_NODE": "2"}):
            with self.subTest(asked):
                self.job("train_1node", **asked)
                self.assertIn("device.kind=cuda", self.started())
                self.job("train_1node", "device.kind=cpu", **asked, DEVICE="0")
                self.assertEqual([w for w in self.started() if w.startswith("device.kind")], ["device.kind=cpu"])
        for asked in ({}, {"SLURM_GPUS_PER_NODE": "0"}, {"SLURM_GPUS_PER_NODE": "gpu:0"}):
            self.job("train_1node", **asked)
            self.assertNotIn("device.kind", "".join(self.started()))

    def test_a_site_s_file_and_commands_of_several_words(self):
        site = self.dir / "a site;$(touch x)"
        shutil.copytree(ROOT / "jobscripts", site / "jobscripts")
        wrapper = self.program("bin/apptainer", 'shift 3; exec "$@"')
        self.program("bin/weft_inside", f'printf "%s\\n" "$SITE" "$@" >>"{self.dir}/arguments"')
        (site / "jobscripts/weft.env").write_text('export SITE="$unset a;b"\nWEFT="apptainer exec --nv weft.sif weft_inside"\n')
        self.job("generate", "a.toml", site=site, WEFT=None)
        self.assertEqual(self.started()[:3], [" a;b", "generate", "a.toml"])
        other = self.dir / "my env"
        other.write_text(f'export SITE=other\nWEFT=("{wrapper}" exec --nv "my weft.sif" weft_inside)\n')
        self.job("generate", "a.toml", site=site, WEFT_ENV=str(other))
        self.assertEqual(self.started()[:2], ["other", "generate"])
        done = self.job("generate", "a.toml", WEFT_ENV="none")
        self.assertEqual((done.returncode, done.stderr), (2, "ERROR: WEFT_ENV=none cannot be read\n"))
        # A job does not start without its modules.
        for text in "module load none || return 1\nSITE=\n", "module load none\n":
            other.write_text(f"module() {{ return 5; }}\n{text}")
            done = self.job("generate", "a.toml", WEFT_ENV=str(other))
            self.assertEqual((done.returncode, self.started()), (2, []))
            self.assertIn(f"ERROR: {other} failed: ", done.stderr)
        # One program whose path has blanks and more, and one that is none.
        odd = self.program("odd $(touch x);y/weft", f'echo odd >>"{self.dir}/arguments"')
        self.job("generate", "a.toml", WEFT=str(odd))
        self.assertEqual(self.started(), ["odd"])
        done = self.job("generate", "a.toml", WEFT="no program at all")
        self.assertEqual(done.returncode, 2)
        self.assertIn("WEFT=no program at all is no program. HINT:", done.stderr)
        self.assertFalse((self.dir / "x").exists())

    def test_the_launch_line_is_the_site_s(self):
        def launched(script, launch=None, **variables):
            environment = self.dir / "site.env"
            environment.write_text(f"WEFT_LAUNCH={launch}\n" if launch else "")
            self.job(script, "a.toml", WEFT_ENV=str(environment), **variables)
            words = (self.dir / "launched").read_text().splitlines()
            return words[:words.index(str(self.dir / "weft"))]
        common = ["--cpu-bind=cores", "--kill-on-bad-exit=0"]
        for script in SCRIPTS:
            array = {"SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "0"} if script == "scaling" else {}
            patience = "--wait=120" if script in (*TRAINING, "scaling", "weft") else "--wait=30"
            if script == "segmentation":
                continue  # trains first, which its stand-in never ends
            self.assertEqual(launched(script, **array), ["srun", *common, patience, "--mpi=pmix"], script)
            self.assertIn("\n#SBATCH --hint=nomultithread ", (ROOT / f"jobscripts/{script}.sbatch").read_text())
        self.assertEqual(launched("train_1node", '"srun --mpi=cray_shasta --cpu-bind=none"', SLURM_GPUS="2"),
                         ["srun", *common, "--wait=120", "--gpu-bind=none", "--mpi=cray_shasta", "--cpu-bind=none"])
        self.assertEqual(launched("generate", '"mpirun --map-by=slot:PE=${SLURM_CPUS_PER_TASK:-1}"', SLURM_CPUS_PER_TASK="3"),
                         ["mpirun", "--map-by=slot:PE=3"])
        self.assertEqual(launched("generate", '(mpirun "--a b")'), ["mpirun", "--a b"])
        done = self.job("generate", "a.toml", WEFT_LAUNCH="no launcher")
        self.assertEqual((done.returncode, self.started()), (2, []))
        self.assertIn("WEFT_LAUNCH=no launcher is no program. HINT: srun --mpi=TYPE", done.stderr)

    def test_scratch_and_disks_of_nodes(self):
        scratch = self.dir / "a scratch"
        site = {"WEFT_SCRATCH": f"{scratch}/", "WEFT_STAGE": "$TMPDIR"}
        done = self.job("train_1node", "a.toml", **site)
        self.assertIn(f"saved in {scratch}/runs/a-1\n", done.stdout)
        self.assertEqual(self.started(), ["train", "a.toml", f"run.dir={scratch}/runs/a-1", "data.stage=$TMPDIR"])
        self.job("train_1node", "a.toml", "data.stage=", "run.dir=here", **site)
        self.assertEqual(self.started()[2:], ["run.dir=here", "data.stage=$TMPDIR", "data.stage=", "run.dir=here"])
        self.job("generate", "a.toml", **site)
        self.assertEqual(self.started(), ["generate", "a.toml"])

    def test_space_and_quota_are_told_before_the_start(self):
        self.program("bin/df", 'echo header; for last; do :; done; echo "/dev/x 10G 7G 3G 70% /mount of $last"')
        self.assertIn("space for 'runs/a-1': 3G of 10G free on /mount\n", self.job("train_1node", "a.toml").stdout)
        self.assertIn("space for 'new/folder/out': 3G of ", self.job("generate", "a.toml", "generate.output=new/folder/out").stdout)
        self.program("bin/quota", 'echo "Disk quotas: 95G of 100G"')
        self.assertIn("quota:\nDisk quotas: 95G of 100G\n", self.job("ingest", "a.toml", "ingest.output=/nowhere/clips.h5").stdout)
        self.program("bin/lfs", '[ "$1 $2 $3" = "quota -h -u" ] && echo "Lustre: 1T of 2T"')
        said = self.job("train_1node", "a.toml").stdout
        self.assertIn("quota:\nLustre: 1T of 2T\n", said)
        self.assertNotIn("Disk quotas", said)
        self.program("bin/lfs", "exit 1")  # a file system that is not Lustre
        self.assertIn("Disk quotas", self.job("train_1node", "a.toml").stdout)

    def pipeline(self, *words, **variables):
        return run(ROOT / "jobscripts/pipeline.sh", *words, cwd=self.dir,
                   env={"PATH": f"{self.dir}/bin:{os.environ['PATH']}", **variables})

    def test_a_pipeline_of_jobs(self):
        (self.dir / "jobscripts").symlink_to(ROOT / "jobscripts")
        for name in ("a deck.toml", "v.toml", "e.toml"):
            (self.dir / name).write_text("")
        done = self.pipeline("a deck.toml", "encode:e.toml", "vae:v.toml", "--account=x", "run.seed=3", "train:--nodes=4",
                             "train:train_16nodes.sbatch", 'generate:generate.prompts=["a b", "c:d"]', "--dry-run", WEFT_SCRATCH="/s")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        commands = [shlex.split(line) for line in done.stdout.splitlines()]
        work = "/s/runs/a deck"
        after = [[], *([f"--dependency=afterok:JOB_OF_{s}", "--kill-on-invalid-dep=yes"] for s in ("ingest", "vae", "encode", "train"))]
        self.assertEqual(commands, [["sbatch", "--parsable", f"--job-name=a deck-{step}", *after[i], *words, "run.seed=3", *last]
                                    for i, (step, words, last) in enumerate((
            ("ingest", ["--account=x", "jobscripts/ingest.sbatch", "a deck.toml", f"ingest.output={work}/clips.h5"], []),
            ("vae", ["--account=x", "jobscripts/train_1node.sbatch", "v.toml", f"data.path={work}/clips.h5", f"run.dir={work}/vae"], []),
            ("encode", ["--account=x", "jobscripts/encode.sbatch", "e.toml", f"data.path={work}/clips.h5",
                        f"encode.output={work}/latents.h5", f"vae.weights={work}/vae"], []),
            ("train", ["--account=x", "--nodes=4", "jobscripts/train_16nodes.sbatch", "a deck.toml", f"data.path={work}/latents.h5",
                       f"run.dir={work}/train"], []),
            ("generate", ["--account=x", "jobscripts/generate.sbatch", "a deck.toml", f"data.path={work}/latents.h5",
                          f"run.dir={work}/train", f"generate.output={work}/generated", f"vae.weights={work}/vae"],
             ['generate.prompts=["a b", "c:d"]'])))])
        # Without a deck of its own there is no VAE to train, and the deck names one.
        done = self.pipeline("a deck.toml", "--from=ingest", "--to=encode", "--dry-run")
        names = [shlex.split(line)[2] for line in done.stdout.splitlines()]
        self.assertEqual(names, ["--job-name=a deck-ingest", "--job-name=a deck-encode"])
        self.assertNotIn("vae.weights", done.stdout)
        for words, said in ((("--dry-run",), "ingest has no deck"), (("none.toml", "--dry-run"), "none.toml cannot be read"),
                            (("v.toml", "--from=tea"), "tea is no step"), (("v.toml", "tea"), "tea is no deck, key or option"),
                            (("v.toml", "--from=vae", "--dry-run"), "vae has no deck"),
                            (("v.toml", "--to=vae", "--dry-run"), "vae has no deck"),
                            (("v.toml", "--from=train", "--to=encode", "--dry-run"), "--to=encode comes before --from=train"),
                            (("v.toml", "train:none.sbatch", "--dry-run"), "there is no jobscripts/none.sbatch")):
            done = self.pipeline(*words)
            self.assertEqual(done.returncode, 2, done.stdout)
            self.assertIn(f"ERROR: {said}. HINT: ", done.stderr)
        # A node's GPUs are for the steps that have any.
        done = self.pipeline("v.toml", "vae:v.toml", "gpu:--gpus-per-node=4", "gpu:run.seed=3", "train:--gpus-per-node=2", "--dry-run")
        given = [[w for w in shlex.split(line) if "gpus" in w or "seed" in w] for line in done.stdout.splitlines()]
        common = ["--gpus-per-node=4", "run.seed=3"]
        self.assertEqual(given, [[], common, common, ["--gpus-per-node=4", "--gpus-per-node=2", "run.seed=3"], common])
        page = (ROOT / "docs/slurm.md").read_text()
        lines = re.findall(r"(?m)^    jobscripts/pipeline\.sh ([^#\n]*)", page)
        self.assertGreater(len(lines), 2)
        for line in lines:
            for name in re.findall(r"\w+\.toml", line):
                (self.dir / name).touch()
            done = self.pipeline(*shlex.split(line), "--dry-run")
            self.assertEqual(done.returncode, 0, f"{line}\n{done.stderr}")
        # A submission that is refused: what is there already can be cancelled.
        self.program("bin/sbatch", 'for w; do case $w in *encode.sbatch) exit 1 ;; esac; done; echo "7;cluster"')
        done = self.pipeline("v.toml")
        self.assertEqual(done.returncode, 2)
        self.assertEqual(done.stdout, "ingest: job 7\n")
        self.assertIn("cancel what was submitted: scancel 7\n", done.stderr)
        # What can be known beforehand is told before anything is submitted.
        self.program("bin/sbatch", f'echo submitted >>"{self.dir}/submitted"; echo 7')
        for word, said in (("encode:none.toml", "none.toml cannot be read"), ("encode:none.sbatch", "there is no jobscripts/none.sbatch")):
            done = self.pipeline("v.toml", word)
            self.assertEqual((done.returncode, done.stdout, (self.dir / "submitted").exists()), (2, "", False))
            self.assertIn(said, done.stderr)
        # The site's file and scripts: those of the module where the folder has none. A file that fails is not passed over.
        (self.dir / "jobscripts").unlink()
        share = self.dir / "share"
        shutil.copytree(ROOT / "jobscripts", share / "jobscripts")
        (share / "jobscripts/weft.env").write_text("WEFT_SCRATCH=/of/the/site\n")
        done = self.pipeline("v.toml", "--to=ingest", "--dry-run", WEFT_SHARE=str(share))
        self.assertIn(f" {share}/jobscripts/ingest.sbatch v.toml ingest.output=/of/the/site/runs/v/clips.h5", done.stdout)
        (share / "jobscripts/weft.env").write_text("false || return 1\nWEFT_SCRATCH=/of/the/site\n")
        done = self.pipeline("v.toml", WEFT_SHARE=str(share))
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertIn(f"ERROR: {share}/jobscripts/weft.env fails here. HINT: read it in your shell (source {share}/", done.stderr)

    def test_a_task_that_was_killed_is_explained(self):
        killed = self.program("killed", "kill -9 $$")
        for script in ("train_1node", "generate", "ingest"):
            done = self.job(script, "a.toml", WEFT=str(killed))
            self.assertIn("137: a task was killed (SIGKILL), most often for want of memory", done.stderr)
            self.assertIn("--mem=0", done.stderr)
        self.assertEqual(done.returncode, 137)

    def test_text_of_others_is_not_run(self):
        """bash evaluates what stands in an arithmetic expression or as an index of an array, commands in it too."""
        (self.dir / "run").mkdir()
        bad = "UID[$(touch PWNED)0]"
        for target in (f"step_{bad}", f"step_1{bad}", "step_", "step_99999999999999999999", "step_08", "elsewhere"):
            (self.dir / "run/latest").unlink(missing_ok=True)
            (self.dir / "run/latest").symlink_to(target)
            done = self.job("train_1node", "a.toml", "run.dir=run", WEFT="/bin/true")
            self.assertIn("ended with 0, 0 steps further: 0 saved in run", done.stdout, done.stderr)
        for script in SCRIPTS:
            for name in ("SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT", "MAX_RESTARTS", "SLURM_GPUS", "SLURM_CPUS_PER_TASK"):
                self.job(script, "a.toml", f"x.y={bad}", **{name: bad})
            self.job(script, "a.toml", squeue=f"echo '1 1_{bad} {bad}'", SLURM_JOB_NAME=bad)
        self.assertFalse((self.dir / "PWNED").exists())


if __name__ == "__main__":
    unittest.main()
