#!/usr/bin/env python3
"""Processes of PyTorch DDP (gloo) that train STDiT3 on command (workers.py): the other side of compare_scaling.py.

The case has `model` (a deck's [model] table), `train`, `threads`, `weights` (safetensors), `bucket_mib`, `micro_batches`
(a step and process), `warmup`, and `shapes`: latents [frames, height, width] with their number of clips an epoch.

A step is what a training loop does: micro-batches (loss of the rectified flow, backward, no_sync for all but the last),
gradient clipping, AdamW(fused=True), moving average. As in Open-Sora's sampler an epoch's clips are shuffled, and each
process takes the next of them, whatever it costs.
"""
import contextlib
import time

import numpy as np
import torch

import workers
from reference import rflow, safetensors_io, stdit3


class Clips:
    """The epochs' clips in order, the same in every process, and this process's batches."""

    def __init__(self, case, rank, ranks):
        self.case, self.rank, self.ranks = case, rank, ranks
        self.epoch_clips = [s["shape"] for s in case["shapes"] for _ in range(s["clips"])]
        self.taken, self.queue, self.epoch = 0, [], 0
        self.generator = torch.Generator().manual_seed(1000 + rank)
        # The footage is in memory; noise and timesteps are drawn anew for each batch, as a training has to.
        self.latents = {tuple(s["shape"]): torch.randn((1, 4, *s["shape"]), generator=self.generator)
                        for s in case["shapes"]}

    def shape(self):
        """Of this process's next micro-batch: processes take turns along the list."""
        index = self.taken * self.ranks + self.rank
        self.taken += 1
        while len(self.queue) <= index:
            order = np.random.default_rng(self.epoch).permutation(len(self.epoch_clips))
            self.queue += [tuple(self.epoch_clips[i]) for i in order]
            self.epoch += 1
        return self.queue[index]

    def batch(self, model):
        shape = self.shape()
        x = self.latents[shape]
        config = model.config
        return {"x": x, "noise": torch.randn(x.shape, generator=self.generator),
                "timestep": torch.sigmoid(torch.randn(1, generator=self.generator)) * 1000,
                "y": model.y_embedder.y_embedding[None, None, :config.model_max_length],
                "fps": torch.tensor([24.0]), "height": torch.tensor([8.0 * shape[1]]),
                "width": torch.tensor([8.0 * shape[2]])}


class Training:
    def __init__(self, case, rank, ranks):
        self.case, train = case, case["train"]
        self.model = stdit3.build(case["model"], safetensors_io.load(case["weights"])).train()
        self.parallel = torch.nn.parallel.DistributedDataParallel(
            self.model, bucket_cap_mb=case["bucket_mib"], gradient_as_bucket_view=True)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=train["lr"], betas=(train["adam_beta1"], train["adam_beta2"]), eps=train["adam_eps"],
            weight_decay=train["weight_decay"], fused=True)
        self.average = [p.detach().clone() for p in self.parameters]
        self.clips = Clips(case, rank, ranks)
        for _ in range(case["warmup"] * 2 // ranks):  # whole epochs
            self.run()

    def run(self):
        """Seconds and this process's loss of a step."""
        begin = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        count, total = self.case["micro_batches"], 0.0
        for i in range(count):
            batch = self.clips.batch(self.model)
            with contextlib.nullcontext() if i + 1 == count else self.parallel.no_sync():
                loss = rflow.losses(self.parallel, **batch).mean() / count
                loss.backward()
            total += float(loss.detach())
        if self.case["train"]["grad_clip"] > 0:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.case["train"]["grad_clip"])
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.average, self.parameters, 1 - self.case["train"]["ema_decay"])
        return {"seconds": time.perf_counter() - begin, "loss": total}


if __name__ == "__main__":
    workers.serve(__doc__, Training)
