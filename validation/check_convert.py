#!/usr/bin/env python3
"""Does convert_weights.py give back every value under its released name, and refuse what it cannot? On small files made here.

    check_convert.py
"""
import json
import pathlib
import pickle
import subprocess
import sys
import tempfile

import torch

import safetensors_io

HERE = pathlib.Path(__file__).resolve().parent


def convert(*argv):
    return subprocess.run([sys.executable, "-W", "ignore", HERE / "convert_weights.py", *map(str, argv)],
                          capture_output=True, text=True, check=False)


def converted(source, output, *options):
    done = convert(source, output, *options)
    assert done.returncode == 0, done.stderr
    return safetensors_io.load(output) if output.suffix == ".safetensors" else None


def refused(source, output, words):
    done = convert(source, output)
    assert done.returncode == 1 and "Traceback" not in done.stderr and words in done.stderr, done.stderr


def same(array, tensor):
    return array.shape == tuple(tensor.shape) and (array == tensor.float().numpy()).all()


def check_names_and_types(folder):
    weights = {"mid.attentions.0.query.weight": torch.randn(4, 4, 1, 1), "mid.attentions.0.proj_attn.bias": torch.randn(4),
               "turned": torch.randn(3, 2).t(), "low": torch.randn(5).bfloat16(), "double": torch.randn(3).double(),
               "scalar": torch.tensor(2.5)}
    torch.save({"state_dict": {"module." + n: t for n, t in weights.items()}, "epoch": 3}, folder / "x.pth")
    out = converted(folder / "x.pth", folder / "x.safetensors")
    assert out.keys() == {"mid.attentions.0.to_q.weight", "mid.attentions.0.to_out.0.bias", "turned", "low", "double", "scalar"}
    assert same(out["mid.attentions.0.to_q.weight"], weights["mid.attentions.0.query.weight"][:, :, 0, 0])
    assert all(same(out[n], weights[n]) for n in ("turned", "low", "double", "scalar"))
    assert out["double"].dtype == "float32"
    out = converted(folder / "x.pth", folder / "low.safetensors", "--dtype", "bf16", "--prefix", "spatial_vae.module.")
    assert same(out["spatial_vae.module.turned"], weights["turned"].bfloat16())
    torch.save({"a": weights["turned"]}, folder / "old.pt", _use_new_zipfile_serialization=False)
    assert same(converted(folder / "old.pt", folder / "old.safetensors")["a"], weights["turned"])


def check_shards(folder):
    shards = [{"shared.weight": torch.randn(8, 4), "encoder.embed_tokens.weight": torch.randn(8, 4)},
              {"encoder.final_layer_norm.weight": torch.randn(4)}]
    model = folder / "epoch0-global_step100" / "model"
    model.mkdir(parents=True)
    names = {}
    for i, shard in enumerate(shards):
        torch.save(shard, model / f"pytorch_model-{i + 1:05}-of-00002.bin")
        names |= {n: f"pytorch_model-{i + 1:05}-of-00002.bin" for n in shard}
    (model / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    for source in (model, model.parent, model / "pytorch_model.bin.index.json"):
        converted(source, folder / "t5")
        index = json.loads((folder / "t5" / "model.safetensors.index.json").read_text())["weight_map"]
        assert index == {"shared.weight": "model-00001-of-00002.safetensors",
                         "encoder.final_layer_norm.weight": "model-00002-of-00002.safetensors"}
        for shard, name in ((shards[0], "shared.weight"), (shards[1], "encoder.final_layer_norm.weight")):
            assert same(safetensors_io.load(folder / "t5" / index[name])[name], shard[name])
    torch.save(shards[0], model / "pytorch_model-00002-of-00002.bin")
    refused(model, folder / "t5", "lacks encoder.final_layer_norm.weight")
    (model / "pytorch_model-00002-of-00002.bin").unlink()
    refused(model, folder / "t5", "pytorch_model-00002-of-00002.bin, which is not beside it")


def check_sadtalker(folder):
    """The layouts of the files that SadTalker and its enhancer are released in."""
    def values(*names):
        return {n: torch.randn(3, 2) for n in names}

    mapping = values("first.0.weight", "fc_exp.bias")
    trained = {"state": {0: {"step": torch.tensor(5.0)}}, "param_groups": [{"lr": 2e-4}]}
    torch.save({"mapping": mapping, "optimizer_mapping": trained, "discriminator": values("a"), "epoch": 229},
               folder / "mapping_00229-model.pth.tar")
    gfpgan = values("stylegan_decoder.noises.noise0", "conv_body_first.weight")
    torch.save({"params": values("conv_body_first.weight"), "params_ema": gfpgan}, folder / "GFPGANv1.4.pth")
    detector, landmarks, parsing = values("body.conv1.weight"), values("conv1.conv.weight"), values("encoder.0.conv2d.weight")
    torch.save({"module." + n: t for n, t in detector.items()}, folder / "detection_Resnet50_Final.pth",
               _use_new_zipfile_serialization=False)
    torch.save({"epoch": 7, "state_dict": landmarks}, folder / "alignment_WFLW_4HG.pth")
    torch.save(parsing, folder / "parsing_parsenet.pth")
    for file, wanted in (("mapping_00229-model.pth.tar", {"mapping." + n: t for n, t in mapping.items()}),
                         ("GFPGANv1.4.pth", gfpgan), ("detection_Resnet50_Final.pth", detector),
                         ("alignment_WFLW_4HG.pth", landmarks), ("parsing_parsenet.pth", parsing)):
        out = converted(folder / file, folder / "part.safetensors")
        assert out.keys() == wanted.keys() and all(same(out[n], t) for n, t in wanted.items()), file
    source = folder / "mapping_00229-model.pth.tar"
    out = converted(source, folder / "part.safetensors", "--prefix", "")
    assert out.keys() == mapping.keys()
    assert converted(source, folder / "part.safetensors", "--key", "mapping").keys() == {"mapping." + n for n in mapping}
    assert converted(source, folder / "part.safetensors", "--key", "discriminator").keys() == {"a"}


class Command:
    def __reduce__(self):
        return print, ("run by the file",)


def check_refusals(folder):
    with open(folder / "command.pt", "wb") as f:
        pickle.dump({"a": Command()}, f)
    refused(folder / "command.pt", folder / "n", "holds more than weights")
    (folder / "cut.pt").write_bytes((folder / "x.pth").read_bytes()[:-300])
    refused(folder / "cut.pt", folder / "n", "damaged")
    torch.save({"optimizer": {"a": 1}, "b": 2}, folder / "none.pt")
    refused(folder / "none.pt", folder / "n", "--key")
    refused(folder / "absent.pt", folder / "n", "no such file")


def main():
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for check in (check_names_and_types, check_shards, check_sadtalker, check_refusals):
            check(folder)
            print(f"{check.__name__}: holds")


if __name__ == "__main__":
    main()
