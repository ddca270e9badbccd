"""What the end-to-end tests share: the real binary under mpiexec, its run directories, safetensors.

The tests read variables that CTest sets: WEFT_BIN (weft), WEFT_PROBE_BIN (weft_probe; beside weft if not set) and WEFT_MPIEXEC
(mpiexec; the one that CMake found for this weft if not set). By hand:
    WEFT_BIN=build/weft python3 -m unittest discover -s tests/e2e -v
Every job carries a mark in its environment, so that a test can tell its own processes from all others.
"""

import contextlib
import functools
import json
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import tempfile
import threading
import time
import unittest
import uuid

from launcher import MPI_ON_ONE_HOST, launcher_of

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
# Without it, oneDNN's products in f32 are sums in an order that depends on the number of rows.
AVX512 = " avx512f " in pathlib.Path("/proc/cpuinfo").read_text()
WEFT = str(pathlib.Path(os.environ.get("WEFT_BIN", REPOSITORY / "build" / "weft")).resolve())
# weft_cuda_on_cpu has its own, weft_probe_cuda_on_cpu.
PROBE = str(pathlib.Path(os.environ.get("WEFT_PROBE_BIN", pathlib.Path(WEFT).with_name(
    pathlib.Path(WEFT).name.replace("weft", "weft_probe", 1)))).resolve())
MPIEXEC = launcher_of(WEFT)
SHIM = os.environ.get("WEFT_SHIM_LIBRARY", str(pathlib.Path(WEFT).parent / "tests/shim/libweft_shim.so"))
MARK = "WEFT_E2E_JOB"

# Where it is not set weft starts itself again with it (src/tensor/device.h): a tenth of a second of each process.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# The smallest model with all parts: a step takes milliseconds, so that what is tested dominates.
TINY_DECK = """
[run]
dir = "run"
seed = 7
threads = 1
[data]
path = "synthetic:clips=24,frames=3,height=16,width=16"
[model]
in_channels = 3
hidden_size = 32
depth = 2
num_heads = 2
caption_channels = 16
model_max_length = 4
[train]
steps = 20
batch_size = 2
micro_batches = 4
lr = 1e-3
checkpoint_every = 5
skip_saves = false
"""

# A Wan on latents in memory: keys of STDiT3 alone would be refused.
TINY_WAN_DECK = TINY_DECK[:TINY_DECK.index("[model]")].replace("height=16,width=16", "latent=1,height=8,width=12") + """
[model]
name = "wan"
in_channels = 4
hidden_size = 96
depth = 2
num_heads = 3
ffn_dim = 192
text_dim = 16
text_len = 6
freq_dim = 32
""" + TINY_DECK[TINY_DECK.index("[train]"):]


@functools.cache
def open_mpi():
    """Whether weft is built with Open MPI; otherwise with MPICH."""
    said = subprocess.run([WEFT, "--version"], env=dict(os.environ, **MPI_ON_ONE_HOST), capture_output=True, text=True).stdout
    return "Open MPI" in said


def rank_variable():
    """The variable in which mpiexec tells a rank its number."""
    return "OMPI_COMM_WORLD_RANK" if open_mpi() else "PMI_RANK"


def code_of_signal(number):
    """mpiexec's exit code if this signal ends a rank: MPICH's says the number, plus 128 where memory was dumped."""
    return (128 + number,) if open_mpi() else (number, 128 + number)


def threads_of(process):
    try:
        return os.listdir(f"/proc/{process}/task")
    except OSError:
        return []


class Job:
    """One run of weft, or of weft_probe (`program`). `ranks=0` starts it without mpiexec. `shim`: faults to order, beside
    those that the environment's WEFT_SHIM and WEFT_FAULT order (tests/shim)."""

    def __init__(self, arguments, ranks, cwd, preexec=None, shim=None, program=None):
        self.mark = uuid.uuid4().hex
        environment = dict(os.environ, OMP_NUM_THREADS="1", TMPDIR=str(cwd), **MPI_ON_ONE_HOST)
        environment[MARK] = self.mark
        orders = ",".join(filter(None, (environment.get("WEFT_SHIM"), shim)))
        if orders or environment.get("WEFT_FAULT"):
            environment.update(LD_PRELOAD=SHIM, WEFT_SHIM=orders)
        self.name = pathlib.Path(program or WEFT).name
        command = [str(program or WEFT), *map(str, arguments)]
        if ranks:
            command = [MPIEXEC, "-n", str(ranks), *command]
        self.started = time.monotonic()
        self.process = subprocess.Popen(command, cwd=cwd, env=environment, text=True,
                                        errors="replace", stdin=subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        start_new_session=True, preexec_fn=preexec)
        self.out, self.err, self._pieces = "", "", ([], [])
        self._readers = [threading.Thread(target=self._read, args=(pipe, pieces), daemon=True)
                         for pipe, pieces in zip((self.process.stdout, self.process.stderr),
                                                 self._pieces)]
        for reader in self._readers:
            reader.start()

    def _read(self, pipe, pieces):
        for line in pipe:
            pieces.append(line.removeprefix("\0"))  # mpirun 5.0 puts one before some lines

    def err_so_far(self):
        return "".join(self._pieces[1])

    def errors(self):
        """weft's ERROR lines; mpirun 5.0 may add "PMIX ERROR:" of its own when a job ends."""
        return [line for line in self.err.splitlines() if "ERROR:" in line and "PMIX" not in line]

    def wait(self, timeout=300):
        """Waits for the end; its exit code. A job that hangs is killed and fails the test."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"weft ran for more than {timeout} s\n{self.err_so_far()}")
        self.seconds = time.monotonic() - self.started
        for reader in self._readers:
            reader.join(10)
        self.process.stdout.close()
        self.process.stderr.close()
        self.out, self.err = ("".join(pieces) for pieces in self._pieces)
        return self.process.returncode

    def members(self):
        """Process ids of this job that are alive, mpiexec among them."""
        found = []
        wanted = f"{MARK}={self.mark}".encode()
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            # Threads of a killed process may live a moment longer than its first, and hold its locks; what has ended has no
            # environment any more.
            for thread in threads_of(entry):
                try:
                    with open(f"/proc/{entry}/task/{thread}/environ", "rb") as f:
                        has = f.read()
                except OSError:
                    continue  # it ended, or is another user's
                if not has:
                    continue  # it ended: others of its process may not have
                if wanted in has.split(b"\0"):
                    found.append(int(entry))
                break
        return found

    def ranks(self):
        """{rank: process id} of the ranks that are there."""
        found = {}
        for pid in self.members():
            try:
                with open(f"/proc/{pid}/environ", "rb") as f:
                    for item in f.read().split(b"\0"):
                        if item.startswith((b"OMPI_COMM_WORLD_RANK=", b"PMI_RANK=")):
                            found[int(item.split(b"=")[1])] = pid
            except OSError:
                continue
        return found

    def kill(self):
        """SIGKILL to every process of the job, at once; returns when they have ended, and hold no lock any more."""
        end = time.monotonic() + 20
        while (members := self.members()) and time.monotonic() < end:
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)


class WeftTest(unittest.TestCase):
    """A test with a directory of its own, and no process left behind."""

    def setUp(self):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="weft_e2e_"))
        self.jobs = []
        (self.dir / "deck.toml").write_text(TINY_DECK)

    def tearDown(self):
        for job in self.jobs:
            job.kill()
            job.process.wait()
        shutil.rmtree(self.dir, ignore_errors=True)

    # Tests try many requests in one folder.
    LIST_JOBS = ("generate", "segment", "animate", "reconstruct", "encode", "score", "evaluate")

    def start(self, *arguments, ranks=2, replace=True, **options):
        if replace and arguments[0] in self.LIST_JOBS and "--help" not in arguments:
            arguments = (*arguments, "--replace")
        job = Job(arguments, ranks, self.dir, **options)
        self.jobs.append(job)
        return job

    def weft(self, *arguments, ranks=2, expect=0, timeout=300, **options):
        """Runs weft to its end and checks the exit code (None: any)."""
        job = self.start(*arguments, ranks=ranks, **options)
        code = job.wait(timeout)
        if expect is not None:
            self.assertEqual(code, expect, f"{job.name} {' '.join(map(str, arguments))}\n{job.err}")
        return job

    def probe(self, *arguments, ranks=0, **how):
        """The same of weft_probe (tests/probe/README.md)."""
        return self.weft(*arguments, ranks=ranks, program=PROBE, **how)

    def train(self, run, *overrides, ranks=2, expect=0, timeout=300):
        return self.weft("train", "deck.toml", f"run.dir={run}", *overrides, ranks=ranks,
                         expect=expect, timeout=timeout)

    def has_cuda(self):
        """Whether weft accepts device.kind = "cuda" here: a build with CUDA on a machine with a GPU."""
        return self.weft("train", "deck.toml", "run.dir=on_cuda", "train.steps=1",
                         "device.kind=cuda", ranks=1, expect=None).process.returncode == 0

    def refused(self, job, code, *said, seconds=120):
        """The job ended as bad input must: code, one ERROR line that says all of `said`, a hint,
        nobody left. Ten seconds are promised; a host on which other tests run, too, may need more."""
        self.assertEqual(job.process.returncode, code, job.err)
        errors = job.errors()
        self.assertEqual(len(errors), 1, f"wanted one ERROR line:\n{job.err}")
        for text in said:
            self.assertIn(text, job.err)
        self.assertIn("HINT:", job.err)
        self.assertLess(job.seconds, seconds)
        self.assert_gone(job)

    def assert_gone(self, job, seconds=20):
        """No process of the job is left, or is about to be."""
        until = time.monotonic() + seconds
        while job.members() and time.monotonic() < until:
            time.sleep(0.02)
        self.assertEqual(job.members(), [], "processes of the job are left")

    def metrics(self, run):
        """The lines of RUN/metrics.jsonl, which must be steps 0, 1, 2 ... without gap or repeat."""
        lines = (self.dir / run / "metrics.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        self.assertEqual([m["step"] for m in found], list(range(len(found))))
        return found

    def cited(self, file):
        """The keys of a cite.bib, in order."""
        return re.findall(r"(?m)^@\w+\{(\w+),", (self.dir / file).read_text())

    def summary(self, folder):
        """FOLDER/summary.json: all of the wall time in parts, the time of the items in those of each rank, and speeds of both."""
        found = json.loads((self.dir / folder / "summary.json").read_text())
        speed, parts = found["speed"], found["parts"].values()
        self.assertAlmostEqual(sum(found["wall"].values()), found["wall_seconds"], 9)
        self.assertAlmostEqual(found["core_hours"], found["ranks"] * found["threads"] * found["wall_seconds"] / 3600, 9)
        self.assertAlmostEqual(speed["a_second"], speed["items"] / speed["seconds"], 9)
        self.assertAlmostEqual(speed["a_second_a_rank"] * found["ranks"], speed["a_second"], 9)
        self.assertAlmostEqual(sum(p["share"] for p in parts), 1, 9)
        if "idle" in found["parts"]:  # of a list job: its stages divide the time
            self.assertAlmostEqual(sum(p["mean"] for p in parts) / speed["seconds"], 1, 6)
        self.assertTrue(all(p["min"] <= p["mean"] <= p["max"] for p in parts), found["parts"])
        return found

    def page_data(self, page):
        """What a page of weft report tells its script."""
        html = (self.dir / page).read_text()
        return json.loads(html.partition('<script type="application/json" id="data">')[2].partition("</script>")[0])

    def losses(self, run):
        return [m["loss"] for m in self.metrics(run)]

    def samples(self, run):
        return [m["samples"] for m in self.metrics(run)]

    def wait_for_steps(self, job, run, steps, timeout=60):
        """Until metrics.jsonl has so many lines, or the job has ended."""
        path = self.dir / run / "metrics.jsonl"
        until = time.monotonic() + timeout
        while job.process.poll() is None:
            if path.exists() and path.read_bytes().count(b"\n") >= steps:
                return
            if time.monotonic() > until:
                self.fail(f"no {steps} steps in {timeout} s\n{job.err_so_far()}")
            time.sleep(0.003)

    def until(self, job, so, timeout=120):
        """Waits until so() is true of a job that goes on."""
        end = time.monotonic() + timeout
        while not so():
            self.assertIsNone(job.process.poll(), f"the job has ended\n{job.err_so_far()}")
            self.assertLess(time.monotonic(), end, job.err_so_far())
            time.sleep(0.003)

    def wait_for_a_save(self, job, run):
        """Until there is a checkpoint: saves are written beside the steps."""
        self.until(job, (self.dir / run / "latest").exists)

    def latest(self, run):
        return os.readlink(self.dir / run / "latest")

    def exported(self, run, *options):
        """The weights of the newest checkpoint as {name: (dtype, shape, bytes)}."""
        out = self.dir / f"{uuid.uuid4().hex}.safetensors"
        self.weft("export", run, out, *options, ranks=0)
        return read_safetensors(out)

    def state(self, run):
        """The hash of the newest checkpoint's state: weights, their average and the optimizer's moments."""
        return json.loads((self.dir / run / "latest" / "manifest.json").read_text())["state_hash"]

    def assert_same_run(self, one, other):
        """Losses, samples and all that is trained equal to the bit."""
        self.assertEqual(self.samples(one), self.samples(other))
        self.assertEqual(self.losses(one), self.losses(other))
        self.assertEqual(self.state(one), self.state(other))

    def assert_close(self, one, other, relative=1e-5):
        """Losses within `relative` of each other."""
        self.assertEqual(len(one), len(other))
        for step, (a, b) in enumerate(zip(one, other)):
            self.assertLessEqual(abs(a - b), relative * abs(b), f"step {step}: {a} and {b}")

    def ingest(self, output="clips.h5", seconds=4, size=32, frames=3, sources=("testsrc2",)):
        """A clip store of FFmpeg's own test pictures: 10 frames a second."""
        inputs = ",".join(f"'lavfi:{s}=duration={seconds}:size={2 * size}x{2 * size}:rate=10'"
                          for s in sources)
        return self.weft("ingest", "deck.toml", f"ingest.inputs=[{inputs}]",
                         f"ingest.output={output}", f"ingest.frames=[{frames}]",
                         f"ingest.height={size}", f"ingest.width={size}")


def make_video(path, source):
    """A video of one of FFmpeg's own sources."""
    subprocess.run(["ffmpeg", "-v", "error", "-y", "-f", "lavfi", "-i", source, "-pix_fmt", "yuv420p", str(path)],
                   check=True, stdin=subprocess.DEVNULL)


def read_safetensors(path):
    data = pathlib.Path(path).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    return {name: (e["dtype"], tuple(e["shape"]),
                   data[8 + length + e["data_offsets"][0]:8 + length + e["data_offsets"][1]])
            for name, e in header.items()}


def without_hashes(data):
    """A safetensors file's bytes without weft's hashes, as other programs write it."""
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + length])
    texts = header.get("__metadata__", {})
    header["__metadata__"] = {k: v for k, v in texts.items() if not k.startswith("xxh3")}
    return safetensors_bytes(header, data[8 + length:])


def safetensors_bytes(header, data):
    """A file with any header, right or wrong."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, (dtype, shape, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape),
                        "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    pathlib.Path(path).write_bytes(safetensors_bytes(header, data))
