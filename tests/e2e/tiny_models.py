"""The smallest T5 and tokenizer that weft reads, written byte by byte: the tests of generation and encoding need some. Weights
for the corpus of released files (tools/make_corpus.sh)."""

import hashlib
import math
import pathlib
import random
import struct

from harness import read_safetensors, write_safetensors

# The sections of a deck that trains a VAE.
TINY_VAE = """[model]
name = "vae"
[vae]
spatial_channels = [8, 8]
spatial_res_blocks = 1
spatial_groups = 2
filters = 8
num_res_blocks = 1
channel_multipliers = [1, 2]
temporal_downsample = [true]
num_groups = 2
micro_batch_size = 2
"""
# Beside them: a STDiT3 and a VAE that weft draws at random (generate.weights, vae.weights = "random:SEED").
TINY_GENERATE_DECK = """
[run]
dir = "run"
seed = 7
threads = 1
[model]
in_channels = 4
hidden_size = 32
depth = 2
num_heads = 2
caption_channels = 16
model_max_length = 24
[vae]
weights = "random:2"
spatial_channels = [8, 8, 16, 16]
spatial_res_blocks = 1
spatial_groups = 4
filters = 8
num_res_blocks = 1
channel_multipliers = [1, 1, 2, 2]
num_groups = 4
[t5]
d_model = 16
d_kv = 8
num_heads = 2
d_ff = 32
num_layers = 2
vocab_size = 144
max_length = 24
[sampler]
steps = 4
[generate]
weights = "random:1"
image_size = [32, 48]
num_frames = "17"
aes = 0
output = "out"
"""


# The same of Wan: its own VAE, and umT5 (write_t5 with umt5=True).
TINY_WAN_DECK = """
[run]
dir = "run"
seed = 7
threads = 1
[model]
name = "wan"
hidden_size = 32
depth = 2
num_heads = 2
ffn_dim = 64
text_dim = 16
text_len = 24
freq_dim = 32
[vae]
weights = "random:2"
filters = 8
num_res_blocks = 1
[t5]
d_model = 16
d_kv = 8
num_heads = 2
d_ff = 32
num_layers = 2
vocab_size = 144
max_length = 24
[sampler]
steps = 4
[generate]
weights = "random:1"
image_size = [32, 48]
num_frames = "5"
output = "out"
"""


def _varint(n):
    out = b""
    while n > 127:
        out, n = out + bytes([n & 127 | 128]), n >> 7
    return out + bytes([n])


def _field(number, value):
    """A protobuf field: bytes, text, a float or a whole number."""
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    value = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def write_tokenizer(path):
    """A SentencePiece Unigram model of single letters, with T5's ids for padding (0), end (1) and unknown (2)."""
    control, unknown, normal = 3, 2, 1
    pieces = [("<pad>", control), ("</s>", control), ("<unk>", unknown)]
    pieces += [(piece, normal) for piece in ["\u2581", *"abcdefghijklmnopqrstuvwxyz0123456789.,:"]]
    model = b"".join(_field(1, _field(1, piece) + _field(2, -float(i)) + _field(3, kind))
                     for i, (piece, kind) in enumerate(pieces))
    trainer = _field(3, 1) + _field(40, 2) + _field(41, 0x7FFFFFFF) + _field(42, 1) + _field(43, 0)
    # Minus one as bos id, as T5 has it: ten bytes of a 64-bit two's complement.
    trainer = trainer.replace(_field(41, 0x7FFFFFFF), _varint(41 << 3) + b"\xff" * 9 + b"\x01")
    normalizer = _field(1, "identity") + _field(3, 1) + _field(4, 1) + _field(5, 1)
    pathlib.Path(path).write_bytes(model + _field(2, trainer) + _field(3, normalizer))


def write_t5(folder, seed=3, umt5=False):
    """FOLDER/model.safetensors and FOLDER/spiece.model, for the [t5] tables above."""
    folder = pathlib.Path(folder)
    folder.mkdir(exist_ok=True)
    draw, tensors = random.Random(seed), {}

    def add(name, shape, deviation):
        count = math.prod(shape)
        values = [draw.gauss(0, deviation) for _ in range(count)] if deviation else [1.0] * count
        tensors[name] = ("F32", shape, struct.pack(f"<{count}f", *values))

    add("shared.weight", (144, 16), 1.0)  # 43 pieces, 100 extra ids, and one that none uses
    for i in range(2):
        block = f"encoder.block.{i}.layer."
        for name, shape in (("q", (16, 16)), ("k", (16, 16)), ("v", (16, 16)), ("o", (16, 16))):
            add(f"{block}0.SelfAttention.{name}.weight", shape, 0.2)
        if i == 0 or umt5:
            add(f"{block}0.SelfAttention.relative_attention_bias.weight", (32, 2), 0.5)
        add(f"{block}0.layer_norm.weight", (16,), 0)
        for name, shape in (("wi_0", (32, 16)), ("wi_1", (32, 16)), ("wo", (16, 32))):
            add(f"{block}1.DenseReluDense.{name}.weight", shape, 0.2)
        add(f"{block}1.layer_norm.weight", (16,), 0)
    add("encoder.final_layer_norm.weight", (16,), 0)
    write_safetensors(folder / "model.safetensors", tensors)
    write_tokenizer(folder / "spiece.model")


def repeat_channels(source, target):
    """The file with the first two channels of each weight, over and over, in both dimensions: it packs well."""
    def repeated(dtype, shape, values):
        outer, inner = [*shape, 1, 1][:2]
        cell = len(values) // (outer * inner)
        rows = [values[o * inner * cell:][:min(2, inner) * cell] for o in range(min(2, outer))]
        rows = [(row * math.ceil(inner / 2))[:inner * cell] for row in rows]
        return dtype, shape, (b"".join(rows) * math.ceil(outer / 2))[:len(values)]
    write_safetensors(target, {name: repeated(*t) for name, t in read_safetensors(source).items()})


def hash_of_weights(path):
    """Of names, types, shapes and values, whatever else is in the file."""
    found = hashlib.sha256()
    for name, (dtype, shape, values) in sorted(read_safetensors(path).items()):
        found.update(f"{name} {dtype} {shape}\n".encode() + values)
    return found.hexdigest()
