"""Abnormal ends: a rank that crashes says once what it was, where and by which calls; all ranks end, with the code that
docs/errors.md names."""

import os
import unittest
from unittest import mock

from harness import WeftTest, code_of_signal, open_mpi
from tiny_models import TINY_GENERATE_DECK, write_t5

SEGV, ABORT, THROWN, MEMORY, KILLED, OVERFLOW = range(6)


class Abnormal(WeftTest):
    def told(self, job, code, said, place, rank="1", ranks=1):
        """One ERROR line of each rank that crashed, of what and where; nobody left. `code`: the exit codes that may be."""
        self.assertIn(job.process.returncode, code, job.err)
        errors = job.errors()
        self.assertIn(len(errors), range(1, ranks + 1), job.err)
        for error in errors:
            self.assertRegex(error, rf"^\[rank {rank} on \S+\] ERROR: {said}.*{place}", job.err)
        self.assertEqual(job.err.count("HINT:"), len(errors), job.err)
        self.assertNotIn("Process received signal", job.err, "Open MPI tells it a second time")
        self.assert_gone(job)

    def calls(self, job):
        """The calls that the job tells, each an address of this binary or of a library."""
        return [line for line in job.err.splitlines() if line.endswith("]") and "[0x" in line]

    def one_list_of_calls(self, job):
        calls = self.calls(job)
        self.assertGreater(len(calls), 2, job.err)
        self.assertEqual(len(set(calls)), len(calls), f"calls twice\n{job.err}")

    def crashing(self, how, *arguments, at=7, ranks=2):
        with mock.patch.dict(os.environ, WEFT_FAULT=f"crash:1:{at}:{how}"):
            return self.weft(*arguments, ranks=ranks, expect=None)

    def training(self, how):
        return self.crashing(how, "train", "deck.toml", "run.dir=run", "train.checkpoint_every=0")

    def test_signals_in_training(self):
        for how, signal, name in ((SEGV, 11, "SIGSEGV"), (ABORT, 6, "SIGABRT"),
                                  (OVERFLOW, 11, "SIGSEGV")):
            with self.subTest(name, how=how):
                job = self.training(how)
                self.told(job, code_of_signal(signal), f"ended by {name}", "in step 8")
                if how != OVERFLOW:  # which is one call, again and again
                    self.one_list_of_calls(job)

    def test_an_exception_that_a_thread_does_not_catch(self):
        job = self.training(THROWN)
        self.told(job, code_of_signal(6), r"ended by SIGABRT \(uncaught exception\)",
                  "in step 8: ordered by WEFT_FAULT")
        self.one_list_of_calls(job)

    def test_an_mpi_of_another_family(self):
        built, other = ("Open MPI v", "MPICH Version 4.2.0") if open_mpi() else ("MPICH ", "Open MPI v5.0.7")
        # MPICH's mpiexec ends no rank that has not come to MPI: each would say it.
        job = self.weft("train", "deck.toml", ranks=2 if open_mpi() else 1, expect=None, shim=f"mpi_version={other}")
        self.refused(job, 2, f"compiled against {built}", f"loaded {other}")
        # MPIs that nobody has heard of are given a chance.
        self.weft("train", "deck.toml", "train.steps=2", shim="mpi_version=A New MPI 1.0")

    def test_out_of_memory(self):
        job = self.training(MEMORY)
        self.told(job, (71,), "out of memory", "in step 8")
        self.assertEqual(self.calls(job), [], job.err)

    def test_killed_as_the_system_kills_for_want_of_memory(self):
        job = self.training(KILLED)
        self.assertIn(job.process.returncode, code_of_signal(9), job.err)
        if open_mpi():
            self.assertIn("rank 1", job.err, "mpirun names it: who is killed says nothing")
        self.assert_gone(job)

    def test_training_goes_on_after_a_crash(self):
        self.train("whole")
        with mock.patch.dict(os.environ, WEFT_FAULT=f"crash:1:12:{SEGV}"):
            self.assertIn(self.train("run", expect=None).process.returncode, code_of_signal(11))
        self.train("run")
        self.assert_same_run("whole", "run")

    def test_generate(self):
        """Whichever rank makes the second clip. What is finished stays, and the same command makes the rest."""
        (self.dir / "deck.toml").write_text(TINY_GENERATE_DECK)
        write_t5(self.dir / "t5")
        (self.dir / "prompts.txt").write_text("a cat\na dog\na bird\n")
        command = ("generate", "deck.toml", "generate.prompt_file=prompts.txt", "t5.weights=t5")
        for how, code, said in ((SEGV, code_of_signal(11), "ended by SIGSEGV"),
                                (THROWN, code_of_signal(6), "ended by SIGABRT"),
                                (MEMORY, (71,), "out of memory")):
            with self.subTest(how=how):
                with mock.patch.dict(os.environ, WEFT_FAULT=f"crash:0:1:{how},crash:1:1:{how}"):
                    job = self.weft(*command, f"generate.output=out{how}", expect=None)
                self.told(job, code, said, "in clip sample_", rank="[01]", ranks=2)
        self.weft(*command, f"generate.output=out{SEGV}")
        lines = (self.dir / f"out{SEGV}" / "generated.jsonl").read_text().splitlines()
        self.assertEqual(len(lines), 3)


if __name__ == "__main__":
    unittest.main()
