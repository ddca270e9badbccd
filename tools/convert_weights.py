#!/usr/bin/env python3
"""Converts weights of PyTorch, or safetensors of other programs, to the safetensors that weft reads.

    convert_weights.py INPUT OUTPUT [--dtype keep|f32|bf16|f16] [--key KEY] [--only PREFIX] [--prefix PREFIX]

INPUT: a file (.bin, .pt, .pth, .ckpt, .safetensors), an index (pytorch_model.bin.index.json), or a folder that holds one of
them: a model of Hugging Face in shards (DeepFloyd's T5 encoder), Open-Sora's checkpoint directory (its model/ shards are taken;
name ema.pt itself for the average). OUTPUT: NAME.safetensors, or a folder, where the name is model.safetensors. One shard
becomes one file; more become NAME-00001-of-0000N.safetensors and NAME.safetensors.index.json, written last.

Files are unpickled with weights_only=True: nothing in them is run. They are mapped, so one tensor is in memory at a time.

Names become the released ones: what training programs put in front of all names goes ("module.", "model.", "_orig_mod.",
"pipe.dit." and the like), as do wrappers inside them ("_checkpoint_wrapped_module.") and the tables "state_dict", "model", "ema",
"params" around them (--key names another). --only takes the tensors whose names begin so, without it: one part of a file with
several. Old attention names query, key, value, proj_attn become to_q, to_k, to_v, to_out.0 and their
1x1 convolutions matrices; a second name of T5's embedding is left out. --prefix puts something in front of all names: for
one file of a segmentation model's encoder_epoch_N.pth and decoder_epoch_N.pth take "encoder." and "decoder."; as they are,
they are model.weights_encoder and model.weights_decoder. Both of PyTorch's formats are read, before and since 1.6.

fp8 becomes bf16 unless --dtype says f32 or f16, multiplied by its scales (NAME.scale_weight, NAME.weight_scale).

torchvision's MobileNetV2 (mobilenet_v2-b0353104.pth, mobilenet_v2-7ebf99e0.pth) gets the names of the segmentation encoder
mobilenetv2dilated; its last convolution and classifier are left out. ResNets keep their names, for the text detector: the
encoders of segmentation have another stem, and do not take them.

SadTalker's parts (docs/models/sadtalker.md) are known by what they hold: a mapping network (mapping_00229-model.pth.tar, a key
"mapping" beside those of its training) gets "mapping." in front of its names unless --prefix names something else.
detection_Resnet50_Final.pth, alignment_WFLW_4HG.pth, parsing_parsenet.pth and GFPGANv1.4.pth need no option.

CLIP (docs/models/clip.md): OpenAI's ViT-L-14.pt gets the names of Hugging Face's model, which weft reads as it is released. Such
a file is a TorchScript archive; only its tensors are taken, and the program in it is neither loaded nor run. The aesthetic
predictor, sac+logos+ava1-l14-linearMSE.pth or Open-Sora's aesthetic.pth, needs no option.

Wan2.1_VAE.pth (docs/models/wan_vae.md) and models_t5_umt5-xxl-enc-bf16.pth (docs/models/t5.md, umT5) need no option, and keep
their names.
"""
import argparse
import collections
import io
import json
import os
import pathlib
import pickle
import re
import struct
import sys
import zipfile

try:
    import numpy  # noqa: F401 PyTorch hands its bytes over through it
    import torch
except ModuleNotFoundError as e:
    print(f"{e.name} is missing. HINT: pip install torch numpy, in a virtual environment: python3 -m venv", file=sys.stderr)
    sys.exit(2)

TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
         torch.uint8: "U8", torch.bool: "BOOL", torch.int16: "I16", torch.int8: "I8"}
FP8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
WANTED = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
WRAPPERS = ("state_dict", "model", "ema", "params", "module")
# If a file contains several sets of weights, these keys are used: GFPGAN's averages, SadTalker's mapping network.
PREFERRED = ("params_ema", "mapping")
PREFIXES = {"mapping": "mapping."}  # put in front of the names found under this key
OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".tar")
# Parts of names that training programs put in front of a model's own: of every name, and anywhere.
IN_FRONT = ("module", "model", "diffusion_model", "transformer", "pipe", "dit", "generator", "generator_ema", "ema", "net")
INSIDE = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\.")
# What scales a NAME.weight of fp8, by the rest of its name; and what such files hold that weft has no use for.
SCALES = ("scale_weight", "weight_scale")
OF_FP8 = re.compile(r"(.*\.)?(scaled_fp8|scale_input|input_scale)")


def shards_of(path):
    """The files of `path`, and the tensor names that the index lists (or None)."""
    if path.is_dir():
        folder = path / "model" if (path / "model").is_dir() else path
        indices = sorted(folder.glob("*.bin.index.json"))
        files = sorted(f for f in folder.iterdir() if f.suffix in ENDINGS)
        shards = sorted(folder.glob("*.safetensors"))
        among = indices or files or sorted(folder.glob("*.safetensors.index.json")) or shards
        if among == shards and len({re.sub(r"-\d+(?=-of-\d+\.)", "", f.name) for f in shards}) == 1:
            return shards, {n: f.name for f in shards for n in tensors_of_safetensors(f)}
        if len(among) != 1:
            sys.exit(f"{folder} contains {len(among)} sets of weights: name the file you mean "
                     f"({', '.join(f.name for f in among) or 'none ends in ' + ', '.join(ENDINGS)})")
        path = among[0]
    if not path.is_file():
        sys.exit(f"{path}: no such file")
    if not path.name.endswith(".index.json"):
        return [path], None
    names = json.loads(path.read_text())["weight_map"]
    for shard in sorted(set(names.values())):
        if "/" in shard or not (path.parent / shard).is_file():
            sys.exit(f"{path} names {shard}, which is not in the same folder")
    return [path.parent / shard for shard in sorted(set(names.values()))], names


STORAGES = {"FloatStorage": torch.float32, "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16,
            "DoubleStorage": torch.float64, "LongStorage": torch.int64, "IntStorage": torch.int32, "ByteStorage": torch.uint8,
            "BoolStorage": torch.bool}


class ScriptModule:
    """Stands for any class of a TorchScript archive: keeps its members, and has no code."""

    def __setstate__(self, members):
        self.members = members


class ScriptTensors(pickle.Unpickler):
    """Reads data.pkl of a TorchScript archive. Nothing that it names is called but what rebuilds tensors and lists."""

    def __init__(self, archive, root):
        super().__init__(io.BytesIO(archive.read(root + "data.pkl")))
        self.archive, self.root, self.storages = archive, root, {}

    def find_class(self, module, name):
        if module.startswith("__torch__"):
            return ScriptModule
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return torch._utils._rebuild_tensor_v2
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch.jit._pickle":  # lists and their types
            return lambda values, *_: values
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a model")

    def persistent_load(self, given):
        _, dtype, key, _, count = given
        if key not in self.storages:
            data = bytearray(self.archive.read(f"{self.root}data/{key}"))
            if len(data) != count * dtype.itemsize:
                raise pickle.UnpicklingError(f"storage {key} has {len(data)} bytes instead of {count * dtype.itemsize}")
            values = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            self.storages[key] = torch.storage.TypedStorage(wrap_storage=values.untyped_storage(), dtype=dtype, _internal=True)
        return self.storages[key]


def tensors_of_script(path):
    """{name: tensor} of a TorchScript archive, or None for another file."""
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        roots = [n.removesuffix("constants.pkl") for n in archive.namelist() if n.endswith("/constants.pkl")]
        if not roots:
            return None
        try:
            module, found = ScriptTensors(archive, roots[0]).load(), {}
        except Exception as e:  # noqa: BLE001 whatever the unpickler meets
            sys.exit(f"{path} is damaged, or contains more than a model: {e}")

    def collect(value, name):
        if torch.is_tensor(value):
            found[name] = value
        elif isinstance(value, ScriptModule) and isinstance(value.members, dict):
            for key, member in value.members.items():
                collect(member, f"{name}.{key}" if name else key)
    collect(module, "")
    return found


def tensors_of_safetensors(path):
    """{name: tensor} of a safetensors file, mapped."""
    data = numpy.memmap(path, dtype=numpy.uint8, mode="c") if path.stat().st_size else b""
    try:
        end = 8 + struct.unpack("<Q", bytes(data[:8]))[0]
        header = json.loads(bytes(data[8:end]))
        kinds = {name: kind for kind, name in TYPES.items()} | FP8 | {"F64": torch.float64}
        return {name: torch.from_numpy(data[end + t["data_offsets"][0]:end + t["data_offsets"][1]]).view(kinds[t["dtype"]])
                .reshape(t["shape"]) for name, t in header.items() if name != "__metadata__"}
    except Exception as e:  # noqa: BLE001 whatever an untrusted header holds
        begin = bytes(data[:40]).split(b"\n")[0].decode("ascii", "replace")
        sys.exit(f"{path} is not a safetensors file that this program reads ({type(e).__name__}: {e}): it begins with {begin!r}")


def unpickled(path):
    """Loads a file, memory-mapped if its format allows; files from before PyTorch 1.6 are read completely."""
    script = tensors_of_script(path)
    if script is not None:
        return script
    for mapped in (True, False):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except Exception as e:  # noqa: BLE001 whatever the unpickler meets
            if mapped and "mmap" in str(e):
                continue
            # PyTorch's advice here is to execute the file's content: never do that with untrusted files.
            reason = str(e).split("WeightsUnpickler error: ")[-1].strip().splitlines()[0]
            sys.exit(f"{path} is not a weight file, is damaged, or contains more than weights: {reason}")
    raise AssertionError


def load(path, key):
    """{name: tensor} of one file, and the prefix for its names."""
    if path.suffix == ".safetensors":
        return tensors_of_safetensors(path), ""
    content, prefix = unpickled(path), ""
    if key:
        if not isinstance(content, dict) or key not in content:
            sys.exit(f"{path} has no key {key}")
        content, prefix = content[key], PREFIXES.get(key, "")
    while isinstance(content, dict) and not any(torch.is_tensor(v) for v in content.values()):
        tables = [k for k, v in content.items() if isinstance(v, dict)]
        inner = [k for k in PREFERRED if k in tables][:1] or [k for k in WRAPPERS if k in tables]
        if len(inner) != 1:
            sys.exit(f"{path} contains no tensors, only the keys {', '.join(map(str, content))}: choose one with --key")
        content, prefix = content[inner[0]], prefix or PREFIXES.get(inner[0], "")
    if not isinstance(content, dict):
        sys.exit(f"{path} holds {type(content).__name__}, not a table of names and tensors")
    for name in [n for n, v in content.items() if not torch.is_tensor(v)]:
        print(f"{path.name}: {name} is not a tensor: left out")
        del content[name]
    return content, prefix


def in_front(names):
    """What a training program put in front of all of them, "" if nothing. Names without a dot are markers."""
    prefix, names = "", [INSIDE.sub("", n) for n in names if "." in n]
    while names:
        heads = {n[len(prefix):].partition(".")[0] for n in names}
        if len(heads) > 1 or not heads <= set(IN_FRONT):
            break
        prefix += heads.pop() + "."
    return prefix


def without_fp8(tensors, wanted):
    """The same with fp8 multiplied by its scales."""
    used, out = set(), {}
    for name, t in tensors.items():
        if t.dtype in FP8.values() and not OF_FP8.fullmatch(name):
            t, kind = t.float(), WANTED.get(wanted, torch.bfloat16)
            for scale in (name.removesuffix("weight") + s for s in SCALES):
                if scale in tensors:
                    used.add(scale)
                    s = tensors[scale].float()
                    t = t * s.reshape(s.shape if s.numel() == 1 else (-1, *[1] * (t.dim() - 1)))
            t = narrowed(name, t, kind)
        out[name] = t
    lost = [n for n in tensors if n.endswith(SCALES) and n not in used]
    if lost:
        sys.exit(f"{lost[0]} scales no fp8 tensor of the same file")
    return {n: t for n, t in out.items() if n not in used and not OF_FP8.fullmatch(n)}


def mobilenet_renamed(tensors):
    """torchvision's MobileNetV2 under the names of the segmentation encoder, whose blocks are lists without nesting."""
    out, left = {}, []
    for name, t in tensors.items():
        if name.startswith(("features.18.", "classifier.")):
            left.append(name)
            continue
        match = re.fullmatch(r"features\.(\d+)\.conv\.([\d.]+)\.(\w+)", name)
        if match:
            places = ["0.0", "0.1", "1", "2"] if match[1] == "1" else ["0.0", "0.1", "1.0", "1.1", "2", "3"]
            place = places.index(match[2])
            name = f"features.{match[1]}.conv.{place // 2 * 3 + place % 2}.{match[3]}"
        out[name] = t
    print(f"torchvision's MobileNetV2: left out {', '.join(left)}")
    return out


# OpenAI's names of CLIP's parts, and Hugging Face's.
CLIP_PARTS = {"visual.class_embedding": "vision_model.embeddings.class_embedding",
              "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
              "visual.conv1.": "vision_model.embeddings.patch_embedding.", "visual.ln_pre.": "vision_model.pre_layrnorm.",
              "visual.ln_post.": "vision_model.post_layernorm.", "visual.transformer.resblocks.": "vision_model.encoder.layers.",
              "transformer.resblocks.": "text_model.encoder.layers.", "ln_final.": "text_model.final_layer_norm.",
              "token_embedding.": "text_model.embeddings.token_embedding.",
              "positional_embedding": "text_model.embeddings.position_embedding.weight"}
CLIP_INNER = {".attn.out_proj.": ".self_attn.out_proj.", ".ln_1.": ".layer_norm1.", ".ln_2.": ".layer_norm2.",
              ".mlp.c_fc.": ".mlp.fc1.", ".mlp.c_proj.": ".mlp.fc2."}


def clip_renamed(tensors):
    """OpenAI's CLIP under Hugging Face's names: q, k and v apart, projections as matrices of linear layers."""
    out = {}
    for name, t in tensors.items():
        if name in ("input_resolution", "context_length", "vocab_size"):
            continue
        if name in ("visual.proj", "text_projection"):
            out["visual_projection.weight" if name == "visual.proj" else "text_projection.weight"] = t.t()
            continue
        part = next((p for p in CLIP_PARTS if name.startswith(p)), None)
        new = name if part is None else CLIP_PARTS[part] + name[len(part):]
        for old, inner in CLIP_INNER.items():
            new = new.replace(old, inner)
        match = re.fullmatch(r"(.*)\.attn\.in_proj_(weight|bias)", new)
        if match:
            for part, piece in zip("qkv", t.chunk(3)):
                out[f"{match[1]}.self_attn.{part}_proj.{match[2]}"] = piece
        else:
            out[new] = t
    return out


def renamed(tensors, prefix, names):
    """Released names; `names`: of the whole model."""
    if "visual.conv1.weight" in tensors and "visual.class_embedding" in tensors:
        tensors = clip_renamed(tensors)
    if "features.1.conv.0.0.weight" in tensors:
        tensors = mobilenet_renamed(tensors)
    if "layer1.0.conv1.weight" in tensors and tuple(tensors.get("conv1.weight", torch.empty(0)).shape[2:]) == (7, 7):
        print("torchvision's ResNet: for model.weights_backbone of text detection, which does not read its fc. It is no encoder of "
              "segmentation: those begin with three 3x3 convolutions instead of one 7x7 (docs/segmentation.md)")
    out = {}
    for name, t in tensors.items():
        if name == "encoder.embed_tokens.weight" and "shared.weight" in names:
            continue
        match = re.fullmatch(r"(.*attentions\.\d+)\.(query|key|value|proj_attn)\.(weight|bias)", name)
        if match:
            name = f"{match[1]}.{OLD_ATTENTION[match[2]]}.{match[3]}"
            if t.dim() == 4:
                t = t[:, :, 0, 0]
        if prefix + name in out:
            sys.exit(f"{prefix + name} would be the name of two tensors")
        out[prefix + name] = t
    return out


def target_type(t, wanted):
    if not t.dtype.is_floating_point:
        return t.dtype
    return WANTED.get(wanted, torch.float32 if t.dtype == torch.float64 else t.dtype)


def narrowed(name, t, kind):
    """In that type. Ends where a value is beyond its range."""
    low = t.detach().to(kind)
    if kind.is_floating_point and torch.isinf(low).sum() > torch.isinf(t).sum():
        sys.exit(f"{name} has the value {t.float().abs().max():g}, which is beyond the range of {TYPES[kind]}: take --dtype bf16")
    return low


def write(partial, tensors, wanted):
    """Writes one safetensors file, tensor by tensor. Returns its bytes of data."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    order = sorted(tensors, key=lambda n: (-target_type(tensors[n], wanted).itemsize, n))
    for name in order:
        t, kind = tensors[name], target_type(tensors[name], wanted)
        if kind not in TYPES:
            sys.exit(f"{name} has type {kind}, which weft cannot read")
        size = t.numel() * kind.itemsize
        header[name] = {"dtype": TYPES[kind], "shape": list(t.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(partial, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            t = narrowed(name, tensors[name], target_type(tensors[name], wanted)).contiguous()
            f.write(t.reshape(-1).view(torch.uint8).numpy().data)
        f.flush()
        os.fsync(f.fileno())
    return offset


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("input", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--dtype", choices=["keep", *WANTED], default="keep")
    parser.add_argument("--key", help="key of the weights in the file's dictionary")
    parser.add_argument("--only", default="", help="take the tensors whose names begin so, without it")
    parser.add_argument("--prefix", help="prefix for all tensor names")
    args = parser.parse_args()
    out = args.output if args.output.suffix == ".safetensors" else args.output / "model.safetensors"
    out.parent.mkdir(parents=True, exist_ok=True)
    shards, promised = shards_of(args.input)
    total, weight_map, written = 0, {}, {}
    try:
        for i, shard in enumerate(shards):
            tensors, prefix = load(shard, args.key)
            if promised is not None:
                lost = [n for n, s in promised.items() if s == shard.name and n not in tensors]
                if lost:
                    sys.exit(f"{shard} lacks {lost[0]}, which the index lists")
            names = [n.removeprefix(args.only) for n in promised or tensors if n.startswith(args.only)]
            front = in_front(names)
            tensors = {INSIDE.sub("", n.removeprefix(args.only)).removeprefix(front): t for n, t in tensors.items()
                       if n.startswith(args.only)}
            if not tensors:
                sys.exit(f"{shard} has no tensor {args.only}...")
            if front:
                print(f"{shard.name}: names without {front}")
            tensors = renamed(without_fp8(tensors, args.dtype), prefix if args.prefix is None else args.prefix,
                              [INSIDE.sub("", n).removeprefix(front) for n in names])
            path = out if len(shards) == 1 else out.with_name(f"{out.stem}-{i + 1:05}-of-{len(shards):05}.safetensors")
            twice = next((n for n in tensors if n in weight_map), None)
            if twice:
                sys.exit(f"{twice} is in {weight_map[twice]} and in {shard.name}")
            if path.exists() and path.resolve() in [s.resolve() for s in shards]:
                sys.exit(f"{path} is an input: choose another output")
            written[path] = pathlib.Path(f"{path}.part")
            total += write(written[path], tensors, args.dtype)
            weight_map |= {name: path.name for name in tensors}
            print(f"{shard} -> {path}: {len(tensors)} tensors")
        for path, partial in written.items():
            partial.rename(path)
    finally:
        for partial in written.values():
            partial.unlink(missing_ok=True)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        path = out.with_name(out.name + ".index.json")
        path.write_text(json.dumps(index, indent=2) + "\n")
    print(f"{len(weight_map)} tensors, {total / 1e9:.3f} GB")


if __name__ == "__main__":
    main()
