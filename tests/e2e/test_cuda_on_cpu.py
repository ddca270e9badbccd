"""The whole program with its CUDA side, on the stand-in for CUDA (WEFT_BIN names weft_cuda_on_cpu): devices, steps, recorded
steps, NCCL and the host's staging, restarts. The stand-in runs streams in any legal order and poisons memory, so
agreement with the CPU side says that the order and the extents are right, too."""

import json
import os
import re
import shutil
import signal
import struct
import unittest
from unittest import mock

from harness import WEFT, WeftTest, read_safetensors, write_safetensors
from test_animate import DECK as ANIMATE
from test_animate import drawn_face, face_points, write_wav
from test_doctor import build_driver
from test_evaluate import png, read_png
from test_vae_training import ADVERSARIAL
from test_vae_training import DECK as VAE
from tiny_models import TINY_GENERATE_DECK, write_t5

# Clips of few tokens: the kernels at other sizes are those of tests/kernels.
SMALL = "data.path=synthetic:clips=24,frames=3,height=8,width=12"
# As the tests' deck has them, where a test counts bytes or differences.
USUAL = "data.path=synthetic:clips=24,frames=3,height=16,width=16"


def emulate(devices=1, **more):
    """The environment of jobs started under it: so many GPUs on this host."""
    return mock.patch.dict(os.environ, {"WEFT_EMULATION_DEVICES": str(devices), **more})


class Devices(WeftTest):
    def test_auto_takes_the_gpu(self):
        with emulate(1):
            job = self.train("run", "train.steps=1", ranks=1)
        self.assertIn("CUDA on the CPU", job.err)

    def test_auto_without_a_gpu_takes_the_cpu_and_says_so(self):
        with emulate(0):
            job = self.train("run", "train.steps=1")
        said = [line for line in job.err.splitlines() if "device    CPU (" in line]
        self.assertEqual(len(said), 1, job.err)

    def test_cuda_without_a_gpu_is_refused(self):
        with emulate(0):
            job = self.train("run", "device.kind=cuda", expect=None)
        self.refused(job, 2, "device.kind")

    def test_a_driver_that_is_too_old(self):
        (self.dir / "driver").mkdir()
        with emulate(1, WEFT_EMULATION_DRIVER="12.4"):
            # The driver's library is there, and no GPU is.
            self.assertIn("device    CPU (", self.train("none", "train.steps=1", ranks=1).err)
            # Now there is one.
            build_driver(self.dir / "driver", ["GPU-0"])
            with mock.patch.dict(os.environ, {"LD_LIBRARY_PATH": f"{self.dir}/driver:{os.environ.get('LD_LIBRARY_PATH', '')}"}):
                for kind in ("auto", "cuda"):
                    job = self.train("run", f"device.kind={kind}", expect=None)
                    self.refused(job, 2, "cannot be used", "driver 580.65.06", "for CUDA 12.4 at most", "13.0")
                doctor = self.weft("doctor", expect=2)
                self.assertIn("for CUDA 12.4 at most", doctor.out + doctor.err)
                self.train("run", "device.kind=cpu", "train.steps=1", ranks=1)

    def test_two_ranks_on_one_gpu_are_refused(self):
        with emulate(1):
            job = self.train("run", "device.kind=cuda", expect=None)
        self.refused(job, 2, "2 ranks", "device.share")


class Hang(WeftTest):
    def test_an_abort_that_blocks(self):
        with emulate(2, WEFT_EMULATION_NCCL_ABORT="blocks"):
            job = self.start("train", "deck.toml", "run.dir=run", "device.kind=cuda", "parallel.hang_timeout=15",
                             "train.steps=100000", "train.checkpoint_every=0", "train.micro_batches=2", SMALL, ranks=2)
            self.wait_for_steps(job, "run", 4)
            os.kill(job.ranks()[1], signal.SIGSTOP)
            self.assertEqual(job.wait(), 7, job.err)
        self.assert_gone(job)
        self.assertIn("rank 1 on", job.err)

    def test_an_error_that_nccl_reports_later(self):
        with emulate(2, WEFT_EMULATION_NCCL_FAIL="40"):
            job = self.start("train", "deck.toml", "run.dir=run", "device.kind=cuda", "train.steps=100000",
                             "train.checkpoint_every=0", "train.micro_batches=2", SMALL, ranks=2)
            self.assertEqual(job.wait(), 6, job.err)
        self.assert_gone(job)
        self.assertIn("another rank failed or went away", job.err)


class OwnDevice(WeftTest):
    """Two ranks with a GPU each: the stand-in ends a process that touches another one's."""

    def test_a_clip_over_two_devices(self):
        (self.dir / "deck.toml").write_text(ANIMATE)
        (self.dir / "face.png").write_bytes(png(64, 56, drawn_face(64, 56)))
        (self.dir / "points.csv").write_text("".join(f"{x:.3f},{y:.3f}\n" for x, y in face_points(32, 28, 36)))
        write_wav(self.dir / "a.wav", 0.16)  # 4 frames, pieces of 2
        clip = ("animate", "deck.toml", "animate.picture=face.png", "animate.speech=a.wav", "animate.keep_frames=true")
        self.weft(*clip, "animate.output=cpu", "device.kind=cpu", ranks=1)
        log = self.dir / "devices"
        with emulate(2, WEFT_EMULATION_DEVICE_LOG=str(log)):
            self.weft(*clip, "animate.output=cuda", "device.kind=cuda", timeout=1200)
        touched = [line.split() for line in log.read_text().splitlines()]
        self.assertEqual(sorted(device for _, device in touched), ["0", "1"])
        self.assertEqual(len({process for process, _ in touched}), 2)
        ranks = json.loads((self.dir / "cuda/animate_report.json").read_text())["ranks"]
        self.assertEqual([r["frames"] for r in ranks], [2] * 2)
        for i in range(4):
            one, other = (read_png(self.dir / f"{side}/face_a_frames/{i:06d}.png")[2] for side in ("cpu", "cuda"))
            worst = max(abs(a - b) for p, q in zip(one, other) for v, w in zip(p, q) for a, b in zip(v, w))
            self.assertLessEqual(worst, 1, f"frame {i}")


class Steps(WeftTest):
    """Against the CPU side of the same program: equal but for the order of sums."""

    OVERRIDES = (SMALL, "train.steps=4", "mask.random=0.4", "mask.intepolate=0.4", "model.drop_path=0.2", "parallel.bucket_mib=0.05",
                 "train.grad_clip=0.5")
    # Two runs each measure their matrix products, and another algorithm means other last bits.
    EXACT = "parallel.deterministic=true"

    def on_cpu(self, *overrides):
        self.train("cpu", "device.kind=cpu", *self.OVERRIDES, *overrides)
        return self.losses("cpu")

    def on_gpu(self, run, *overrides, ranks=2, **options):
        return self.train(run, "device.kind=cuda", *self.OVERRIDES, *overrides, ranks=ranks, **options)

    def test_nccl_staging_and_one_rank_agree_with_the_cpu(self):
        wanted = self.on_cpu()
        with emulate(2):
            job = self.on_gpu("nccl")
        self.assertIn("NCCL", job.err)
        with emulate(1):
            job = self.on_gpu("staged", "device.share=true")
        self.assertIn("staged", job.err)
        with emulate(1):
            self.on_gpu("one", ranks=1)
        for run in ("nccl", "staged", "one"):
            with self.subTest(run=run):
                self.assert_close(self.losses(run), wanted, 1e-4)

    def test_two_ranks_on_one_gpu_through_nccl(self):
        """Each passes for a host of its own, or NCCL refuses them; so does validation/gpu/check.sh on a GPU (ranks_*)."""
        few = ("train.steps=3", "train.micro_batches=2")
        own_host = self.dir / "own_host"
        own_host.write_text(f'#!/bin/sh\nNCCL_HOSTID=${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}} exec {WEFT} "$@"\n')
        own_host.chmod(0o755)
        with emulate(1):
            self.on_gpu("one", *few, ranks=1)
        with emulate(1, WEFT_COMM="nccl"):
            said = self.on_gpu("refused", "device.share=true", *few, expect=6).err
            self.assertIn("Duplicate GPU", said)
            for run, more, tolerance in (("zero_0", "parallel.zero=0", 1e-5), ("zero_1", "parallel.zero=1", 1e-5),
                                         ("wire_bf16", "parallel.wire=bf16", 1e-2), ("sp", "parallel.sp=2", 1e-5)):
                with self.subTest(run=run):
                    job = self.weft("train", "deck.toml", f"run.dir={run}", "device.kind=cuda", "device.share=true",
                                    *self.OVERRIDES, *few, more, program=own_host)
                    self.assertIn("NCCL", job.err)
                    self.assert_close(self.losses(run), self.losses("one"), tolerance)
        # Slices of one GPU have UUIDs of their own.
        with emulate(2, WEFT_EMULATION_MIG="1"):
            said = self.on_gpu("slices", *few).err
        self.assertIn("slices (MIG) of one GPU", said)
        self.assertIn("staged", said)
        self.assert_close(self.losses("slices"), self.losses("one"), 1e-5)

    def test_the_same_bits_unrecorded_in_another_order_and_after_a_restart(self):
        # The GPUs' switches add in another order in every call, where NCCL lets them.
        with emulate(2, WEFT_EMULATION_NVLS="1"):
            self.on_gpu("recorded", self.EXACT)
            self.on_gpu("plain", "device.graphs=false", self.EXACT)
            self.on_gpu("parts", "train.steps=2", self.EXACT)
            self.on_gpu("parts", self.EXACT)
        with emulate(2, WEFT_EMULATION_NVLS="1", NCCL_ALGO="Ring,NVLS"):
            self.on_gpu("switches", self.EXACT)
        self.assertNotEqual(self.exported("switches"), self.exported("recorded"))
        with emulate(2, WEFT_EMULATION_SEED="5"):
            self.on_gpu("other_order", self.EXACT)
        # Memory for one graph, and for none.
        with emulate(2, WEFT_EMULATION_GRAPHS="1"):
            self.assertIn("no memory is left for a graph", self.on_gpu("one_graph", self.EXACT).err)
        with emulate(2, WEFT_EMULATION_GRAPHS="0"):
            self.refused(self.on_gpu("none", self.EXACT, expect=None), 71, "device.graphs = false")
        for run in ("plain", "parts", "other_order", "one_graph"):
            with self.subTest(run=run):
                self.assert_same_run("recorded", run)

    def test_a_wrong_way_is_left_out(self):
        """An untested way is taken only where it agrees with the tested one; rank 0 measures, and the others follow."""
        wide = (USUAL, "model.hidden_size=256", "model.depth=1", "train.batch_size=4", "train.micro_batches=2", "train.steps=1")
        tried = 'device.try=["gelu_sums", "second_stream"]'
        with emulate(2, WEFT_EMULATION_MATMUL="wrong_sums"):
            job = self.on_gpu("wrong", tried, *wide)
            self.assertRegex(job.err, r"WARN: way gelu_sums of linear_gelu_backward_input .* is not taken: its results differ from "
                                      r"fused's by 1\.0e-02")
            self.assertIn("gelu_sums in none (wrong), second_stream in", job.err)
            # The plain way, with the same choices of all else, and what a restart would do.
            for run in ("plain", "again"):
                (self.dir / run).mkdir()
                shutil.copy(self.dir / "wrong/matmul.txt", self.dir / run)
            self.assertNotIn("WARN: way", self.on_gpu("plain", 'device.try=["second_stream"]', *wide).err)
            self.on_gpu("again", tried, "device.graphs=false", *wide)
            self.refused(self.on_gpu("both", 'device.try=["five"]', self.EXACT, expect=None), 2, "device.try")
        for run in ("plain", "again"):
            self.assert_same_run("wrong", run)
            self.assertEqual((self.dir / run / "matmul.txt").read_text(), (self.dir / "wrong/matmul.txt").read_text())

    def test_weights_in_parts(self):
        """parallel.zero = 3: the bits of 1 with one micro-batch a rank; recorded or not, in any order of streams."""
        blocks = ("parallel.bucket_mib=0.001", "train.steps=6", self.EXACT)
        one = ("train.micro_batches=2", *blocks)
        with emulate(2):
            self.on_gpu("whole", "parallel.zero=1", *one)
            for name, share in (("several", blocks), ("parts", one)):
                job = self.on_gpu(name, "parallel.zero=3", *share)
                self.on_gpu(name + "_plain", "parallel.zero=3", "device.graphs=false", *share)
        with emulate(2, WEFT_EMULATION_SEED="5"):
            self.on_gpu("parts_other_order", "parallel.zero=3", *one)
        self.assertRegex(job.err, r"graphs +[1-9]\d* recorded, [1-9]\d* of \d+ micro-batches replayed")
        self.assertEqual(self.losses("parts"), self.losses("whole"))
        self.assertEqual(self.exported("parts"), self.exported("whole"))
        for run, other in (("parts", "parts_plain"), ("parts", "parts_other_order"), ("several", "several_plain")):
            with self.subTest(run=other):
                self.assert_same_run(run, other)

    def test_ranks_that_share_clips(self):
        """parallel.sp = 2: the same bits recorded or not and in any order of streams; the losses of the CPU."""
        shared = ("parallel.sp=2", "train.micro_batches=2", self.EXACT)
        with emulate(2):
            job = self.on_gpu("recorded", *shared)
            self.on_gpu("plain", "device.graphs=false", *shared)
        with emulate(2, WEFT_EMULATION_SEED="5"):
            self.on_gpu("other_order", *shared)
        self.assertRegex(job.err, r"graphs +[1-9]\d* recorded, [1-9]\d* of \d+ micro-batches replayed")
        self.assert_close(self.losses("recorded"), self.on_cpu("train.micro_batches=2"), 1e-4)
        for run in ("plain", "other_order"):
            with self.subTest(run=run):
                self.assert_same_run("recorded", run)

    def test_memory_that_libraries_take(self):
        # 500 MiB are the context's and 200 NCCL's, which takes 100 more with its first operation: when the arena has the rest.
        for gib, arena, code, said in (("0.9", "0.066", 0, "no memory is left for a graph"), ("0.73", "0", 71, "GiB are free"),
                                       ("0.9", "0.16", 6, "MiB of the GPU's memory are free"), ("0.6", "0", 6, "NCCL")):
            with self.subTest(gib=gib, arena=arena), emulate(2, WEFT_EMULATION_OVERHEAD="1", WEFT_EMULATION_MEMORY_GIB=gib):
                job = self.on_gpu(f"gib{gib}_{arena}", self.EXACT, USUAL, f"memory.arena_gib={arena}", expect=code)
                self.assertIn(said, job.err)

    def test_losses_of_each_store(self):
        stores = ["synthetic:clips=12,frames=3,height=16,width=16,seed=1", "synthetic:clips=8,frames=2,height=16,width=16,seed=2"]
        two = (f"data.path={json.dumps(stores)}", "train.steps=3", "train.micro_batches=2")
        self.train("mix_cpu", "device.kind=cpu", *two, ranks=1)
        with emulate(1):
            self.train("mix_cuda", "device.kind=cuda", *two, ranks=1)
        for cpu, cuda in zip(self.metrics("mix_cpu"), self.metrics("mix_cuda"), strict=True):
            for store in stores:
                self.assertEqual(cuda["stores"][store]["samples"], cpu["stores"][store]["samples"])
                self.assert_close([cuda["stores"][store].get("loss", 0)], [cpu["stores"][store].get("loss", 0)], 1e-4)

    def test_recorded_steps_of_uneven_size(self):
        # Two clips in one bucket, many in the other: a step has five samples or six, and the same recorded micro-batch counts
        # for a fifth or for a sixth. One recording does for both.
        uneven = ("data.path=synthetic:clips=2,frames=3,height=8,width=12;clips=24,frames=2,height=8,width=12",
                  "train.batch_size=3", "train.micro_batches=2", "train.steps=6")
        with emulate(1):
            for run, graphs in (("recorded", "true"), ("plain", "false")):
                job = self.train(run, "device.kind=cuda", f"device.graphs={graphs}", *uneven, self.EXACT, ranks=1)
                if run == "recorded":
                    said = re.search(r"graphs +(\d+) recorded, (\d+) of (\d+) micro-batches replayed", job.err)
        self.assertEqual({len(s) for s in self.samples("plain")}, {5, 6})
        self.assert_same_run("recorded", "plain")
        # Two buckets, first or last of a step: four kinds at most, of each of which two runs are not replayed.
        self.assertIsNotNone(said, job.err)
        recorded, replayed, runs = map(int, said.groups())
        self.assertLessEqual(recorded, 4)
        self.assertEqual(runs, 12)
        self.assertGreaterEqual(replayed, 4)

    def test_recompute_and_accumulation_in_bf16(self):
        options = ("train.steps=2", "model.dtype=bf16", "model.recompute=0.5")
        wanted = self.on_cpu(*options)
        with emulate(1):
            self.on_gpu("one", *options, ranks=1)
        with emulate(2):
            self.on_gpu("parts", *options, "parallel.zero=3")
        for run in ("one", "parts"):
            self.assert_close(self.losses(run), wanted, 1e-2)

    def test_a_loss_that_is_not_finite_ends_the_job(self):
        self.train("run", "device.kind=cpu", "train.steps=1", ranks=1)
        weights = self.dir / "weights.safetensors"
        self.weft("export", "run", weights, ranks=0)
        tensors = read_safetensors(weights)
        dtype, shape, data = tensors["final_layer.linear.bias"]
        tensors["final_layer.linear.bias"] = (dtype, shape, struct.pack("<f", 3e38) + data[4:])
        write_safetensors(weights, tensors)
        with emulate(1):
            job = self.train("bad", "device.kind=cuda", f"model.weights={weights}", ranks=1, expect=None)
        # A GPU's threads one after another, twice, for the step is run again.
        self.refused(job, 5, "step 1", "samples")


class Vae(WeftTest):
    """Clips small enough for threads one after another."""

    def test_a_vae_trains_against_a_discriminator(self):
        """Both of its parts, and both groups of parameters."""
        (self.dir / "vae.toml").write_text(VAE)
        options = (*ADVERSARIAL, "vae_train.freeze_spatial=false", "train.steps=2", "train.micro_batches=1",
                   "data.path=synthetic:clips=12,frames=2,height=24,width=24")
        self.weft("train", "vae.toml", "run.dir=cpu", "device.kind=cpu", *options, ranks=1)
        with emulate(1):
            self.weft("train", "vae.toml", "run.dir=cuda", "device.kind=cuda", *options, ranks=1, timeout=240)
        self.assert_close(self.losses("cuda"), self.losses("cpu"), 1e-3)


class Video(WeftTest):
    """Prompts to clips and clips to latents, on two ranks of one GPU and on the CPU."""

    OPTIONS = ("t5.weights=t5", "vae.spatial_channels=[8, 8]", "vae.channel_multipliers=[1, 2]",
               "vae.temporal_downsample=[true]")

    def setUp(self):
        super().setUp()
        (self.dir / "deck.toml").write_text(TINY_GENERATE_DECK)
        write_t5(self.dir / "t5")

    def on(self, kind, command, *options):
        with emulate(1):
            return self.weft(command, "deck.toml", f"device.kind={kind}", "device.share=true", *self.OPTIONS, *options,
                             timeout=240)

    def test_prompts_become_the_clips_of_the_cpu(self):
        # T5's layers on two ranks, the queue, sampling, of two clips together, decoding.
        for kind, together in ("cpu", 1), ("cuda", 2):
            self.on(kind, "generate", f"generate.output={kind}", "generate.tensors=true", "generate.image_size=[16, 16]",
                    "generate.num_frames=2", "sampler.steps=2", f"generate.batch_size={together}",
                    'generate.prompts=["a cat", "two dogs, running", "rain"]')
        for i in range(3):
            name = f"sample_{i:04}"
            self.assertTrue((self.dir / "cuda" / f"{name}.mp4").exists())
            cpu, cuda = (read_safetensors(self.dir / kind / f"{name}.safetensors") for kind in ("cpu", "cuda"))
            self.assertEqual(cpu.keys(), cuda.keys())
            for tensor in cpu:
                self.assert_close_values(cuda[tensor][2], cpu[tensor][2], 1e-4)

    def test_clips_become_the_latents_of_the_cpu(self):
        def constants(kind, output, *options):
            job = self.on(kind, "encode", f"encode.output={output}", "encode.text=false", "encode.dtype=f32", "vae.scale=[]",
                          "vae.shift=[]", "data.path=synthetic:clips=3,frames=4,height=16,width=16", *options)
            return [float(x) for name in ("vae.shift", "vae.scale")
                    for x in re.search(name + r"=\[([^]]*)", job.err)[1].split(",")]

        cpu, cuda = constants("cpu", "cpu.h5"), constants("cuda", "cuda.h5")
        self.assert_close(cuda, cpu, 1e-4)
        # Convolutions whose factors have 10 bits: near, but not as near.
        rounded = constants("cuda", "tf32.h5", "device.tf32=true")
        self.assert_close(rounded, cpu, 1e-2)
        self.assertNotEqual(rounded, cuda)

    def assert_close_values(self, one, other, relative):
        one, other = (struct.unpack(f"<{len(v) // 4}f", v) for v in (one, other))
        largest = max(map(abs, other))
        self.assertGreater(largest, 0)
        self.assertLess(max(abs(a - b) for a, b in zip(one, other, strict=True)), relative * largest)


if __name__ == "__main__":
    unittest.main()
