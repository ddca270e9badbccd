"""From footage to a clip: ingest, train, generate, report, inspect, export, and the weights back in."""

import json
import struct
import unittest

from harness import WeftTest, make_video, read_safetensors


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n", f"{path} is no PNG"
    return struct.unpack(">II", data[16:24])


SIZE = ("generate.image_size=[32,32]", "generate.num_frames=5")


class Pipeline(WeftTest):
    def test_the_whole_story(self):
        job = self.ingest(sources=("testsrc2", "smptebars"), seconds=4, frames=5)
        self.assertIn("16 clips", job.err)
        job = self.weft("inspect", "clips.h5", ranks=0)
        self.assertIn("every hash verified", job.out)
        self.assertIn("16 clips", job.out)

        data = "data.path=clips.h5"
        self.train("run", data)
        losses = self.losses("run")
        self.assertLess(sum(losses[-5:]) / 5, 0.7 * losses[0])

        few = ("run.dir=run", "sampler.steps=4", *SIZE)
        self.weft("generate", "deck.toml", *few, "generate.num_samples=3")
        made = self.dir / "run" / "generated"
        for i in range(3):
            self.assertIn(b"ftyp", (made / f"sample_0000-{i}.mp4").read_bytes()[:16])
        for rank in json.loads((made / "generate_report.json").read_text())["ranks"]:
            # References would take a little more.
            self.assertLessEqual(rank["arena_peak_bytes"], rank["arena_planned_bytes"])
            self.assertGreater(rank["arena_peak_bytes"], 0.95 * rank["arena_planned_bytes"])
        self.weft("generate", "deck.toml", *few, "generate.num_frames=1", "generate.output=image", ranks=1)
        self.assertEqual(png_size(self.dir / "image" / "sample_0000.png"), (32, 32))
        # Two given frames begin the clip, and come out as they are.
        self.weft("generate", "deck.toml", *few, "generate.references=['lavfi:color=red:duration=1:size=32x32:rate=10']",
                  "generate.mask_strategies=['0,0,0,0,2']", "generate.tensors=true", "generate.output=went_on")
        _, shape, values = read_safetensors(self.dir / "went_on" / "sample_0000.safetensors")["latent_0"]
        self.assertEqual(shape, (3, 5, 32, 32))
        red, green = (struct.unpack_from("<2048f", values, 4 * channel * 5 * 1024) for channel in (0, 1))
        self.assertGreater(min(red), 0.9)
        self.assertLess(max(green), -0.9)

        job = self.weft("report", "run", ranks=0)
        page = (self.dir / "run" / "report.html").read_text()
        self.assertIn("report.html", job.out)
        self.assertEqual(self.page_data("run/report.html")["runs"][0]["steps"]["last"], 20)
        self.assertEqual(page.count("data:video/mp4"), 3)
        self.assertNotIn("http://", page.replace("http://www.w3.org", ""))

        job = self.weft("inspect", "run", ranks=0)
        self.assertIn("latest -> step_20", job.out)
        job = self.weft("inspect", "run/latest", ranks=0)
        self.assertIn("every byte matches its hash", job.out)

        self.weft("export", "run", "w.safetensors", ranks=0)
        self.weft("export", "run", "ema.safetensors", "--ema", ranks=0)
        weights, average = (read_safetensors(self.dir / f"{n}.safetensors") for n in ("w", "ema"))
        self.assertEqual(weights.keys(), average.keys())
        self.assertNotEqual(weights, average)
        for name in ("x_embedder.proj.weight", "y_embedder.y_embedding",
                     "spatial_blocks.0.attn.qkv.weight", "final_layer.linear.bias"):
            self.assertIn(name, weights)
        self.assertIn("final_layer.linear.bias",
                      self.weft("inspect", "w.safetensors", ranks=0).out)

        # Back in: nothing is trained at a rate of 0, so the same weights come out.
        self.train("again", data, "model.weights=w.safetensors", "train.lr=0", "train.steps=1")
        self.assertEqual(self.exported("again"), weights)
        self.weft("generate", "deck.toml", *SIZE, "sampler.steps=2", "generate.weights=w.safetensors",
                  "generate.output=from_file", "run.dir=nowhere")
        self.assertTrue((self.dir / "from_file" / "sample_0000.mp4").is_file())

    def test_broken_video_is_skipped_named_and_counted(self):
        (self.dir / "broken.mp4").write_bytes(b"no video at all" * 100)
        make_video(self.dir / "good.mp4", "testsrc2=duration=1:size=64x64:rate=10")
        rows = [{"path": "broken.mp4", "text": "nothing"}, {"path": "good.mp4", "text": "a test picture"}]
        (self.dir / "list.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        arguments = ("ingest", "deck.toml", "ingest.inputs=list.jsonl", "ingest.frames=[3]",
                     "ingest.height=32", "ingest.width=32", "ingest.output=clips.h5")
        job = self.weft(*arguments)
        self.assertRegex(job.err, r"WARN: skipped .*broken\.mp4")
        self.assertIn("1 broken", job.err)
        self.assertIn("a test picture", self.weft("inspect", "clips.h5", ranks=0).out)
        job = self.weft(*arguments, "ingest.strict=true", expect=3)
        self.assertIn("WARN: clips.h5 is there already: the new one replaces it once it is complete", job.err)

    def test_ingest_does_not_depend_on_the_rank_count(self):
        sources = ",".join(f"'lavfi:{s}=duration=1:size=64x64:rate=10'"
                           for s in ("testsrc2", "smptebars", "mandelbrot"))
        for ranks in (1, 3):
            self.weft("ingest", "deck.toml", f"ingest.inputs=[{sources}]", "ingest.frames=[3]",
                      "ingest.height=32", "ingest.width=32", f"ingest.output=on{ranks}.h5",
                      ranks=ranks)
        self.assertEqual((self.dir / "on1.h5").read_bytes(), (self.dir / "on3.h5").read_bytes())

    def test_ingest_with_nothing_to_read(self):
        job = self.weft("ingest", "deck.toml", "ingest.inputs=nowhere.mp4", expect=None)
        self.assertEqual(job.process.returncode, 3, job.err)
        self.assertIn("nowhere.mp4", job.err)
        self.assertFalse((self.dir / "clips.h5").exists())
        self.refused(self.weft("ingest", "deck.toml", expect=None), 2, "ingest.inputs is empty")


if __name__ == "__main__":
    unittest.main()
