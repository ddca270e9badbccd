"""weft plan: tables and JSON for a described machine, refusals that name what fits, and the memory that training then takes."""

import json
import re
import unittest

from harness import REPOSITORY, WeftTest
from tiny_models import TINY_VAE

USAGE = 2
VAE_DECK = """
[run]
threads = 1
resume = false
[data]
path = "synthetic:clips=4,frames=6,height=32,width=32"
""" + TINY_VAE + """[vae_train]
random_length = false
[train]
steps = 2
micro_batches = 2
checkpoint_every = 0
"""


class Plan(WeftTest):
    def plan(self, deck, *arguments, ranks=0):
        out = self.dir / "plan.json"
        run = self.weft("plan", deck, *arguments, "--json", out, ranks=ranks, expect=0)
        return run.out, json.loads(out.read_text())

    def test_stage_2_on_128_gpus(self):
        deck = REPOSITORY / "inputs" / "stage2.toml"
        text, plan = self.plan(deck, "--gpus", "128", "--memory", "141", "--fabric", "8x400")
        self.assertIn("not measured", text)
        self.assertIn("train.batch_sizes = [", text)
        self.assertEqual(plan["ranks"], 128)
        self.assertEqual(len(plan["buckets"]), 35)
        # XL/2 (docs/models/stdit3.md, Parameters), its state in shards: 2.4 GB of bf16 weights, 4.8 GB of f32 gradients.
        self.assertAlmostEqual(plan["parameters"]["trained"] / 1.2016e9, 1, delta=0.001)
        self.assertAlmostEqual(plan["memory"]["weights"] / 2.40e9, 1, delta=0.01)
        self.assertAlmostEqual(plan["memory"]["gradients"] / 4.81e9, 1, delta=0.01)
        self.assertLess(plan["memory"]["moments"], 0.1e9)
        for bucket in plan["buckets"]:
            self.assertLessEqual(bucket["memory"], plan["memory"]["capacity"])
        shares = {e["ranks"]: e["share"] for e in plan["efficiency"]}
        self.assertEqual(list(shares), [1, 2, 4, 8, 16, 32, 64, 128])
        self.assertGreater(shares[128], 0.97)
        self.assertLess(sum(plan["step"][k] for k in ("exposed_reduce", "exposed_gather")),
                        0.01 * plan["step"]["seconds"])

    def test_how_many_jobs_a_training_takes(self):
        deck = REPOSITORY / "inputs" / "stage2.toml"
        machine = ("--gpus", "128", "--memory", "141", "--fabric", "8x400", "train.steps=100000")
        text, plan = self.plan(deck, *machine, "--wall", "24h")
        jobs, step = plan["jobs"], plan["step"]["seconds"]
        self.assertEqual(jobs["wall"], 86400)
        self.assertEqual(jobs["steps"], 1 + int((86400 - jobs["start"] - jobs["end"]) / step))
        self.assertEqual(jobs["jobs"], -(-100000 // jobs["steps"]))
        self.assertIn(f"jobs of 24.0 h: {jobs['jobs']} for 100000 steps, {jobs['steps']} each (start ", text)
        self.assertEqual(self.plan(deck, *machine, "--wall", "1-00:00:00")[1]["jobs"], jobs)
        self.assertEqual(self.plan(deck, *machine, "--wall", "00:00:01")[1]["jobs"]["jobs"], 0)
        self.assertIn("\nall 7 steps: ", self.plan(deck, *machine, "train.steps=+7")[0])
        # One step fits that the margin for another forbids.
        wall = int(jobs["end"] - 120 + jobs["start"] + 1)
        self.assertEqual(self.plan(deck, *machine, "--wall", f"{wall / 60}m")[1]["jobs"]["steps"], 1)
        self.assertNotIn("jobs", self.plan(deck, *machine)[1])
        for wrong in ("24", "x", "-1h", "1h2"):
            self.assertIn("24h, 90m, 2d", self.weft("plan", deck, f"--wall={wrong}", ranks=0, expect=USAGE).err)

    def test_clips_that_are_encoded_on_the_way(self):
        """The VAE's weights, and what it takes while it encodes, count."""
        latents, pixels = (self.plan(REPOSITORY / "inputs/train.toml", "--gpus", "2", "--gpu", "h100", "train.batch_size=1",
                                     "vae.weights=random:1", "data.path=synthetic:clips=64," + clips)[1]["memory"]
                           for clips in ("frames=5,height=8,width=8,latent=1", "frames=17,height=64,width=64"))
        self.assertAlmostEqual((pixels["fixed"] - latents["fixed"]) / 787e6, 1, 1)  # of bf16
        self.assertGreater(pixels["activations"], latents["activations"] + 1e6)

    def test_several_ranks_leave_nccl_its_memory(self):
        deck = REPOSITORY / "inputs" / "stage2.toml"
        data = "data.path=synthetic:latent=1,frames=5,height=16,width=16,clips=64"
        for gigabytes in (80, 40):
            with self.subTest(gigabytes=gigabytes):
                # With the optimizer's state whole on every rank, the same state.
                one, eight = (self.plan(deck, data, "train.batch_sizes=[]", "parallel.zero=0",
                                        "--memory", str(gigabytes), "--gpus", n)[1]["memory"]["capacity"] for n in ("1", "8"))
                # A sixteenth of what the state leaves is free, and another one for NCCL, or 3 GiB.
                self.assertAlmostEqual(one - eight, min(3 * 2**30, one / 15), delta=2**20)

    def test_the_whole_run_and_advice(self):
        deck = REPOSITORY / "inputs" / "stage2.toml"
        machine = ("train.steps=30000", "--memory", "141", "--gpus")
        text, plan = self.plan(deck, "train.micro_batches=64", *machine, "64")
        seconds = 30000 * plan["step"]["seconds"]
        self.assertAlmostEqual(plan["run"]["seconds"], seconds, delta=1e-6 * seconds)
        self.assertAlmostEqual(plan["run"]["rank_hours"], seconds * 64 / 3600, delta=1e-6 * seconds)
        self.assertIn(f"all 30000 steps: {seconds / 3600:.1f} h on 64 ranks, ", text)
        self.assertIn(" GPU-hours, ", text)
        self.assertIn("advice: with 1 micro-batch of different costs each, ranks wait for the slowest", text)
        self.assertIn("train.micro_batches = 256", text)
        text, plan = self.plan(deck, "train.micro_batches=64", *machine, "128")
        self.assertEqual(plan["advice"],
                         "64 of 128 ranks have no micro-batch: set train.micro_batches to 128 or more")
        # Without a step of the optimizer to share out, nothing is above one rank's efficiency.
        self.assertEqual("(above 100 %" in text, max(e["share"] for e in plan["efficiency"]) > 1.0005)

    def test_what_a_run_costs_on_a_gpu(self):
        deck = ("deck.toml", "model.dtype=bf16", "train.steps=30000", "train.micro_batches=61", "train.ema_decay=[0.99, 0.9]")
        text, h100 = self.plan(*deck, "--gpu", "h100", "--gpus", "8")
        seconds = 30000 * h100["step"]["seconds"]
        self.assertAlmostEqual(h100["run"]["days"], seconds / 86400, delta=1e-9 * seconds)
        self.assertAlmostEqual(h100["run"]["gpu_hours"], 8 * seconds / 3600, delta=1e-9 * seconds)
        self.assertIn("cost of train.steps = 30000 on 8 x H100 SXM: ", text)
        self.assertIn(f"{seconds / 86400:.4g} days, {8 * seconds / 3600:.4g} GPU-hours (rates of one GPU are measured", text)
        self.assertEqual(h100["gpu"], {"name": "h100", "measured": True})
        self.assertEqual(h100["advice"], "61 micro-batches on 8 ranks: the busiest holds 8, with which 64 would take as long: "
                         "set train.micro_batches = 64 (or 56)")
        # Two averages: what moments of two arrays take.
        self.assertEqual(h100["memory"]["ema"], h100["memory"]["moments"])
        for name in ("h200", "a100"):
            text, plan = self.plan(*deck, "--gpu", name, "--gpus", "8")
            self.assertEqual(text.count("scaled, not measured"), 2, text)
            self.assertEqual(plan["gpu"]["measured"], False)
        self.assertGreater(plan["step"]["seconds"], h100["step"]["seconds"])
        # In f32 an H100 is far slower, which the rates know.
        _, f32 = self.plan("deck.toml", "--gpu", "h100", "train.micro_batches=64", "data.path=synthetic:clips=24,frames=3,height=256,width=256")
        _, bf16 = self.plan("deck.toml", "--gpu", "h100", "train.micro_batches=64", "model.dtype=bf16",
                            "data.path=synthetic:clips=24,frames=3,height=256,width=256")
        self.assertGreater(f32["step"]["compute"], 1.5 * bf16["step"]["compute"])

        stage2 = REPOSITORY / "inputs" / "stage2.toml"
        self.refuse("--gpu h10: unknown GPU", "did you mean h100?", "h100, h200, a100", arguments=("--gpu", "h10"))
        self.refuse("--rates", "leave one of them out", arguments=("--gpu", "h100", "--rates", "r.json"))
        self.refuse("--fabric local", "leave one of them out", arguments=("--gpu", "h100", "--fabric", "local"))
        # Where memory is short: what frees some, with figures.
        self.refuse("optimizer need", "set parallel.zero = 1 (ZeRO-1)", "GiB a rank", deck=stage2,
                    arguments=("parallel.zero=0", "--gpu", "h100", "--gpus", "8", "--memory", "20"))
        self.refuse("optimizer need", "keep fewer averages (train.ema_decay), or use more ranks", "16 hold it", deck=stage2,
                    arguments=("train.ema_decay=[0.99, 0.999]", "--gpu", "h100", "--gpus", "8", "--memory", "9"))

    def test_advice_was_tried(self):
        lora = (REPOSITORY / "inputs" / "wan_1.3b_lora.toml", "model.hidden_size=5120", "model.depth=40", "model.num_heads=40",
                "model.ffn_dim=13824", "train.micro_batches=64", "--gpu", "h100",
                "data.path=synthetic:clips=1000,frames=21,height=60,width=104,latent=1,channels=16")
        text, plan = self.plan(*lora, "--gpus", "64")
        advice = plan["memory_advice"]
        self.assertIn(f"advice: {advice}", text)
        self.assertIn(f"% of the compute: {plan['step']['seconds']:.3f} s a step", advice)
        _, other = self.plan(*lora, "parallel.sp=8", "--gpus", "64")
        self.assertIn(f"; parallel.sp = 8: {other['step']['seconds']:.3f} s a step, {other['run']['gpu_hours']:.4g} GPU-hours", advice)
        self.assertLess(other["step"]["seconds"], 0.9 * plan["step"]["seconds"])
        # Less than 1 %, and nothing.
        self.assertNotIn("parallel.sp = 2", advice)
        self.assertNotIn("128 ranks", advice)
        _, alone = self.plan(lora[0], *lora[5:], "--gpus", "1")
        self.assertIn("none of these helps: 2 ranks", alone["memory_advice"])

    def test_nodes_of_any_size(self):
        deck = ("deck.toml", "model.dtype=bf16", "train.micro_batches=16", "--gpu", "h100", "--gpus", "16")
        text, four = self.plan(*deck, "--per-node", "4")
        self.assertIn("16 ranks on 4 nodes of 4, fabric 4x400", text)
        self.assertEqual(four["ranks_a_node"], 4)
        text, eight = self.plan(*deck)
        self.assertIn("16 ranks on 2 nodes of 8, fabric 8x400", text)
        self.refuse("--fabric local", "leave one of them out", arguments=("--per-node", "4", "--fabric", "local"))
        # A tiny model's saves stall nobody, and would by Young and Daly follow each other at once.
        self.assertLess(eight["checkpoint"]["young_daly"], 600)
        self.assertEqual(eight["checkpoint"]["interval"], 600)
        self.assertIn("save every 10.0 min (Young, Daly: ", text)

    def test_sample_clips_are_in_the_memory(self):
        machine = ("--gpus", "2", "--memory", "20", "--fabric", "8x400")
        samples = ("samples.every=10", 'samples.prompts=["a"]', "generate.image_size=[64,64]", "generate.num_frames=9")
        text, without = self.plan("deck.toml", *machine)
        self.assertNotIn("  samples ", text)
        text, plan = self.plan("deck.toml", *samples, *machine)
        self.assertIn("weights of model and codec for sample clips", text)
        # This model works on pixels, in f32, and has no codec.
        self.assertEqual((without["memory"]["samples"], plan["memory"]["samples"]), (0, 4 * plan["parameters"]["all"]))
        # These clips have more tokens than the training's.
        self.assertGreater(plan["memory"]["activations"], without["memory"]["activations"])
        self.refuse("a sample clip of 9x4096x4096 takes", "generate.resolution", deck="deck.toml",
                    arguments=(*samples, "generate.image_size=[4096,4096]", *machine))

    def test_without_data(self):
        self.refused(self.weft("plan", "deck.toml", "data.path=none.h5", "--gpus", "8", "--memory", "80", ranks=0,
                               expect=None), 3, "none.h5", "synthetic:")

    def test_thinner_fabric_and_no_overlap_cost_more(self):
        deck = REPOSITORY / "inputs" / "stage1.toml"
        machine = ("--gpus", "32", "--memory", "141", "--fabric")
        exposed = []
        for fabric, override in (("8x400", "parallel.overlap=true"),
                                 ("1x200", "parallel.overlap=true"),
                                 ("1x200", "parallel.overlap=false")):
            _, plan = self.plan(deck, override, *machine, fabric)
            exposed.append(plan["step"]["exposed_reduce"] + plan["step"]["exposed_gather"])
        self.assertLess(exposed[0], exposed[1])
        self.assertLess(3 * exposed[1], exposed[2])

    def refuse(self, *said, deck=REPOSITORY / "inputs" / "stage2.toml", arguments):
        self.refused(self.weft("plan", deck, *arguments, ranks=0, expect=None), USAGE, *said)

    def test_what_does_not_fit(self):
        machine = ("--gpus", "128", "--memory", "30", "--fabric", "8x400")
        self.refuse("1 clip of bucket", "not even one clip fits of 360p-408-0.56, ", arguments=machine)
        machine = ("--gpus", "128", "--memory", "35", "--fabric", "8x400")
        self.refuse("clips of bucket", "largest batches that fit", arguments=machine)
        # What the refusal says to set is enough, for all buckets at once.
        said = re.search(r"train\.batch_sizes = (\[.*?\])", self.jobs[-1].err)[1]
        self.weft("plan", REPOSITORY / "inputs" / "stage2.toml", "train.batch_sizes=" + said, *machine, ranks=0)
        self.refuse("weights, gradients and optimizer need", "use more ranks", "16 hold it",
                    arguments=("--gpus", "8", "--memory", "9", "--fabric", "8x400"))
        self.refuse("weights, gradients and optimizer need", "set parallel.zero = 3",
                    arguments=("--gpus", "8", "--memory", "6", "--fabric", "8x400"))
        self.refuse("weights, gradients and optimizer need", "use a smaller model", "any number of ranks",
                    arguments=("parallel.zero=3", "--gpus", "8", "--memory", "0.5", "--fabric", "8x400"))
        self.refuse("optimizer need", "parallel.zero = 1",
                    arguments=("parallel.zero=0", "--gpus", "8", "--memory", "20", "--fabric",
                               "8x400"))

    def test_bad_arguments(self):
        self.refuse("8x40O", "did you mean 8x400?",
                    arguments=("--gpus", "8", "--memory", "141", "--fabric", "8x40O"))
        self.refuse("8xnan", arguments=("--gpus", "8", "--memory", "141", "--fabric", "8xnan"))
        for option, value in (("--mtbf", "nan"), ("--mtbf", "-5"), ("--memory", "inf"), ("--gpus", "0"), ("--gpus", "-1"),
                              ("--per-node", "0")):
            self.refuse(f"{option} {value} is out of range", "it goes from ", arguments=(option, value))
        self.refuse("--mtbf: expected a number, got '0,5'", "write 0.5", arguments=("--mtbf", "0,5"))
        self.refuse("needs --memory", arguments=("--gpus", "8"))
        self.refuse("--rates", "cannot be read",
                    arguments=("--gpus", "8", "--memory", "141", "--rates", "missing.json"))
        self.refuse("parallel.sp = 3", arguments=("parallel.sp=3", "--gpus", "8", "--memory", "141"))
        self.refuse("mpirun -n 2", arguments=("--gpus", "2", "--fabric", "local"))
        self.refuse("720-51", "did you mean \"720p-51\"?",
                    arguments=('train.batch_sizes=["720-51=1"]', "--gpus", "8", "--memory", "141"))

    def test_rates_from_a_file(self):
        rates = dict(products=1e14, attention_forward=1e14, attention_backward=1e14,
                     bandwidth=1e12, gaps=0, origin="a slow device")
        (self.dir / "rates.json").write_text(json.dumps(rates))
        deck = REPOSITORY / "inputs" / "stage2.toml"
        machine = ("--gpus", "8", "--memory", "141")
        text, slow = self.plan(deck, *machine, "--rates", self.dir / "rates.json")
        _, fast = self.plan(deck, *machine)
        self.assertIn("a slow device", text)
        self.assertEqual(fast["fabric"], "8x400")  # of a described machine
        self.assertGreater(slow["step"]["seconds"], 4 * fast["step"]["seconds"])

    def test_the_memory_of_the_run_itself(self):
        """The planned peak is the arena's, within 3 %, also where blocks are recomputed."""
        data = ("data.path=synthetic:clips=8,frames=3,height=16,width=16;"
                "clips=8,frames=6,height=32,width=32")
        capacity = 0  # GiB: what there is
        for ranks in (2, 1):
            overrides = [data, "train.steps=4", "train.checkpoint_every=0", "run.resume=false",
                         "parallel.bucket_mib=1", f"memory.arena_gib={capacity}"]
            with self.subTest(ranks=ranks, arena_gib=capacity):
                _, plan = self.plan("deck.toml", *overrides, "--fabric", "local", ranks=ranks)
                planned = plan["memory"]["activations"]
                self.assertEqual(max(b["recompute"] for b in plan["buckets"]) > 0, capacity > 0)
                self.weft("train", "deck.toml", *overrides, ranks=ranks, expect=0)
                peak = max(m["memory"]["arena_peak_bytes"] for m in self.metrics("run"))
                self.assertAlmostEqual(planned / peak, 1, delta=0.03)
                capacity = 0.8 * planned / 2**30 if ranks == 2 else 0

    def test_a_vae_in_training(self):
        """Stage 3 on the released shape; what a run's arena holds, the discriminator's steps included, to the byte."""
        data = "data.path=synthetic:clips=24,frames=33,height=256,width=256"
        machine = ("--gpus", "24", "--memory", "141")
        stage3 = REPOSITORY / "inputs" / "vae_stage3.toml"
        text, plan = self.plan(stage3, data, *machine)
        self.assertIn("temporal C = 128", text)
        self.assertAlmostEqual(plan["parameters"]["trained"] / 393.34e6, 1, delta=0.001)
        self.assertAlmostEqual(plan["memory"]["gradients"] / (4 * 393.34e6), 1, delta=0.01)
        # VGG16's 14.7e6 weights, in f32 and bf16.
        self.assertAlmostEqual(plan["memory"]["fixed"] / (6 * 14.72e6), 1, delta=0.01)
        shares = [b["ready"] for b in plan["gradient_buckets"]]
        self.assertEqual(shares, sorted(shares))
        _, frozen = self.plan(REPOSITORY / "inputs" / "vae_stage1.toml", data, *machine)
        self.assertLess(3 * frozen["step"]["flops"], plan["step"]["flops"])
        self.refused(self.weft("plan", stage3, data, "--gpus", "24", "--memory", "6", ranks=0,
                               expect=None), USAGE, "bucket synthetic-33-256x256", "not even one clip fits")

        (self.dir / "vae.toml").write_text(VAE_DECK)
        learning = ["vae_train.discriminator_start=0", "vae_train.lecam_weight=0.1",
                    "vae_train.gradient_penalty_weight=0.1"]
        for critic, more in (("none", []), ("patchgan", learning)):
            options = [f"vae_train.discriminator={critic}", f"run.dir={critic}", *more]
            _, plan = self.plan("vae.toml", *options, "--fabric", "local")
            self.weft("train", "vae.toml", *options, expect=0)
            peak = max(m["memory"]["arena_peak_bytes"] for m in self.metrics(critic))
            self.assertEqual(plan["memory"]["activations"], peak)
            terms = self.metrics(critic)[-1]["terms"]
            for term in ("discriminator", "lecam", "gradient_penalty"):
                self.assertEqual(terms[term] > 0, critic != "none", term)

    def test_generation_and_encoding_are_planned(self):
        deck = REPOSITORY / "inputs" / "generate.toml"
        machine = ("--job", "generate", "--gpus", "4", "--memory", "16", "generate.resolution=720p")
        text, plan = self.plan(deck, *machine)
        # T5-XXL in bf16 over four devices of 16 GB, layers in order, none left out.
        self.assertEqual(plan["t5"][0]["first"], 0)
        self.assertEqual(plan["t5"][-1]["last"], 24)
        self.assertAlmostEqual(sum(p["weights"] for p in plan["t5"]) / 9.5246e9, 1, delta=0.001)
        self.assertEqual(plan["clips"][0]["size"], "51x720x1280")
        taken = sum(plan["memory"][k] for k in ("STDiT3 weights", "VAE weights"))
        self.assertGreater(plan["clips"][0]["decoding_seconds"], 0)
        self.assertLess(taken + max(plan["clips"][0]["sampling"], plan["clips"][0]["vae"]), 16e9)
        # As many together as there is memory for, fewer than the ten that each of four ranks would have.
        _, plan = self.plan(deck, *machine, "t5.weights=", "generate.batch_size=32", "generate.prompts=[]",
                            "generate.prompt_generator=a cat", "generate.end_index=40")
        together = plan["clips"][0]
        self.assertEqual(together["clips"], 40)
        self.assertIn(together["together"], range(2, 10))
        self.assertLess(taken + max(together["sampling"], together["vae"]), 16e9)
        self.refused(self.weft("plan", deck, "--job", "generate", "--gpus", "1", "--memory", "6",
                               ranks=0, expect=None), USAGE, "T5", "missing")
        self.refused(self.weft("plan", deck, "--job", "generate", "--gpus", "4", "--memory", "10",
                               "generate.resolution=720p", "generate.num_frames=408", ranks=0, expect=None), USAGE, "408x720x1280", "num_frames")
        deck = REPOSITORY / "inputs" / "encode.toml"
        clips = "data.path=synthetic:clips=2,frames=51,height=144,width=256"
        _, plan = self.plan(deck, clips, "--job", "encode", "--gpus", "4", "--memory", "16")
        self.assertEqual(plan["buckets"][0]["clip_bytes"], 2 * 8 * 15 * 18 * 32)
        self.assertGreater(plan["seconds"], 0)


if __name__ == "__main__":
    unittest.main()
