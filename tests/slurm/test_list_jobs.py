"""The job scripts of list jobs under a real Slurm on this host (cluster.py): ranks and nodes that are lost, stops, arrays.
`make test-slurm` runs this; by hand, as root:
    WEFT_BIN=build/weft python3 -B tests/slurm/test_list_jobs.py -v
"""

import contextlib
import json
import os
import signal
import time
import unittest

from scripts import ENDED, ScriptTest
from test_animate import DECK as ANIMATE_DECK, drawn_face, face_points, write_wav
from test_evaluate import png
from test_score import DECK as SCORE_DECK
from test_vae_training import DECK as VAE_DECK
from tiny_models import TINY_GENERATE_DECK, write_t5


SHAPE = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1")  # two nodes
PAIR = ("--ntasks-per-node=2", "--cpus-per-task=1")  # on one node

SEGMENTATION_DECK = """
[run]
seed = 7
threads = 1
[memory]
arena_gib = 0.5
[data]
path = "shapes:images=60,classes=3,height=40..72,width=40..72,hues=1"
short_sides = [32, 48]
max_side = 64
[model]
name = "segmentation"
encoder = "mobilenetv2dilated"
decoder = "c1_deepsup"
num_classes = 3
[train]
steps = 60
batch_size = 2
micro_batches = 2
bn_momentum = 0.1
checkpoint_every = 20
[parallel]
deterministic = true
[evaluate]
data = "shapes:images=300,classes=3,height=40..72,width=40..72,hues=1,seed=2"
"""


def pictures(folder, count):
    """Small pictures p0.png ... in that folder and a table of them, meta.csv."""
    for i in range(count):
        (folder / f"p{i}.png").write_bytes(png(24, 20, lambda x, y: ((37 * i + 11 * x * y) % 256, x * (i + 3) % 256, y * i * 7 % 256)))
    (folder / "meta.csv").write_text("id,path\n" + "".join(f"{i},p{i}.png\n" for i in range(count)))


def write_face(folder):
    """A picture, its landmarks and 40 frames of speech."""
    (folder / "face.png").write_bytes(png(64, 56, drawn_face(64, 56)))
    (folder / "points.csv").write_text("".join(f"{x:.3f},{y:.3f}\n" for x, y in face_points(32, 28, 36)))
    write_wav(folder / "speech.wav", 1.6)


class ListTest(ScriptTest):
    def lose(self, take_away, partition, command, *overrides, deck="generate.toml", rank=1, script=None, **variables):
        """A job of two nodes, one of whose ranks take_away(process) takes away while it makes clips: its id, its output."""
        ending = {"encode": ".h5", "score": ".csv"}.get(command, "")
        for attempt in range(20):
            out = self.site / f"{partition}_{command}{attempt}{ending}"
            folder = out.with_name(out.name + ".parts") if ending else out
            stem = {"generate": "generated", "encode": "encoded", "evaluate": "images"}.get(command, command)
            job = self.sbatch(script or command, f"{command}.output={out.name}", *overrides, deck=deck, partition=partition,
                              options=(*SHAPE, "--exclusive"), **variables)  # a node that is lost takes no other job along

            def has_in_hand():
                try:
                    return "begun" in (folder / f"{stem}.rank{rank}.jsonl").read_text().splitlines()[-1]
                except (OSError, IndexError):
                    return False  # not begun, or over
            self.until(f"an item in the hands of rank {rank}", lambda: self.cluster.job(job).get("JobState") in ENDED or
                       has_in_hand())
            try:
                task = self.cluster.task(job, rank)
                os.kill(task, signal.SIGSTOP)  # so that it does not end while one looks
                if has_in_hand():
                    take_away(task)
                    return job, out
                os.kill(task, signal.SIGCONT)
            except (TypeError, OSError):
                pass  # it has ended: the next is looked at sooner
            self.finish(job)
        self.fail(f"rank {rank} was always done before it could be taken away")


class ListJobs(ListTest):
    def test_a_vae_latents_and_clips(self):
        """Three jobs beside each other, two tasks each: a VAE stage, encode, and generate, which is stopped and queued again."""
        (self.site / "generate.toml").write_text(TINY_GENERATE_DECK)
        (self.site / "vae.toml").write_text(VAE_DECK)
        write_t5(self.site / "t5")
        # More than are made before it is stopped, however fast it is.
        prompts = ["a cat"] + [f'prompt {i} {{"num_frames": 1}}' for i in range(1000)]
        (self.site / "prompts.txt").write_text("\n".join(prompts) + "\n")
        vae = self.sbatch("weft", "vae.toml", "device.kind=cpu", "train.steps=2", deck="train", device=None, options=PAIR)
        encode = self.sbatch("encode", "data.path=synthetic:clips=4,frames=17,height=32,width=32", "encode.text=false",
                             deck="generate.toml", options=PAIR)
        clips = ("generate.prompt_file=prompts.txt", "t5.weights=t5", "sampler.steps=60")
        generate = self.sbatch("generate", *clips, "generate.output=out", deck="generate.toml", options=PAIR)
        out = self.site / "out"
        self.until("a clip", lambda: any(out.glob("sample_*.*")))
        self.cluster.run("scancel", "--signal=USR1", generate)
        self.until("the second start", lambda: self.cluster.job(generate).get("Restarts") == "1")
        before = len(list(out.glob("sample_*.*")))
        self.until("another clip", lambda: len(list(out.glob("sample_*.*"))) > before)
        (out / "stop").touch()
        facts = self.finish(generate, "FAILED", "75:0")
        self.assertEqual(facts["Restarts"], "1", self.output())
        self.assertIn("weft generate ended with 75", self.output())
        before = json.loads((out / "generate_report.json").read_text())["finished_before"]
        self.assertGreater(before, 0)
        lines = [json.loads(line) for line in (out / "generated.jsonl").read_text().splitlines()]
        self.assertEqual(sorted(line["name"] for line in lines), sorted(p.stem for p in out.glob("sample_*.*")))
        rest = self.sbatch("generate", *clips, "generate.end_index=21", "generate.output=out", deck="generate.toml", options=PAIR)
        self.finish(rest)
        for name in ["sample_0000.mp4", *(f"sample_{i:04}.png" for i in range(1, 21))]:
            self.assertTrue((out / name).exists(), name)
        self.finish(vae)
        self.assertEqual(self.steps(f"runs/vae-{vae}"), 2)
        self.finish(encode)
        self.assertIn("weft encode ended with 0", self.output())
        self.assertTrue((self.site / "latents.h5").exists())
        self.show(f"job {vae}: two steps of a VAE; job {encode}: 4 clips encoded; job {generate}: stopped by SIGUSR1 after "
                  f"{before} clips, queued again, Restarts={facts['Restarts']}, went on until out/stop; job {rest} made the rest")

    def test_score_as_an_array_of_which_one_is_queued_again(self):
        (self.site / "deck.toml").write_text(SCORE_DECK)
        pictures(self.site, 600)
        whole = self.sbatch("score", "score.input=meta.csv", "score.output=whole.csv", options=PAIR)
        array = self.sbatch("score", "score.input=meta.csv", "score.output=ocr_%a.csv", "score.shard=%a/2",
                            options=("--array=1-2", *PAIR))
        parts = self.site / "ocr_2.csv.parts"

        def begun():
            with contextlib.suppress(FileNotFoundError):  # they are joined at the end
                if any(p.stat().st_size for p in parts.glob("score.rank*.jsonl")):
                    return True
            return self.cluster.job(f"{array}_2").get("JobState") in ENDED
        self.until("a picture of the second part", begun)
        self.cluster.run("scancel", "--signal=USR1", f"{array}_2")
        facts = [self.finish(f"{array}_{k}") for k in (1, 2)]
        self.finish(whole)
        self.assertEqual([f["Restarts"] for f in facts], ["0", "1"], self.output())
        said = self.output()
        for text in "weft score ended with 75", "queued again", " scored before":
            self.assertIn(text, said)
        first, second = ((self.site / f"ocr_{k}.csv").read_text().splitlines(keepends=True) for k in (1, 2))
        self.assertEqual("".join(first + second[1:]), (self.site / "whole.csv").read_text())
        counts = {line.rsplit(",", 1)[1] for line in first[1:] + second[1:]}
        self.assertGreater(len(counts), 2, "counts that are alike tell little")
        self.show(f"array {array}: 600 pictures in two parts, the second stopped by SIGUSR1, exit 75, queued again; both parts joined "
                  f"are the table of job {whole}")

    def test_segmentation_stopped_and_queued_again(self):
        (self.site / "deck.toml").write_text(SEGMENTATION_DECK)
        longer = ("train.steps=300", "train.checkpoint_every=100")  # the signal comes in time
        straight = self.sbatch("segmentation", "run.dir=straight", *longer, options=SHAPE)
        job = self.sbatch("segmentation", "run.dir=stopped", *longer, options=SHAPE)
        self.wait_for_steps(job, "stopped", 5)
        self.cluster.run("scancel", "--signal=USR1", job)
        self.assertEqual(self.finish(job)["Restarts"], "1", self.output())
        self.finish(straight)
        said = (self.site / f"weft-segmentation-{job}.out").read_text()
        for text in "weft train ended with 75", "weft train ended with 0", "weft evaluate ended with 0":
            self.assertIn(text, said)
        self.assertEqual(self.results("stopped"), self.results("straight"))
        found = [json.loads((self.site / run / "evaluation/evaluation.json").read_text()) for run in ("stopped", "straight")]
        self.assertEqual(found[0]["classes"], found[1]["classes"])
        self.show(f"job {job}: training stopped by SIGUSR1, exit 75, queued again, evaluated: losses, state and the classes' counts "
                  f"equal to those of job {straight}, which nobody disturbed")


class LostNodes(ListTest):
    NODES = {"nodes": 14, "usual": 2, "large": 2}  # the other twelve are to be lost

    def test_a_lost_rank_and_a_lost_node(self):
        """Two jobs of one prompt file: each is queued again and makes the clips that are missing."""
        (self.site / "generate.toml").write_text(TINY_GENERATE_DECK)
        (self.site / "prompts.txt").write_text("".join(f"prompt {i}\n" for i in range(8)))
        clips = ("generate", "generate.prompt_file=prompts.txt", "generate.num_frames=1", "sampler.steps=240")
        killed, by_kill = self.lose(lambda task: os.kill(task, signal.SIGKILL), "normal", *clips)
        nodes = []
        cut_off, by_node = self.lose(lambda task: nodes.append(self.cluster.lose_node_of(task)), "spare", *clips)
        pixels = []
        for job, out in (killed, by_kill), (cut_off, by_node):
            facts = self.finish(job)
            self.assertEqual(facts["Restarts"], "1", self.output())
            report = json.loads((out / "generate_report.json").read_text())
            self.assertEqual((report["made"] + report["finished_before"], report["failures"]), (8, []))
            lines = [json.loads(line) for line in (out / "generated.jsonl").read_text().splitlines()]
            pixels.append({line["name"]: line["pixels"] for line in lines})
        self.assertEqual(len(pixels[0]), 8)
        self.assertEqual(pixels[0], pixels[1])
        said = [(self.site / f"weft-generate-{job}.out").read_text() for job in (killed, cut_off)]
        self.assertIn("weft generate ended with 137", said[0])
        for text in said:
            self.assertIn("weft generate ended with 0", text)
        self.show(f"job {killed}: SIGKILL of rank 1 in the middle, exit 137, queued again, exit 0; job {cut_off}: node {nodes[0]} "
                  f"gone with rank 1, queued again, the same clips")

    def test_the_first_node_dies_in_each_list_job(self):
        """The node of the batch script and of rank 0. Where --no-kill keeps the job, Slurm queues it again once its other nodes
        register, for which the test need not wait."""
        (self.site / "generate.toml").write_text(TINY_GENERATE_DECK)
        (self.site / "prompts.txt").write_text("".join(f"prompt {i}\n" for i in range(8)))
        (self.site / "animate.toml").write_text(ANIMATE_DECK)
        write_face(self.site)
        (self.site / "score.toml").write_text(SCORE_DECK)
        pictures(self.site, 240)
        (self.site / "segmentation.toml").write_text(SEGMENTATION_DECK)

        def table(out):
            return out.read_bytes()

        def pixels(out):
            lines = [json.loads(line) for line in (out / "generated.jsonl").read_text().splitlines()]
            self.assertEqual(len(lines), 8)
            return {line["name"]: line["pixels"] for line in lines}

        jobs = {
            "generate": (pixels, "generate.prompt_file=prompts.txt", "generate.num_frames=1", "sampler.steps=240"),
            "encode": (table, "data.path=synthetic:clips=200,frames=5,height=32,width=32", "encode.text=false"),
            "animate": (lambda out: (out / "face_speech.mp4").read_bytes(), "animate.picture=face.png",
                        "animate.speech=speech.wav"),
            "score": (table, "score.input=meta.csv"),
            "evaluate": (lambda out: json.loads((out / "evaluation.json").read_text())["classes"], "train.steps=2"),
        }
        undisturbed, lost = {}, {}
        for command, (_, *overrides) in jobs.items():
            script, deck = {"evaluate": ("segmentation", "segmentation.toml")}.get(command, (command, f"{command}.toml"))
            if command == "encode":
                deck = "generate.toml"
            ending = {"encode": ".h5", "score": ".csv"}.get(command, "")
            out = self.site / f"whole_{command}{ending}"
            trained = script == "segmentation"
            undisturbed[command] = self.sbatch(script, f"{command}.output={out.name}", *overrides, *["run.dir=whole_run"] * trained,
                                               deck=deck, options=SHAPE), out
            nodes = []
            lost[command] = *self.lose(lambda task: nodes.append(self.cluster.lose_node_of(task)), "spare", command, *overrides,
                                       *["run.dir=run"] * trained, deck=deck, rank=0, script=script), nodes
        def queued_again():
            self.cluster.run("scontrol", "reconfigure")  # all nodes register; counts from BatchStartTimeout (10 s) on
            time.sleep(2)
            return all(self.cluster.job(job).get("Restarts") == "1" for job, *_ in lost.values())
        self.until("second starts", queued_again)
        for command, (results, *_) in jobs.items():
            with self.subTest(command):
                job, out, nodes = lost[command]
                facts = self.finish(job)
                self.assertEqual(facts["Restarts"], "1", self.output())
                straight, whole = undisturbed[command]
                self.finish(straight)
                self.assertEqual(results(out), results(whole))
                self.show(f"job {job}, {command}: its first node {nodes[0]} gone, started again on {facts['NodeList']}, "
                          f"results equal to those of job {straight}")


if __name__ == "__main__":
    unittest.main()
