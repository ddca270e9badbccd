#!/usr/bin/env python3
"""Does weft's CLIP give what transformers' CLIPModel gives, and `weft evaluate` the scores that follow from it?

    check_clip.py [--weft build/weft] [--tolerance 1e-5] [--full] [--numbers] [--json FILE]

Models with random weights: a small one, with --full also one of ViT-L/14's shape (1.7 GB). Pictures of several shapes go
through Pillow's bicubic resize, the middle crop and both encoders, captions through the tokenizer, which is written here anew
from docs/models/clip.md and is held to transformers' CLIPTokenizer on plain text. Figures are relative L2 errors of features.
End to end, `weft evaluate` scores pictures of a table: `match` against 100 times the cosine, `aes` against the predictor in
PyTorch, `lpips` against the package of that name with random weights. --numbers prints what tests/models/clip/clip_test.cpp expects of its small model. Exit status 0 if all hold.
"""
import csv
import html
import pathlib
import re
import sys
import tempfile

import lpips
import numpy as np
import torch
import transformers
from PIL import Image

import common
from reference import safetensors_io

SMALL = {"vision": (128, 2, 192, 4, 12), "text": (64, 2, 96, 600, 16), "channels": 24}  # width, layers, MLP, patch, side; ...
FULL = {"vision": (1024, 24, 4096, 14, 224), "text": (768, 12, 3072, 49408, 77), "channels": 768}
TEXTS = ["a cat", "A photo of 2 DOGS running, isn't it?", "caf\u00e9 &amp; cr\u00e8me -- 100%   !!", "the lower lowest newer wider",
         "x" * 90, "\u4e2d\u6587 text", "end<|endoftext|>behind"]


# ---- models ----

def model_of(shape, seed=3):
    (width, layers, mlp, patch, side), (twidth, tlayers, tmlp, vocabulary, positions) = shape["vision"], shape["text"]
    config = transformers.CLIPConfig(
        text_config={"hidden_size": twidth, "intermediate_size": tmlp, "num_hidden_layers": tlayers, "vocab_size": vocabulary,
                     "num_attention_heads": twidth // 64, "max_position_embeddings": positions, "projection_dim": shape["channels"],
                     "bos_token_id": vocabulary - 2, "eos_token_id": vocabulary - 1, "hidden_act": "quick_gelu"},
        vision_config={"hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers, "patch_size": patch,
                       "image_size": side, "num_attention_heads": width // 64, "projection_dim": shape["channels"],
                       "hidden_act": "quick_gelu"},
        projection_dim=shape["channels"])
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    return transformers.CLIPModel(config).eval()


def randomise(model):
    """Weights of trained sizes: every part counts."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.copy_((1.0 if name.endswith("weight") else 0.0) + 0.2 * torch.randn_like(p))
            elif p.dim() >= 2:
                p.copy_(torch.randn_like(p) / p[0].numel() ** 0.5)
            elif p.dim() == 1:
                p.copy_(0.2 * torch.randn_like(p))
    return model


def formula_values(name, count):
    """In -0.5 to 0.5, by a hash of name and place: tests/models/clip/clip_test.cpp has the same."""
    h = 2166136261
    for byte in name.encode():
        h = ((h ^ byte) * 16777619) & 0xffffffff
    x = (h + np.arange(count, dtype=np.uint64) * 2654435761) & 0xffffffff
    x = ((x ^ (x >> np.uint64(16))) * 0x45d9f3b) & 0xffffffff
    x = x ^ (x >> np.uint64(16))
    return x.astype(np.float64) / 4294967296.0 - 0.5


def formula_weight(name, shape):
    v = formula_values(name, int(np.prod(shape)))
    if "norm" in name:
        v = (1.0 if name.endswith("weight") else 0.0) + 0.4 * v
    elif len(shape) >= 2:
        v = v * (3.0 / np.sqrt(float(np.prod(shape[1:]))))
    else:
        v = 0.4 * v
    return v.astype(np.float32).reshape(shape)


def weights_of(model):
    return {k: v.detach().numpy() for k, v in model.state_dict().items() if not k.endswith("position_ids")}


class Aesthetic(torch.nn.Module):
    def __init__(self, channels):
        super().__init__()
        widths = [channels, 1024, 128, 64, 16, 1]
        self.parts = torch.nn.ModuleDict(
            {str(n): torch.nn.Linear(i, o) for n, i, o in zip((0, 2, 4, 6, 7), widths, widths[1:])})

    def forward(self, x):
        for part in self.parts.values():
            x = part(x)
        return x[:, 0]

    def weights(self):
        return {f"layers.{k.removeprefix('parts.')}": v.detach().numpy() for k, v in self.state_dict().items()}


# ---- tokens and pixels ----

def byte_characters():
    """The character of each byte, in the order of their ids."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(rest)}}


def random_merges(count, seed=5):
    """Merges of pairs that occur in English words, then made-up ones, which meet no text."""
    words = " ".join(TEXTS[:4]).lower().split() + ["photo", "photograph", "running", "lower", "newest", "widest"] * 2
    draw, merges = np.random.default_rng(seed), []
    parts = [list(w[:-1]) + [w[-1] + "</w>"] for w in words if w.isascii() and w.isalpha()]
    made, tokens = set(), list("qxzj")  # joined names occur once
    pairs = True
    while len(merges) < count:
        pairs = pairs and sorted({(a, b) for p in parts for a, b in zip(p, p[1:]) if a + b not in made})
        if pairs:
            pair = pairs[draw.integers(len(pairs))]
        else:
            pair = (tokens[draw.integers(len(tokens))], "qxzj"[draw.integers(4)])
            if "".join(pair) in made:
                continue
            tokens.append("".join(pair))
        made.add("".join(pair))
        merges.append(pair)
        for p in parts if pairs else ():
            i = 0
            while i + 1 < len(p):
                if (p[i], p[i + 1]) == pair:
                    p[i:i + 2] = ["".join(pair)]
                i += 1
    return merges


class Bpe:
    def __init__(self, merges, size):
        self.of_byte, self.ranks = byte_characters(), {m: i for i, m in enumerate(merges)}
        names = [*self.of_byte.values(), *(c + "</w>" for c in self.of_byte.values()), *("".join(m) for m in merges),
                 "<|startoftext|>", "<|endoftext|>"]
        assert len(names) == size
        self.ids = {n: i for i, n in enumerate(names)}

    def encode(self, text, most):
        import ftfy
        import regex
        text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
        text = re.sub(r"\s+", " ", text).strip().lower()
        ids = []
        for word in regex.findall(r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
                                  text, regex.IGNORECASE):
            if word.startswith("<|") and word in self.ids:
                ids.append(self.ids[word])
                continue
            parts = [self.of_byte[b] for b in word.encode()]
            parts[-1] += "</w>"
            while len(parts) > 1:
                rank, pair = min((self.ranks.get(p, 1 << 30), p) for p in zip(parts, parts[1:]))
                if rank == 1 << 30:
                    break
                out, i = [], 0
                while i < len(parts):
                    joined = tuple(parts[i:i + 2]) == pair
                    out.append("".join(pair) if joined else parts[i])
                    i += 2 if joined else 1
                parts = out
            ids += [self.ids[p] for p in parts]
        ids = [self.ids["<|startoftext|>"], *ids, self.ids["<|endoftext|>"]]
        return ids if len(ids) <= most else ids[:most - 1] + ids[-1:]


def shown(rgb, side):
    """torchvision's Resize(side, BICUBIC) and CenterCrop(side) of a PIL picture."""
    h, w = rgb.shape[:2]
    short = min(h, w)
    size = (int(side * w / short), int(side * h / short))
    picture = Image.fromarray(rgb).resize(size, Image.BICUBIC) if size != (w, h) else Image.fromarray(rgb)
    left, top = round((size[0] - side) / 2), round((size[1] - side) / 2)
    return np.asarray(picture.crop((left, top, left + side, top + side)))


def normalised(pixels):
    mean, deviation = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    x = torch.from_numpy(np.array(pixels)).permute(0, 3, 1, 2).float() / 255
    return (x - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(deviation).view(3, 1, 1)


@torch.no_grad()
def image_features(model, pixels):
    return model.visual_projection(model.vision_model(normalised(pixels)).pooler_output)


@torch.no_grad()
def text_features(model, ids, positions):
    """One by one, up to the first mark of the end: what OpenAI's arg-max picks."""
    rows = []
    for one in ids:
        padded = torch.tensor([one + [0] * (positions - len(one))])
        hidden = model.text_model(padded).last_hidden_state
        rows.append(model.text_projection(hidden[0, padded[0].argmax()]))
    return torch.stack(rows)


def relative(a, b):
    return float(np.linalg.norm(np.asarray(a, np.float64) - np.asarray(b, np.float64)) / np.linalg.norm(b))


# ---- checks ----

def pictures():
    draw = np.random.default_rng(1)
    made = []
    for h, w in ((40, 31), (224, 224), (97, 300), (301, 120)):
        y, x = np.mgrid[:h, :w]
        waves = 128 + 100 * np.sin(x[..., None] / (3 + np.arange(3)) + y[..., None] / 7)
        made.append(np.clip(waves + 20 * draw.standard_normal((h, w, 3)), 0, 255).astype(np.uint8))
    return made


def check(weft, where, name, shape, tolerance):
    vocabulary, positions = shape["text"][3:]
    model = randomise(model_of(shape))
    safetensors_io.save(where / "model.safetensors", weights_of(model))
    merges = random_merges(vocabulary - 514)
    (where / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    torch.manual_seed(4)
    predictor = Aesthetic(shape["channels"])
    safetensors_io.save(where / "aesthetic.safetensors", predictor.weights())
    images = pictures()
    inputs = {f"image.{i}": p for i, p in enumerate(images)}
    inputs |= {f"text.{i}": np.frombuffer(t.encode(), np.uint8) for i, t in enumerate(TEXTS)}
    deck = common.toml({"clip": {"weights": str(where), "aesthetic": str(where / "aesthetic.safetensors")}})
    ours = common.probe(weft, where, "clip", inputs, deck=deck)

    bpe = Bpe(merges, vocabulary)
    ids = [bpe.encode(t, positions) for t in TEXTS]
    tokens_right = all(list(ours[f"tokens.{i}"]) == one for i, one in enumerate(ids))
    theirs = transformers.CLIPTokenizer(vocab=bpe.ids, merges=merges)
    plain = [i for i, t in enumerate(TEXTS) if t.isascii() and "&" not in t and "<|" not in t]
    tokens_right &= all(theirs(TEXTS[i], truncation=True, max_length=positions)["input_ids"] == ids[i] for i in plain)

    side = shape["vision"][4]
    seen = np.stack([shown(p, side) for p in images])
    levels = int(np.abs(seen.astype(int) - ours["pixels"].astype(int)).max())  # Pillow 13 differs by one (media/resize.h)
    want_image = image_features(model, ours["pixels"]).numpy()
    want_text = text_features(model, ids, positions).numpy()
    with torch.no_grad():
        want_aesthetic = predictor(torch.nn.functional.normalize(torch.from_numpy(want_image), dim=-1)).numpy()
    found = {"image": max(map(relative, ours["image_features"], want_image)),
             "text": max(map(relative, ours["text_features"], want_text)),
             "aesthetic": float(np.abs(ours["aesthetic"] - want_aesthetic).max())}
    print(f"{name}: worst picture {found['image']:.1e}, worst caption {found['text']:.1e}, aesthetic {found['aesthetic']:.1e}, "
          f"pixels differ by {levels} levels, tokens {'agree' if tokens_right else 'DIFFER'}")

    # End to end.
    torch.manual_seed(6)
    judge = lpips.LPIPS(net="vgg", pretrained=False, pnet_rand=True, verbose=False).eval().requires_grad_(False)
    for lin in judge.lins:  # the package's start has both signs
        lin.model[1].weight.abs_()
    safetensors_io.save(where / "lpips.safetensors", {n: p.numpy() for n, p in judge.state_dict().items()})
    noisy = [np.clip(p + np.random.default_rng(7).normal(0, 12, p.shape), 0, 255).astype(np.uint8) for p in images]
    for i, (p, q) in enumerate(zip(images, noisy)):
        Image.fromarray(p).save(where / f"{i}.png")
        Image.fromarray(q).save(where / f"reference{i}.png")
    with open(where / "in.csv", "w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["path", "text", "reference"])
        writer.writerows([f"{i}.png", TEXTS[i], f"reference{i}.png"] for i in range(len(images)))
    (where / "deck.toml").write_text(deck)
    common.run([weft, "evaluate", where / "deck.toml", f"evaluate.clips={where}/in.csv", f"evaluate.output={where}/out",
                f"evaluate.lpips_weights={where}/lpips.safetensors"])
    rows = list(csv.DictReader(open(where / "out" / "scores.csv", newline="")))
    cosine = 100 * torch.nn.functional.cosine_similarity(torch.from_numpy(want_image),
                                                         torch.from_numpy(want_text[:len(images)])).numpy()
    found["match"] = max(abs(float(r["match"]) - c) for r, c in zip(rows, cosine))
    found["aes"] = max(abs(float(r["aes"]) - a) for r, a in zip(rows, want_aesthetic))
    unit = lambda p: torch.from_numpy(np.array(p)).permute(2, 0, 1)[None].float() / 127.5 - 1  # noqa: E731
    wanted = [float(judge(unit(p), unit(q))) for p, q in zip(images, noisy)]
    found["lpips"] = max(abs(float(r["lpips"]) / v - 1) for r, v in zip(rows, wanted))
    print(f"{name}: weft evaluate differs by {found['match']:.1e} in match (of 100), {found['aes']:.1e} in aes, "
          f"{found['lpips']:.1e} of lpips")
    good = tokens_right and levels <= 1 and max(found["image"], found["text"]) <= tolerance
    good &= found["lpips"] <= tolerance
    return good and found["match"] <= 100 * tolerance and max(found["aes"], found["aesthetic"]) <= tolerance, found


def numbers():
    """Of the model that clip_test.cpp makes by the same formula."""
    model = model_of(SMALL)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.from_numpy(np.array(formula_weight(name, tuple(p.shape)))))
    model = model.double()
    side, positions = SMALL["vision"][4], SMALL["text"][4]
    pixels = ((formula_values("pixels", 2 * side * side * 3) + 0.5) * 256).astype(np.uint8).reshape(2, side, side, 3)
    with torch.no_grad():
        image = model.visual_projection(model.vision_model(normalised(pixels).double()).pooler_output)
        text = text_features(model, [[598, 5, 77, 300, 599], [598, 599]], positions)
    for name, rows in (("picture_features", image), ("caption_features", text)):
        print(f"{name}:")
        for row in rows.numpy():
            print("    {" + ", ".join(f"{v:.8f}" for v in row) + "},")


def main():
    parser = common.parser(__doc__)
    parser.add_argument("--tolerance", type=float, default=1e-5)
    parser.add_argument("--full", action="store_true", help="also ViT-L/14's shape")
    parser.add_argument("--numbers", action="store_true", help="print the expected numbers of the unit test, and end")
    if "--numbers" in sys.argv:
        return numbers()
    a = common.parse(parser)
    facts = common.about(a, "transformers")
    good, results = True, {}
    for name, shape in (("small", SMALL), ("ViT-L/14", FULL)):
        if name != "small" and not a.full:
            continue
        with tempfile.TemporaryDirectory() as folder:
            one, results[name] = check(a.weft, pathlib.Path(folder), name, shape, a.tolerance)
            good &= one
    common.write(a, facts, {"cases": results})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
