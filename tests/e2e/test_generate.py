"""weft generate on tiny models: the same pixels at any rank count, restarts, what fails, and bad input."""

import collections
import contextlib
import functools
import http.server
import json
import os
import shutil
import signal
import struct
import threading
import time
import unittest

from harness import WeftTest, code_of_signal, read_safetensors, without_hashes, write_safetensors
from tiny_models import TINY_GENERATE_DECK, write_t5


class QuietFiles(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class Generate(WeftTest):
    def setUp(self):
        super().setUp()
        (self.dir / "deck.toml").write_text(TINY_GENERATE_DECK)
        write_t5(self.dir / "t5")

    def generate(self, *overrides, ranks=0, expect=0, text=True, prompts=("a cat", "a dog")):
        (self.dir / "prompts.txt").write_text("\n".join(prompts) + "\n")
        return self.weft("generate", "deck.toml", *self.options(*overrides, text=text), ranks=ranks,
                         expect=expect)

    def options(self, *overrides, text=True):
        return ["generate.prompt_file=prompts.txt", *(["t5.weights=t5"] if text else []), *overrides]

    def clips(self, output="out"):
        """{name: line of the manifest}"""
        lines = (self.dir / output / "generated.jsonl").read_text().splitlines()
        return {line["name"]: line for line in map(json.loads, lines)}

    def pixels(self, output="out"):
        return {name: line["pixels"] for name, line in self.clips(output).items()}

    def report(self, output="out"):
        return json.loads((self.dir / output / "generate_report.json").read_text())

    def assert_same_frames(self, one, other, limit=1e-4):
        """Tensors that differ by the order of sums alone."""
        a, b = read_safetensors(self.dir / one), read_safetensors(self.dir / other)
        self.assertEqual(a.keys(), b.keys())
        for name, (dtype, shape, values) in a.items():
            self.assertEqual((dtype, shape), b[name][:2], name)
            x, y = (struct.unpack(f"<{len(v) // 4}f", v) for v in (values, b[name][2]))
            largest = max(abs(v) for v in x)
            self.assertGreater(largest, 0)
            self.assertLess(max(abs(p - q) for p, q in zip(x, y)), limit * largest, f"{other} {name}")

    def test_same_pixels_at_any_rank_count(self):
        prompts = ["a cat", "a dog", "|0|rain|1|sun", "a bird {\"num_frames\": 1}",
                   "a fish {\"num_frames\": 34}"]
        loops = ["generate.loop=2", "generate.condition_frame_length=0"]
        self.generate(*loops, "generate.tensors=true", prompts=prompts)
        one = self.pixels()
        self.assertEqual(len(set(one.values())), 5)
        # Other prompts are other clips, not only other noise.
        self.generate(*loops, "generate.output=null", text=False, prompts=prompts)
        self.assertTrue(all(one[name] != other for name, other in self.pixels("null").items()))
        self.generate(*loops, "generate.output=out2", ranks=2, prompts=prompts)
        self.generate(*loops, "generate.output=out3", ranks=3, prompts=prompts)
        self.generate(*loops, "generate.output=sp", "parallel.sp=2", "generate.tensors=true", ranks=2,
                      prompts=prompts)
        for output in ("out2", "out3"):
            self.assertEqual(self.pixels(output), one, output)
        self.assertEqual(self.pixels("sp").keys(), one.keys())
        for name in one:
            self.assert_same_frames(f"out/{name}.safetensors", f"sp/{name}.safetensors")
        took = self.summary("out2")
        self.assertEqual((took["speed"]["unit"], took["speed"]["items"]), ("clip", 5))
        self.assertEqual(list(took["wall"]), ["start", "text", "weights", "clips", "end"])
        self.assertEqual(list(took["parts"]), ["encode", "sample", "decode", "write_wait", "idle", "other"])
        ranks = self.report("out2")["ranks"]
        self.assertEqual(sum(r["clips"] for r in ranks), 5)
        for r in ranks:
            self.assertLessEqual(r["arena_peak_bytes"], r["arena_planned_bytes"])
        # A slice of the file with more samples makes the same clips again.
        self.generate(*loops, "generate.output=slice", "generate.start_index=1", "generate.end_index=2",
                      "generate.num_samples=2", text=False, prompts=prompts)
        slice_, whole = self.pixels("slice"), self.pixels("null")
        self.assertEqual(slice_["sample_0001-0"], whole["sample_0001"])
        self.assertNotEqual(slice_["sample_0001-1"], whole["sample_0001"])

    def test_clips_that_are_sampled_together(self):
        long = " {\"num_frames\": 17}"
        prompts = ["a cat" + long, "a dog on a roof", "rain", "a fox in the long grass" + long, "a bird", "sun",
                   "a fish" + long, "a tree"]
        settings = ["generate.num_frames=1", "generate.tensors=true"]
        self.generate(*settings, "generate.output=alone", prompts=prompts)
        self.assertEqual(self.report("alone")["ranks"][0]["batches"], {"1": 8})
        settings += ["generate.batch_size=3"]
        self.generate(*settings, ranks=2, prompts=prompts)
        # Three clips for two ranks are two and one, five pictures three and two.
        taken = collections.Counter()
        for rank in self.report()["ranks"]:
            taken.update(rank["batches"])
            self.assertLessEqual(rank["arena_peak_bytes"], rank["arena_planned_bytes"])
        self.assertEqual(taken, {"1": 1, "2": 2, "3": 1})
        for name in self.clips():
            self.assert_same_frames(f"alone/{name}.safetensors", f"out/{name}.safetensors", 1e-5)
        # One text is spoilt: of its batch that clip alone fails, and alone it is made when the text is good again.
        features = self.dir / "out" / "text_features.safetensors"
        good = features.read_bytes()
        dog = read_safetensors(features)["1"][2]
        spoilt = good.replace(dog, b"\xff" * len(dog))
        features.write_bytes(without_hashes(spoilt))
        for name in ("sample_0001", "sample_0002", "sample_0004"):
            os.remove(self.dir / "out" / f"{name}.png")
        self.assertIn("sample_0001: the latent of loop 0 is not finite",
                      self.generate(*settings, expect=3, prompts=prompts).err)
        self.assertEqual(self.report()["ranks"][0]["batches"], {"3": 1})
        # With the hashes that weft writes, no clip is made of it.
        features.write_bytes(spoilt)
        self.assertRegex(self.generate(*settings, expect=3, prompts=prompts).err,
                         r"text_features.safetensors: tensor 1 is damaged: its XXH3-128 is")
        features.write_bytes(good)
        self.assertIn("1 made, 7 finished before", self.generate(*settings, prompts=prompts).err)
        self.assert_same_frames("alone/sample_0001.safetensors", "out/sample_0001.safetensors", 1e-5)

    def test_solvers_and_a_step_cache(self):
        steps = ["sampler.steps=8"]
        self.generate(*steps, ranks=2)
        plain = self.pixels()
        for solver in ("unipc", "dpm++"):
            self.generate(*steps, f"sampler.solver={solver}", f"generate.output={solver}", ranks=2)
            self.assertTrue(all(plain[name] != pixels for name, pixels in self.pixels(solver).items()), solver)
        # A threshold of 0 gives the same pixels, and clips of before such keys count as finished.
        off = ["sampler.cache=teacache", "sampler.cache_threshold=0"]
        self.generate(*steps, *off, "generate.output=off")
        self.assertEqual(self.pixels("off"), plain)
        before = self.clips()
        self.assertIn("2 finished before", self.generate(*steps, *off).err)
        self.assertEqual(self.clips(), before)
        # All but the first and the last, of EasyCache the first two, in groups of ranks too.
        for cache, skipped in (("teacache", 6), ("easycache", 5)):
            on = [*steps, f"sampler.cache={cache}", "sampler.cache_threshold=1000"]
            log = self.generate(*on, f"generate.output={cache}", "generate.tensors=true").err
            self.assertIn(f"{2 * skipped} of 16 steps skipped", log)
            ranks = self.report(cache)["ranks"]
            self.assertEqual([(r["steps"], r["steps_skipped"]) for r in ranks], [(16, 2 * skipped)])
            self.assertTrue(all(plain[name] != pixels for name, pixels in self.pixels(cache).items()))
            self.generate(*on, f"generate.output={cache}_sp", "generate.tensors=true", "parallel.sp=2", ranks=2)
            ranks = self.report(f"{cache}_sp")["ranks"]
            self.assertEqual(sum(r["steps_skipped"] for r in ranks), 2 * skipped)
            for r in ranks:
                self.assertLessEqual(r["arena_peak_bytes"], r["arena_planned_bytes"])
            for name in plain:
                self.assert_same_frames(f"{cache}/{name}.safetensors", f"{cache}_sp/{name}.safetensors")

    def test_killed_and_restarted(self):
        prompts = [f"prompt {i}" for i in range(8)]
        many = ["sampler.steps=40"]
        self.generate(*many, "generate.output=whole", ranks=2, prompts=prompts)
        for _ in range(20):  # until the kill does not come too late
            shutil.rmtree(self.dir / "out", ignore_errors=True)
            job = self.start("generate", "deck.toml", *self.options(*many), ranks=2)
            # Of three clips one has its line in a manifest, for a rank writes that before it begins another.
            while job.process.poll() is None and len(list((self.dir / "out").glob("sample_*.mp4"))) < 3:
                time.sleep(0.005)
            for rank in job.ranks().values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
            job.wait()
            self.assert_gone(job)
            kept = {p.name: p.stat().st_mtime_ns for p in (self.dir / "out").glob("sample_*.mp4")}
            if 0 < len(kept) < 8:
                break
        again = self.generate(*many, ranks=3, prompts=prompts)
        report = self.report()
        self.assertGreaterEqual(report["finished_before"], 1)
        self.assertEqual(report["made"] + report["finished_before"], 8)
        self.assertIn(" cached in ", again.err)
        self.assertEqual(self.pixels(), self.pixels("whole"))
        names = sorted(os.listdir(self.dir / "out"))
        self.assertEqual([n for n in names if "rank" in n or "partial" in n], [])
        # Finished clips stay as they are, but one whose line was lost with the rank may be made again.
        touched = [n for n, t in kept.items() if (self.dir / "out" / n).stat().st_mtime_ns != t]
        self.assertLessEqual(len(touched), 2)
        # A clip that is gone, and another seed: made anew.
        os.remove(self.dir / "out" / "sample_0003.mp4")
        self.assertIn("1 made, 7 finished before", self.generate(*many, prompts=prompts).err)

    def test_an_item_that_two_ranks_died_with_is_given_up(self):
        (self.dir / "prompts.txt").write_text("a cat\n")
        slow = ["sampler.steps=20000", "generate.num_frames=1"]
        whole, part = (self.dir / "out" / f"generated{rank}.jsonl" for rank in ("", ".rank0"))

        def is_in_hand(death):
            if whole.exists() != (death > 0):  # first: the part of the death before stands until then
                return False
            lines = part.read_text().splitlines() if part.exists() else []
            return bool(lines) and "begun" in lines[-1]

        for death in range(2):
            job = self.start("generate", "deck.toml", *self.options(*slow), ranks=1)
            while job.process.poll() is None:
                with contextlib.suppress(FileNotFoundError):  # it has just gone into the whole
                    if is_in_hand(death):
                        break
                time.sleep(0.005)
            for pid in job.ranks().values():
                os.kill(pid, signal.SIGKILL)
            self.assertIn(job.wait(), code_of_signal(signal.SIGKILL), job.err)
        job = self.generate(*slow, expect=3, prompts=["a cat"])
        self.assertIn("failed    sample_0000: gave up after 2 ranks died", job.err)
        self.assertEqual(json.loads(whole.read_text())["died"], 2)

    def test_a_stop_of_one_rank_stops_all(self):
        prompts = [f"prompt {i}" for i in range(5000)]  # more than are made before it stops
        (self.dir / "prompts.txt").write_text("\n".join(prompts) + "\n")
        slow = ["sampler.steps=120", "generate.num_frames=1"]
        for ask in ("signal", "file"):
            output = f"generate.output={ask}"
            job = self.start("generate", "deck.toml", *self.options(*slow, output, text=False), ranks=2)
            self.until(job, lambda: any((self.dir / ask).glob("sample_*.png")))
            if ask == "signal":
                os.kill(job.ranks()[1], signal.SIGUSR1)
            else:
                (self.dir / ask / "stop").touch()
            self.assertEqual(job.wait(), 75, job.err_so_far())
            self.assertLess(self.report(ask)["made"], 5000)
            self.assertEqual((self.dir / ask / "stopped").exists(), ask == "file")

    def test_a_clip_that_fails_leaves_the_others(self):
        (self.dir / "broken.png").write_bytes(b"no picture")
        prompts = ["a cat {\"num_frames\": 1}",
                   "a dog {\"reference_path\": \"broken.png\", \"mask_strategy\": \"0\"}", "a bird"]
        job = self.generate(ranks=2, expect=3, prompts=prompts)
        self.assertIn("1 of 3 clips failed", job.err)
        self.assertIn("broken.png", job.err)
        self.assertEqual(sorted(self.clips()), ["sample_0000", "sample_0002"])
        # The same where groups of ranks share a clip: each group goes on in step.
        self.generate("generate.output=sp", "parallel.sp=2", ranks=2, expect=3, prompts=prompts)
        self.assertEqual(sorted(self.clips("sp")), ["sample_0000", "sample_0002"])
        # With a picture in its place only that clip is made. It begins with the picture: its latent is not noise.
        os.replace(self.dir / "out" / "sample_0000.png", self.dir / "broken.png")
        self.assertIn("2 made, 1 finished before", self.generate(prompts=prompts).err)

    def test_references_loops_and_watermark(self):
        self.generate("generate.num_frames=1", "generate.output=pictures", text=False)
        prompts = ["a cat {\"reference_path\": \"pictures/sample_0000.png\", \"mask_strategy\": \"0\"}",
                   "|0|a dog|1|a fox"]
        base = ["generate.num_frames=34", "generate.loop=2"]
        self.generate(*base, "generate.watermark=pictures/sample_0001.png", "generate.fps=12",
                      prompts=prompts)
        clips = self.clips()
        self.assertEqual([c["frames"] for c in clips.values()], [51, 51])  # 34 + 34 - 17
        self.assertEqual(clips["sample_0000"]["height"], 32)
        self.assertTrue((self.dir / "out" / "sample_0001_watermark.mp4").exists())
        # The page shows what the first one began with.
        self.assertEqual(clips["sample_0000"]["references"], ["references/sample_0000-0.png"])
        self.assertNotIn("references", clips["sample_0001"])
        self.weft("report", "out", ranks=0)
        shown = self.page_data("out/report.html")["galleries"][0]["clips"]
        self.assertEqual([len(c["references"]) for c in shown], [1, 0])
        self.assertIn("data", shown[0]["references"][0]["media"])
        # References, what the second loop goes on from and its text each change the clip.
        for output, overrides, changed in (
                ("plain", base, ["sample_0000"]),
                ("edit", [*base, "generate.condition_frame_edit=0.5"], ["sample_0000", "sample_0001"])):
            self.generate(*overrides, "generate.fps=12", f"generate.output={output}",
                          prompts=["a cat", prompts[1]] if output == "plain" else prompts)
            pixels = self.pixels(output)
            self.assertEqual([n for n in pixels if pixels[n] != clips[n]["pixels"]], changed)

    def test_texts_are_refined_and_references_fetched(self):
        self.generate("generate.num_frames=1", "generate.output=pictures", text=False, prompts=["a cat"])
        files = functools.partial(QuietFiles, directory=self.dir / "pictures")
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), files) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{server.server_port}"
            prompt = "a dog {\"reference_path\": \"%s\", \"mask_strategy\": \"0\"}"
            ask = ["generate.refine=echo once >> runs.txt; tr a-z A-Z", "generate.output=fetched"]
            there = [prompt % f"{address}/sample_0000.png"]
            self.generate(*ask, ranks=2, prompts=there)
            self.refused(self.generate(expect=None, prompts=[prompt % f"{address}/none.png"]), 3,
                         "prompts.txt:1", "none.png", "404")
            server.shutdown()
        # The same from files; and what was fetched and refined once serves a job that goes on.
        self.generate("generate.output=local", prompts=["A DOG " + prompt[6:] % "pictures/sample_0000.png"])
        self.assertEqual(self.pixels("fetched"), self.pixels("local"))
        (self.dir / "fetched" / "sample_0000.mp4").unlink()
        self.generate(*ask, prompts=there)
        self.assertEqual(self.pixels("fetched"), self.pixels("local"))
        self.assertEqual((self.dir / "runs.txt").read_text(), "once\n")
        # One text for many numbers: each is asked for once, and keeps its answer in another slice.
        count = ["generate.prompt_generator=a cat", "generate.refine=cat -n", "generate.num_frames=1",
                 "generate.output=counted"]
        for first, last, made in ((2, 4, 2), (3, 5, 1)):
            job = self.weft("generate", "deck.toml", *count, f"generate.start_index={first}",
                            f"generate.end_index={last}", ranks=0)
            self.assertIn(f"{made} made, {2 - made} finished before", job.err)
        self.assertEqual(sorted(self.clips("counted")), ["sample_0002", "sample_0003", "sample_0004"])
        texts = json.loads((self.dir / "counted" / "refined_texts.json").read_text())["texts"]
        self.assertEqual([int(t.split()[0]) for t in texts.values()], [1, 2, 1])
        for command, said in (("cat; echo more", "2 lines"), ("exit 3", "with code 3"),
                              ("echo", "is empty")):
            self.refused(self.generate("generate.output=bad", f"generate.refine={command}", expect=None,
                                       prompts=["a cat"]), 3, "generate.refine", said)

    def test_less_memory_takes_fewer_frames_at_once(self):
        self.generate()
        whole = self.report()["ranks"][0]
        job = self.generate("generate.output=less",
                            f"memory.arena_gib={whole['arena_planned_bytes'] * 0.8 / 2**30}")
        self.assertRegex(job.err, r"micro-batch reduced to \d frames \(asked: 4\) to fit")
        less = self.report("less")["ranks"][0]
        self.assertLess(less["micro_batch"], whole["micro_batch"])
        self.assertLessEqual(less["arena_peak_bytes"], less["arena_capacity_bytes"])
        self.assertEqual(self.pixels("less"), self.pixels())

    def test_plan_of_host_memory_does_not_grow_with_the_clip(self):
        peaks = []
        for chunks in (2, 4):
            output = f"generate.output=out{chunks}"
            self.generate("generate.loop=2", f"generate.num_frames={17 * chunks}", output, text=False,
                          prompts=["a cat"])
            rank = self.report(f"out{chunks}")["ranks"][0]
            peaks.append(rank["frames_planned_bytes"])
        frame = 3 * 32 * 48
        # Four pieces of four frames on their way, and the 17 that the second loop goes on from in f32.
        self.assertEqual(peaks, 2 * [4 * 4 * frame + 17 * frame * 4])

    def test_bad_input(self):
        def refused(code, *said, prompts=("a cat",), overrides=(), text=False):
            self.refused(self.generate(*overrides, expect=None, text=text, prompts=prompts), code, *said)

        refused(3, "prompts.txt:2", "broken JSON", prompts=["a", "a cat {\"mask_strategy\": "])
        refused(3, "reference file", "cat.png",
                prompts=["a {\"reference_path\": \"cat.png\", \"mask_strategy\": \"0\"}"])
        refused(2, "vae.weights is empty", overrides=["vae.weights="])
        refused(3, 't5.weights = "none" does not exist', overrides=["t5.weights=none"])
        refused(2, "cannot be the name of a file: it holds a slash", overrides=["generate.sample_name=a/b"])
        refused(2, "sampler.solver", "euler, unipc, dpm++", overrides=["sampler.solver=heun"])
        refused(2, 'sampler.cache is "none"', overrides=["sampler.cache_threshold=0.1"])
        refused(2, "cannot be the name of a file: it is too long",
                overrides=["generate.sample_name=" + "a" * 225])
        (self.dir / "prompts.txt").write_bytes(b"caf\xe9\n")
        self.refused(self.weft("generate", "deck.toml", *self.options(text=False), ranks=0, expect=None),
                     3, "prompts.txt:1", "not UTF-8")
        zero = ("F32", (1,), b"\0\0\0\0")
        write_safetensors(self.dir / "extra.safetensors", {"x_embedder.proj.weigth": zero})
        refused(3, "x_embedder.proj.weigth", overrides=["generate.weights=extra.safetensors"])
        odd = self.generate("generate.image_size=[35, 50]", "generate.num_frames=1", text=False)
        self.assertIn("50x35 (width x height) is not a multiple of 8: output will be 48x32", odd.err)
        self.assertIn("of 1 frame, 48 wide x 32 high, landscape", odd.err)
        self.assertEqual({(c["height"], c["width"]) for c in self.clips().values()}, {(32, 48)})

    def test_results_of_another_request_stay(self):
        words = ("generate", "deck.toml", "generate.image_size=[16,16]", "generate.output=kept")
        ask = lambda prompts, *more, **how: self.weft(*words, f"generate.prompts={json.dumps(prompts)}", *more, ranks=0,
                                                      replace=False, **how)
        ask(["a", "b"])
        before = {p.name: p.read_bytes() for p in (self.dir / "kept").glob("*.mp4")}
        for prompts, more, count in ((["x", "y"], (), 2), (["a", "b"], ("run.seed=8",), 2), (["a", "y"], (), 1),
                                     (["a", "b"], ("sampler.steps=3",), 2), (["a"], ("generate.weights=random:5",), 1)):
            self.refused(ask(prompts, *more, expect=None), 4, f"kept holds {count} finished result", "--replace")
        self.assertEqual({p.name: p.read_bytes() for p in (self.dir / "kept").glob("*.mp4")}, before)
        self.assertIn("1 finished result in kept that this list does not name", ask(["a"]).err)
        job = ask(["x", "b"], "--replace")
        self.assertIn("replaces 1 finished result of another request", job.err)
        self.assertIn("1 made, 1 finished before", job.err)
        ask(["x", "b"])

    def test_sizes_are_said(self):
        self.refused(self.generate("generate.image_size=[]", "generate.aspect_ratio=8:6", text=False, expect=None), 2,
                     'unknown aspect ratio "8:6"', "height:width")
        tall = self.generate("generate.image_size=[]", "generate.resolution=144p", "generate.aspect_ratio=16:9",
                             "generate.num_frames=1", "generate.output=tall", text=False)
        self.assertIn("of 1 frame, 144 wide x 256 high, portrait (aspect ratios are height:width; 9:16 is landscape)",
                      tall.err)
        both = self.generate("generate.image_size=[16, 16]", "generate.resolution=360p", "generate.num_frames=1",
                             "generate.output=both", text=False)
        self.assertIn("generate.resolution and aspect_ratio are not used, generate.image_size is set", both.err)


if __name__ == "__main__":
    unittest.main()
