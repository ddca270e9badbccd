#!/usr/bin/env python3
"""One process of PyTorch DDP (gloo) training the model in stdit3.py: the other side of compare_scaling.py.

    ddp.py CASE.json --rank R --ranks N --store FILE

CASE.json has `model` (a deck's [model] table), `train`, `threads`, `weights` (safetensors), `bucket_mib`, `micro_batches`
(a step and process), `warmup`, and `shapes`: latents [frames, height, width] with their number of clips an epoch.

A step is what a training loop does: micro-batches (loss of the rectified flow, backward, no_sync for all but the last),
gradient clipping, AdamW(fused=True), moving average. As in Open-Sora's sampler an epoch's clips are shuffled, and each
process takes the next of them, whatever it costs. Process 0 reads commands from stdin, a line each: a number trains that many
steps, and one JSON line on stdout tells their seconds and losses; the end of stdin ends all. While no command is there nobody
takes processor time.
"""
import argparse
import contextlib
import datetime
import json
import sys
import time

import numpy as np
import torch
import torch.distributed as dist

import check_golden
import rflow
import safetensors_io


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
        self.model = check_golden.build(case, safetensors_io.load(case["weights"]), torch.float32).train()
        self.parallel = torch.nn.parallel.DistributedDataParallel(
            self.model, bucket_cap_mb=case["bucket_mib"], gradient_as_bucket_view=True)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=train["lr"], betas=(train["adam_beta1"], train["adam_beta2"]), eps=train["adam_eps"],
            weight_decay=train["weight_decay"], fused=True)
        self.average = [p.detach().clone() for p in self.parameters]
        self.clips = Clips(case, rank, ranks)

    def step(self):
        """Seconds and this process's loss."""
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
        return time.perf_counter() - begin, total


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--store", required=True, help="file that processes meet at; must not exist")
    args = parser.parse_args()
    with open(args.case, encoding="utf-8") as f:
        case = json.load(f)
    torch.set_num_threads(case["threads"])
    torch.manual_seed(args.rank)
    dist.init_process_group("gloo", init_method=f"file://{args.store}", rank=args.rank, world_size=args.ranks,
                            timeout=datetime.timedelta(hours=1))
    training = Training(case, args.rank, args.ranks)
    for _ in range(case["warmup"] * 2 // args.ranks):  # whole epochs
        training.step()
    command = torch.zeros(1, dtype=torch.int64)
    if args.rank == 0:
        print(json.dumps({"ready": True, "torch": torch.__version__, "threads": torch.get_num_threads(),
                          "parameters": sum(p.numel() for p in training.parameters)}), flush=True)
    while True:
        if args.rank == 0:
            line = sys.stdin.readline()
            command[0] = int(line) if line.strip() else 0
        dist.broadcast(command, 0)
        if command[0] == 0:
            break
        done = [training.step() for _ in range(int(command[0]))]
        if args.rank == 0:
            print(json.dumps({"seconds": [d[0] for d in done], "loss": [d[1] for d in done]}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
