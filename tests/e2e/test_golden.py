"""weft_probe against what the original PyTorch models computed, in float64. Needs the folder of golden
cases beside the checkout (or WEFT_GOLDEN); skipped where it is absent. WEFT_TEST_DEVICE and WEFT_TEST_DTYPE choose what is
probed: the CPU side in f32 if nothing is said."""

import array
import math
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import unittest

from harness import REPOSITORY, WeftTest, read_safetensors

GOLDEN = pathlib.Path(os.environ.get("WEFT_GOLDEN", REPOSITORY.parent / "shared" / "golden")).resolve()
DEVICE = os.environ.get("WEFT_TEST_DEVICE", "cpu")
DTYPE = os.environ.get("WEFT_TEST_DTYPE", "f32")


def python_with_numpy():
    """Draws weights and projections. Debian's own has numpy (tools/debian-packages.txt), another python3 in PATH perhaps not."""
    known = (os.environ.get("PYTHON"), REPOSITORY / ".venv-validation/bin/python", sys.executable, "/usr/bin/python3")
    for python in known:
        if python and shutil.which(python) and subprocess.run([python, "-c", "import numpy"], capture_output=True).returncode == 0:
            return python
    return sys.executable


PYTHON = python_with_numpy()
# Relative, in the L2 norm, of every tensor.
TOLERANCE = {"f32": 1e-4, "bf16": 2e-2}[DTYPE]
# In bf16 the gradients of q/k norm weights, small sums of large terms of either sign, are let through further. Rounding the
# weights alone, all else in float64, moves gradients of these cases by 1.6e-2, rounding the blocks' outputs alone those of
# the norm weights by 1.1e-2; PyTorch under autocast is 2.5e-2 off here, with bf16 weights 1.9e-1.
NORM_WEIGHT_TOLERANCE = {"f32": 1e-4, "bf16": 3.5e-2}[DTYPE]
# A VAE keeps every activation in bf16, where STDiT3's residual stream alone is; one projection of a norm's gradient is 2.7e-2
# off on the CPU.
VAE_TOLERANCE = {"f32": 1e-4, "bf16": 4e-2}[DTYPE]
# So does a text encoder, with scores that are not scaled: in bf16 2.7e-2 off, transformers' 4.0e-2.
TEXT_TOLERANCE = {"f32": 1e-4, "bf16": 4e-2}[DTYPE]
# A projection on one random direction is such a sum, too: in bf16 2.7e-2 off on the CPU side, 4.2e-2 where convolutions take a
# rounded bias and leave a rounded gradient of the weights, as cuDNN's do.
PROJECTION_TOLERANCE = {"f32": 1e-4, "bf16": 6e-2}[DTYPE]
# Wan's VAE has some 70 layers in a row: in bf16 gradients are up to 0.10 off on the CPU; PyTorch in bf16 is 0.16 off in a length and
# 0.4 in a projection. That of Wan2.2 has twice as many: 3 of 396 lengths and projections are more than that off, one of them 0.41.
# Its outputs are 1.8e-2 off.
WAN22_VAE_TOLERANCE, WAN22_VAE_BEYOND = {"f32": (1e-4, 0), "bf16": (1.5e-1, 3)}[DTYPE]
WAN22_TOLERANCE = {"f32": 1e-4, "bf16": 4e-2}[DTYPE]
WAN_VAE_TOLERANCE = {"f32": 1e-4, "bf16": 1.5e-1}[DTYPE]
# Of a segmentation model's probabilities, relative; bf16 is 3e-3 off on the CPU.
SEGMENTATION_TOLERANCE = {"f32": 1e-4, "bf16": 1e-2}[DTYPE]
# Of its gradients in f32, which jump where rounding carries a ReLU's input over zero: inputs of these cases stay 5 times the
# rounding errors of short sums away from it, and convolutions are sums of that kind (src/ops/cpu/conv/blocked.cpp).
TRAINING_TOLERANCE = 1e-4
# Of a text detector's probabilities and logits, likewise.
DETECTOR_TOLERANCE = {"f32": 1e-4, "bf16": 2e-2}[DTYPE]
# Of the training of segmentation in bf16: losses are 2e-3 off on the CPU. Rounding moves ReLUs' inputs over zero, which turns a single gradient
# into another direction (PyTorch under autocast is 0.50 off over all gradients of seg_r18_train_b4, weft 0.57; of the
# MobileNet 0.16 and 0.17), but not the lengths of all: their median error is 2.5e-2.
BF16_LOSS_TOLERANCE, BF16_LENGTH_TOLERANCE = 1e-2, 8e-2

# Of SadTalker's cases, relative; what is not named has the first. Crops and landmarks are whole numbers or halves of them; where an
# aligned face's or a frame's last bit falls the other way, its 8 bits differ by one.
SADTALKER_TOLERANCE = {"": 1e-4, "crop": 1e-6, "landmarks": 1e-6, "resize": 1e-6, "align": 1e-5, "paste": 1e-3, "render": 2e-4}
SADTALKER_U8_TOLERANCE = {"align": 5e-4, "render": 1e-3}
# In bf16, by output. Speech, keypoints and the mapping stay in f32. PyTorch with weights and layers' outputs rounded is off by
# a third of the other bounds. What a threshold or a greatest value decides (detections, points) may be another one, and is left
# out.
SADTALKER_BF16 = {
    "exp": {"exp": 1e-4}, "pose": {"pose": 1e-4, "pose_smooth": 1e-4}, "transform": {"keypoints": 1e-4, "rotation": 1e-4},
    "kp": {"keypoints": 1e-4}, "recon": {"coefficients": 2e-2}, "fan": {"heatmaps": 2.5e-2},
    "detect": {"loc": 2.5e-2, "conf": 2.5e-2, "landms": 3e-2, "boxes": 1e-2},
    "generator": {"mask": 3e-2, "occlusion": 1e-2, "deformation": 1e-2, "image": 8e-2},
    "render": {"kp_source": 1e-4, "kp_driving": 1e-4, "prediction": 8e-2}}


def floats(tensor):
    dtype, _, data = tensor
    values = array.array({"F32": "f", "F64": "d"}[dtype])
    values.frombytes(data)
    return values


def distance(wanted, got):
    """|got - wanted| / |wanted|; the absolute distance where all of `wanted` is zero."""
    difference = math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(wanted, got)))
    norm = math.sqrt(math.fsum(a * a for a in wanted))
    return difference / norm if norm > 0 else difference


@unittest.skipUnless(GOLDEN.is_dir(), f"{GOLDEN} is not there")
class Golden(WeftTest):
    def weights(self, case):
        """The case's weights: as they lie there, or drawn as its manifest says."""
        there = GOLDEN / f"{case}.weights.safetensors"
        if there.exists():
            return there
        drawn = self.dir / "weights.safetensors"
        made = subprocess.run([PYTHON, GOLDEN / "make_weights.py", GOLDEN / f"{case}.manifest.json", drawn],
                              capture_output=True, text=True)
        if "No module named 'numpy'" in made.stderr:
            self.skipTest("numpy draws the weights of this case, and is not there")
        self.assertEqual(made.returncode, 0, made.stderr)
        return drawn

    def computed(self, case, what, *options, ranks=0):
        """Expected and written tensors: two files."""
        out = self.dir / "out.safetensors"
        self.probe(what, "--deck", GOLDEN / f"{case}.toml", "--weights", self.weights(case),
                   "--inputs", GOLDEN / f"{case}.inputs.safetensors", "--outputs", out,
                   "--device", DEVICE, "--dtype", DTYPE, *options, ranks=ranks, timeout=1200)
        return GOLDEN / f"{case}.expected.safetensors", out

    def verdict(self, script, *arguments):
        """Of the cases' own script."""
        verdict = subprocess.run([PYTHON, GOLDEN / script, *arguments], capture_output=True, text=True)
        self.assertEqual(verdict.returncode, 0, verdict.stdout + verdict.stderr)

    def judge(self, script, expected, out, tolerance):
        self.verdict(script, expected, out, "--tolerance", str(tolerance))

    def check(self, case, what, *options, tolerance=TOLERANCE):
        expected, out = self.computed(case, what, *options)
        wanted = read_safetensors(expected)
        if any(name.startswith("grad_norm.") for name in wanted):
            # Gradients by their length and one projection, which only the cases' own script can draw.
            self.judge("compare.py", expected, out, PROJECTION_TOLERANCE)
            return
        got = read_safetensors(out)
        self.assertEqual(sorted(set(wanted) - set(got)), [], "tensors that weft did not write")
        for name, tensor in wanted.items():
            self.assertEqual(got[name][1], tensor[1], name)
            with self.subTest(tensor=name):
                of_norm = name.endswith("_norm.weight")
                self.assertLessEqual(distance(floats(tensor), floats(got[name])),
                                     NORM_WEIGHT_TOLERANCE if of_norm else tolerance)

    def test_video(self):
        self.check("stdit3_video", "forward", "--backward")

    def test_masked_odd(self):
        self.check("stdit3_masked_odd", "forward", "--backward")

    def test_rflow_loss(self):
        self.check("stdit3_rflow_loss", "loss", "--backward")

    def test_wan(self):
        for case, what in (("wan_video", "forward"), ("wan_small_head", "forward"), ("wan_loss", "loss")):
            with self.subTest(case=case):
                if not (GOLDEN / f"{case}.toml").exists():
                    self.skipTest(f"{case} is not there")
                self.check(case, what, "--backward")

    def test_sample(self):
        self.check("stdit3_sample", "sample", "--backward")

    def test_vae_temporal(self):
        self.check("vae_temporal_small", "forward", "--backward")

    def test_wan_sample(self):
        for case in ("wan_sample", "wan_sample_dpm"):
            with self.subTest(case):
                self.check(case, "sample")

    def test_wan_vae(self):
        self.judge("compare.py", *self.computed("wan_vae", "forward", "--backward"), WAN_VAE_TOLERANCE)

    def test_wan22(self):
        for case, what, *options in (("wan22_i2v", "forward", "--backward"), ("wan22_ti2v", "forward", "--backward"),
                                     ("wan22_ti2v_loss", "loss", "--backward"), ("wan22_sample_experts", "sample"),
                                     ("wan22_ti2v_sample", "sample"), ("wan22_vae", "forward", "--backward"),
                                     ("wan22_i2v_condition", "condition"), ("wan22_ti2v_condition", "condition")):
            with self.subTest(case=case):
                if not (GOLDEN / f"{case}.toml").exists():
                    self.skipTest(f"{case} is not there")
                expected, out = self.computed(case, what, *options)
                if case != "wan22_vae":
                    self.judge("compare.py", expected, out, WAN22_TOLERANCE)
                    continue
                said = subprocess.run([PYTHON, GOLDEN / "compare.py", expected, out, "--tolerance", str(WAN22_VAE_TOLERANCE)],
                                      capture_output=True, text=True).stdout
                good, of = map(int, re.search(r"(\d+) of (\d+) within", said).groups())
                self.assertLessEqual(of - good, WAN22_VAE_BEYOND, said)
                wanted, got = read_safetensors(expected), read_safetensors(out)
                for name in "moments", "latent", "reconstruction":
                    self.assertLessEqual(distance(floats(wanted[name]), floats(got[name])), WAN22_TOLERANCE, name)

    def test_wan22_sizes_of_pictures(self):
        if not (GOLDEN / "wan22_picture_size.toml").exists():
            self.skipTest("wan22_picture_size is not there")
        out = self.dir / "out.safetensors"
        self.probe("picture_size", "--deck", GOLDEN / "wan22_picture_size.toml", "--inputs",
                   GOLDEN / "wan22_picture_size.inputs.safetensors", "--outputs", out, ranks=0)
        self.judge("compare.py", GOLDEN / "wan22_picture_size.expected.safetensors", out, 1e-7)

    def test_umt5(self):
        if not (GOLDEN / "umt5.toml").exists():
            self.skipTest("umt5 is not there")
        self.check("umt5", "forward", tolerance=TEXT_TOLERANCE)

    def segmentation(self, case, what, *options, tolerance=SEGMENTATION_TOLERANCE, ranks=0, script="compare.py"):
        if not (GOLDEN / f"{case}.toml").exists():
            self.skipTest(f"{case} is not there")
        expected, out = self.computed(case, what, *options, ranks=ranks)
        self.judge(script, expected, out, tolerance)
        return expected, out

    def training(self, case, what, *options, ranks=0):
        """In f32 every tensor; in bf16 the losses, and gradients by the median error of their lengths."""
        if DTYPE == "f32":
            self.segmentation(case, what, *options, ranks=ranks, tolerance=TRAINING_TOLERANCE)
            return
        if not (GOLDEN / f"{case}.toml").exists():
            self.skipTest(f"{case} is not there")
        wanted, got = map(read_safetensors, self.computed(case, what, *options, ranks=ranks))
        lengths = []
        for name, tensor in wanted.items():
            kind, _, rest = name.partition(".")
            if kind == "grad_norm":
                length = math.sqrt(sum(x * x for x in floats(got["grad." + rest])))
                lengths.append(distance(floats(tensor), [length]))
            elif name.endswith("loss"):
                self.assertLessEqual(distance(floats(tensor), floats(got[name])), BF16_LOSS_TOLERANCE, name)
        self.assertLessEqual(statistics.median(lengths), BF16_LENGTH_TOLERANCE)

    def test_segmentation_networks(self):
        for case in ("seg_r18_infer", "seg_r50_upernet_infer", "seg_hrnet_c1_infer"):
            with self.subTest(case=case):
                self.segmentation(case, "forward")

    def test_text_detectors(self):
        for case in ("ocr_dbnetpp_infer", "ocr_dbnet_r18_infer"):
            with self.subTest(case=case):
                self.segmentation(case, "forward", tolerance=DETECTOR_TOLERANCE)

    def test_segmentation_losses(self):
        for case in ("seg_r18_train_b4", "seg_mobilenet_c1ds_train"):
            with self.subTest(case=case):
                self.training(case, "loss", "--backward")

    def test_segmentation_steps_of_two_ranks(self):
        self.training("seg_r18_step_g2", "train_steps", ranks=2)

    @unittest.skipUnless(DTYPE == "f32", "these have no number format")
    def test_segmentation_of_every_format(self):
        for case in ("seg_syncbn_g2", "seg_syncbn_g2_resumed"):
            with self.subTest(case=case):
                self.segmentation(case, "sync_batch_norm", ranks=2)
        with self.subTest(case="seg_resize"):
            self.segmentation("seg_resize", "resize_image", script="check_digest.py", tolerance=1e-7)
        for case in ("seg_batch_landscape", "seg_batch_portrait"):
            with self.subTest(case=case):
                self.segmentation(case, "segmentation_batch", tolerance=1e-7)
        with self.subTest(case="seg_multiscale"):
            self.segmentation("seg_multiscale", "segmentation_scales", tolerance=1e-7)

    @unittest.skipUnless(DTYPE == "f32", "logits are f32")
    def test_segmentation_scores(self):
        expected, out = self.segmentation("seg_evaluation", "segmentation_scores")
        wanted, got = read_safetensors(expected), read_safetensors(out)
        for name, tensor in wanted.items():
            if tensor[0] in ("I64", "U8"):
                self.assertEqual(got[name], tensor, f"{name}: whole numbers are exact")

    @unittest.skipUnless(DTYPE == "f32" and (GOLDEN / "compare_boxes.py").exists(), "these have no number format")
    def test_text_boxes(self):
        out = self.dir / "out.safetensors"
        for case in ("ocr_boxes", "ocr_boxes_eps"):
            with self.subTest(case=case):
                self.probe("boxes", "--deck", GOLDEN / f"{case}.toml", "--inputs",
                           GOLDEN / f"{case}.inputs.safetensors", "--outputs", out)
                self.verdict("compare_boxes.py", GOLDEN / f"{case}.expected.safetensors", out)

    @unittest.skipUnless(DTYPE == "f32" and (GOLDEN / "compare_frames.py").exists(), "these have no number format")
    def test_text_frames(self):
        out, drawn = self.dir / "out.safetensors", self.dir / "frames.safetensors"
        self.verdict("make_frames.py", GOLDEN / "ocr_frame.frames.json", drawn)
        for case, inputs in (("ocr_frame", drawn), ("ocr_frame_small", GOLDEN / "ocr_frame_small.inputs.safetensors")):
            with self.subTest(case=case):
                self.probe("frames", "--inputs", inputs, "--outputs", out)
                self.verdict("compare_frames.py", GOLDEN / f"{case}.expected.safetensors", out)
        self.refused(self.probe("forward", "--inputs", drawn, "--outputs", out, expect=None),
                     2, "weft_probe forward needs", "--deck")
        self.refused(self.probe("boxes", "--inputs", drawn, "--outputs", out, expect=None), 3, "the inputs have no q.000")

    def test_sadtalker(self):
        cases = sorted(path.stem for path in GOLDEN.glob("sadtalker_*.toml"))
        if not cases:
            self.skipTest("sadtalker_* are not there")
        for case in cases:
            kind = case.split("_")[1]
            if DTYPE == "f32" or kind in SADTALKER_BF16:
                with self.subTest(case=case):
                    self.sadtalker(case, kind)

    def sadtalker(self, case, kind):
        expected, out = self.computed(case, f"sadtalker_{kind}")
        wanted, got = read_safetensors(expected), read_safetensors(out)
        if DTYPE == "bf16":
            for name, tolerance in SADTALKER_BF16[kind].items():
                self.assertEqual(got[name][1], wanted[name][1], name)
                self.assertLessEqual(distance(floats(wanted[name]), floats(got[name])), tolerance, name)
            return
        self.judge("compare.py", expected, out, SADTALKER_TOLERANCE.get(kind, SADTALKER_TOLERANCE[""]))
        for name, tensor in wanted.items():
            if tensor[0] == "I64" or (tensor[0] == "U8" and kind == "resize"):
                self.assertEqual(got[name], tensor, f"{name}: whole numbers are exact")
        pictures = GOLDEN / f"{case}.u8.expected.safetensors"
        if pictures.exists():
            self.judge("compare.py", pictures, out, SADTALKER_U8_TOLERANCE[kind])

    def test_a_device_that_is_not_there(self):
        if self.has_cuda():
            self.skipTest("this build and machine have a GPU")
        job = self.probe("forward", "--deck", GOLDEN / "stdit3_video.toml",
                         "--weights", GOLDEN / "stdit3_video.weights.safetensors",
                         "--inputs", GOLDEN / "stdit3_video.inputs.safetensors",
                         "--outputs", self.dir / "out.safetensors", "--device", "cuda", expect=None)
        self.refused(job, 2, "cuda")


if __name__ == "__main__":
    unittest.main()
