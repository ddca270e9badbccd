#!/usr/bin/env python3
"""Does weft's T5 encoder give what transformers' T5EncoderModel gives?

    check_t5.py [--weft build/weft] [--tolerance 1e-4] [--json FILE]

Two encoders with random weights: a small gated one of three layers, whose heads are not as wide as the model together, and one
layer of XXL's width (d_model 4096, d_ff 10240, 64 heads; about 0.8 GB of weights). Captions of very different lengths go
through `weft text --features` (only real tokens) and through transformers in f32, padded to 300 as Open-Sora pads them.
The figure is the relative L2 error over all real tokens, and the worst caption's. Exit status 0 if both hold.
"""
import pathlib
import sys
import tempfile

import torch

import common
from reference import captions, safetensors_io, t5


def check(weft, where, name, shape, texts, tokenizer, ranks):
    vocab = tokenizer.get_piece_size() + 100
    model = t5.model_of(shape, vocab)
    t5.write_weights(model, where / "t5.safetensors")
    (where / "deck.toml").write_text(t5.deck(shape, vocab, weights=str(where / "t5.safetensors"), clean=False))
    (where / "in.txt").write_text("".join(t + "\n" for t in texts))
    common.run([weft, "text", where / "deck.toml", where / "in.txt", "--features", where / "out.safetensors"], ranks=ranks)
    ours = safetensors_io.load(where / "out.safetensors")
    ids = [tokenizer.encode(t)[:299] + [1] for t in texts]
    theirs = t5.encode_padded(model, ids, 300)
    total = norm = worst = 0.0
    for i, one in enumerate(ids):
        mine, wanted = torch.tensor(ours[str(i)]), theirs[i, :len(one)]
        if mine.shape != wanted.shape:
            sys.exit(f"caption {i} has shape {tuple(mine.shape)}, wanted {tuple(wanted.shape)}")
        square, size = float((mine - wanted).square().sum()), float(wanted.square().sum())
        total, norm, worst = total + square, norm + size, max(worst, (square / size) ** 0.5)
    error = (total / norm) ** 0.5
    print(f"{name}: {len(texts)} captions of {min(map(len, ids))} to {max(map(len, ids))} tokens, relative error {error:.2e}, "
          f"worst caption {worst:.2e}")
    return {"error": error, "worst_caption": worst, "captions": len(texts), "longest": max(map(len, ids))}


def main():
    parser = common.parser(__doc__, ranks=1)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--small", action="store_true", help="leave the real-width layer out")
    a = common.parse(parser)
    facts = common.about(a, "transformers")
    texts = captions.captions(20, 9) + ["", "a", " ".join(captions.WORDS * 6)]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        where = pathlib.Path(folder)
        tokenizer = t5.train_tokenizer(where)
        results["small"] = check(a.weft, where, "small", t5.SMALL, texts, tokenizer, a.ranks)
        if not a.small:
            results["real_layer"] = check(a.weft, where, "real layer", t5.REAL_LAYER, texts[:4] + texts[-3:], tokenizer,
                                          a.ranks)
    common.write(a, facts, {"cases": results})
    return 0 if all(r["worst_caption"] <= a.tolerance for r in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
