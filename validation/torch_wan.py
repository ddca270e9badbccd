#!/usr/bin/env python3
"""A process of PyTorch that trains or samples with Wan2.1's network on command (workers.py): the other side of compare_wan.py.

The network (docs/models/wan.md) as somebody would write it for PyTorch: fused scaled-dot-product attention, every block
compiled; with `autocast` in bf16 as the original runs, the residual stream, time and head in float32. Parameters have the names
of the released files. As in the original all text_len rows are keys of the cross attention.

The case has `model` (a deck's [model] table), `weights` (safetensors), `what` ("train" or "sample"), `train` (a deck's table),
`latent` [batch, channels, frames, height, width], `threads`, `autocast`, `warmup`. A step of training: noise, loss, backward,
AdamW(fused=True). A step of sampling: the conditional and the unconditional forward as one batch, guidance, Euler.

Letters: B batch, N tokens, C channels, H heads, D = C/H, M text rows.
"""
import dataclasses
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

import workers
from reference import safetensors_io


@dataclasses.dataclass
class Config:
    in_channels: int = 16
    patch_size: tuple = (1, 2, 2)
    hidden_size: int = 1536
    depth: int = 30
    num_heads: int = 12
    ffn_dim: int = 8960
    text_dim: int = 4096
    text_len: int = 512
    freq_dim: int = 256


def float32():
    return torch.autocast("cpu", enabled=False)


def rope_table(grid, width):
    """cos and sin [N, D/2] of every token of a grid of frames, rows and columns; each axis has exponents over its own width."""
    third = width // 6
    angles = []
    for axis, pairs in enumerate((width // 2 - 2 * third, third, third)):
        turns = torch.outer(torch.arange(grid[axis], dtype=torch.float64),
                            10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs))
        shape = [1, 1, 1, pairs]
        shape[axis] = grid[axis]
        angles.append(turns.view(shape).expand(*grid, pairs))
    angles = torch.cat(angles, -1).flatten(0, 2)
    return angles.cos().float(), angles.sin().float()


def rotate(x, rope):
    """x [B,N,H,D]: pairs of neighbours."""
    cos, sin = (t[None, :, None] for t in rope)
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x.float(), (x.shape[-1],), eps=1e-6).type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.norm_q, self.norm_k = RMSNorm(width), RMSNorm(width)

    def forward(self, x, y, rope=None):
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in (self.norm_q(self.q(x)), self.norm_k(self.k(y)), self.v(y)))
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        q, k = q.type_as(v), k.type_as(v)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.o(out.transpose(1, 2).flatten(2))


def norm(x):
    return F.layer_norm(x.float(), (x.shape[-1],), eps=1e-6)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        width = c.hidden_size
        self.modulation = nn.Parameter(torch.randn(1, 6, width) / width**0.5)
        self.self_attn, self.cross_attn = Attention(width, c.num_heads), Attention(width, c.num_heads)
        self.norm3 = nn.LayerNorm(width, eps=1e-6)
        self.ffn = nn.Sequential(nn.Linear(width, c.ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(c.ffn_dim, width))

    def forward(self, x, y, e0, rope):
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.modulation + e0).chunk(6, 1)
        u = norm(x) * (1 + scale1) + shift1
        x = x + gate1 * self.self_attn(u, u, rope)
        x = x + self.cross_attn(self.norm3(x), y)
        return x + gate2 * self.ffn(norm(x) * (1 + scale2) + shift2)


class Head(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.modulation = nn.Parameter(torch.randn(1, 2, c.hidden_size) / c.hidden_size**0.5)
        self.head = nn.Linear(c.hidden_size, c.in_channels * c.patch_size[0] * c.patch_size[1] * c.patch_size[2])

    def forward(self, x, e):
        shift, scale = (self.modulation + e[:, None]).chunk(2, 1)
        return self.head(norm(x) * (1 + scale) + shift)


class Wan(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config, width = c, c.hidden_size
        self.patch_embedding = nn.Conv3d(c.in_channels, width, c.patch_size, c.patch_size)
        self.text_embedding = nn.Sequential(nn.Linear(c.text_dim, width), nn.GELU(approximate="tanh"), nn.Linear(width, width))
        self.time_embedding = nn.Sequential(nn.Linear(c.freq_dim, width), nn.SiLU(), nn.Linear(width, width))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.depth))
        self.head = Head(c)

    def forward(self, x, timestep, text, rope):
        """x [B,C,T,h,w], timestep [B] in 0..1000, text [B,M,text_dim] with zeros behind a caption -> eps - x0."""
        c = self.config
        tokens = self.patch_embedding(x)
        grid, tokens = tokens.shape[2:], tokens.flatten(2).transpose(1, 2)
        with float32():
            half = c.freq_dim // 2
            angles = torch.outer(timestep.double(), 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half))
            e = self.time_embedding(torch.cat((angles.cos(), angles.sin()), 1).float())
            e0 = self.time_projection(e).unflatten(1, (6, -1))
        y = self.text_embedding(text)
        for block in self.blocks:
            tokens = block(tokens, y, e0, rope)
        with float32():
            out = self.head(tokens, e)
        out = out.view(len(x), *grid, *c.patch_size, c.in_channels)
        return torch.einsum("bthwijkc->bctihjwk", out).reshape(x.shape)


def build(table, weights=None):
    model = Wan(Config(**{key: value for key, value in table.items() if key not in ("name", "weights", "dtype")}))
    if weights:
        arrays = safetensors_io.load(weights)
        model.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in arrays.items()})
    return model


class Work:
    """Steps of the case, on noise."""

    def __init__(self, case, rank, ranks):
        self.case, c = case, Config(**{k: v for k, v in case["model"].items() if k != "name"})
        self.model = build(case["model"], case["weights"])
        if case["compiled"]:
            workers.compile_blocks(self.model, "Block")
        b, _, *size = case["latent"]
        self.x = torch.randn(case["latent"])
        self.rope = rope_table([n // p for n, p in zip(size, c.patch_size)], c.hidden_size // c.num_heads)
        self.text = torch.zeros(b, c.text_len, c.text_dim)
        self.step = self.train if case["what"] == "train" else self.sample
        train = case["train"]
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=train["lr"], betas=(train["adam_beta1"], train["adam_beta2"]), eps=train["adam_eps"],
            weight_decay=train["weight_decay"], fused=True)
        for _ in range(case["warmup"]):
            self.run()

    def train(self):
        noise, sigma = torch.randn_like(self.x), torch.rand(len(self.x))
        self.optimizer.zero_grad(set_to_none=True)
        noisy = torch.lerp(self.x, noise, sigma.view(-1, 1, 1, 1, 1))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.case["autocast"]):
            out = self.model(noisy, 1000 * sigma, self.text, self.rope)
        loss = (out.float() - (noise - self.x)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.case["train"]["grad_clip"])
        self.optimizer.step()
        return float(loss.detach())

    def sample(self):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=self.case["autocast"]):
            both, time_ = self.x.repeat(2, 1, 1, 1, 1), torch.full((2 * len(self.x),), 500.0)
            with_text, without = self.model(both, time_, self.text.repeat(2, 1, 1), self.rope).float().chunk(2)
        self.x = self.x - 0.01 * (without + 5.0 * (with_text - without))
        return float(self.x.flatten()[0])

    def run(self):
        begin = time.perf_counter()
        value = self.step()
        return {"seconds": time.perf_counter() - begin, "value": value}


if __name__ == "__main__":
    workers.serve(__doc__, Work)
