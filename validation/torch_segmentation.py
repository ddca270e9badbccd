#!/usr/bin/env python3
"""PyTorch's side of compare_segmentation.py: processes that train a segmentation model or evaluate images on command
(workers.py).

The case has `what` ("train" or "evaluate"), `model` (a deck's [model] table), `train`, `data` (short_sides, max_side, padding;
`height` and `width`, ranges that images are drawn from), `threads`, `weights` (safetensors), `micro_batches` (of all processes
in a step), `batch_size`, `original` (folder of the original's code, or null), `channels_last` and `compiled`.

A training step is what a loop does: micro-batches, forward and backward, then SGD. Sizes are drawn as the original draws them,
each process for itself. Images are random numbers that lie in memory, so that reading them costs nothing here. Several
processes are DistributedDataParallel over gloo, with batch norm over all of them, one exchange a layer and direction.
"""
import contextlib
import sys
import time
import warnings

import numpy as np
import torch
import torch.distributed as dist

import workers
from reference import safetensors_io, segmentation, segmentation_original


class Sizes:
    """Sizes of micro-batches: a short side, an orientation, and the largest of the scaled images."""

    def __init__(self, case, rank):
        self.case, self.rng = case, np.random.default_rng(100 + rank)

    def image(self, portrait):
        data = self.case["data"]
        while True:
            height, width = (int(self.rng.integers(a, b + 1)) for a, b in (data["height"], data["width"]))
            if portrait is None or (height > width) == portrait:
                return height, width

    def next(self):
        data = self.case["data"]
        first = self.image(None)
        images = [first] + [self.image(first[0] > first[1]) for _ in range(1, self.case["batch_size"])]
        short, pad = int(self.rng.choice(data["short_sides"])), data["padding"]
        scaled = []
        for height, width in images:
            scale = min(short / min(height, width), data["max_side"] / max(height, width))
            scaled.append((int(height * scale), int(width * scale)))
        return tuple((max(sides) - 1) // pad * pad + pad for sides in zip(*scaled))


def prepared(model, case):
    if case["channels_last"]:
        model = model.to(memory_format=torch.channels_last)
    return workers.compile_blocks(model, "Block", "Pyramid") if case.get("compiled") else model


class Training:
    def __init__(self, case, rank, ranks):
        self.case, self.ranks, model, train = case, ranks, case["model"], case["train"]
        arrays = safetensors_io.load(case["weights"])
        dropout = model["dropout"]
        if case["original"]:
            segmentation_original.use(case["original"])
            self.model = segmentation_original.build(model["encoder"], model["decoder"], model["num_classes"], arrays, dropout,
                                                     train["deep_sup_scale"])
        else:
            self.model = segmentation.build(model["encoder"], model["decoder"], model["num_classes"], dropout)
            segmentation.load(self.model, arrays)
        self.model = prepared(self.model, case).train()
        self.optimizers = [
            torch.optim.SGD(segmentation.groups(part, train["weight_decay"]), lr=lr, momentum=train["momentum"])
            for part, lr in ((self.model.encoder, train["lr_encoder"]), (self.model.decoder, train["lr_decoder"]))]
        self.parallel = None
        if ranks > 1:
            segmentation.share_statistics(self.model)
            # The processes' running statistics agree anyway; sending them would only cost time.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            self.parallel = torch.nn.parallel.DistributedDataParallel(Loss(self.model), broadcast_buffers=False,
                                                                      gradient_as_bucket_view=True)
        self.rate = segmentation.label_rate(model["encoder"], model["decoder"])
        self.sizes = Sizes(case, rank)
        self.generator = torch.Generator().manual_seed(rank)

    def batch(self):
        height, width = self.sizes.next()
        batch, classes = self.case["batch_size"], self.case["model"]["num_classes"]
        image = torch.randn((batch, 3, height, width), generator=self.generator)
        label = torch.randint(-1, classes, (batch, height // self.rate, width // self.rate), generator=self.generator)
        if self.case["channels_last"]:
            image = image.contiguous(memory_format=torch.channels_last)
        return image, label

    def loss(self, image, label):
        if self.parallel is not None:
            return self.parallel(image, label)
        if self.case["original"]:
            return self.model({"img_data": image, "seg_label": label})[0]
        return self.model.loss(image, label, self.case["train"]["deep_sup_scale"])[0]

    def run(self):
        """Seconds and loss of a step; pixels of all processes' images."""
        count = self.case["micro_batches"] // self.ranks
        batches = [self.batch() for _ in range(count)]
        begin, total = time.perf_counter(), 0.0
        self.model.zero_grad(set_to_none=True)
        for i, batch in enumerate(batches):
            hold = self.parallel is not None and i + 1 < count
            with self.parallel.no_sync() if hold else contextlib.nullcontext():
                loss = self.loss(*batch) / count
                loss.backward()
            total += float(loss.detach())
        for optimizer in self.optimizers:
            optimizer.step()
        seconds = time.perf_counter() - begin
        pixels = torch.tensor(sum(image[:, 0].numel() for image, _ in batches))
        if self.ranks > 1:
            dist.all_reduce(pixels)
        return {"seconds": seconds, "loss": total, "pixels": int(pixels)}


class Loss(torch.nn.Module):
    """A model whose call is its loss, as DistributedDataParallel wants it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, image, label):
        return self.model.loss(image, label)[0]


class Evaluation:
    """One image after another, from its file to its counts."""

    def __init__(self, case, *_):
        self.case, self.next = case, 0
        model = case["model"]
        arrays = safetensors_io.load(case["weights"])
        if case["original"]:
            segmentation_original.use(case["original"])
            self.model = segmentation_original.build(model["encoder"], model["decoder"], model["num_classes"], arrays, 0.0,
                                                     use_softmax=True).eval()
            with contextlib.redirect_stdout(sys.stderr):
                self.items = segmentation_original.validation_set(case["root"], case["records"], case["data"])
        else:
            self.model = segmentation.build(model["encoder"], model["decoder"], model["num_classes"], 0.0)
            self.model = prepared(segmentation.load(self.model, arrays).eval(), case)

    def run(self):
        from PIL import Image

        record = self.case["records"][self.next % len(self.case["records"])]
        index, self.next = self.next % len(self.case["records"]), self.next + 1
        begin = time.perf_counter()
        if self.case["original"]:
            segmentation_original.evaluate(self.model, self.items[index], self.case["model"]["num_classes"])
        else:
            root = self.case["root"]
            scores = segmentation.scores_of(self.model, Image.open(f"{root}/{record['fpath_img']}").convert("RGB"),
                                                  self.case["data"])
            label = np.asarray(Image.open(f"{root}/{record['fpath_segm']}")).astype(np.int64) - 1
            segmentation.counts_of(scores.argmax(0), label, self.case["model"]["num_classes"])
        return {"seconds": time.perf_counter() - begin}


if __name__ == "__main__":
    workers.serve(__doc__, lambda case, *ranks: (Training if case["what"] == "train" else Evaluation)(case, *ranks))
