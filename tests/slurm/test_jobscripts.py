"""The job scripts under a real Slurm on this host (cluster.py). `make test-slurm` runs this; by hand, as root:
    WEFT_BIN=build/weft python3 -B tests/slurm/test_jobscripts.py -v

What was shown (job ids, exit codes, restarts) is printed as each test ends.
"""

import json
import os
import pathlib
import shutil
import signal
import sys
import time
import unittest

from cluster import GRACE, Cluster

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests" / "e2e"))
from test_animate import DECK as ANIMATE_DECK, drawn_face, face_points, write_wav  # noqa: E402
from test_evaluate import png  # noqa: E402
from test_vae_training import DECK as VAE_DECK  # noqa: E402
from tiny_models import TINY_GENERATE_DECK, write_t5  # noqa: E402

WEFT = pathlib.Path(os.environ.get("WEFT_BIN", REPOSITORY / "build" / "weft")).resolve()

# Long enough to be disturbed, short enough to wait for.
DECK = """
[run]
seed = 7
threads = 1
[data]
path = "synthetic:clips=48,frames=3,height=24,width=16"
[model]
in_channels = 3
hidden_size = 64
depth = 2
num_heads = 4
caption_channels = 16
model_max_length = 4
[train]
steps = 200
batch_size = 2
micro_batches = 4
lr = 1e-3
checkpoint_every = 50
log_every = 20
[parallel]
bucket_mib = 0.25
deterministic = true
"""

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")

cluster = None


def setUpModule():
    global cluster
    # A test run that is told to end takes its Slurm with it, by way of KeyboardInterrupt, which unittest lets through.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cluster = Cluster()


def tearDownModule():
    left = cluster.stop()
    if left:
        raise AssertionError(f"had to be killed in the end: {left}")


class JobScripts(unittest.TestCase):
    """Each test is a user with a checkout of his own: job scripts, a deck and build/weft."""

    def setUp(self):
        self.site = cluster.dir / self.id().rsplit(".", 1)[1]
        (self.site / "build").mkdir(parents=True)
        (self.site / "build" / "weft").symlink_to(WEFT)
        (self.site / "jobscripts").symlink_to(REPOSITORY / "jobscripts")
        (self.site / "inputs").symlink_to(REPOSITORY / "inputs")
        (self.site / "deck.toml").write_text(DECK)
        self.jobs = []
        self.began = time.monotonic()

    def tearDown(self):
        for job in self.jobs:
            cluster.run("scancel", "--quiet", job, check=False)
        shutil.rmtree(self.site, ignore_errors=True)

    def sbatch(self, script, *arguments, options=(), partition="normal", deck="deck.toml", **variables):
        """Submits a job script with partition and deck set by the environment; the job's id."""
        environment = dict(SBATCH_PARTITION=partition, DEVICE="cpu", OMPI_MCA_btl_vader_single_copy_mechanism="none",
                           OMPI_MCA_mpi_yield_when_idle="1") | variables
        if deck:
            environment["DECK"] = deck
        job = cluster.run("sbatch", "--parsable", *options, f"jobscripts/{script}.sbatch", *arguments,
                          cwd=self.site, environment=environment).strip()
        self.jobs.append(job)
        return job

    def output(self):
        return "\n".join(f"== {p.name}\n{p.read_text(errors='replace')}" for p in sorted(self.site.glob("*.out")))

    def until(self, what, condition, seconds=180):
        limit = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > limit:
                self.fail(f"{what}: not in {seconds} s\n{cluster.run('squeue')}{self.output()}\n{cluster.logs()}")
            time.sleep(0.05)

    def finish(self, job, state="COMPLETED", exit_code="0:0", seconds=180):
        """Waits for the job's end in this state and returns what Slurm says of it."""
        self.until(f"end of job {job}", lambda: cluster.job(job).get("JobState") in ENDED, seconds)
        facts = cluster.job(job)
        self.assertEqual((facts["JobState"], facts["ExitCode"]), (state, exit_code), self.output())
        return facts

    def steps(self, run):
        path = self.site / run / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_for_steps(self, job, run, steps):
        def there():
            if self.steps(run) >= steps:
                return True
            self.assertIn(cluster.job(job).get("JobState"), ("PENDING", "RUNNING", "COMPLETING"), self.output())
            return False
        self.until(f"step {steps} of {run}", there)

    def results(self, run):
        """Losses and samples of every step, and the hash of the final state."""
        lines = [json.loads(line) for line in (self.site / run / "metrics.jsonl").read_text().splitlines()]
        self.assertEqual([m["step"] for m in lines], list(range(len(lines))))
        manifest = json.loads((self.site / run / "latest" / "manifest.json").read_text())
        return [m["loss"] for m in lines], [m["samples"] for m in lines], manifest["step"], manifest["state_hash"]

    def show(self, what):
        print(f"\n  shown in {time.monotonic() - self.began:.0f} s: {what}", file=sys.stderr)

    def test_smoke_on_two_nodes(self):
        job = self.sbatch("smoke", deck=None, options=("--cpus-per-task=1",))
        facts = self.finish(job)
        self.assertEqual(facts["NodeList"], "n[1-2]")
        self.assertIn("verdict: fit", self.output())
        run = f"runs/weft-smoke-{job}"
        self.assertEqual(self.steps(run), 20)
        self.show(f"job {job} on {facts['NodeList']}: {facts['JobState']}, exit {facts['ExitCode']}, 20 steps")

    def test_scaling_is_an_array(self):
        job = self.sbatch("scaling", "train.micro_batches=1", "--steps", "2", "--rounds", "1", "--warmup", "2",
                          options=("--array=0-1", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1"))
        tasks = [f"{job}_{i}" for i in (0, 1)]
        for task, kind in zip(tasks, ("weak_mixed", "weak_uniform")):
            self.finish(task)
            result = json.loads((self.site / f"runs/weft-scaling-{job}" / f"{kind}_2.json").read_text())
            self.assertTrue(result)
            self.assertTrue((self.site / f"runs/weft-scaling-{job}" / f"{kind}_2.svg").exists())
        self.show(f"array {job}: tasks 0 and 1 COMPLETED, exit 0:0, one JSON and one plot each")

    def test_preempted_and_requeued_until_done(self):
        shape = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1")
        deck = self.site / "deck.toml"
        # It does not end before it has been disturbed, however fast it is.
        deck.write_text(DECK.replace("steps = 200", "steps = 1000000"))
        job = self.sbatch("restart_chain", options=(*shape, "--job-name=chain"))
        self.wait_for_steps(job, "runs/chain", 40)
        # 1. An urgent job wants both nodes: Slurm itself preempts the chain.
        urgent = cluster.run("sbatch", "--parsable", "-p", "urgent", "--nodes=2", "--exclusive", "--time=1",
                             "--output=urgent.out", "--wrap=sleep 1", cwd=self.site).strip()
        self.jobs.append(urgent)
        began = time.monotonic()
        self.until("preemption", lambda: cluster.job(urgent).get("JobState") in ("RUNNING", "COMPLETED"), GRACE)
        preempted = time.monotonic() - began
        first = self.steps("runs/chain")
        # 2. It goes on by itself. Then the signal that --signal sends before the end of a job.
        self.wait_for_steps(job, "runs/chain", first + 30)
        self.assertEqual(cluster.job(job)["Restarts"], "1")
        # The next start reads the deck again. Should the steps be done by then, it finds them so.
        (self.site / "next.toml").write_text(DECK.replace("steps = 200", f"steps = {first + 130}"))
        os.replace(self.site / "next.toml", deck)
        cluster.run("scancel", "--signal=USR1", job)
        # 3. And to the end.
        facts = self.finish(job)
        self.assertEqual(facts["Restarts"], "2", self.output())
        self.assertEqual(facts["Requeue"], "1")
        self.assertEqual(self.output().count("weft train ended with 75"), 2, self.output())
        self.assertEqual(self.output().count("stopped on request after step"), 2, self.output())
        records = cluster.accounting(job)
        codes = [(r["JobState"], r["ExitCode"]) for r in records]
        self.assertEqual(codes[-1], ("COMPLETED", "0:0"))
        # 4. As many steps in one go.
        steps = self.steps("runs/chain")
        self.assertGreaterEqual(steps, first + 130)
        straight = self.sbatch("restart_chain", f"train.steps={steps}", options=(*shape, "--job-name=straight"))
        self.assertEqual(self.finish(straight)["Restarts"], "0")
        self.assertEqual(self.results("runs/chain"), self.results("runs/straight"))
        state = self.results("runs/chain")[3]
        self.show(f"job {job} preempted after {first} steps by job {urgent} (its nodes were free in {preempted:.1f} s), "
                  f"then stopped by SIGUSR1: Restarts={facts['Restarts']}, {facts['JobState']}, exit {facts['ExitCode']}; "
                  f"{steps} losses and state hash {state} bit-equal to job {straight}, which nobody disturbed\n"
                  f"  Slurm's records of job {job}: " + ", ".join(
                      f"{s} {c} {r['StartTime'][11:]}-{r['EndTime'][11:]}" for (s, c), r in zip(codes, records)))

    def test_time_left_is_honoured_without_a_signal(self):
        job = self.sbatch("restart_chain", "train.steps=1000000", "run.stop_margin=290",
                          options=("--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1", "--time=5", "--no-requeue",
                                   "--signal=CONT@1"))
        # The next of a chain waits for it. It is to do no more steps, and so it ends at once.
        following = self.sbatch("restart_chain", "train.steps=1",
                                options=("--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1", "--no-requeue",
                                         "--dependency=singleton"))
        began = time.monotonic()
        facts = self.finish(job, "FAILED", "75:0", seconds=280)
        left = self.steps("runs/weft-chain")
        self.assertIn("asked to stop by the end of the Slurm job", self.output())
        self.assertIn("Slurm does not requeue this job", self.output())
        self.assertEqual(facts["Restarts"], "0")
        stopped_after = time.monotonic() - began
        self.finish(following)
        self.assertEqual(self.steps("runs/weft-chain"), left)
        self.show(f"job {job} with --time=5 and a margin of 290 s stopped and saved {stopped_after:.0f} s after "
                  f"it was submitted, exit {facts['ExitCode']}; not requeued (--no-requeue), and says so; "
                  f"job {following} waited for it (singleton), found its steps done and ended with 0")

    def test_trigger_files(self):
        job = self.sbatch("train_1node", "train.steps=1000000", "train.checkpoint_every=0",
                          options=("--ntasks-per-node=2", "--cpus-per-task=1"))
        run = f"runs/weft-1node-{job}"
        self.wait_for_steps(job, run, 5)
        self.assertFalse((self.site / run / "latest").exists())
        (self.site / run / "save").touch()
        self.until("the save", lambda: (self.site / run / "latest").exists())
        self.assertFalse((self.site / run / "save").exists())
        (self.site / run / "stop").touch()
        facts = self.finish(job, "FAILED", "75:0")
        self.assertEqual(facts["Restarts"], "0")
        self.assertIn(f"asked to save by {run}/save", self.output())
        self.assertIn(f"asked to stop by {run}/stop", self.output())
        self.assertIn("not queued again", self.output())
        self.assertTrue((self.site / run / "stopped").exists())
        # And a clip from what was saved.
        clip = self.sbatch("generate", f"run.dir={run}", "sampler.steps=2", "generate.num_frames=3",
                           "generate.image_size=[24,16]", options=("--ntasks-per-node=1", "--cpus-per-task=1"))
        self.finish(clip)
        self.assertTrue((self.site / run / "generated" / "sample_0000.mp4").exists())
        self.show(f"job {job}: RUN/save saved at once, RUN/stop ended it with exit {facts['ExitCode']} and no requeue; "
                  f"job {clip} made a clip from it")

    def test_a_vae_latents_and_clips(self):
        """Three jobs beside each other, two tasks each: a VAE stage, encode, and generate, which is stopped and queued again."""
        (self.site / "generate.toml").write_text(TINY_GENERATE_DECK)
        (self.site / "vae.toml").write_text(VAE_DECK)
        write_t5(self.site / "t5")
        # More than are made before it is stopped, however fast it is.
        prompts = ["a cat"] + [f'prompt {i} {{"num_frames": 1}}' for i in range(1000)]
        (self.site / "prompts.txt").write_text("\n".join(prompts) + "\n")
        shape = ("--ntasks-per-node=2", "--cpus-per-task=1")
        vae = self.sbatch("train_vae", "train.steps=2", deck="vae.toml", options=shape)
        encode = self.sbatch("encode", "data.path=synthetic:clips=4,frames=17,height=32,width=32", "encode.text=false",
                             deck="generate.toml", options=shape)
        clips = ("generate.prompt_file=prompts.txt", "t5.weights=t5", "sampler.steps=60")
        generate = self.sbatch("generate", *clips, deck="generate.toml", options=shape, OUTPUT="out")
        out = self.site / "out"
        self.until("a clip", lambda: any(out.glob("sample_*.*")))
        cluster.run("scancel", "--signal=USR1", generate)
        self.until("the second start", lambda: cluster.job(generate).get("Restarts") == "1")
        before = len(list(out.glob("sample_*.*")))
        self.until("another clip", lambda: len(list(out.glob("sample_*.*"))) > before)
        (out / "stop").touch()
        facts = self.finish(generate, "FAILED", "75:0")
        self.assertEqual(facts["Restarts"], "1", self.output())
        self.assertIn("weft generate ended with 75", self.output())
        before = json.loads((out / "generate_report.json").read_text())["finished_before"]
        self.assertGreater(before, 0)
        lines = [json.loads(line) for line in (out / "generated.jsonl").read_text().splitlines()]
        self.assertEqual(sorted(line["name"] for line in lines), sorted(p.stem for p in out.glob("sample_*.*")))
        rest = self.sbatch("generate", *clips, "generate.end_index=21", deck="generate.toml", options=shape, OUTPUT="out")
        self.finish(rest)
        for name in ["sample_0000.mp4", *(f"sample_{i:04}.png" for i in range(1, 21))]:
            self.assertTrue((out / name).exists(), name)
        self.finish(vae)
        self.assertEqual(self.steps(f"runs/weft-vae-{vae}"), 2)
        self.finish(encode)
        self.assertIn("weft encode ended with 0", self.output())
        self.assertTrue((self.site / "latents.h5").exists())
        self.show(f"job {vae}: two steps of a VAE; job {encode}: 4 clips encoded; job {generate}: stopped by SIGUSR1 after "
                  f"{before} clips, queued again, Restarts={facts['Restarts']}, went on until out/stop; job {rest} made the rest")

    def lose(self, take_away, partition, command, *overrides, deck="generate.toml"):
        """A job of two nodes, whose rank 1 take_away(process) takes away while it makes clips: its id, its output."""
        for attempt in range(20):
            out = self.site / f"{partition}{attempt}{'.h5' if command == 'encode' else ''}"
            members = (out.with_name(out.name + ".parts") if command == "encode" else out) / ".ranks"
            job = self.sbatch(command, f"{command}.output={out.name}", *overrides, deck=deck, partition=partition,
                              options=("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1"))
            def words():
                try:
                    return set((members / "1").read_text().split())
                except OSError:
                    return set()  # not begun, or over
            self.until("a clip that rank 1 has claimed", lambda: cluster.job(job).get("JobState") in ENDED or
                       "take" in words())
            try:
                task = cluster.task(job, 1)
                os.kill(task, signal.SIGSTOP)  # so that it does not end while one looks
                if "take" in words() and not {"idle", "end"} & words():
                    take_away(task)
                    return job, out
                os.kill(task, signal.SIGCONT)
            except (TypeError, OSError):
                pass  # it has ended: the next is looked at sooner
            self.finish(job)
        self.fail("rank 1 was always done before it could be taken away")

    def test_a_lost_rank_and_a_lost_node(self):
        """Two jobs of one prompt file: in each, the rank that is left makes all clips."""
        (self.site / "generate.toml").write_text(TINY_GENERATE_DECK)
        (self.site / "prompts.txt").write_text("".join(f"prompt {i}\n" for i in range(8)))
        clips = ("generate", "generate.prompt_file=prompts.txt", "generate.num_frames=1", "sampler.steps=240")
        killed, by_kill = self.lose(lambda task: os.kill(task, signal.SIGKILL), "normal", *clips)
        nodes = []
        cut_off, by_node = self.lose(lambda task: nodes.append(cluster.lose_node_of(task)), "spare", *clips)
        pixels = []
        for job, out in (killed, by_kill), (cut_off, by_node):
            facts = self.finish(job)
            report = json.loads((out / "generate_report.json").read_text())
            self.assertEqual([lost["rank"] for lost in report["lost"]], [1])
            self.assertEqual((report["made"], report["failures"]), (8, []))
            lines = [json.loads(line) for line in (out / "generated.jsonl").read_text().splitlines()]
            pixels.append({line["name"]: line["pixels"] for line in lines})
            # srun passes on that a task was killed, and the script asks for another start, which finds all clips made; of
            # tasks that are gone with their node it says nothing.
            self.assertEqual(facts["Restarts"], "1" if job == killed else "0", self.output())
        self.assertEqual(len(pixels[0]), 8)
        self.assertEqual(pixels[0], pixels[1])
        said = [(self.site / f"weft-generate-{job}.out").read_text() for job in (killed, cut_off)]
        self.assertIn("weft generate ended with 137", said[0])
        self.assertIn("clips     0 made, 8 finished before", said[0])
        self.assertIn(f"Node failure on {nodes[0]}", said[1])
        for text in said:
            self.assertIn("failed    rank 1 on", text)
            self.assertIn("weft generate ended with 0", text)
        self.show(f"job {killed}: SIGKILL of rank 1 in the middle, all 8 clips by rank 0, exit 137, queued again, exit 0; job "
                  f"{cut_off}: node {nodes[0]} gone with rank 1, the same 8 clips, exit 0, not queued again")

    def test_encode_with_a_failed_rank_a_stop_and_a_damaged_clip(self):
        (self.site / "generate.toml").write_text(TINY_GENERATE_DECK)
        run = [str(WEFT), "ingest", "generate.toml", 'ingest.inputs=["lavfi:testsrc2=size=64x64:rate=10:duration=60"]',
               "ingest.output=clips.h5", "ingest.height=32", "ingest.width=32", "ingest.frames=[3]"]
        cluster.run(*run, cwd=self.site)
        jobs = ("data.path=clips.h5", "encode.text=false", "vae.weights=random:1")
        # 1. Rank 1 is killed: rank 0 encodes the rest; the next start finds the store made.
        killed, store = self.lose(lambda task: os.kill(task, signal.SIGKILL), "normal", "encode", *jobs)
        facts = self.finish(killed)
        said = (self.site / f"weft-encode-{killed}.out").read_text()
        self.assertEqual(facts["Restarts"], "1", said)
        for text in "failed    rank 1 on", "weft encode ended with 137", "is made already", "weft encode ended with 0":
            self.assertIn(text, said)
        # 2. A file stops a job of more clips than are made; the same store is untouched by it.
        many = self.sbatch("encode", "data.path=synthetic:clips=100000,frames=3,height=32,width=32", *jobs[1:],
                           "encode.output=many.h5", deck="generate.toml", options=("--ntasks-per-node=2", "--cpus-per-task=1"))
        parts = self.site / "many.h5.parts"
        self.until("a clip", lambda: any(p.stat().st_size for p in parts.glob("encoded.rank*.jsonl")))
        (parts / "stop").touch()
        self.finish(many, "FAILED", "75:0")
        made = (parts / "encoded.jsonl").read_bytes().count(b"\n")
        self.assertGreater(made, 0)
        # 3. A damaged clip is named and the others are kept; whole again, it alone is made, and the store is the same.
        clips = self.site / "clips.h5"
        cluster.run("h5dump", "-d", "/clips/32x32-3/frames", "-b", "LE", "-o", "raw", "clips.h5", cwd=self.site)
        at = clips.read_bytes().index((self.site / "raw").read_bytes()[:3 * 32 * 32 * 3]) + 1000
        times = clips.stat()

        def flip():
            with open(clips, "r+b") as file:
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 1]))
            os.utime(clips, ns=(times.st_atime_ns, times.st_mtime_ns))  # the same store, as the job knows it
        flip()
        again = (*jobs, "encode.output=again.h5")
        shape = ("--ntasks-per-node=2", "--cpus-per-task=1")
        self.finish(damaged := self.sbatch("encode", *again, deck="generate.toml", options=shape), "FAILED", "3:0")
        self.assertIn("failed    32x32-3/0: ", (self.site / f"weft-encode-{damaged}.out").read_text())
        self.assertFalse((self.site / "again.h5").exists())
        flip()
        self.finish(whole := self.sbatch("encode", *again, deck="generate.toml", options=shape))
        self.assertIn("clips     1 made, ", (self.site / f"weft-encode-{whole}.out").read_text())
        self.assertEqual((self.site / "again.h5").read_bytes(), store.read_bytes())
        self.show(f"job {killed}: SIGKILL of rank 1 while encoding, exit 137, queued again, the store whole, exit 0; job {many}: "
                  f"stopped by the file after {made} clips, exit 75; job {damaged}: one damaged clip, exit 3; job {whole} made it")

    def test_animate_with_a_failed_rank_and_a_stop(self):
        (self.site / "deck.toml").write_text(ANIMATE_DECK)
        (self.site / "face.png").write_bytes(png(64, 56, drawn_face(64, 56)))
        (self.site / "points.csv").write_text("".join(f"{x:.3f},{y:.3f}\n" for x, y in face_points(32, 28, 36)))
        write_wav(self.site / "speech.wav", 1.6)  # 40 frames
        clip = ("animate.picture=face.png", "animate.speech=speech.wav", "animate.plan=frames")
        # 1. Of one clip that two nodes share, rank 1 is killed: rank 0 makes its frames, the next start finds the clip there.
        killed, out = self.lose(lambda task: os.kill(task, signal.SIGKILL), "normal", "animate", *clip, deck="deck.toml")
        facts = self.finish(killed)
        said = (self.site / f"weft-animate-{killed}.out").read_text()
        self.assertEqual(facts["Restarts"], "1", said)
        for text in "failed    rank 1 on", "weft animate ended with 137", "weft animate ended with 0":
            self.assertIn(text, said)
        # 2. A signal stops it, and it goes on where it was.
        stopped = self.sbatch("animate", *clip, "animate.output=stopped", options=("--ntasks-per-node=2", "--cpus-per-task=1"))
        segments = self.site / "stopped" / ".work"
        self.until("a segment", lambda: any(segments.glob("*/*.mp4")))
        cluster.run("scancel", "--signal=USR1", stopped)
        facts = self.finish(stopped)
        said = (self.site / f"weft-animate-{stopped}.out").read_text()
        self.assertEqual(facts["Restarts"], "1", said)
        for text in "weft animate ended with 75", "parts made before", "weft animate ended with 0":
            self.assertIn(text, said)
        clips = [(folder / "face_speech.mp4").read_bytes() for folder in (out, self.site / "stopped")]
        self.assertEqual(clips[0], clips[1])
        self.show(f"job {killed}: SIGKILL of rank 1 in the middle of a clip, exit 137, queued again, exit 0; job {stopped}: SIGUSR1, "
                  "exit 75, queued again, the same file")

    def test_a_wrong_deck_ends_the_job(self):
        job = self.sbatch("train_1node", "train.stepps=3", options=("--ntasks-per-node=2", "--cpus-per-task=1"))
        facts = self.finish(job, "FAILED", "2:0")
        self.assertEqual(facts["Restarts"], "0")
        self.assertIn("did you mean train.steps", self.output())
        self.show(f"job {job} with a key that is none: exit {facts['ExitCode']}, not requeued")

    def test_gpus_that_cannot_be_used_end_the_job(self):
        job = self.sbatch("train_1node", options=("--ntasks-per-node=2", "--cpus-per-task=1"), DEVICE="cuda")
        self.finish(job, "FAILED", "2:0")
        self.assertIn('device.kind = "cuda": ', self.output())
        # As the script has it, without a word in the environment.
        said = cluster.run("bash", "-c", "export WEFT=/bin/true SLURM_JOB_ID=1 SLURM_JOB_NAME=x SLURM_JOB_NODELIST=x; "
                           '. jobscripts/common.sh; echo "<${device[*]-}>"', cwd=self.site,
                           environment={"SLURM_GPUS_PER_NODE": "8"})
        self.assertIn("<device.kind=cuda>", said)

    def test_mpirun_instead_of_srun(self):
        """The two lines that a site without PMIx changes; the signal then comes by way of the script."""
        (self.site / "jobscripts").unlink()
        shutil.copytree(REPOSITORY / "jobscripts", self.site / "jobscripts")
        script = self.site / "jobscripts" / "train_1node.sbatch"
        lines = script.read_text().replace("--signal=USR1@300", "--signal=B:USR1@300").splitlines()
        lines = [line[2:] if line.startswith("# launch=(mpirun") else line for line in lines
                 if not line.startswith("launch=(srun")]
        script.write_text("\n".join(lines) + "\n")
        job = self.sbatch("train_1node", "train.steps=1000000",
                          options=("--ntasks-per-node=2", "--cpus-per-task=1", "--no-requeue"),
                          OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                          OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_hwloc_base_binding_policy="none")
        self.wait_for_steps(job, f"runs/weft-1node-{job}", 5)
        cluster.run("scancel", "--batch", "--signal=USR1", job)
        facts = self.finish(job, "FAILED", "75:0")
        self.show(f"job {job} under mpirun, one node: SIGUSR1 to the script reached the ranks, exit {facts['ExitCode']}")

    def test_no_requeue_for_ever(self):
        """With programs in weft's place that always ask to be started again."""
        stuck = self.site / "stuck"
        stuck.write_text("#!/bin/sh\nexit 75\n")
        # One step further each time; under srun with one task, it alone writes.
        crawling = self.site / "crawling"
        crawling.write_text("""#!/bin/sh
for word in "$@"; do case $word in run.dir=*) run=${word#run.dir=} ;; esac; done
mkdir -p "$run"; old=$(readlink "$run/latest"); old=${old#step_}
ln -sfn "step_$((${old:-0} + 1))" "$run/latest"
exit 75
""")
        losing = self.site / "losing"
        # Its second start makes a clip, whose line nobody is left to gather.
        losing.write_text("#!/bin/sh\n[ $SLURM_RESTART_COUNT != 1 ] || echo a clip >> 'an out/generated.rank0.jsonl'\nkill -9 $$\n")
        (self.site / "an out").mkdir()
        for program in (stuck, crawling, losing):
            program.chmod(0o755)
        shape = ("--ntasks-per-node=1", "--cpus-per-task=1")
        one = self.sbatch("train_1node", options=shape, WEFT="./stuck")
        other = self.sbatch("train_1node", options=shape, WEFT="./crawling", MAX_RESTARTS="1")
        third = self.sbatch("generate", 'generate.output="an out"', options=shape, WEFT="./losing")
        self.assertEqual(self.finish(third, "FAILED", "137:0")["Restarts"], "2")
        self.assertIn("a rank failed in a start after the first, and no clip was made: not queued again", self.output())
        self.assertEqual(self.finish(one, "FAILED", "75:0")["Restarts"], "0")
        self.assertIn("no step further", self.output())
        self.assertEqual(self.finish(other, "FAILED", "75:0")["Restarts"], "1")
        self.assertIn("started again 1 times already", self.output())
        self.assertEqual(os.readlink(self.site / f"runs/weft-1node-{other}" / "latest"), "step_2")
        self.show(f"jobs that always end with 75: {one} makes no progress and is not requeued, {other} was requeued as "
                  f"often as MAX_RESTARTS allows; {third} loses its ranks, with a clip made, and then without: exit 137")

    def test_the_large_job_is_accepted(self):
        said = cluster.run("sbatch", "--test-only", "--partition=large", "jobscripts/train_16nodes.sbatch", cwd=self.site)
        self.assertIn("on nodes n[1-16]", said)
        self.show("train_16nodes.sbatch (not run): " + said.strip().removeprefix("sbatch: "))


if __name__ == "__main__":
    unittest.main()
