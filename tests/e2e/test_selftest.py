"""weft selftest: every check passes on any number of ranks, and fails where a result is wrong, a job ends with an error or a
rank hangs: with the documented exit code, the check's name in the last line, and the files kept.

The results that it knows (inputs/reference, src/cli/selftest_checks.cpp) are those of one rank. Where a change of the code rightly changes them,
docs/doctor.md says how to make the former again, and
    weft selftest --checks NAME     tells each value that it finds instead
"""

import os
import re
import signal
import subprocess
import unittest
from unittest import mock

from harness import WeftTest
from test_doctor import BAD_BYTE

DATA, USAGE, NON_FINITE, HARDWARE, HANG, STOPPED = 3, 2, 5, 6, 7, 75

# The first message that goes to a rank's log never ends.
HANGING_WRITE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
size_t fwrite(const void* from, size_t size, size_t n, FILE* to) {
  static size_t (*next)(const void*, size_t, size_t, FILE*);
  char name[4096] = "";
  if (to == stderr && readlink("/proc/self/fd/2", name, sizeof name - 1) > 0 && strstr(name, "rank_0.log"))
    for (flockfile(to);;) pause();
  if (!next) next = (size_t (*)(const void*, size_t, size_t, FILE*))dlsym(RTLD_NEXT, "fwrite");
  return next(from, size, n, to);
}
"""


class Base(WeftTest):
    def selftest(self, *arguments, ranks=1, expect=0, **how):
        job = self.weft("selftest", *arguments, ranks=ranks, expect=expect, **how)
        self.folders = list(self.dir.glob("weft-selftest-*"))
        return job

    def preload(self, name, source):
        (self.dir / f"{name}.c").write_text(source)
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", self.dir / f"{name}.so", self.dir / f"{name}.c", "-ldl"], check=True)

    def last(self, job):
        return job.out.rstrip("\n").splitlines()[-1]

    def failed(self, job, *names, of, ranks=1):
        self.assertEqual(self.last(job), f"selftest: failed {len(names)} of {of} checks on {ranks} ranks: {', '.join(names)}")
        folder, = self.folders
        self.assertIn(str(folder), job.out)
        self.assertEqual({p.name for p in folder.glob("rank_*.log")}, {f"rank_{r}.log" for r in range(ranks)})


class SelfTest(Base):
    def test_every_check_on_three_ranks(self):
        job = self.selftest(ranks=3)
        lines = re.findall(r"(?m)^(\w+) +\S.* +\d+\.\d s  ok$", job.out)
        self.assertEqual(len(lines), len(set(lines)))
        self.assertGreaterEqual(len(lines), 12)
        self.assertRegex(self.last(job), rf"^selftest: passed {len(lines)} checks on 3 ranks in \d+ s$")
        self.assertEqual(self.folders, [])
        self.assertNotIn("ERROR", job.out + job.err)

    def test_a_wrong_product_fails_and_the_rest_goes_on(self):
        self.preload("bad", BAD_BYTE)
        with mock.patch.dict(os.environ, LD_PRELOAD=str(self.dir / "bad.so")):
            job = self.selftest("--checks", "operations,captions,encode", ranks=0, expect=HARDWARE)
        self.failed(job, "operations", "encode", of=3)
        self.assertRegex(job.out, r"(?m)^captions .* ok$")
        self.assertRegex(job.out, r"matrix product (f32|bf16): \d+ wrong values?")

    def test_an_error_of_a_job(self):
        """Its exit code is that of the job; the checks behind it are made."""
        with mock.patch.dict(os.environ, WEFT_FAULT="nan:1:1:0"):
            job = self.selftest("--checks", "open_sora,captions", ranks=2, expect=NON_FINITE)
        self.failed(job, "open_sora", of=2, ranks=2)
        self.assertIn("gradient norm nan", job.out)

    def test_a_check_that_takes_too_long(self):
        """Its rank hangs in a write, as on a file system that does not answer, and holds stderr's lock."""
        self.preload("hang", HANGING_WRITE)
        with mock.patch.dict(os.environ, LD_PRELOAD=str(self.dir / "hang.so")):
            job = self.selftest("--checks", "open_sora", "--timeout", "1", ranks=1, expect=HANG, timeout=60)
        self.failed(job, "open_sora", of=1)
        self.assertIn("timed out after 1 s; raise --timeout", job.out)
        self.assert_gone(job)

    def test_a_request_to_stop_is_no_failure(self):
        """It comes while MPI starts: the first training stops by it."""
        job = self.selftest("--checks", "captions,open_sora,wan", ranks=0, expect=STOPPED, shim=f"init_signal={int(signal.SIGTERM)}")
        self.assertEqual(self.last(job), "selftest: stopped after 1 of 3 checks on 1 ranks")
        self.assertRegex(job.out, r"(?m)^open_sora .* stopped$")
        self.assertNotIn("FAILED", job.out)
        self.assertEqual(self.folders, [])

    def test_what_cannot_be(self):
        self.refused(self.selftest("--checks", "opensora", expect=None), USAGE, "--checks", "opensora not in {operations,")
        self.refused(self.selftest("train.lr=1", expect=None), USAGE, "not train.lr")
        self.refused(self.selftest("run.threads=-1", expect=None), USAGE, "override 'run.threads=-1'")
        self.refused(self.selftest("--timeout", "0", expect=None), USAGE, "--timeout 0 is out of range", "from 1 to 1000000")
        self.refused(self.selftest("--dir", "nowhere", expect=None), USAGE, "cannot make a folder in nowhere", "--dir")
        self.assertEqual(self.folders, [])


@unittest.skipUnless(os.environ.get("WEFT_SELFTEST_RANKS"), "a minute: make test-all")
class Ranks(Base):
    def test_more_ranks_than_there_is_work(self):
        job = self.selftest("--checks", "collectives,open_sora,score", "device.kind=cpu", ranks=9)
        self.assertRegex(self.last(job), r"^selftest: passed 3 checks on 9 ranks in \d+ s$")

    def test_a_rank_that_hangs(self):
        with mock.patch.dict(os.environ, WEFT_FAULT="stop:1:1", WEFT_COMM_TIMEOUT="5"):
            job = self.selftest("--checks", "open_sora,captions", ranks=2, expect=HANG)
        self.failed(job, "open_sora", of=2, ranks=2)
        self.assertIn("rank 1", job.out)
        self.assert_gone(job)


if __name__ == "__main__":
    unittest.main()
