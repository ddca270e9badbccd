"""A Slurm of one's own: munged, slurmctld and some slurmd's on this host, all files in one scratch directory.

Nothing of the system's own Slurm is read or touched. Needs root: slurmd starts each job as its user, and each gets a
/dev/shm of its own, so that ranks on two "nodes" cannot meet there. When the process that started it all ends, however it
ends, a second one, which does nothing but wait for that, ends what is left.
"""

import atexit
import contextlib
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

MARK = "WEFT_SLURM_TEST"
GRACE = 60  # seconds that a preempted job has to save

CONFIGURATION = """
ClusterName=weft
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
# A requeued job starts again once its old credential has run out: 120 s unless told otherwise.
AuthInfo=socket={dir}/munge.socket,cred_expire=5
CredType=cred/munge
# Seconds that an ended job is remembered: tests ask late.
MinJobAge=86400
SlurmUser=root
SlurmdUser=root
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/%n
TmpFS={dir}/%n
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/%n.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdLogFile={dir}/%n.log
JobCompType=jobcomp/filetxt
JobCompLoc={dir}/accounting
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# Nodes may claim more cores than this host has; GPUs are empty files.
SlurmdParameters=config_overrides
GresTypes=gpu
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
# An urgent job takes the nodes of a normal one, which gets SIGTERM and then has its time to save.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=normal Nodes={usual} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace} State=UP
PartitionName=urgent Nodes={usual} PriorityTier=2 PreemptMode=OFF State=UP
PartitionName=large Nodes={large} State=UP
PartitionName=spare Nodes={spare} State=UP
"""


def free_ports(count):
    """Below those that the system gives to whoever asks for any: nobody takes them before they are used."""
    ports = []
    for port in random.sample(range(12000, 30000), 10 * count):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            ports.append(port)
    return ports[:count]


def ours(directory):
    """Process ids of all that belongs to the scratch directory: it is in their environment, or they work in it, as
    slurmstepd does, which writes over its environment."""
    mark = f"{MARK}={directory}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            work = os.readlink(f"/proc/{entry}/cwd") + "/"
            with open(f"/proc/{entry}/environ", "rb") as f:
                if work.startswith(f"{directory}/") or mark in f.read().split(b"\0"):
                    found.append(int(entry))
        except OSError:
            continue  # it ended
    return found


def clear(directory):
    """Kills whatever is left and removes the directory. The names of what had to be killed."""
    killed = []
    while True:
        left = ours(directory)
        for pid in left:
            try:
                killed.append(pathlib.Path(f"/proc/{pid}/comm").read_text().strip())
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        if not left:
            shutil.rmtree(directory, ignore_errors=True)
            return killed
        time.sleep(0.1)


class Cluster:
    """`nodes` nodes, each with 96 cores and 8 GPUs on paper: the partitions `normal` and `large` have the first `usual` and
    `large` of them, `spare` those after them, to be lost."""

    def __init__(self, nodes=18, usual=2, large=16):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="weft_slurm_"))
        self.environment = {name: value for name, value in os.environ.items()
                            if not name.startswith(("SLURM_", "SBATCH_", "SRUN_", "PMI_", "PMIX_"))}
        self.environment["SLURM_CONF"] = str(self.dir / "slurm.conf")
        self.environment[MARK] = str(self.dir)
        self.heir = subprocess.Popen([sys.executable, "-B", __file__, str(self.dir)], stdin=subprocess.PIPE,
                                     start_new_session=True)
        self.daemons = []
        atexit.register(self.stop)  # also after Ctrl-C
        try:
            self._start(nodes, usual, large)
        except BaseException:
            self.stop()
            raise

    def _start(self, nodes, usual, large):
        host = socket.gethostname().split(".")[0]
        ports = free_ports(1 + nodes)
        lines = [f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[i]} CPUs=96 Gres=gpu:8"
                 for i in range(1, nodes + 1)]
        (self.dir / "slurm.conf").write_text(CONFIGURATION.format(
            host=host, ports=ports, dir=self.dir, nodes="\n".join(lines), usual=f"n[1-{usual}]", large=f"n[1-{large}]",
            spare=f"n[{large + 1}-{nodes}]", grace=GRACE))
        (self.dir / "gpu").mkdir()
        for i in range(8):
            (self.dir / "gpu" / str(i)).touch()
        (self.dir / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={self.dir}/gpu/[0-7]\n")
        # No plugin in use asks for cgroups; named, it is not looked for on a host that has none.
        (self.dir / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        (self.dir / "munge.key").write_bytes(os.urandom(128))
        (self.dir / "munge.key").chmod(0o600)
        self._daemon("munged", "--foreground", "--force", f"--socket={self.dir}/munge.socket",
                     f"--key-file={self.dir}/munge.key", f"--pid-file={self.dir}/munged.pid",
                     f"--log-file={self.dir}/munged.log", f"--seed-file={self.dir}/munged.seed")
        self._wait("munged", lambda: (self.dir / "munge.socket").exists())
        self._daemon("slurmctld", "-D", "-c")
        for i in range(1, nodes + 1):
            (self.dir / f"n{i}").mkdir()
            self._daemon("unshare", "--mount", "sh", "-c",
                         f"mount -t tmpfs tmpfs /dev/shm && exec slurmd -D -N n{i}")
        self._wait("the nodes", lambda: self.run("sinfo", "-h", "-N", "-p", "large,spare", "-o", "%t", check=False)
                   .split() == ["idle"] * nodes)

    def _daemon(self, *command):
        log = open(self.dir / "daemons.log", "a")
        self.daemons.append(subprocess.Popen(command, env=self.environment, cwd=self.dir, stdin=subprocess.DEVNULL,
                                             stdout=log, stderr=log, start_new_session=True))
        log.close()

    def _wait(self, what, condition, seconds=180):
        until = time.monotonic() + seconds
        while not condition():
            dead = [d.args[0] for d in self.daemons if d.poll() is not None]
            if dead or time.monotonic() > until:
                raise RuntimeError(f"Slurm did not start: {what} in {seconds} s; ended: {dead}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self):
        """The last lines of every log, for a failure."""
        parts = []
        for path in sorted([*self.dir.glob("*.log")]):
            parts.append(f"== {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:]))
        return "\n".join(parts)

    def run(self, *command, check=True, **more):
        """The output of one of Slurm's commands."""
        done = subprocess.run(command, env={**self.environment, **more.pop("environment", {})}, text=True,
                              capture_output=True, timeout=60, **more)
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def job(self, job_id):
        """What `scontrol show job` says, as {name: value}."""
        text = self.run("scontrol", "show", "job", "-o", str(job_id), check=False)
        return dict(item.split("=", 1) for item in text.split() if "=" in item)

    def task(self, job_id, rank):
        """The process of that rank of a job with one step; None if it is not there."""
        marks = {f"{MARK}={self.dir}".encode(), f"SLURM_JOB_ID={job_id}".encode(), f"SLURM_PROCID={rank}".encode()}
        for entry in os.listdir("/proc"):
            try:
                # The batch script and srun have a number in their environments too.
                if entry.isdigit() and pathlib.Path(f"/proc/{entry}/comm").read_text().startswith("weft") and \
                        marks <= set(pathlib.Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")):
                    return int(entry)
            except OSError:
                continue  # it ended
        return None

    def lose_node_of(self, task):
        """What a power cut does to the node of that process: slurmd, slurmstepd, the batch script and all tasks are gone, and say
        nothing. Slurm is told in place of the 300 seconds after which it would see. Returns the node's name."""
        variables = pathlib.Path(f"/proc/{task}/environ").read_text().split("\0")
        node = next(v.split("=", 1)[1] for v in variables if v.startswith("SLURMD_NODENAME="))
        daemon = next(d for d in self.daemons if d.args[-1].endswith(f"slurmd -D -N {node}"))
        tasks, steps = [], set()
        for pid in ours(self.dir):
            try:
                if f"SLURMD_NODENAME={node}".encode() in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    status = pathlib.Path(f"/proc/{pid}/status").read_text().split()
                    parent = status[status.index("PPid:") + 1]
                    tasks.append(pid)
                    # It has written over its environment.
                    if pathlib.Path(f"/proc/{parent}/comm").read_text().startswith("slurmstepd"):
                        steps.add(int(parent))
            except OSError:
                continue  # it ended
        for pid in daemon.pid, *steps, *tasks:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")
        return node

    def accounting(self, job_id):
        """The records of the job that Slurm has written, one a start that has ended: [{name: value}]."""
        path = self.dir / "accounting"
        records = [dict(item.split("=", 1) for item in line.split() if "=" in item)
                   for line in (path.read_text().splitlines() if path.exists() else [])]
        return [r for r in records if r.get("JobId") == str(job_id)]

    def stop(self):
        """Ends all jobs and daemons; whatever is left of them is killed. The names of what had to be."""
        if not self.dir.exists():
            return []
        if any(d.args[0] == "slurmctld" and d.poll() is None for d in self.daemons):
            try:
                self.run("scancel", "--user=root", check=False)
                until = time.monotonic() + 10
                while self.run("squeue", "-h", check=False).strip() and time.monotonic() < until:
                    time.sleep(0.2)
            except subprocess.TimeoutExpired:
                pass
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        until = time.monotonic() + 5
        while ours(self.dir) and time.monotonic() < until:
            time.sleep(0.1)
        left = clear(self.dir)
        self.heir.stdin.close()
        self.heir.wait()
        return left


if __name__ == "__main__":
    sys.stdin.read()  # until whoever started this has ended
    clear(pathlib.Path(sys.argv[1]))
