"""Bad input: each case is one message that names key and value, the documented exit code, and no rank left."""

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
    def test_refused(self):
        """Keys, types, ranges, sources and files: what is named in the message, and what to write instead."""
        deck = self.dir / "deck.toml"
        for name, text in (("key.toml", deck.read_text() + "warmup_step = 5\n"), ("table.toml", deck.read_text() + "[modle]\ndepth = 2\n"),
                           ("bad.toml", "[run\ndir = 3")):
            (self.dir / name).write_text(text)
        for words, *said in (
                (["key.toml"], "train.warmup_step", "key.toml:", "train.warmup_steps?"),
                (["table.toml"], "[modle]", "[model]?"),
                (["bad.toml"], "bad.toml:1"),
                (["nowhere.toml"], "nowhere.toml"),
                ([], "deck", "weft train --help"),
                (["deck.toml", "train.lrr=1"], "train.lrr", "train.lr?"),
                (["deck.toml", "--steps", "10"], "--steps", "train.steps=10"),
                (["deck.toml", "device.kind=gpu"], 'device.kind = "gpu"', '"cuda"?'),
                (["deck.toml", "train.steps=many"], "train.steps", "many"),
                (["deck.toml", "train.batch_size=0"], "train.batch_size", "0"),
                (["deck.toml", "data.path=synthetic:heigth=16"], "heigth", '"height"?'),
                (["deck.toml", "data.path=synthetic:;"], '"synthetic:;"'),
                (["deck.toml", "model.in_channels=4"], "model.in_channels = 4")):
            with self.subTest(words=words):
                self.refused(self.weft("train", *words, ranks=0, expect=None), USAGE, *said)
        # On two ranks it is said once, and both end.
        self.refused(self.weft("train", "deck.toml", "train.lrr=1", expect=None), USAGE, "train.lrr")

    def test_a_gpu_of_a_build_without_cuda(self):
        job = self.train("run", "device.kind=cuda", "train.steps=1", ranks=1, expect=None)
        if "no CUDA side" not in job.err:
            self.skipTest("built with CUDA")
        self.refused(job, USAGE, 'device.kind = "cuda"')

    def test_usage_of_a_command_hints_at_its_help(self):
        for words, *said in ((("export", "run", "x.safetensors", "--dtype", "f64"), "weft export --help"),
                             (("completion", "tcsh"), "weft completion --help"),
                             (("bench", "scaling", "--mix"), "weft bench scaling --help"), (("trian", "deck.toml"), "trian"),
                             (("help", "trian"), "trian", "train?"), (("help", "zzzzzzzz"), "zzzzzzzz", "weft help lists")):
            self.refused(self.weft(*words, ranks=0, expect=None), USAGE, *said)


class ClipStores(WeftTest):
    def test_files_that_are_no_store(self):
        self.ingest()
        whole = (self.dir / "clips.h5").read_bytes()
        (self.dir / "folder").mkdir()
        for name, data in (("notes.h5", b"these are not the clips you are looking for\n" * 9), ("empty.h5", b""),
                           *((f"cut{i}.h5", whole[:int(share * len(whole))]) for i, share in enumerate((0.02, 0.5, 0.95)))):
            (self.dir / name).write_bytes(data)
        for path in ("nowhere.h5", "folder", "notes.h5", "empty.h5", "cut0.h5", "cut1.h5", "cut2.h5"):
            with self.subTest(path=path):
                self.refused(self.weft("train", "deck.toml", f"data.path={path}", ranks=0, expect=None), DATA, path)
                if path != "folder":  # of weights, perhaps
                    self.refused(self.weft("inspect", path, ranks=0, expect=None), DATA, path)

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
            for ranks in (0, 2):
                with self.subTest(ranks=ranks):
                    job = self.weft("ingest", "deck.toml",
                                    "ingest.inputs=['lavfi:testsrc2=duration=8:size=64x64:rate=10']",
                                    "ingest.output=disk/clips.h5", "ingest.frames=[3]",
                                    "ingest.height=32", "ingest.width=32", ranks=ranks, expect=None)
                    file = "clips.h5.part" if ranks else "clip store disk/clips.h5"
                    self.refused(job, DATA, "cannot write", file, "No space left on device")
                    self.assertEqual(os.listdir(disk), ["clips.h5.status.json"])  # for weft status: that it failed
        finally:
            subprocess.run(["umount", disk], check=True)

    def test_flipped_byte_is_found_while_training(self):
        self.ingest()
        store = bytearray((self.dir / "clips.h5").read_bytes())
        store[len(store) // 2] ^= 0x10  # clips of many kilobytes fill the middle of the file
        (self.dir / "clips.h5").write_bytes(store)
        # On three ranks two wait in reductions that the third never joins.
        job = self.weft("train", "deck.toml", "data.path=clips.h5", "model.hidden_size=64", "parallel.bucket_mib=0.25", ranks=3,
                        expect=None)
        self.refused(job, DATA)
        self.assertRegex(job.err, r"clip \d+ of bucket \S+ in clips\.h5 is damaged")
        self.refused(self.weft("inspect", "clips.h5", ranks=0, expect=None), DATA, "clips.h5", "damaged")
        # By a key they are replaced by others, the same ones in every run and after a restart.
        options = ("data.path=clips.h5", "train.steps=12", "train.checkpoint_every=4", "data.max_damaged=0.2")
        job = self.weft("train", "deck.toml", "run.dir=one", *options)
        self.assertRegex(job.err, r"WARN: clip \d+ of bucket \S+ in clips\.h5 is damaged")
        self.weft("train", "deck.toml", "run.dir=parts", *options, "train.steps=5")
        self.weft("train", "deck.toml", "run.dir=parts", *options)
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

    def test_a_damaged_newest_falls_back_with_a_warning(self):
        shutil.copytree(self.dir / "run", self.dir / "good", symlinks=True)
        self.train("good")
        shard = self.dir / "run" / "step_10" / "shard_0000.bin"
        data = bytearray(shard.read_bytes())
        data[1000] ^= 1
        shard.write_bytes(data)
        job = self.train("run")
        self.assertRegex(job.err, r"WARN: .*step_10.*shard_0000\.bin block 0 .*master")
        self.assertIn("5 of 20 steps done", job.err)
        self.assert_same_run("run", "good")

    def test_all_damaged(self):
        self.cut(5)
        self.cut(10)
        before = (self.dir / "run" / "metrics.jsonl").read_bytes()
        self.refused(self.train("run", expect=None), CHECKPOINT, "step_10", "step_5")
        self.assertEqual((self.dir / "run" / "metrics.jsonl").read_bytes(), before)
        for words, said in ((("inspect", "run"), "shard_0001.bin"), (("export", "run", "w.safetensors"), "step_10"),
                            (("generate", "deck.toml", "run.dir=run"), "step_10")):
            self.refused(self.weft(*words, ranks=0, expect=None), CHECKPOINT, said)

    def test_inspect_ends_with_its_verdict(self):
        text = self.weft("inspect", "run/step_10", ranks=0).out
        self.assertRegex(text, r"\ncheckpoint \S+/run/step_10: step 10, complete, every byte matches its hash\n$")
        self.assertIn("final_layer.linear.bias", text)
        # A run that starts anew in the directory leaves the later checkpoints of the one before.
        self.train("run", "run.resume=false", "train.steps=5")
        text = self.weft("inspect", "run", ranks=0).out
        self.assertRegex(text, r"\n  step_10 +verified, every byte matches its hash, left by an earlier run\n"
                               r"  step_5 +verified, every byte matches its hash\n")
        self.assertRegex(text, r"\nnewest intact: run/step_5 \(weft inspect run/step_5: tensors, deck\)\n$")
        self.cut(5)
        job = self.weft("inspect", "run", ranks=0, expect=None)
        self.refused(job, CHECKPOINT, "step_5/shard_0001.bin")
        self.assertRegex(job.out, r"\n  step_5 +DAMAGED since it was verified: ")
        self.assertNotIn("newest intact", job.out)

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
                self.refused(self.train("new", ranks=0, expect=None), CHECKPOINT, f"new/{name}")
        (self.dir / "file").write_text("in the way")
        self.refused(self.train("file/run", ranks=0, expect=None), CHECKPOINT, "file/run")

    def test_limits_are_found_before_the_first_step(self):
        def tight(what, limit):
            return lambda: resource.setrlimit(what, (limit, limit))

        # More than what MPI writes for itself.
        job = self.weft("train", "deck.toml", "run.dir=new", "model.hidden_size=384", expect=None,
                        preexec=tight(resource.RLIMIT_FSIZE, 20_000_000))
        self.refused(job, CHECKPOINT, "new/shard_0000.bin", "ulimit -f")
        self.assertNotIn("step      1/", job.err)
        job = self.weft("train", "deck.toml", "run.dir=new", ranks=0, expect=None,
                        preexec=tight(resource.RLIMIT_NOFILE, 24))
        self.refused(job, CHECKPOINT, "ulimit -n")

    def test_a_state_that_no_host_has_memory_for(self):
        # More than a process can address: nothing of it is ever written.
        job = self.weft("train", "deck.toml", "run.dir=vast", "model.hidden_size=10240", "model.mlp_ratio=64", "model.depth=1000",
                        expect=None, timeout=60)
        self.assertNotEqual(job.process.returncode, 0)
        self.assertRegex(job.err, r"WARN: .*weights, gradients and optimizer need [\d.]+ GiB a rank, which has [\d.]+ ")
        self.assertNotIn("optimizer need", self.train("small", "train.steps=1").err)

    def test_another_model(self):
        job = self.train("run", "model.hidden_size=64", expect=None)
        self.refused(job, CHECKPOINT, "has shape")


class Weights(WeftTest):
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

    def refuse(self, *said, path="w.safetensors"):
        self.refused(self.weft("train", "deck.toml", f"model.weights={path}", ranks=0, expect=None), DATA, *said)

    def test_a_header_that_cannot_be(self):
        self.write({"a": self.entry(0, 8), "b": self.entry(4, 12)}, bytes(12))
        self.refused(self.weft("inspect", "w.safetensors", ranks=0, expect=None), DATA, "w.safetensors", "a and b overlap")
        self.refuse("w.safetensors")
        self.refuse("none.safetensors", path="none.safetensors")

    def test_shards_are_one_model(self):
        self.train("made", "train.steps=1")
        (self.dir / "m").mkdir()
        self.weft("export", "made", "m/model.safetensors", "--shard-size", "0.00002", ranks=0)
        one = self.exported("made")
        shards = sorted((self.dir / "m").glob("model-*.safetensors"))
        self.assertGreater(len(shards), 2)
        self.assertEqual({n: t for shard in shards for n, t in read_safetensors(shard).items()}, one)
        self.train("again", "train.steps=1", "model.weights=m")


class Numbers(WeftTest):
    def test_a_loss_that_is_not_finite(self):
        self.train("run", "train.steps=1")
        weights = self.exported("run")
        dtype, shape, data = weights["final_layer.linear.bias"]
        for name, value in (("nan", float("nan")), ("large", 3e38)):
            weights["final_layer.linear.bias"] = (dtype, shape, struct.pack("<f", value) + data[4:])
            write_safetensors(self.dir / f"{name}.safetensors", weights)
        job = self.train("nan", "model.weights=nan.safetensors", expect=None)
        self.refused(job, DATA, "nan.safetensors", "final_layer.linear.bias")
        job = self.train("large", "model.weights=large.safetensors", expect=None)
        self.refused(job, NON_FINITE, "step 1")
        # The samples of the step are named, as metrics.jsonl names them.
        first = json.loads((self.dir / "run" / "metrics.jsonl").read_text().splitlines()[0])
        named = ", ".join(re.findall(r"samples \[([\d, ]+)\]: the loss is not finite", job.err))
        self.assertEqual(sorted(map(int, named.split(", "))), sorted(first["samples"]))


if __name__ == "__main__":
    unittest.main()
