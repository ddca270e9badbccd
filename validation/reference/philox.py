"""weft's random numbers in numpy: Philox4x32-10 keyed by (seed, purpose, step, sample), as src/core/philox.h has it."""
import pathlib
import re

import numpy as np

LOW = np.uint64(0xFFFFFFFF)


def purposes():
    """Numbers of the random streams, by name."""
    text = (pathlib.Path(__file__).resolve().parents[2] / "src/core/philox.h").read_text()
    body = re.sub(r"//.*", "", re.search(r"enum class Purpose[^{]*{(.*?)}", text, re.S).group(1))
    return {n.split("=")[0].strip(): i + 1 for i, n in enumerate(body.strip().strip(",").split(","))}


def words(seed, purpose, step, sample, count):
    blocks = -(-count // 4)
    c = [np.arange(blocks, dtype=np.uint64), np.full(blocks, purpose << 24 | step & 0xFFFFFF, np.uint64),
         np.full(blocks, sample & 0xFFFFFFFF, np.uint64), np.full(blocks, sample >> 32 ^ step >> 24, np.uint64)]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(key[0]), p1 & LOW,
             (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(key[1]), p0 & LOW]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(c, 1).reshape(-1)


def normals(seed, purpose, step, sample, shape):
    """Standard normals in f64: Box-Muller on pairs of 24-bit uniforms."""
    count = int(np.prod(shape))
    pairs = (words(seed, purpose, step, sample, count + count % 2) >> np.uint64(8)).astype(np.float64).reshape(-1, 2)
    radius = np.sqrt(-2 * np.log((pairs[:, 0] + 0.5) * 2.0 ** -24))
    angle = 2 * np.pi * pairs[:, 1] * 2.0 ** -24
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1)[:count].reshape(shape)
