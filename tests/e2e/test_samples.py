"""Sample clips while training ([samples]): the bytes that `weft generate` makes of that checkpoint, and no trace in the training."""

import json
import os
import shutil
import unittest

from harness import WeftTest

CLIPS = ("generate.image_size=[16,16]", "generate.num_frames=3", "sampler.steps=3", 'samples.prompts=["a","b","c"]')
EVERY = "samples.every=4"


class Samples(WeftTest):
    def files(self, folder):
        """{name: bytes} of the clips."""
        return {p.name: p.read_bytes() for p in sorted((self.dir / folder).glob("sample_*"))}

    def generated(self, run, *options, ranks=1):
        self.weft("generate", "deck.toml", f"run.dir={run}", "generate.output=generated", 'generate.prompts=["a","b","c"]', *CLIPS,
                  *options, ranks=ranks)
        found = self.files("generated")
        shutil.rmtree(self.dir / "generated")
        return found

    def test_as_weft_generate_makes_them_on_any_ranks(self):
        self.train("without", "train.steps=8")
        for ranks in (1, 2, 3):
            with self.subTest(ranks=ranks):
                run = f"on{ranks}"
                job = self.train(run, "train.steps=8", *CLIPS, EVERY, ranks=ranks)
                self.assertEqual(sorted(os.listdir(self.dir / run / "samples")), ["4", "8"])
                found = self.files(f"{run}/samples/8")
                self.assertEqual(list(found), ["sample_0000.mp4", "sample_0001.mp4", "sample_0002.mp4"])
                self.assertEqual(found, self.generated(run))
                self.assertNotEqual(found, self.files(f"{run}/samples/4"))
                lines = [json.loads(line) for line in (self.dir / run / "samples/8/generated.jsonl").read_text().splitlines()]
                self.assertEqual([line["name"] for line in lines], ["sample_0000", "sample_0001", "sample_0002"])
                self.assertEqual({line["rank"] for line in lines}, set(range(ranks)))
                self.assertIn("samples   step 8", job.err)
        self.assert_same_run("without", "on2")
        # Of the weights themselves.
        self.train("raw", "train.steps=4", *CLIPS, EVERY, "generate.ema=false")
        self.assertEqual(self.files("raw/samples/4"), self.generated("raw", "generate.ema=false", ranks=2))
        shared = self.train("shared", "train.steps=4", *CLIPS, EVERY, "parallel.sp=2")
        self.assertEqual(len(self.files("shared/samples/4")), 3, shared.err)

    def test_a_restart_makes_what_is_missing(self):
        self.train("run", "train.steps=8", *CLIPS, EVERY)
        before = self.files("run/samples/8")
        shutil.rmtree(self.dir / "run" / "samples" / "8")
        self.train("run", "train.steps=8", *CLIPS, EVERY)
        self.assertEqual(self.files("run/samples/8"), before)

    def test_killed_while_they_are_made_no_line_is_missing(self):
        """The line of a step stands before its checkpoint counts."""
        options = ("train.steps=6", *CLIPS, EVERY, "train.checkpoint_every=100")
        job = self.start("train", "deck.toml", "run.dir=run", *options, "sampler.steps=20000", ranks=0)
        self.until(job, lambda: (self.dir / "run" / "latest").is_symlink())
        job.kill()
        job.wait()
        self.assertEqual(len(self.metrics("run")), 4)
        again = self.train("run", *options, ranks=0)
        self.assertEqual(len(self.metrics("run")), 6)
        self.assertNotIn("metrics.jsonl", again.err)

    def test_pages_show_them(self):
        self.train("run", "train.steps=8", *CLIPS, EVERY)
        self.weft("report", "run", ranks=0)
        shown = self.page_data("run/report.html")["runs"][0]["through_time"]
        self.assertEqual([(g["name"], len(g["clips"])) for g in shown], [("step 4", 3), ("step 8", 3)])
        self.weft("report", "--tensorboard", "events", "run", ranks=0)
        events = (self.dir / "events" / "run" / "events.out.tfevents.weft").read_bytes()
        self.assertEqual(events.count(b"samples/sample_0001"), 2)
        self.assertEqual(events.count(b"\x89PNG"), 6)
        self.assertEqual(os.listdir(self.dir / "events" / "run"), ["events.out.tfevents.weft"])

    def test_what_cannot_be(self):
        self.refused(self.train("bad", EVERY, expect=None), 2, "samples.prompts is empty")
        self.refused(self.train("bad", *CLIPS, EVERY, "generate.image_size=[512,512]", "generate.num_frames=99",
                                "memory.arena_gib=0.02", expect=None), 2, "a clip of")


if __name__ == "__main__":
    unittest.main()
