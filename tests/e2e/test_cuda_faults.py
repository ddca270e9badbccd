"""A GPU that fails in the middle of a job, on the stand-in for CUDA (WEFT_BIN names weft_cuda_on_cpu): from some call or kernel
on, every call fails, as after a kernel's illegal access. Wherever that is, the job ends with exit code 6 and the call that
failed first, not with what fails while it unwinds; and all ranks end."""

import os
import re
import unittest
from unittest import mock

from harness import WeftTest
from test_evaluate import png
from test_score import DECK as SCORE
from tiny_models import TINY_GENERATE_DECK, write_t5

SAID = "CUDA: an illegal memory access was encountered (cudaErrorIllegalAddress)"


class Fault(WeftTest):
    LIMIT = 120  # seconds; a job takes a few

    def ends(self, fault, *command, ranks=1, devices=1, **environment):
        """The job with this fault ends as it must. Returns its messages."""
        settings = dict(WEFT_EMULATION_FAULT=fault, WEFT_EMULATION_DEVICES=str(devices), **environment)
        with self.subTest(fault=fault, ranks=ranks), mock.patch.dict(os.environ, settings):
            job = self.weft(*command, ranks=ranks, expect=None, timeout=self.LIMIT)
            first = re.findall(r"cuda_on_cpu: (\w+) is the first call that fails", job.err)
            self.assertEqual(len(first), 1, f"the fault did not come\n{job.err}")
            self.assertEqual(job.process.returncode, 6, job.err)
            errors = job.errors()
            self.assertEqual(len(errors), 1, job.err)
            self.assertIn(SAID, errors[0])
            self.assertIn("HINT: run weft doctor on this node", job.err)
            # With several ranks a thread that looks at its events may be the first to fail and the second to say so.
            if ranks == 1:
                self.assertIn(first[0], errors[0])
            self.assert_gone(job)
            return job.err
        return ""


class Training(Fault):
    # Graphs are recorded in the second step.
    DECK = ("train", "deck.toml", "device.kind=cuda", "train.steps=3", "train.micro_batches=2", "train.checkpoint_every=2",
            "model.depth=1", "run.resume=false")

    def test_at_each_kind_of_call(self):
        for fault in ("kernel:1", "kernel:200", "cudaLaunchKernelEx:40", "cudaMalloc:2", "cudaHostAlloc:1", "cudaFree:1",
                      "cudaMemcpyAsync:3", "cudaMemsetAsync:2", "cudaStreamWaitEvent:3", "cudaEventRecord:5",
                      "cudaEventSynchronize:2", "cudaStreamBeginCapture:1", "cudaStreamEndCapture:1",
                      "cudaGraphInstantiate:1", "cudaGraphLaunch:2", "cublasLtMatmulAlgoGetHeuristic:2",
                      "cublasLtMatmul:3", "cublasLtMatmul:30"):
            self.ends(fault, *self.DECK)

    def test_one_of_two_ranks(self):
        for fault in ("kernel:200@1", "cudaEventRecord:20@0", "cudaGraphLaunch:2@1", "ncclCommInitRankConfig:1@1",
                      "ncclReduceScatter:2@0", "ncclAllGather:2@1", "ncclMemAlloc:1@1", "ncclCommRegister:2@0"):
            self.ends(fault, *self.DECK, ranks=2, devices=2)

    def test_one_of_two_ranks_that_reduce_through_the_host(self):
        for fault in ("kernel:200@1", "cudaMemcpyAsync:20@0", "cudaEventQuery:3@1"):
            self.ends(fault, *self.DECK, "device.share=true", ranks=2)


class Lists(Fault):
    """No item is counted as failed, and none is tried on a GPU that is lost."""

    def ends(self, *arguments, **more):
        said = re.sub(r"(?m)^.*WARN.*a network of random numbers.*$", "", super().ends(*arguments, **more))
        self.assertNotIn("WARN", said)
        self.assertNotIn("failed of", said)

    def test_clips(self):
        (self.dir / "deck.toml").write_text(TINY_GENERATE_DECK)
        write_t5(self.dir / "t5")
        command = ("generate", "deck.toml", "device.kind=cuda", "device.share=true", "t5.weights=t5", "vae.spatial_channels=[8, 8]",
                   "vae.channel_multipliers=[1, 2]", "vae.temporal_downsample=[true]", "generate.image_size=[16, 16]",
                   "generate.num_frames=2", "sampler.steps=2", 'generate.prompts=["a cat", "two dogs, running", "rain"]')
        # Each of two ranks has a part of the text encoder; which of them makes how many clips is open.
        for ranks, fault in ((1, "cudnnBackendExecute:2"), (1, "cudnnBackendFinalize:9"), (1, "kernel:400"),
                             (2, "cublasLtMatmul:2@1"), (2, "kernel:10@0")):
            self.ends(fault, *command, f"generate.output={fault}_{ranks}".replace(":", "_"), ranks=ranks)

    def test_pictures(self):
        (self.dir / "deck.toml").write_text(SCORE)
        for i in range(3):
            (self.dir / f"{i}.png").write_bytes(png(24, 20, lambda x, y: (37 * i % 256, 11 * x * y % 256, 7 * y % 256)))
        (self.dir / "in.csv").write_text("path\n0.png\n1.png\n2.png\n")
        for ranks, fault in ((1, "cudnnBackendExecute:3"), (1, "cudaMemcpyAsync:40"), (2, "kernel:1@1")):
            self.ends(fault, "score", "deck.toml", "device.kind=cuda", "device.share=true", "score.input=in.csv",
                      f"score.output={fault}.csv".replace(":", "_"), ranks=ranks)


class Others(Fault):
    def test_a_profile(self):
        """Operations that time themselves, in destructors."""
        self.ends("cudaEventRecord:60", "bench", "step", "deck.toml", "device.kind=cuda", "--shape", "1x2x4x4", "--captions", "4",
                  "--steps", "1", "--warmup", "0", "--profile", "--untuned", ranks=0)


if __name__ == "__main__":
    unittest.main()
