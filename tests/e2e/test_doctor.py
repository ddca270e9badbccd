"""weft doctor: fit ranks pass; a rank that really differs, is misplaced or computes wrongly is named, with the exit status."""

import json
import os
import pathlib
import re
import shlex
import subprocess
import unittest

from harness import MPI_ON_ONE_HOST, MPIEXEC, WEFT, WeftTest

FIT, MEND, DATA, HARDWARE = 0, 2, 3, 6

# Another HDF5, as far as a program can tell.
OTHER_HDF5 = """
int H5get_libversion(unsigned* major, unsigned* minor, unsigned* release) {
  *major = 1, *minor = 99, *release = 7;
  return 0;
}
"""

# A processor with a bad bit: the first value of every oneDNN result loses its lowest one.
BAD_BIT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <dnnl.h>
dnnl_status_t dnnl_primitive_execute(const_dnnl_primitive_t p, dnnl_stream_t s, int n, const dnnl_exec_arg_t* a) {
  dnnl_status_t (*real)(const_dnnl_primitive_t, dnnl_stream_t, int, const dnnl_exec_arg_t*) =
      (dnnl_status_t (*)(const_dnnl_primitive_t, dnnl_stream_t, int, const dnnl_exec_arg_t*))dlsym(
          RTLD_NEXT, "dnnl_primitive_execute");
  dnnl_status_t status = real(p, s, n, a);
  dnnl_stream_wait(s);
  for (int i = 0; i < n; ++i) {
    void* data = 0;
    if (a[i].arg == DNNL_ARG_DST && dnnl_memory_get_data_handle(a[i].memory, &data) == dnnl_success && data)
      *(unsigned char*)data ^= 1;
  }
  return status;
}
"""

# And one that is far off.
BAD_BYTE = BAD_BIT.replace("*(unsigned char*)data ^= 1;", "((unsigned char*)data)[3] ^= 64;")

# The driver's library as far as the doctor calls it: the GPUs of UUIDS, each with rank 0 of this host on it (its own process)
# and, on the last, a stranger: process 1.
DRIVER = """
#include <stdio.h>
#include <unistd.h>
static const char* uuids[] = {UUIDS};
enum { count = sizeof uuids / sizeof *uuids };
typedef struct device* Device;
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
struct process { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char* to, unsigned n) { return snprintf(to, n, "580.65.06"), 0; }
int nvmlDeviceGetCount_v2(unsigned* n) { return *n = count, 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, Device* d) { return *d = (Device)(i + 1L), 0; }
int nvmlDeviceGetUUID(Device d, char* to, unsigned n) { return snprintf(to, n, "%s", uuids[(long)d - 1]), 0; }
int nvmlDeviceGetPciInfo_v3(Device d, struct pci* p) { return snprintf(p->bus_id, 32, "0000000%ld:AB:00.0", (long)d), 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(Device d, unsigned* n, struct process* p) {
  *n = (long)d == count ? 2 : 1;
  p[0].pid = getpid(), p[0].used = 1ull << 31;
  if (*n == 2) p[1].pid = 1, p[1].used = ~0ull;
  return 0;
}
"""


def build_driver(folder, gpus):
    folder.mkdir(exist_ok=True)
    (folder / "driver.c").write_text(DRIVER.replace("UUIDS", ", ".join(f'"{g}"' for g in gpus)))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", folder / "driver.c"], check=True)


class Doctor(WeftTest):
    def doctor(self, *started_by, expect, program=WEFT, arguments=("deck.toml",)):
        """Two ranks, of which rank 1 is `program`, started by "env", "X=1" or the like."""
        (self.dir / "ranks.sh").write_text(f"""#!/bin/sh
[ "${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}" = 0 ] || exec {shlex.join([*map(str, started_by), str(program)])} "$@"
exec {shlex.quote(str(WEFT))} "$@"
""")
        (self.dir / "ranks.sh").chmod(0o755)
        job = self.weft("doctor", *arguments, "--json", "report.json", expect=None, program=self.dir / "ranks.sh")
        self.assertEqual(job.process.returncode, expect, job.out + job.err)
        report = json.loads((self.dir / "report.json").read_text())
        self.assertEqual(report["exit"], expect)
        self.assertEqual(len(report["ranks"]), 2)
        self.assertEqual(list(self.dir.glob(".weft-doctor*")), [], "a temporary file is left")
        return job, report

    def failures(self, report):
        return [f for f in report["findings"] if f["level"] == "FAIL"]

    def only_failure(self, job, report, *said):
        """One FAIL, in the report and on the screen, with all of `said` and with what to do."""
        found = self.failures(report)
        self.assertEqual(len(found), 1, job.out)
        lines = [line for line in job.out.splitlines() if line.startswith("FAIL")]
        self.assertEqual(len(lines), 1, job.out)
        for text in said:
            self.assertIn(text, lines[0])
        self.assertIn("DO:", lines[0])
        self.assertGreater(len(found[0]["do"]), 10)

    def preloaded(self, name, code):
        (self.dir / f"{name}.c").write_text(code)
        library = self.dir / f"lib{name}.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, self.dir / f"{name}.c", "-ldl"], check=True)
        return ("env", f"LD_PRELOAD={library}")

    def test_two_fit_ranks(self):
        job, report = self.doctor(expect=FIT)
        self.assertEqual(self.failures(report), [])
        self.assertIn("verdict: fit", job.out)
        for rank in report["ranks"]:
            self.assertEqual(rank["device"], "CPU")
            self.assertGreater(len(rank["cores"]), 0)
            self.assertGreater(rank["memory_gib"], 0)
            for name in "weft", "MPI", "HDF5", "oneDNN":
                self.assertTrue(rank["versions"][name])
            for name in "memory copy GB/s", "product f32 TFLOP/s", "file read GB/s", "all-reduce 64 MiB GB/s":
                self.assertGreater(rank["measured"][name], 0)
            self.assertEqual(set(rank["wrong"].values()), {0})
            self.assertEqual(set(rank["operations"].values()), {0})
            self.assertEqual(rank["faults"], [])

    def test_one_rank_alone_without_a_deck(self):
        job = self.weft("doctor", ranks=0)
        self.assertIn("weft doctor: 1 rank on 1 host", job.out)
        self.assertIn("verdict: fit", job.out)

    def test_another_environment(self):
        job, report = self.doctor("env", "OMP_NUM_THREADS=2", expect=MEND)
        self.only_failure(job, report, 'OMP_NUM_THREADS differs: "1" on rank 0; "2" on rank 1', "mpirun -x OMP_NUM_THREADS")

    def test_a_variable_that_one_rank_lacks(self):
        job, report = self.doctor("env", "WEFT_CPU_ISA=v3", expect=MEND)
        self.only_failure(job, report, "WEFT_CPU_ISA differs", "not set on rank 0", '"v3" on rank 1')

    def test_another_library(self):
        job, report = self.doctor(*self.preloaded("other_hdf5", OTHER_HDF5), expect=MEND)
        self.only_failure(job, report, "HDF5 differs", "1.99.7 on rank 1")

    def test_another_build(self):
        """A copy of the program that was built from another commit, as far as it knows itself."""
        program = pathlib.Path(WEFT).read_bytes()
        version = subprocess.run([WEFT, "--version"], check=True, capture_output=True, text=True).stdout
        commit = re.search(r"commit (\w+)", version)[1]
        other = "".join("b" if c == "a" else "a" for c in commit)
        self.assertIn(commit.encode() + b"\0", program)
        copy = self.dir / "weft_of_another_commit"
        copy.write_bytes(program.replace(commit.encode() + b"\0", other.encode() + b"\0"))
        copy.chmod(0o755)
        job, report = self.doctor(program=str(copy), expect=MEND)
        self.only_failure(job, report, "weft differs", commit, other, "rank 1", "same build")

    def test_a_wrong_bit(self):
        job, report = self.doctor(*self.preloaded("bad_bit", BAD_BIT), expect=HARDWARE)
        wrong = [f for f in self.failures(report) if f["exit"] == HARDWARE]
        self.assertGreaterEqual(len(wrong), 1)
        self.assertEqual(self.failures(report), wrong)
        self.assertIn("product f32: not the known answer on rank 1", wrong[-1]["what"])
        self.assertNotIn("rank 0", "".join(f["what"] for f in wrong))
        self.assertEqual(report["ranks"][0]["wrong"]["product f32"], 0)
        self.assertGreater(report["ranks"][1]["wrong"]["product f32"], 0)
        # Rounding may be off by more than a bit.
        self.assertEqual(report["ranks"][1]["operations"]["matrix product f32"], 0)

    def test_a_wrong_operation(self):
        job, report = self.doctor(*self.preloaded("bad_byte", BAD_BYTE), expect=HARDWARE)
        said = [f["what"] for f in self.failures(report) if f["exit"] == HARDWARE]
        self.assertRegex(said[0], "^operations compute wrong results: .*matrix product f32 on rank 1 on .*(1 value)")
        self.assertNotIn("rank 0", "".join(said))
        self.assertEqual(set(report["ranks"][0]["operations"].values()), {0})

    @unittest.skipIf(len(os.sched_getaffinity(0)) == 1, "on one core nobody is bound")
    def test_two_ranks_on_one_core(self):
        def both_on_core_0():
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        job = self.weft("doctor", "--json", "report.json", ranks=2, expect=None, preexec=both_on_core_0)
        self.assertEqual(job.process.returncode, MEND, job.out)
        report = json.loads((self.dir / "report.json").read_text())
        self.only_failure(job, report, "ranks 0-1", "bound to the same core", "--bind-to core")

    def test_data_that_nobody_can_read(self):
        """One fault does not hide the others' health: everything else is still examined."""
        job, report = self.doctor(expect=MEND, arguments=("deck.toml", "data.path=nowhere.h5"))
        self.only_failure(job, report, "cannot read data.path nowhere.h5", "No such file", "ranks 0-1")
        self.assertGreater(report["ranks"][1]["measured"]["all-reduce 64 MiB GB/s"], 0)

    def test_a_clip_store(self):
        self.ingest()
        job, report = self.doctor(expect=FIT, arguments=("deck.toml", "data.path=clips.h5"))
        self.assertEqual(report["ranks"][1]["file"], "clips.h5")
        self.assertGreater(report["ranks"][1]["measured"]["file read GB/s"], 0)

    def test_bad_command_lines(self):
        self.refused(self.weft("doctor", "nowhere.toml", expect=None), MEND, "nowhere.toml", "does not exist")
        self.refused(self.weft("doctor", "--jason", "x", expect=None), MEND, "--jason", "--json")
        self.refused(self.weft("doctor", "--json", "no/such/dir/x.json", expect=None), DATA, "no/such/dir/x.json")


ON_CPU = pathlib.Path(WEFT).parent / "weft_cuda_on_cpu"


@unittest.skipUnless(ON_CPU.exists(), "needs weft_cuda_on_cpu beside weft")
class Gpus(WeftTest):
    """The CUDA side without a GPU, and a driver's library that tells of the same GPUs."""

    def doctor(self, expect, *environment, devices=2):
        """Two ranks of weft_cuda_on_cpu."""
        command = [MPIEXEC, "-n", "2", "env", "OMP_NUM_THREADS=1", f"WEFT_EMULATION_DEVICES={devices}", *environment, ON_CPU,
                   "doctor", "--json", "report.json"]
        done = subprocess.run(command, cwd=self.dir, capture_output=True, text=True, check=False, timeout=200,
                              env=dict(os.environ, **MPI_ON_ONE_HOST))
        self.assertEqual(done.returncode, expect, done.stdout + done.stderr)
        return done, json.loads((self.dir / "report.json").read_text())

    def test_each_rank_its_gpu_then_a_driver_that_tells_more(self):
        done, report = self.doctor(FIT)
        gpus = [rank["gpu"] for rank in report["ranks"]]
        self.assertEqual(len(set(gpus)), 2)
        for rank in report["ranks"]:
            for name in "host to device GB/s", "device to host GB/s", "device copy GB/s", "product bf16 TFLOP/s":
                self.assertGreater(rank["measured"][name], 0)
            self.assertEqual(rank["wrong"]["device memory"], 0)
            self.assertEqual(rank["wrong"]["product f32"], 0)
            self.assertEqual(len(rank["operations"]), 8)
            self.assertEqual(set(rank["operations"].values()), {0})
            self.assertIn("CUDA runtime", rank["versions"])

        build_driver(self.dir / "driver", gpus)
        done, report = self.doctor(MEND, f"LD_LIBRARY_PATH={self.dir}/driver:{os.environ.get('LD_LIBRARY_PATH', '')}")
        said = [f["level"] + " " + f["what"] for f in report["findings"]]
        foreign = [s for s in said if s.startswith("FAIL")]
        # Only rank 0 speaks for the host, so that its process is on both.
        self.assertEqual(foreign, [f"FAIL rank 0 holds a context on GPU {gpus[1]} on {report['ranks'][0]['host']}, "
                                   "which is not its own"])
        self.assertTrue(any(s.startswith("WARN") and gpus[1] in s and "(process 1, 0.0 GiB)" in s for s in said), said)
        self.assertEqual(report["ranks"][1]["host_gpus"][0]["bus"], "0001:ab:00.0")
        self.assertEqual(report["ranks"][1]["host_gpus"][0]["driver"], "580.65.06")
        self.assertIn("0002:ab:00.0", done.stdout)

    def test_two_ranks_and_one_gpu(self):
        done, report = self.doctor(MEND, devices=1)
        failed = [f["what"] for f in report["findings"] if f["level"] == "FAIL"]
        self.assertEqual(len(failed), 1, done.stdout)
        self.assertIn("would serve 2 ranks", failed[0])


if __name__ == "__main__":
    unittest.main()
