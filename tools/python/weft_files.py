"""Reads weft's files into numpy: stores of clips and latents, text features, weights, checkpoints, metrics.

    import weft_files as wf
    store = wf.read_store("latents.h5")            # of weft ingest or weft encode; needs h5py
    bucket = store["synthetic-17-32x32"]
    bucket.clip(0), bucket.captions[0], bucket.text_features(0)
    wf.read_weights("weights.safetensors")         # a file, an index or a folder: {name: array}
    run = wf.read_checkpoint("runs/first")         # the newest; runs/first/step_200 for another
    run.tensor("x_embedder.proj.weight"), run.tensor("x_embedder.proj.weight", "ema")
    wf.read_metrics("runs/first")                  # {"step": array, "loss": array, "split.compute": array, ...}

weft does not need this file. It checks shapes and bounds; hashes are verified by `weft inspect`.
"""

import json
import math
import os
import pathlib

import numpy as np

SAFETENSORS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
               "U8": "u1", "BOOL": "?"}


def from_bf16(bits):
    """float32 of the bits of bf16."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


# --- Stores: HDF5, the schema is in src/data/clip_store.h.

def _texts(group, name):
    """The texts that lie one behind the other in `name`, cut at `name`_end. Bytes that are not UTF-8, as a file's name may have
    them, become \\xe9 and so on."""
    data, texts, begin = bytes(group[name][:]), [], 0
    for end in group[name + "_end"][:].tolist():
        texts.append(data[begin:end].decode(errors="backslashreplace"))
        begin = end
    return texts


class Bucket:
    """Clips of one shape. `clips` is the dataset: clips are read when asked for."""

    def __init__(self, name, group):
        self.name = name
        kind = group.attrs.get("kind", "latents")
        self.kind = "pixels" if "frames" in group else kind.decode() if isinstance(kind, bytes) else str(kind)
        self.clips = group["frames" if self.kind == "pixels" else "latents"]
        self.fps = group["fps"][:]
        if "captions" in group:
            self.sources, self.captions = _texts(group, "sources"), _texts(group, "captions")
        else:  # stores of versions 1 and 2
            self.sources, self.captions = ([t.decode(errors="backslashreplace") for t in group[name][:]] for name in ("source", "text"))
        self.scale, self.shift = group.attrs.get("scale"), group.attrs.get("shift")
        self._features = group.get("text_features")
        self._rows = group["text_offset"][:] if self._features is not None else None

    def __len__(self):
        return self.clips.shape[0]

    def clip(self, i):
        """Pixels u8 [T,H,W,3]; latents [C,T,H,W] as they are stored: moments are means, then log variances."""
        return self.clips[i]

    def latent(self, i):
        """float32 latents as the model sees them; of moments the mean."""
        x = self.clips[i].astype(np.float32)
        if self.kind == "pixels":
            raise ValueError(f"bucket {self.name} holds pixels")
        if self.kind != "moments":
            return x
        mean = x[:x.shape[0] // 2]
        scale, shift = (np.asarray(v, np.float32).reshape(-1, 1, 1, 1) for v in (self.scale, self.shift))
        return (mean - shift) / scale

    def text_features(self, i):
        """float32 [tokens, channels] of the clip's caption; None where the store has none."""
        if self._features is None:
            return None
        rows = self._features[int(self._rows[i]):int(self._rows[i + 1])]
        return from_bf16(rows) if rows.dtype == np.uint16 else rows.astype(np.float32)


def read_store(path):
    """{name: Bucket} of a store of clips or latents, in the order in which weft counts clips."""
    import h5py
    file = h5py.File(path, "r")
    if "clips" not in file or "schema_version" not in file.attrs:
        raise ValueError(f"{path} is no store of clips")
    return {name: Bucket(name, file["clips"][name]) for name in sorted(file["clips"])}


# --- Weights.

def read_safetensors(path):
    """{name: array} of one file, mapped, not copied; BF16 becomes float32."""
    data = np.memmap(path, np.uint8, "r")
    length = int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:8 + length].tobytes())
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        values = data[begin:end].view(SAFETENSORS[entry["dtype"]]).reshape(entry["shape"])
        tensors[name] = from_bf16(values) if entry["dtype"] == "BF16" else values
    return tensors


def read_weights(path):
    """{name: array} of a safetensors file, of an index with its shards, or of a folder that holds either. Also the text features
    of `weft text`, by sample id."""
    path = pathlib.Path(path)
    if path.is_dir():
        endings = (".safetensors", ".safetensors.index.json")
        found = [file for ending in endings for stem in ("model", "diffusion_pytorch_model")
                 if (file := path / (stem + ending)).exists()][:1]
        found = found or sorted(path.glob("*" + endings[1])) or sorted(path.glob("*" + endings[0]))
        if len(found) != 1:
            raise ValueError(f"{path} holds {len(found)} sets of weights: name the one that is meant")
        path = found[0]
    if path.suffix != ".json":
        return read_safetensors(path)
    tensors = {}
    for shard in sorted(set(json.loads(path.read_text())["weight_map"].values())):
        tensors |= read_safetensors(path.parent / shard)
    return tensors


# --- Checkpoints: docs/checkpoints.md.

def _lengths(text):
    """[65536, 65536, 4096] of "65536*2 4096"."""
    lengths = []
    for word in text.split():
        length, _, times = word.partition("*")
        lengths += [int(length)] * int(times or 1)
    return lengths


def _part(length, rank, ranks):
    """Elements [begin, end) of a stretch that the rank wrote: units of 16, the last rank to the end."""
    units = length // 16
    return 16 * (units * rank // ranks), length if rank == ranks - 1 else 16 * (units * (rank + 1) // ranks)


class Checkpoint:
    """Attributes step, deck (TOML as text), arrays ({name: elements}) and shapes ({tensor: shape}) of what was trained."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.manifest = m = json.loads((self.folder / "manifest.json").read_text())
        if m["schema"] != "weft-checkpoint-2":
            raise ValueError(f"{self.folder}: format {m['schema']} is not read")
        self.step, self.deck = m["step"], m["deck"]
        self.arrays = {a["name"]: a["elements"] for a in m["arrays"]}
        self.shapes = {t["name"]: tuple(t["shape"]) for t in m["tensors"]}
        self._offsets = {t["name"]: t["offset"] for t in m["tensors"]}
        self._cache = {}

    def array(self, name):
        """One array whole, float32: master (the weights), exp_avg, exp_avg_sq, ema, fixed; of several averages also
        ema_DECAY."""
        if name in self._cache:
            return self._cache[name]
        for s in self.manifest["shards"]:
            file = self.folder / s["file"]
            if file.stat().st_size != s["bytes"]:
                raise ValueError(f"{file} has {file.stat().st_size} bytes, not {s['bytes']}: copy it again")
        shards = [np.memmap(self.folder / s["file"], "<f4", "r") for s in self.manifest["shards"]]
        whole, at = np.empty(self.arrays[name], np.float32), [0] * len(shards)
        for entry in self.manifest["arrays"]:
            begin = 0
            for length in _lengths(self.manifest["cuts"][entry["cuts"]]):
                for rank, shard in enumerate(shards):
                    first, last = _part(length, rank, len(shards))
                    if entry["name"] == name:
                        whole[begin + first:begin + last] = shard[at[rank]:at[rank] + last - first]
                    at[rank] += last - first
                begin += length
        self._cache[name] = whole
        return whole

    def tensor(self, name, array="master"):
        """A trained parameter, or its moments or average, in its own shape."""
        begin, shape = self._offsets[name], self.shapes[name]
        return self.array(array)[begin:begin + math.prod(shape)].reshape(shape)


def read_checkpoint(path):
    """Of a run directory the newest checkpoint, or of step_N itself."""
    path = pathlib.Path(path)
    return Checkpoint(path if (path / "manifest.json").exists() else path / os.readlink(path / "latest"))


# --- Metrics.

def read_metrics(path):
    """{name: array} of a run's metrics.jsonl, a value a step, nested members as "split.compute". A member that some steps lack is
    NaN there; lists (samples, rank_busy) stay lists of lists. The last line of a run at work may not be whole: it is left out."""
    path = pathlib.Path(path)
    text = (path / "metrics.jsonl" if path.is_dir() else path).read_text()
    lines = text[:text.rfind("\n") + 1].splitlines()

    def flat(values, before=""):
        for name, value in values.items():
            if isinstance(value, dict):
                yield from flat(value, f"{before}{name}.")
            else:
                yield before + name, value
    steps = [dict(flat(json.loads(line))) for line in lines]
    columns = {}
    for name in dict.fromkeys(name for step in steps for name in step):
        values = [step.get(name, math.nan) for step in steps]
        number = all(isinstance(v, (int, float)) for v in values)
        columns[name] = np.array(values) if number else values
    return columns
