"""What the tests of the job scripts share: a Slurm for each class of tests, a checkout for each test."""

import json
import os
import pathlib
import shutil
import signal
import sys
import time
import unittest

from cluster import Cluster

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests" / "e2e"))
from harness import MPIEXEC, WEFT, open_mpi  # noqa: E402

# What jobs get from the environment in which they are submitted; a rank that waits gives its core to others. With MPICH (docs/mpi.md)
# the launch line is another; its UCX would use /dev/shm, which nodes of this host do not share.
SUBMITTED = {"SBATCH_PARTITION": "normal"}
if open_mpi():
    SUBMITTED |= {"OMPI_MCA_btl_vader_single_copy_mechanism": "none", "OMPI_MCA_mpi_yield_when_idle": "1"}
else:
    SUBMITTED |= {"WEFT_LAUNCH": "srun --mpi=pmi2", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1", "UCX_TLS": "tcp,self"}

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


class ScriptTest(unittest.TestCase):
    """Each test is a user with a checkout of his own: job scripts, a deck and build/weft."""

    NODES = {}  # of the class's Slurm: arguments of Cluster

    @classmethod
    def setUpClass(cls):
        # A test run that is told to end takes its Slurm with it, by way of KeyboardInterrupt, which unittest lets through.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        cls.cluster = Cluster(**cls.NODES)

    @classmethod
    def tearDownClass(cls):
        left = cls.cluster.stop()
        if left:
            raise AssertionError(f"had to be killed in the end: {left}")

    def setUp(self):
        self.site = self.cluster.dir / self.id().rsplit(".", 1)[1]
        (self.site / "build").mkdir(parents=True)
        (self.site / "build" / "weft").symlink_to(WEFT)
        (self.site / "jobscripts").symlink_to(REPOSITORY / "jobscripts")
        (self.site / "inputs").symlink_to(REPOSITORY / "inputs")
        (self.site / "deck.toml").write_text(DECK)
        self.jobs = []
        self.began = time.monotonic()

    def tearDown(self):
        for job in self.jobs:
            self.cluster.run("scancel", "--quiet", job, check=False)
        shutil.rmtree(self.site, ignore_errors=True)

    def sbatch(self, script, *keys, options=(), partition="normal", deck="deck.toml", device="cpu", **variables):
        """Submits a job script with the partition set by the environment; the job's id. The nodes' GPUs are on paper."""
        environment = SUBMITTED | {"SBATCH_PARTITION": partition} | variables
        environment = {name: value for name, value in environment.items() if value is not None}
        words = [*([deck] if deck else []), *([f"device.kind={device}"] if device else []), *keys]
        job = self.cluster.run("sbatch", "--parsable", *options, f"jobscripts/{script}.sbatch", *words,
                          cwd=self.site, environment=environment).strip()
        self.jobs.append(job)
        return job

    def output(self):
        return "\n".join(f"== {p.name}\n{p.read_text(errors='replace')}" for p in sorted(self.site.glob("*.out")))

    def until(self, what, condition, seconds=180):
        limit = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > limit:
                self.fail(f"{what}: not in {seconds} s\n{self.cluster.run('squeue')}{self.output()}\n{self.cluster.logs()}")
            time.sleep(0.05)

    def finish(self, job, state="COMPLETED", exit_code="0:0", seconds=180):
        """Waits for the job's end in this state and returns what Slurm says of it."""
        self.until(f"end of job {job}", lambda: self.cluster.job(job).get("JobState") in ENDED, seconds)
        facts = self.cluster.job(job)
        self.assertEqual((facts["JobState"], facts["ExitCode"]), (state, exit_code), self.output())
        return facts

    def steps(self, run):
        path = self.site / run / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_for_steps(self, job, run, steps):
        def there():
            if self.steps(run) >= steps:
                return True
            self.assertIn(self.cluster.job(job).get("JobState"), ("PENDING", "RUNNING", "COMPLETING"), self.output())
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
