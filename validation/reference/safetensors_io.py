"""Reads and writes safetensors files with numpy alone.

The file is: u64 little-endian length of the header, a JSON header {name: {dtype, shape, data_offsets}}, then the
bytes of all tensors, back to back. numpy has no bfloat16, so BF16 is widened to float32 on reading.
"""
import json
import os
import struct

import numpy as np

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
           "U8": "u1", "BOOL": "?"}
_NAMES = {np.dtype(code): name for name, code in _DTYPES.items()}


def load(path):
    """All tensors of a file, {name: array}. ValueError where the file does not describe itself completely."""
    with open(path, "rb") as f:
        data = f.read()
    if len(data) < 8:
        raise ValueError(f"{path}: {len(data)} bytes are no safetensors file")
    (size,) = struct.unpack("<Q", data[:8])
    if size > len(data) - 8:
        raise ValueError(f"{path}: header of {size} bytes in a file of {len(data)}")
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    body = memoryview(data)[8 + size:]
    out = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= len(body):
            raise ValueError(f"{path}: {name} lies at {begin}..{end}, the data end at {len(body)}")
        raw = body[begin:end]
        if entry["dtype"] == "BF16":
            array = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            array = np.frombuffer(raw, _DTYPES[entry["dtype"]])
        out[name] = array.reshape(entry["shape"])
    return out


def save(path, tensors):
    """Writes {name: array}; the file appears under its name only when it is complete."""
    header, offset, blobs = {}, 0, []
    # Widest elements first, as the reference writer does it, so that every tensor starts aligned.
    for name, array in sorted(tensors.items(), key=lambda item: (-np.asarray(item[1]).itemsize, item[0])):
        # asarray keeps 0-d tensors 0-d, ascontiguousarray would not.
        array = np.asarray(array, order="C")
        if array.dtype not in _NAMES:
            raise ValueError(f"{name}: dtype {array.dtype} is none that safetensors knows here")
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape),
                        "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
        blobs.append(array)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = f"{path}.part"
    with open(partial, "wb") as f:
        f.write(struct.pack("<Q", len(text)))
        f.write(text)
        for array in blobs:
            f.write(array.tobytes())
    os.replace(partial, path)
