"""`weft reconstruct` on a tiny VAE with random weights: footage in, both sides and figures out, at any rank count."""

import json
import os
import shutil
import unittest

from harness import WeftTest

DECK = """
[run]
dir = "run"
threads = 1
[model]
name = "vae"
[vae]
weights = "random:7"
spatial_channels = [8, 16]
spatial_res_blocks = 1
spatial_groups = 4
filters = 8
num_res_blocks = 1
channel_multipliers = [1, 1, 2]
temporal_downsample = [true, true]
num_groups = 4
micro_frame_size = 5
[reconstruct]
inputs = ["lavfi:testsrc2=duration=1:rate=12:size=32x25", "lavfi:smptebars=duration=1:rate=1:size=24x16"]
"""


class Reconstruct(WeftTest):
    def setUp(self):
        super().setUp()
        (self.dir / "vae.toml").write_text(DECK)

    def results(self, ranks, *overrides):
        shutil.rmtree(self.dir / "run/reconstructed", ignore_errors=True)  # what is finished would stay
        self.weft("reconstruct", "vae.toml", *overrides, ranks=ranks)
        return json.loads((self.dir / "run/reconstructed/reconstruct.json").read_text())

    def test_figures_do_not_depend_on_the_ranks(self):
        one, two = self.results(1), self.results(2)
        self.assertEqual(self.cited("run/reconstructed/cite.bib"), ["weft", "opensora", "ssim"])
        self.assertEqual(one["latent"], two["latent"])
        for a, b in zip(one["clips"], two["clips"]):
            for key in ("output", "frames", "height", "width", "latent_frames", "psnr", "ssim"):
                self.assertEqual(a[key], b[key], key)
            self.assertEqual(a["planned_bytes"], a["peak_bytes"])
            self.assertFalse({"name", "file", "bytes", "file_xxh3", "xxh3"} & set(a), "members of the manifest's line alone")
        # 12 frames are chunks of 5, 5 and 2; an odd row is cut off.
        clip, picture = one["clips"]
        self.assertEqual([clip["frames"], clip["latent_frames"], clip["height"]], [12, 5, 24])
        self.assertTrue((self.dir / clip["output"]).suffix == ".mp4" and (self.dir / clip["output"]).exists())
        self.assertTrue((self.dir / picture["output"]).suffix == ".png" and (self.dir / picture["output"]).exists())
        self.assertEqual(len(one["latent"]["mean"]), 4)

    def test_any_file_name(self):
        picture = self.results(1, "reconstruct.inputs=['lavfi:smptebars=duration=1:rate=1:size=24x16']")["clips"][0]
        (self.dir / "pictures").mkdir()
        os.rename(self.dir / picture["output"], os.fsencode(self.dir) + b"/pictures/caf\xe9.png")
        self.assertEqual(self.results(1, "reconstruct.inputs=['pictures/*.png']")["clips"][0]["input"],
                         "pictures/caf\\xe9.png")
        self.weft("report", "run/reconstructed", ranks=0)
        shown, = self.page_data("run/reconstructed/report.html")["galleries"][0]["clips"]
        self.assertEqual(shown["line"]["input"], "pictures/caf\\xe9.png")

    def test_a_file_that_cannot_be_read_is_skipped(self):
        (self.dir / "a.mp4").write_bytes(b"no video")
        inputs = "reconstruct.inputs=['a.mp4','lavfi:smptebars=duration=1:rate=1:size=24x16','lost.mp4']"
        figures = []
        for ranks in (1, 2):
            shutil.rmtree(self.dir / "run/reconstructed", ignore_errors=True)
            job = self.weft("reconstruct", "vae.toml", inputs, ranks=ranks)
            for name in ("a.mp4", "lost.mp4"):
                self.assertRegex(job.err, rf"WARN: skipped {name}: cannot open (video )?{name}: ")
            self.assertRegex(job.err, r"all  .* over 1 clip; 2 inputs skipped")
            all = json.loads((self.dir / "run/reconstructed/reconstruct.json").read_text())
            self.assertEqual([s["input"] for s in all["skipped"]], ["a.mp4", "lost.mp4"])
            figures.append((all["psnr"], all["latent"], all["clips"][0]["output"]))
        self.assertEqual(*figures)
        self.assertTrue(figures[0][2].endswith("/0001_lavfi.png"))
        self.weft("report", "run/reconstructed", ranks=0)
        self.assertIn("cannot open video a.mp4", (self.dir / "run/reconstructed/report.html").read_text())
        # None is left: the first fault is the job's.
        job = self.weft("reconstruct", "vae.toml", "reconstruct.inputs=['a.mp4']", ranks=2, expect=None)
        self.refused(job, 3, "none of 1 input can be read; the first fault: cannot open video a.mp4")

    def test_the_same_command_makes_what_is_missing(self):
        out = self.dir / "run/reconstructed"
        before = self.results(2)
        os.remove(out / "0001_lavfi.png")
        (self.dir / "later.mp4").write_bytes(b"no video yet")
        inputs = "reconstruct.inputs=['lavfi:testsrc2=duration=1:rate=12:size=32x25','lavfi:smptebars=duration=1:rate=1:size=24x16'," \
                 "'later.mp4']"
        job = self.weft("reconstruct", "vae.toml", inputs, ranks=2)
        self.assertIn("1 made, 1 finished before, 0 failed, of 3", job.err)
        again = json.loads((out / "reconstruct.json").read_text())
        self.assertEqual(again["clips"][0], before["clips"][0])
        self.assertEqual(again["latent"], before["latent"])
        self.assertEqual([s["input"] for s in again["skipped"]], ["later.mp4"])
        os.replace(out / "0000_lavfi.mp4", self.dir / "later.mp4")
        # What was skipped is tried again, and what was taken away made again.
        job = self.weft("reconstruct", "vae.toml", inputs, ranks=1)
        self.assertIn("2 made, 1 finished before, 0 failed, of 3", job.err)
        self.assertEqual(len(json.loads((out / "reconstruct.json").read_text())["clips"]), 3)

    def test_results_of_another_request_stay(self):
        source = "reconstruct.inputs=['lavfi:smptebars=duration=1:rate=1:size=24x16']"
        ask = lambda *more, **how: self.weft("reconstruct", "vae.toml", source, *more, ranks=0, replace=False, **how)
        ask()
        before = (self.dir / "run/reconstructed/0000_lavfi.png").read_bytes()
        ask()
        self.refused(ask("vae.weights=random:8", expect=None), 4, "1 finished result of another request", "--replace")
        self.assertEqual((self.dir / "run/reconstructed/0000_lavfi.png").read_bytes(), before)
        # Also those of a weft that had no manifest here.
        manifest = self.dir / "run/reconstructed/reconstruct.jsonl"
        os.remove(manifest)
        self.refused(ask("vae.weights=random:8", expect=None), 4, "1 finished result of another request",
                     "0000_lavfi.png", "--replace")
        self.assertEqual((self.dir / "run/reconstructed/0000_lavfi.png").read_bytes(), before)
        self.assertFalse(manifest.exists())
        self.assertIn("1 made, 0 finished before", ask().err)
        self.assertIn("replaces 1 finished result", ask("vae.weights=random:8", "--replace").err)
        ask("vae.weights=random:8")

    def test_inputs_that_are_no_media_fail_alone(self):
        (self.dir / "names.txt").write_text("a\n")
        (self.dir / "empty").mkdir()
        job = self.weft("reconstruct", "vae.toml", ranks=0, replace=False,
                        *["reconstruct.inputs=['names.txt','empty','lavfi:smptebars=duration=1:rate=1:size=24x16']"])
        self.assertRegex(job.err, "over 1 clip; 2 inputs skipped")
        for name in ("names.txt", "empty"):
            self.assertRegex(job.err, f"WARN: skipped {name}: ")

    def test_bad_input(self):
        self.refused(self.weft("reconstruct", "vae.toml", "reconstruct.inputs=[]", ranks=1, expect=None), 2,
                     "reconstruct.inputs")
        self.refused(self.weft("reconstruct", "vae.toml", "reconstruct.inputs=['nowhere.mp4']", ranks=2, expect=None), 3,
                     "nowhere.mp4")
        self.refused(self.weft("reconstruct", "vae.toml", "reconstruct.output=vae.toml", ranks=2, expect=None), 3,
                     "cannot make the folder vae.toml")
        self.refused(self.weft("reconstruct", "vae.toml", "memory.arena_gib=0.0001", ranks=1, expect=None), 2,
                     "memory.arena_gib")


if __name__ == "__main__":
    unittest.main()
