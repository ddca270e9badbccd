"""Bad input: each case is one clear message, the documented exit code, and no rank left after 10 s."""

import json
import re
import os
import resource
import shutil
import struct
import subprocess
import unittest

from harness import REPOSITORY, WeftTest, read_safetensors, safetensors_bytes, write_safetensors

USAGE, DATA, CHECKPOINT, NON_FINITE = 2, 3, 4, 5


class Decks(WeftTest):
    def refuse(self, *said, arguments=("deck.toml",), code=USAGE):
        self.refused(self.weft("train", *arguments, expect=None), code, *said)

    def test_unknown_key_in_the_deck(self):
        with open(self.dir / "deck.toml", "a") as deck:
            deck.write("warmup_step = 5\n")
        self.refuse("train.warmup_step", "deck.toml:", "did you mean train.warmup_steps?")

    def test_unknown_key_on_the_command_line(self):
        self.refuse("train.lrr", "did you mean train.lr?", arguments=("deck.toml", "train.lrr=1"))

    def test_a_key_as_an_option(self):
        self.refuse("--steps", "as in train.steps=10", arguments=("deck.toml", "--steps", "10"))

    def test_what_others_call_a_gpu(self):
        self.refuse('device.kind = "gpu"', 'did you mean "cuda"?', arguments=("deck.toml", "device.kind=gpu"))

    def test_a_gpu_of_a_build_without_cuda(self):
        job = self.train("run", "device.kind=cuda", "train.steps=1", ranks=1, expect=None)
        if "no CUDA side" not in job.err:
            self.skipTest("built with CUDA")
        self.refused(job, USAGE, 'device.kind = "cuda"', "build weft where nvcc is on the PATH")

    def test_unknown_table(self):
        with open(self.dir / "deck.toml", "a") as deck:
            deck.write("[modle]\ndepth = 2\n")
        self.refuse("[modle]", "did you mean [model]?")

    def test_wrong_type(self):
        self.refuse("train.steps", "whole number", "many",
                    arguments=("deck.toml", "train.steps=many"))

    def test_out_of_range(self):
        self.refuse("train.batch_size", "0", arguments=("deck.toml", "train.batch_size=0"))

    def test_not_toml(self):
        (self.dir / "deck.toml").write_text("[run\ndir = 3")
        self.refuse("deck.toml:1", "not TOML")

    def test_missing_deck(self):
        self.refuse("nowhere.toml", "does not exist", arguments=("nowhere.toml",))

    def test_no_deck_and_unknown_command(self):
        self.refuse("deck", arguments=())
        self.refused(self.weft("trian", "deck.toml", expect=None), USAGE, "trian")

    def test_usage_of_a_command_hints_at_its_help(self):
        for words, hint in ((("export", "run", "x.safetensors", "--dtype", "f64"), "weft export"), (("train",), "weft train"),
                            (("completion", "tcsh"), "weft completion"), (("bench", "scaling", "--mix"), "weft bench scaling")):
            self.refused(self.weft(*words, ranks=0, expect=None), USAGE, f"see {hint} --help")

    def test_unknown_topic(self):
        self.refused(self.weft("help", "trian", ranks=0, expect=None), USAGE, 'unknown topic "trian"', 'did you mean "train"?')
        self.refused(self.weft("help", "zzzzzzzz", ranks=0, expect=None), USAGE, 'unknown topic "zzzzzzzz"', "deck, man, man-deck")

    def test_unknown_key_of_a_synthetic_source(self):
        self.refuse("heigth", 'did you mean "height"?',
                    arguments=("deck.toml", "data.path=synthetic:heigth=16"))

    def test_a_synthetic_source_of_nothing(self):
        self.refuse('"synthetic:;" describes no clips', "HINT: write for example",
                    arguments=("deck.toml", "data.path=synthetic:;"))

    def test_channels_that_do_not_fit_the_data(self):
        self.refuse("model.in_channels = 4", arguments=("deck.toml", "model.in_channels=4"))


class ClipStores(WeftTest):
    def refuse(self, path, *said):
        job = self.weft("train", "deck.toml", f"data.path={path}", expect=None)
        self.refused(job, DATA, str(path), *said)
        self.refused(self.weft("inspect", path, ranks=0, expect=None), DATA, str(path))

    def test_missing(self):
        self.refuse("nowhere.h5", "No such file")

    def test_a_directory(self):
        (self.dir / "folder").mkdir()
        job = self.weft("train", "deck.toml", "data.path=folder", expect=None)
        self.refused(job, DATA, "folder is not a file")

    def test_text_file(self):
        (self.dir / "notes.h5").write_text("these are not the clips you are looking for\n" * 9)
        self.refuse("notes.h5", "not an HDF5 file")

    def test_empty_file(self):
        (self.dir / "empty.h5").write_bytes(b"")
        self.refuse("empty.h5")

    def test_truncated(self):
        self.ingest()
        whole = (self.dir / "clips.h5").read_bytes()
        for share in (0.02, 0.5, 0.95):
            with self.subTest(share=share):
                (self.dir / "cut.h5").write_bytes(whole[:int(share * len(whole))])
                self.refuse("cut.h5", "truncated")

    def test_a_store_that_crashes_hdf5(self):
        """Texts of variable length lie in a heap; a size in it that is wrong is followed out of the file's memory."""
        store = bytearray((REPOSITORY / "tests/data/clips_v2.h5").read_bytes())
        first = store.index(b"GCOL") + 16  # the heap's objects: number, count, size, bytes
        size = int.from_bytes(store[first + 8:first + 16], "little")
        second = first + 16 + (size + 7) // 8 * 8
        store[second + 8:second + 16] = (1 << 20).to_bytes(8, "little")
        (self.dir / "heap.h5").write_bytes(store)
        # HDF5 1.14 notices; older ones crash, in a process of their own.
        said = ("clip store heap.h5 is damaged: reading its structure crashed the HDF5 library",
                "clip store heap.h5: / has an unreadable attribute made_by")
        for job in (self.weft("train", "deck.toml", "data.path=heap.h5", expect=None),
                    self.weft("inspect", "heap.h5", ranks=0, expect=None)):
            self.refused(job, DATA)
            self.assertTrue(any(s in job.err for s in said), job.err)

    @unittest.skipIf(os.geteuid() != 0, "only root mounts a small disk")
    def test_a_full_disk_ends_ingest_with_its_message(self):
        disk = self.dir / "disk"
        disk.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk],
                          capture_output=True).returncode != 0:
            self.skipTest("this container may not mount")
        try:
            for ranks in (0, 1, 2):
                with self.subTest(ranks=ranks):
                    job = self.weft("ingest", "deck.toml",
                                    "ingest.inputs=['lavfi:testsrc2=duration=8:size=64x64:rate=10']",
                                    "ingest.output=disk/clips.h5", "ingest.frames=[3]",
                                    "ingest.height=32", "ingest.width=32", ranks=ranks, expect=None)
                    self.refused(job, DATA, "cannot write clip store disk/clips.h5",
                                 "No space left on device")
                    self.assertEqual(os.listdir(disk), ["clips.h5.status.json"])  # for weft status: that it failed
        finally:
            subprocess.run(["umount", disk], check=True)

    def test_flipped_byte_is_found_while_training(self):
        self.ingest()
        store = bytearray((self.dir / "clips.h5").read_bytes())
        store[len(store) // 2] ^= 0x10  # clips of many kilobytes fill the middle of the file
        (self.dir / "clips.h5").write_bytes(store)
        # On four ranks three wait in reductions that the fourth never joins.
        for ranks in (1, 2, 4):
            with self.subTest(ranks=ranks):
                job = self.weft("train", "deck.toml", "data.path=clips.h5", f"run.dir=run{ranks}",
                                "model.hidden_size=64", "parallel.bucket_mib=0.25", ranks=ranks,
                                expect=None)
                self.refused(job, DATA, "clips.h5", "damaged", "XXH3")
                self.assertRegex(job.err, r"clip \d+ of bucket \S+ in clips\.h5 is damaged")
        job = self.weft("inspect", "clips.h5", ranks=0, expect=None)
        self.refused(job, DATA, "clips.h5", "damaged")

    def test_damaged_clips_are_skipped_by_key(self):
        """Replaced by others, the same ones in every run and after a restart."""
        self.ingest()
        store = bytearray((self.dir / "clips.h5").read_bytes())
        store[len(store) // 2] ^= 0x10
        (self.dir / "clips.h5").write_bytes(store)
        options = ("data.path=clips.h5", "train.steps=12", "train.checkpoint_every=4", "data.max_damaged=0.2")
        for run in ("one", "two"):
            job = self.weft("train", "deck.toml", f"run.dir={run}", *options)
            self.assertRegex(job.err, r"WARN: clip \d+ of bucket \S+ in clips\.h5 is damaged.*: the next whole clip")
        self.weft("train", "deck.toml", "run.dir=parts", *options, "train.steps=5")
        self.weft("train", "deck.toml", "run.dir=parts", *options)
        self.assert_same_run("one", "two")
        self.assert_same_run("one", "parts")
        job = self.weft("train", "deck.toml", "run.dir=few", *options, "data.max_damaged=0.001", expect=None)
        self.refused(job, DATA, "clips.h5", "damaged", "data.max_damaged = 0.001")


class Checkpoints(WeftTest):
    def setUp(self):
        super().setUp()
        self.train("run", "train.steps=10")

    def cut(self, step):
        shard = self.dir / "run" / f"step_{step}" / "shard_0001.bin"
        os.truncate(shard, shard.stat().st_size // 2)

    def test_truncated_newest_falls_back_with_a_warning(self):
        shutil.copytree(self.dir / "run", self.dir / "good", symlinks=True)
        self.cut(10)
        job = self.train("run")
        self.assertRegex(job.err, r"WARN: .*step_10.*shard_0001\.bin has \d+ bytes, \d+ were saved")
        self.assertIn("5 of 20 steps done", job.err)
        self.train("good")
        self.assert_same_run("run", "good")

    def test_a_flipped_bit_is_found_and_named(self):
        shard = self.dir / "run" / "step_10" / "shard_0000.bin"
        data = bytearray(shard.read_bytes())
        data[1000] ^= 1
        shard.write_bytes(data)
        job = self.train("run")
        self.assertRegex(job.err, r"WARN: .*step_10.*shard_0000\.bin block 0 .*damaged; it holds master")
        self.assertIn("5 of 20 steps done", job.err)

    def test_truncated_manifest_falls_back(self):
        manifest = self.dir / "run" / "step_10" / "manifest.json"
        os.truncate(manifest, manifest.stat().st_size - 40)
        self.assertIn("5 of 20 steps done", self.train("run").err)

    def test_all_damaged(self):
        self.cut(5)
        self.cut(10)
        before = (self.dir / "run" / "metrics.jsonl").read_bytes()
        job = self.train("run", expect=None)
        self.refused(job, CHECKPOINT, "no checkpoint of run is usable", "step_10", "step_5")
        self.assertEqual((self.dir / "run" / "metrics.jsonl").read_bytes(), before)
        self.refused(self.weft("inspect", "run", ranks=0, expect=None), CHECKPOINT, "shard_0001.bin")
        self.refused(self.weft("export", "run", "w.safetensors", ranks=0, expect=None), CHECKPOINT,
                     "step_10")
        self.refused(self.weft("generate", "deck.toml", "run.dir=run", expect=None), CHECKPOINT)

    def test_inspect_ends_with_its_verdict(self):
        text = self.weft("inspect", "run/step_10", ranks=0).out
        self.assertRegex(text, r"\ncheckpoint \S+/run/step_10: step 10, complete, every byte matches its hash\n$")
        # A run that starts anew in the directory leaves the later checkpoints of the one before.
        self.train("run", "run.resume=false", "train.steps=5")
        text = self.weft("inspect", "run", ranks=0).out
        self.assertRegex(text, r"\n  step_10 +verified, every byte matches its hash, left by an earlier run\n"
                               r"  step_5 +verified, every byte matches its hash\n")
        self.assertRegex(text, r"\ncheckpoint \S+/run/step_5: step 5, complete, every byte matches its hash\n$")
        self.cut(5)
        job = self.weft("inspect", "run", ranks=0, expect=None)
        self.refused(job, CHECKPOINT, "step_5/shard_0001.bin")
        self.assertRegex(job.out, r"\n  step_5 +verified, DAMAGED: ")
        self.assertNotIn("complete", job.out)

    def test_a_checkpoint_of_another_run(self):
        self.train("other", "train.steps=15", "run.seed=8")
        shutil.copytree(self.dir / "other" / "step_15", self.dir / "run" / "step_15")
        (self.dir / "run" / "latest").unlink()
        (self.dir / "run" / "latest").symlink_to("step_15")
        job = self.train("run")
        self.assertRegex(job.err, r"WARN: checkpoint run/step_15 is not usable: run/step_15 is of another run")
        self.assertIn("10 of 20 steps done", job.err)

    def test_a_run_that_has_moved_and_one_without_its_file(self):
        os.rename(self.dir / "run", self.dir / "moved")
        self.assertIn("10 of 12 steps done", self.train("moved", "train.steps=12").err)
        identity = json.loads((self.dir / "moved" / "run.json").read_text())["id"]
        (self.dir / "moved" / "run.json").unlink()
        self.assertIn("12 of 14 steps done", self.train("moved", "train.steps=14").err)
        self.assertEqual(json.loads((self.dir / "moved" / "run.json").read_text())["id"], identity)

    def test_run_files_that_cannot_be_written(self):
        for name in ("deck.toml", "run.json", "metrics.jsonl"):
            with self.subTest(name=name):
                shutil.rmtree(self.dir / "new", ignore_errors=True)
                (self.dir / "new" / name).mkdir(parents=True)
                self.refused(self.train("new", expect=None), CHECKPOINT, f"new/{name}")

    def test_limits_are_found_before_the_first_step(self):
        def tight(what, limit):
            return lambda: resource.setrlimit(what, (limit, limit))

        for ranks in (1, 2):
            with self.subTest(ranks=ranks):
                # More than what MPI writes for itself.
                job = self.weft("train", "deck.toml", "run.dir=new", "model.hidden_size=384", ranks=ranks,
                                expect=None, preexec=tight(resource.RLIMIT_FSIZE, 20_000_000))
                self.refused(job, CHECKPOINT, "new/shard_0000.bin will have", "ulimit -f")
                self.assertNotIn("step      1/", job.err)
        job = self.weft("train", "deck.toml", "run.dir=new", ranks=0, expect=None,
                        preexec=tight(resource.RLIMIT_NOFILE, 24))
        self.refused(job, CHECKPOINT, "ulimit -n")

    def test_a_state_that_no_host_has_memory_for(self):
        # More than a process can address: nothing of it is ever written.
        job = self.weft("train", "deck.toml", "run.dir=vast", "model.hidden_size=65536", "model.depth=1000",
                        expect=None, timeout=60)
        self.assertNotEqual(job.process.returncode, 0)
        self.assertRegex(job.err, r"WARN: .*weights, gradients and optimizer need [\d.]+ GiB a rank, which has [\d.]+ ")
        self.assertNotIn("optimizer need", self.train("small", "train.steps=1").err)

    def test_another_model(self):
        job = self.train("run", "model.hidden_size=64", expect=None)
        self.refused(job, CHECKPOINT, "has shape")

    def test_run_directory_in_use(self):
        first = self.start("train", "deck.toml", "run.dir=busy", "train.steps=100000")
        self.wait_for_steps(first, "busy", 2)
        second = self.train("busy", expect=None)
        self.refused(second, CHECKPOINT, "busy is in use by another job", "process")
        self.assertIsNone(first.process.poll(), "the first job must not notice")
        first.kill()
        first.wait()
        self.assert_gone(first)
        self.train("busy", "train.steps=1")  # the lock died with its job

    def test_run_directory_that_cannot_be_made(self):
        (self.dir / "file").write_text("in the way")
        self.refused(self.train("file/run", expect=None), CHECKPOINT, "file/run")


class Weights(WeftTest):
    def refuse(self, *said, inspect=True):
        job = self.weft("train", "deck.toml", "model.weights=w.safetensors", expect=None)
        self.refused(job, DATA, "w.safetensors", *said)
        if inspect:
            job = self.weft("inspect", "w.safetensors", ranks=0, expect=None)
            self.refused(job, DATA, "w.safetensors", *said)

    def write(self, header, data=b"\0" * 16):
        (self.dir / "w.safetensors").write_bytes(safetensors_bytes(header, data))

    @staticmethod
    def entry(begin, end, shape=(2,), dtype="F32"):
        return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}

    def test_inspect_ends_with_what_is_wrong(self):
        self.write({"a": self.entry(0, 8), "b": self.entry(8, 16)}, struct.pack("<4f", 1, 2, 3, float("nan")))
        lines = self.weft("inspect", "w.safetensors", ranks=0).out.splitlines()
        self.assertIn("3 to 3, norm 3, 1 NOT FINITE", lines[-2])
        self.assertEqual(lines[-1], "safetensors w.safetensors: 2 tensors, no hashes: weft did not write this file, "
                                    "1 with values NOT FINITE")

    def test_inspect_of_a_folder(self):
        shards = self.dir / "hf"
        shards.mkdir()
        entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
        for name, value in (("a", 1), ("b", 2)):
            (shards / f"m-{name}.safetensors").write_bytes(safetensors_bytes({name: entry}, struct.pack("<2f", value, 0)))
        (shards / "m.safetensors.index.json").write_text('{"weight_map": {"a": "m-a.safetensors", "b": "m-b.safetensors"}}')
        for path in ("hf", "hf/m.safetensors.index.json"):
            said = self.weft("inspect", path, ranks=0).out
            self.assertIn(f"weights {path}, 2 tensors in 2 files", said)
            self.assertIn("0 to 2, norm 2", said)
        (shards / "m-b.safetensors").unlink()
        self.refused(self.weft("inspect", "hf", ranks=0, expect=None), DATA, "m-b.safetensors, which is not there")

    def test_overlapping_tensors(self):
        self.write({"a": self.entry(0, 8), "b": self.entry(4, 12)}, b"\0" * 12)
        self.refuse("a and b overlap")

    def test_tensor_out_of_range(self):
        self.write({"a": self.entry(0, 8), "b": self.entry(8, 24, (4,))})
        self.refuse("tensor b ends at byte 24")

    def test_huge_header(self):
        (self.dir / "w.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
        self.refuse(str(1 << 62), "header")

    def test_header_longer_than_the_file(self):
        (self.dir / "w.safetensors").write_bytes(struct.pack("<Q", 1000) + b"{}")
        self.refuse("a header of 1000 bytes")

    def test_offsets_that_contradict_the_shape(self):
        self.write({"a": self.entry(0, 16, (3,))})
        self.refuse("tensor a")

    def test_sizes_that_overflow(self):
        self.write({"a": self.entry(0, 16, (1 << 62, 1 << 62))})
        self.refuse("tensor a")

    def test_not_json_and_deep_json(self):
        for text in (b"{nonsense", b"[" * 100000):
            with self.subTest(text=text[:10]):
                data = struct.pack("<Q", len(text)) + text
                (self.dir / "w.safetensors").write_bytes(data)
                self.refuse()

    def test_wrong_shape_missing_and_unknown_tensor(self):
        self.train("made", "train.steps=1")
        good = self.exported("made")
        name = "final_layer.linear.bias"
        dtype, shape, data = good[name]
        path = self.dir / "w.safetensors"
        write_safetensors(path, good | {name: (dtype, (shape[0] + 1,), data + b"\0" * 4)})
        self.refuse(name, f"[{shape[0] + 1}]", f"[{shape[0]}]", inspect=False)
        write_safetensors(path, {n: t for n, t in good.items() if n != name})
        self.refuse(f"has no tensor {name}", inspect=False)
        write_safetensors(path, good | {"final_layer.linear.bais": good[name]})
        self.refuse("final_layer.linear.bais", name, inspect=False)
        self.assertEqual(read_safetensors(path)[name], good[name])

    def test_shards_that_are_cut_or_missing(self):
        self.train("made", "train.steps=1")
        (self.dir / "m").mkdir()
        self.weft("export", "made", "m/model.safetensors", "--shard-size", "0.00002", ranks=0)
        one = self.exported("made")
        shards = sorted((self.dir / "m").glob("model-*.safetensors"))
        self.assertGreater(len(shards), 2)
        self.assertEqual({n: t for shard in shards for n, t in read_safetensors(shard).items()}, one)
        self.train("again", "train.steps=1", "model.weights=m")

        def refused(*said):
            job = self.weft("train", "deck.toml", "model.weights=m", expect=None)
            self.refused(job, DATA, *said)

        whole = shards[1].read_bytes()
        shards[1].write_bytes(whole[:-1])
        refused(shards[1].name, "but the file has")
        shards[1].unlink()
        refused("model.safetensors.index.json", shards[1].name, "not there")
        shards[1].write_bytes(whole)
        (self.dir / "m" / "model.safetensors.index.json").unlink()
        refused("sets of weights", shards[0].name)

    def test_missing_file(self):
        self.refuse("No such file", inspect=False)


class Numbers(WeftTest):
    def test_a_loss_that_is_not_finite(self):
        self.train("run", "train.steps=1")
        weights = self.exported("run")
        dtype, shape, data = weights["final_layer.linear.bias"]
        weights["final_layer.linear.bias"] = (dtype, shape, struct.pack("<f", float("nan")) + data[4:])
        write_safetensors(self.dir / "w.safetensors", weights)
        job = self.train("nan", "model.weights=w.safetensors", expect=None)
        self.refused(job, NON_FINITE, "step 1", "nan")
        # The samples of the step are named, as metrics.jsonl names them.
        first = json.loads((self.dir / "run" / "metrics.jsonl").read_text().splitlines()[0])
        named = ", ".join(re.findall(r"samples \[([\d, ]+)\]: the loss is not finite", job.err))
        self.assertEqual(sorted(map(int, named.split(", "))), sorted(first["samples"]))


if __name__ == "__main__":
    unittest.main()
