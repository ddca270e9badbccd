"""Training: the smoke deck, and every option that changes what a step does."""

import json
import os
import pathlib
import random
import re
import shutil
import struct
import unittest
from unittest import mock

from harness import REPOSITORY, WeftTest, write_safetensors
from test_evaluate import png

SMOKE = REPOSITORY / "inputs" / "smoke.toml"


def mean(values):
    return sum(values) / len(values)


class Smoke(WeftTest):
    def check_summary(self, job, metrics):
        """The last lines account for all time, and count what the plan counts."""
        summary = self.summary("run")
        self.assertIn("18 steps, median ", job.err)
        self.assertEqual(list(summary["wall"]), ["start", "steps", "saves", "end"])
        speed, work = summary["speed"], summary["operations"]
        self.assertEqual(speed["items"], 72, "of 18 steps: the first tenth is left out")
        self.assertAlmostEqual(speed["seconds"], sum(m["seconds"] for m in metrics[2:]), 5)
        self.weft("plan", SMOKE, "--json", "plan.json")
        planned = json.loads((self.dir / "plan.json").read_text())["step"]["flops"]
        self.assertAlmostEqual(work["all"] / (18 * planned), 1, 6)
        self.assertAlmostEqual(work["a_second_a_rank"] * 2 * speed["seconds"] / work["all"], 1, 9)
        self.assertAlmostEqual(work["share_of_limit"] * work["limit_a_rank"] / work["a_second_a_rank"], 1, 9)
        self.assertEqual(self.cited("run/cite.bib"), ["weft", "opensora", "t5", "rectified_flow", "zero"])
        # The status says the same.
        status = self.weft("status", "run", ranks=0).out
        for line in job.err[job.err.index("speed     "):].splitlines():
            self.assertIn(line.strip(), status)

    def test_twenty_steps_on_two_ranks(self):
        job = self.weft("train", SMOKE, "run.dir=run")
        metrics = self.metrics("run")
        self.assertEqual(len(metrics), 20)
        for m in metrics:
            self.assertGreater(m["seconds"], 0)
            self.assertEqual(len(m["samples"]), 4)
            self.assertEqual(len(set(m["samples"])), 4)
            self.assertTrue(all(0 <= s < 64 for s in m["samples"]))
        losses = [m["loss"] for m in metrics]
        self.assertLess(mean(losses[-5:]), 0.6 * losses[0])
        self.assertEqual(self.latest("run"), "step_20")
        for name in ("deck.toml", "run.json"):
            self.assertTrue((self.dir / "run" / name).is_file())
        self.check_summary(job, metrics)
        # 64 clips, 4 a step: every clip once in the first 16 steps.
        seen = [s for m in metrics[:16] for s in m["samples"]]
        self.assertEqual(sorted(seen), list(range(64)))

    def test_threads(self):
        """The harness says OMP_NUM_THREADS=1; without a word a rank alone takes all cores."""
        for threads, said in ((0, "1 thread each"), (2, "2 threads each")):
            job = self.weft("train", "deck.toml", f"run.dir=run{threads}", "train.steps=1", f"run.threads={threads}", ranks=0)
            self.assertIn(said, job.err)

    def test_waiting_threads_spin_briefly(self):
        """libgomp reads its limit before main; what the user has set stays."""
        for i, given in enumerate(({}, {"GOMP_SPINCOUNT": "77"})):
            with self.subTest(given=given), mock.patch.dict(os.environ, given):
                for name in {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} - given.keys():
                    os.environ.pop(name, None)
                job = self.start("train", "deck.toml", f"run.dir=run{i}", "train.steps=100000")
                self.wait_for_steps(job, f"run{i}", 1)
                for rank in job.ranks().values():
                    inside = pathlib.Path(f"/proc/{rank}/environ").read_bytes().split(b"\0")
                    found = [v for v in inside if v.startswith((b"GOMP_SPINCOUNT=", b"OMP_WAIT_POLICY="))]
                    wanted = given or {"GOMP_SPINCOUNT": "10000"}
                    self.assertEqual(found, [f"{k}={v}".encode() for k, v in wanted.items()])
                    self.assertEqual(pathlib.Path(f"/proc/{rank}/comm").read_text(), "weft\n")
                self.assertEqual(len(job.ranks()), 2)
                job.kill()

    def test_bf16_stays_near_f32(self):
        self.train("f32")
        self.train("bf16", "model.dtype=bf16")
        f32, bf16 = self.losses("f32"), self.losses("bf16")
        self.assertLess(mean(bf16[-5:]), 0.6 * bf16[0])
        self.assertNotEqual(f32, bf16)
        self.assert_close(bf16[:5], f32[:5], 0.02)
        self.assert_close(bf16, f32, 0.05)

    def test_what_becomes_of_a_finished_run(self):
        """It stays as it is, starts anew where that is asked for, goes on, and says that the data is another."""
        self.train("run", "train.steps=5")
        before, losses = (self.dir / "run" / "metrics.jsonl").read_bytes(), self.losses("run")
        self.assertIn("5 of 5 steps", self.train("run", "train.steps=5").err)
        self.assertEqual((self.dir / "run" / "metrics.jsonl").read_bytes(), before)
        self.assertNotIn("resuming from", self.train("run", "train.steps=5", "run.resume=false").err)
        self.assertEqual(self.losses("run"), losses)
        job = self.train("run", "train.steps=6", "data.path=synthetic:clips=20,frames=3,height=16,width=16")
        self.assertRegex(job.err, r"WARN: data.path = .*step_5.*=24.*=20")

    def test_data_of_the_same_shape_is_told_apart(self):
        """Clips, labelled images and pictures with text, each as a store or list, and made in memory. A copy elsewhere is the
        same data."""
        (self.dir / "copy").mkdir()

        def copied(name, text=None):
            if text is not None:
                (self.dir / name).write_text(text)
            shutil.copy(self.dir / name, self.dir / "copy" / name)
            os.utime(self.dir / "copy" / name, (0, 0))
            return name, f"copy/{name}"

        for i in range(2):
            self.ingest(f"clips{i}.h5", seconds=1, size=16, sources=(("testsrc2", "smptebars")[i],))
            for kind in ("pictures", "labels"):
                (self.dir / kind).mkdir(exist_ok=True)
                (self.dir / kind / "a.png").write_bytes(png(40, 40, lambda x, y: [(i + x) % 3]))
            self.weft("ingest", "deck.toml", "ingest.images=pictures", "ingest.labels=labels", f"ingest.output=images{i}.h5",
                      "ingest.num_classes=3", ranks=1)
        polygon = '{"path": "%s/pictures/a.png", "polygons": [{"points": [[1, 1], [30, 1], [30, %d]]}]}'
        segmentation = ("model.name=segmentation", "model.encoder=resnet18dilated", "model.decoder=c1", "model.num_classes=3",
                        "data.short_sides=[32]", "data.max_side=64")
        dbnet = ("model.name=dbnet", "model.backbone=resnet18", "model.asf=false", "data.crop=32")
        synthetic = "synthetic:clips=24,frames=3,height=16,width=16"
        shapes, text = "shapes:images=4,classes=3,height=40,width=40", "text:images=4,height=64,width=64,words=1,letters=8..9"
        for name, model, (first, same), other in (
                ("clips", (), copied("clips0.h5"), "clips1.h5"),
                ("drawn", (), (synthetic, synthetic + ",seed=42"), synthetic + ",seed=1"),
                ("images", segmentation, copied("images0.h5"), "images1.h5"),
                ("shapes", segmentation, (shapes, shapes + ",seed=1"), shapes + ",seed=2"),
                ("list", dbnet, copied("list.jsonl", polygon % (self.dir, 30)), copied("other.jsonl", polygon % (self.dir, 31))[0]),
                ("text", dbnet, (text, text + ",seed=1"), text + ",seed=2")):
            with self.subTest(name):
                def job(step, data):
                    return self.train(name, *model, f"train.steps={step}", f"data.path={data}", "train.batch_size=2",
                                      "train.micro_batches=2", ranks=1 + step % 2).err
                job(1, first)
                self.assertNotIn("is not the data that", job(2, same))
                self.assertRegex(job(3, other), r"WARN: data.path = .* is not the data that .*step_2 was trained on: the same number of clips, but")


class Options(WeftTest):
    """Two ranks agree with one, a restart is exact, and each option changes what is computed."""

    STEPS = 12

    def check(self, *options):
        steps = f"train.steps={self.STEPS}"
        self.train("two", steps, *options)
        self.train("one", steps, *options, ranks=1)
        self.assertEqual(self.samples("two"), self.samples("one"))
        self.assert_close(self.losses("two"), self.losses("one"))
        self.train("parts", "train.steps=7", *options)
        self.train("parts", steps, *options)
        self.assert_same_run("two", "parts")
        return self.losses("two")

    def test_masks_drop_path_and_shapes(self):
        """With three micro-batches on two ranks, and buckets of several shapes."""
        masks = ("mask.random=0.2", "mask.image_head=0.2", "mask.quarter_tail=0.2", "mask.intepolate=0.2", "mask.image_head_tail=0.2")
        drop = ("model.drop_path=0.3",)
        common = ("model.depth=3", "train.micro_batches=3", "data.path=synthetic:clips=12,frames=3,height=16,width=16;"
                  "clips=9,frames=1,height=24,width=16;clips=7,frames=5,height=10,width=14")
        both = self.check(*common, *masks, *drop)
        for name, options in (("masked", masks), ("dropped", drop)):
            self.train(name, f"train.steps={self.STEPS}", *common, *options)
            self.assertNotEqual(self.losses(name), both)

    def test_loss_spikes(self):
        """A learning rate that rises until the run diverges: told, or the end before a checkpoint has it."""
        # A checkpoint every five steps, and none of the spike's own step.
        rising = ("train.steps=250", "train.lr=4", "train.warmup_steps=2000", "train.grad_clip=0")
        told = self.train("warned", *rising).err
        self.assertRegex(told, r"WARN: step \d+: (loss|gradient norm) spike: .* samples [\d ]+\)")
        job = self.train("stopped", *rising, "train.loss_spike=stop", expect=None)
        self.refused(job, 5, "samples")
        spike = int(re.search(r"ERROR: step (\d+):", job.err).group(1))
        newest = (self.dir / "stopped" / "latest").resolve().name
        self.assertEqual(newest, f"step_{(spike - 1) // 5 * 5}")

    def test_what_is_frozen_stays(self):
        for option in ("only_train_temporal", "freeze_y_embedder"):
            with self.subTest(option):
                self.train("start", "train.steps=1", "train.lr=0", f"model.{option}=true", "run.resume=false")
                self.train("run", "train.steps=4", f"model.{option}=true", "run.resume=false")
                start, end = self.exported("start"), self.exported("run")
                changed = {name for name in start if start[name] != end[name]}
                if option == "only_train_temporal":
                    self.assertTrue(changed)
                    self.assertLessEqual(changed, {n for n in start if n.startswith("temporal_blocks.")})
                else:
                    self.assertFalse({n for n in changed if n.startswith("y_embedder.")})
                    self.assertIn("final_layer.linear.weight", changed)
        self.check("model.only_train_temporal=true")

    def test_recomputation_and_many_buckets_change_no_values(self):
        options = (f"train.steps={self.STEPS}", "model.hidden_size=96")
        self.train("kept", *options, "parallel.bucket_mib=1000")
        for share, bucket in (("0.5", "0.25"), ("1.0", "0.001")):
            run = f"recomputed{share}"
            self.train(run, *options, f"model.recompute={share}", f"parallel.bucket_mib={bucket}")
            self.assert_close(self.losses(run), self.losses("kept"), 1e-6)
            self.assertLess(self.metrics(run)[-1]["memory"]["arena_peak_bytes"],
                            self.metrics("kept")[-1]["memory"]["arena_peak_bytes"])

    def test_text_features(self):
        values = random.Random(3)
        features = {}
        for clip in range(24):
            tokens = 1 + clip % 4
            data = struct.pack(f"<{16 * tokens}f", *(values.gauss(0, 1) for _ in range(16 * tokens)))
            features[str(clip)] = ("F32", (tokens, 16), data)
        path = self.dir / "t5.safetensors"
        write_safetensors(path, features)
        self.check("data.text_features=t5.safetensors")
        # Another caption of a clip that a step trains on is another loss in that step.
        sample = self.samples("two")[0][0]
        dtype, shape, data = features[str(sample)]
        write_safetensors(path, features | {str(sample): (dtype, shape, bytes(len(data)))})
        self.train("other", "train.steps=1", "data.text_features=t5.safetensors",
                   "model.class_dropout_prob=0")
        write_safetensors(path, features)
        self.train("same", "train.steps=1", "data.text_features=t5.safetensors",
                   "model.class_dropout_prob=0")
        self.assertNotEqual(self.losses("other"), self.losses("same"))
        # Faults of the file are named.
        for name, bad in (("23", ("F32", (1, 15), bytes(60))), ("23", ("F32", (5, 16), bytes(320))),
                          ("23", None)):
            tensors = {n: t for n, t in (features | {name: bad}).items() if t}
            write_safetensors(path, tensors)
            job = self.weft("train", "deck.toml", "data.text_features=t5.safetensors",
                            "run.dir=refused", ranks=0, expect=None)
            self.refused(job, 3, "t5.safetensors", name)


if __name__ == "__main__":
    unittest.main()
