"""tools/convert_weights.py gives back every value under its released name, and refuses what it cannot convert: on small files
that PyTorch writes here. Skipped (exit status 77) where there is no PyTorch."""
import json
import os
import pathlib
import pickle
import struct
import subprocess
import sys
import tempfile
import unittest
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
try:
    import numpy  # noqa: F401  the converter needs it, too
    import torch
except ImportError:
    python = ROOT / ".venv-validation/bin/python"  # made by `make bench`
    if python.is_file() and pathlib.Path(sys.prefix).resolve() != python.parents[1].resolve():
        os.execv(python, [str(python), *sys.argv])
    print("skipped: no PyTorch")
    sys.exit(77)

TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64}


def read_safetensors(path):
    data = bytearray(pathlib.Path(path).read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    body = torch.frombuffer(data, dtype=torch.uint8)[8 + length:]
    return {name: body[slice(*e["data_offsets"])].clone().view(TYPES[e["dtype"]]).reshape(e["shape"])
            for name, e in header.items()}


def same(found, wanted):
    return found.shape == wanted.shape and torch.equal(found.double(), wanted.double())


class ConvertWeights(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = pathlib.Path(folder.name)
        torch.manual_seed(1)

    def convert(self, *argv):
        return subprocess.run([sys.executable, "-W", "ignore", ROOT / "tools/convert_weights.py", *map(str, argv)],
                              capture_output=True, text=True, check=False)

    def converted(self, source, output, *options):
        done = self.convert(source, output, *options)
        self.assertEqual(done.returncode, 0, done.stderr)
        return read_safetensors(output) if output.suffix == ".safetensors" else None

    def assert_refused(self, source, words):
        done = self.convert(source, self.dir / "refused")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertNotIn("Traceback", done.stderr)
        self.assertIn(words, done.stderr)

    def assert_same(self, found, wanted):
        self.assertEqual(found.keys(), wanted.keys())
        for name, value in wanted.items():
            self.assertTrue(same(found[name], value), name)

    def test_names_and_types(self):
        weights = {"mid.attentions.0.query.weight": torch.randn(4, 4, 1, 1), "mid.attentions.0.proj_attn.bias": torch.randn(4),
                   "turned": torch.randn(3, 2).t(), "low": torch.randn(5).bfloat16(),
                   "double": torch.tensor([1 / 3, 1e-40, 7.0], dtype=torch.float64), "scalar": torch.tensor(2.5)}
        torch.save({"state_dict": {"module." + n: t for n, t in weights.items()}, "epoch": 3}, self.dir / "x.pth")
        found = self.converted(self.dir / "x.pth", self.dir / "x.safetensors")
        self.assert_same(found, {
            "mid.attentions.0.to_q.weight": weights["mid.attentions.0.query.weight"][:, :, 0, 0],
            "mid.attentions.0.to_out.0.bias": weights["mid.attentions.0.proj_attn.bias"], "turned": weights["turned"],
            "low": weights["low"], "double": weights["double"].float(), "scalar": weights["scalar"]})
        self.assertEqual((found["double"].dtype, found["low"].dtype), (torch.float32, torch.bfloat16))
        found = self.converted(self.dir / "x.pth", self.dir / "low.safetensors", "--dtype", "bf16", "--prefix", "spatial_vae.module.")
        self.assertTrue(same(found["spatial_vae.module.turned"], weights["turned"].bfloat16()))
        self.assertEqual(found["spatial_vae.module.turned"].dtype, torch.bfloat16)

    def test_safetensors_of_other_programs(self):
        """Prefixes, wrappers, one part of a file, values beyond f16; fp8 with its scales where this PyTorch has it."""
        source, low = self.dir / "x.safetensors", self.dir / "low.safetensors"

        def write(tensors):
            kinds = {torch.float32: "F32", torch.uint8: "U8", getattr(torch, "float8_e4m3fn", None): "F8_E4M3"}
            header, data = {}, b""
            for name, t in tensors.items():
                raw = t.reshape(-1).view(torch.uint8).numpy().tobytes()
                header[name] = {"dtype": kinds[t.dtype], "shape": list(t.shape), "data_offsets": [len(data), len(data) + len(raw)]}
                data += raw
            text = json.dumps(header | {"__metadata__": None}).encode()
            source.write_bytes(struct.pack("<Q", len(text)) + text + data)
        a, b = torch.randn(2, 3), torch.randn(4)
        write({"pipe.dit.a": a, "pipe.dit.x._checkpoint_wrapped_module.b": b})
        self.assert_same(self.converted(source, low), {"a": a, "x.b": b})
        write({"dit.a": a, "vae.b": b})
        self.assert_same(self.converted(source, low, "--only", "dit."), {"a": a})
        low.unlink()
        write({"a": a, "b": b * 1e6})
        done = self.convert(source, low, "--dtype", "f16")
        self.assertEqual(done.returncode, 1)
        self.assertIn("b has the value", done.stderr)
        self.assertEqual(sorted(self.dir.iterdir()), [source])
        source.write_text("version https://git-lfs.github.com/spec/v1")
        self.assert_refused(source, "git-lfs")
        if hasattr(torch, "float8_e4m3fn"):
            write({"model.l.weight": a.to(torch.float8_e4m3fn), "model.l.scale_weight": torch.tensor(0.5),
                   "model.n.bias": b, "scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)})
            wanted = {"l.weight": a.to(torch.float8_e4m3fn).float() / 2, "n.bias": b}
            self.assert_same(self.converted(source, low, "--dtype", "f32"), wanted)
            self.assertEqual(self.converted(source, low)["l.weight"].dtype, torch.bfloat16)

    def test_mobilenet_of_torchvision(self):
        names = {"features.0.0.weight": "features.0.0.weight", "features.1.conv.0.0.weight": "features.1.conv.0.weight",
                 "features.1.conv.0.1.bias": "features.1.conv.1.bias", "features.1.conv.1.weight": "features.1.conv.3.weight",
                 "features.1.conv.2.bias": "features.1.conv.4.bias", "features.2.conv.1.0.weight": "features.2.conv.3.weight",
                 "features.2.conv.1.1.bias": "features.2.conv.4.bias", "features.2.conv.2.weight": "features.2.conv.6.weight",
                 "features.2.conv.3.bias": "features.2.conv.7.bias", "features.18.0.weight": None, "classifier.1.bias": None}
        weights = {n: torch.randn(3) for n in names}
        torch.save(weights, self.dir / "mobilenet_v2-b0353104.pth")
        self.assert_same(self.converted(self.dir / "mobilenet_v2-b0353104.pth", self.dir / "m.safetensors"),
                         {new: weights[n] for n, new in names.items() if new})

    def test_resnet_of_torchvision(self):
        """Keeps its names, and the converter says what it is for; the stem of segmentation's encoders has 3x3 convolutions."""
        for side, told in ((7, True), (3, False)):
            weights = {"conv1.weight": torch.randn(4, 3, side, side), "layer1.0.conv1.weight": torch.randn(4, 4, 1, 1),
                       "fc.weight": torch.randn(5, 4)}
            torch.save(weights, self.dir / "resnet.pth")
            done = self.convert(self.dir / "resnet.pth", self.dir / "r.safetensors")
            self.assertEqual((done.returncode, "no encoder of segmentation" in done.stdout), (0, told), done.stderr)
            self.assert_same(read_safetensors(self.dir / "r.safetensors"), weights)

    def test_the_format_before_1_6(self):
        weights = {"a": torch.randn(3, 2).t()}
        torch.save(weights, self.dir / "old.pt", _use_new_zipfile_serialization=False)
        self.assert_same(self.converted(self.dir / "old.pt", self.dir / "old.safetensors"), weights)

    def test_shards_and_their_index(self):
        shards = [{"shared.weight": torch.randn(8, 4), "encoder.embed_tokens.weight": torch.randn(8, 4)},
                  {"encoder.final_layer_norm.weight": torch.randn(4)}]
        model = self.dir / "epoch0-global_step100" / "model"
        model.mkdir(parents=True)
        files = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
        for file, shard in zip(files, shards):
            torch.save(shard, model / file)
        names = {name: file for file, shard in zip(files, shards) for name in shard}
        (model / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
        for source in (model, model.parent, model / "pytorch_model.bin.index.json"):
            self.converted(source, self.dir / "t5")
            index = json.loads((self.dir / "t5" / "model.safetensors.index.json").read_text())["weight_map"]
            self.assertEqual(index, {"shared.weight": "model-00001-of-00002.safetensors",
                                     "encoder.final_layer_norm.weight": "model-00002-of-00002.safetensors"})
            for shard, name in zip(shards, ("shared.weight", "encoder.final_layer_norm.weight")):
                self.assertTrue(same(read_safetensors(self.dir / "t5" / index[name])[name], shard[name]))
        torch.save(shards[0], model / files[1])
        self.assert_refused(model, "lacks encoder.final_layer_norm.weight")
        (model / files[1]).unlink()
        self.assert_refused(model, f"{files[1]},")

    def test_the_files_of_wan(self):
        """Flat tables of released names, which stay as they are, the text encoder's in bf16; of two in a folder one must be named."""
        folder = self.dir / "Wan2.1-T2V-1.3B"
        folder.mkdir()
        umt5 = {n: torch.randn(4, 4).bfloat16() for n in (
            "token_embedding.weight", "blocks.0.norm1.weight", "blocks.0.attn.q.weight", "blocks.0.ffn.gate.0.weight",
            "blocks.0.pos_embedding.embedding.weight", "norm.weight")}
        vae = {"conv1.weight": torch.randn(4, 4, 1, 1, 1), "encoder.middle.1.to_qkv.weight": torch.randn(12, 4, 1, 1),
               "decoder.upsamples.0.residual.0.gamma": torch.randn(2, 1, 1, 1), "decoder.upsamples.3.time_conv.bias": torch.randn(8)}
        for file, weights in (("models_t5_umt5-xxl-enc-bf16.pth", umt5), ("Wan2.1_VAE.pth", vae)):
            torch.save(weights, folder / file)
            found = self.converted(folder / file, (self.dir / file).with_suffix(".safetensors"))
            self.assert_same(found, weights)
            self.assertEqual({n: t.dtype for n, t in found.items()}, {n: t.dtype for n, t in weights.items()})
        self.assert_refused(folder, "2 sets of weights: name the file you mean (Wan2.1_VAE.pth, models_t5_")

    def test_the_files_of_sadtalker_and_its_enhancer(self):
        def values(*names):
            return {n: torch.randn(3, 2) for n in names}

        mapping = values("first.0.weight", "fc_exp.bias")
        trained = {"state": {0: {"step": torch.tensor(5.0)}}, "param_groups": [{"lr": 2e-4}]}
        source = self.dir / "mapping_00229-model.pth.tar"
        torch.save({"mapping": mapping, "optimizer_mapping": trained, "discriminator": values("a"), "epoch": 229}, source)
        gfpgan = values("stylegan_decoder.noises.noise0", "conv_body_first.weight")
        torch.save({"params": values("conv_body_first.weight"), "params_ema": gfpgan}, self.dir / "GFPGANv1.4.pth")
        detector, landmarks, parsing = values("body.conv1.weight"), values("conv1.conv.weight"), values("encoder.0.conv2d.weight")
        torch.save({"module." + n: t for n, t in detector.items()}, self.dir / "detection_Resnet50_Final.pth",
                   _use_new_zipfile_serialization=False)
        torch.save({"epoch": 7, "state_dict": landmarks}, self.dir / "alignment_WFLW_4HG.pth")
        torch.save(parsing, self.dir / "parsing_parsenet.pth")
        prefixed = {"mapping." + n: t for n, t in mapping.items()}
        for file, wanted in ((source.name, prefixed), ("GFPGANv1.4.pth", gfpgan), ("detection_Resnet50_Final.pth", detector),
                             ("alignment_WFLW_4HG.pth", landmarks), ("parsing_parsenet.pth", parsing)):
            with self.subTest(file):
                self.assert_same(self.converted(self.dir / file, self.dir / "part.safetensors"), wanted)
        part = self.dir / "part.safetensors"
        self.assert_same(self.converted(source, part, "--prefix", ""), mapping)
        self.assert_same(self.converted(source, part, "--key", "mapping"), prefixed)
        self.assertEqual(self.converted(source, part, "--key", "discriminator").keys(), {"a"})

    def test_what_holds_more_than_weights_is_refused_and_not_run(self):
        marker = self.dir / "was run"

        class Command:
            def __reduce__(self):
                return os.mkdir, (str(marker),)

        with open(self.dir / "command.pt", "wb") as f:
            pickle.dump({"a": Command()}, f)
        self.assert_refused(self.dir / "command.pt", "more than weights")
        self.assertFalse(marker.exists())

    def test_what_is_damaged_or_holds_no_weights_is_refused(self):
        torch.save({"a": torch.randn(400)}, self.dir / "x.pth")
        (self.dir / "cut.pt").write_bytes((self.dir / "x.pth").read_bytes()[:-300])
        self.assert_refused(self.dir / "cut.pt", "damaged")
        torch.save({"optimizer": {"a": 1}, "b": 2}, self.dir / "none.pt")
        self.assert_refused(self.dir / "none.pt", "--key")
        self.assert_refused(self.dir / "absent.pt", "no such file")

    def clip(self):
        """OpenAI's names around a block of each encoder: a module to be saved, and the tensors under Hugging Face's names."""
        wanted = {}

        def module(weights):
            made = torch.nn.Module()
            for name, value in weights.items():
                owner = made
                *path, last = name.split(".")
                for part in path:
                    if not hasattr(owner, part):
                        owner.add_module(part, torch.nn.Module())
                    owner = getattr(owner, part)
                owner.register_parameter(last, torch.nn.Parameter(value))
            return made

        def both(theirs, ours, *shape):
            value = torch.randn(*shape)
            wanted[ours] = value
            return {theirs: value}

        weights = both("visual.class_embedding", "vision_model.embeddings.class_embedding", 4)
        weights |= both("visual.positional_embedding", "vision_model.embeddings.position_embedding.weight", 5, 4)
        weights |= both("visual.conv1.weight", "vision_model.embeddings.patch_embedding.weight", 4, 3, 2, 2)
        weights |= both("token_embedding.weight", "text_model.embeddings.token_embedding.weight", 9, 4)
        weights |= both("positional_embedding", "text_model.embeddings.position_embedding.weight", 7, 4)
        weights |= both("logit_scale", "logit_scale", 1)
        for theirs, ours in (("visual.ln_pre", "vision_model.pre_layrnorm"), ("visual.ln_post", "vision_model.post_layernorm"),
                             ("ln_final", "text_model.final_layer_norm")):
            weights |= both(theirs + ".bias", ours + ".bias", 4)
        for theirs, ours in (("visual.transformer", "vision_model"), ("transformer", "text_model")):
            block, layer = theirs + ".resblocks.0.", ours + ".encoder.layers.0."
            weights |= both(block + "attn.out_proj.weight", layer + "self_attn.out_proj.weight", 4, 4)
            weights |= both(block + "ln_1.weight", layer + "layer_norm1.weight", 4)
            weights |= both(block + "ln_2.weight", layer + "layer_norm2.weight", 4)
            weights |= both(block + "mlp.c_fc.weight", layer + "mlp.fc1.weight", 16, 4)
            weights |= both(block + "mlp.c_proj.bias", layer + "mlp.fc2.bias", 4)
            for kind, shape in (("weight", (4, 4)), ("bias", (4,))):
                parts = [torch.randn(*shape) for _ in range(3)]
                weights[f"{block}attn.in_proj_{kind}"] = torch.cat(parts)
                wanted |= {f"{layer}self_attn.{q}_proj.{kind}": p for q, p in zip("qkv", parts)}
        for theirs, ours in (("visual.proj", "visual_projection.weight"), ("text_projection", "text_projection.weight")):
            weights[theirs] = torch.randn(4, 3)
            wanted[ours] = weights[theirs].t()
        made = module(weights)
        made.register_buffer("context_length", torch.tensor(7))
        return made, wanted

    def test_clip_of_openai(self):
        model, wanted = self.clip()
        torch.save(model.state_dict(), self.dir / "state.pt")
        self.assert_same(self.converted(self.dir / "state.pt", self.dir / "a.safetensors"), wanted)
        # As it is released: a TorchScript archive, whose program is not run.
        torch.jit.save(torch.jit.script(model), self.dir / "script.pt")
        self.assert_same(self.converted(self.dir / "script.pt", self.dir / "b.safetensors"), wanted)

    def test_script_that_names_other_things(self):
        class Evil:
            def __reduce__(self):
                return (os.system, (f"touch {self.path}",))

        evil = Evil()
        evil.path = self.dir / "ran"
        with zipfile.ZipFile(self.dir / "evil.pt", "w") as archive:
            archive.writestr("evil/constants.pkl", pickle.dumps(()))
            archive.writestr("evil/data.pkl", pickle.dumps(evil))
        self.assert_refused(self.dir / "evil.pt", "system is not part of a model")
        self.assertFalse((self.dir / "ran").exists())


if __name__ == "__main__":
    unittest.main()
