"""STDiT3 in plain PyTorch: the yardstick for weft's speed and the second opinion on its numbers.

Written as somebody who knows eager PyTorch would write it: fused scaled-dot-product attention, no work on padded
caption rows, no second modulation branch (the per-frame choice is made on the small parameter tensors), tokens kept as
[B,T,S,C] throughout. Where PyTorch offers several ways, the one that measured fastest on a CPU is here.

Letters: B batch, T frames, S tokens a frame, N = T*S, C channels, H heads, D = C/H, L caption tokens.
Parameter names are those of the released checkpoints, so `load_state_dict(strict=True)` works on them.
"""
import dataclasses
import functools
import math
from typing import Optional, Tuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

EPS = 1e-6


@dataclasses.dataclass
class Config:
    """The fields of the released config.json. The three enable_* switches choose an implementation there; here they
    are accepted and change nothing, as does input_size."""

    input_size: Tuple[Optional[int], ...] = (None, None, None)
    input_sq_size: int = 512
    in_channels: int = 4
    patch_size: Tuple[int, int, int] = (1, 2, 2)
    hidden_size: int = 1152
    depth: int = 28
    num_heads: int = 16
    mlp_ratio: float = 4.0
    class_dropout_prob: float = 0.1
    pred_sigma: bool = True
    drop_path: float = 0.0
    caption_channels: int = 4096
    model_max_length: int = 300
    qk_norm: bool = True
    enable_flash_attn: bool = False
    enable_layernorm_kernel: bool = False
    enable_sequence_parallelism: bool = False
    only_train_temporal: bool = False
    freeze_y_embedder: bool = False

    @classmethod
    def from_deck(cls, table):
        """From a deck's [model] table; `name` says which model it is and is no field of it."""
        table = {key: value for key, value in table.items() if key != "name"}
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(table) - known)
        if unknown:
            raise ValueError(f"unknown model fields: {', '.join(unknown)}")
        return cls(**table)

    @property
    def out_channels(self):
        return self.in_channels * (2 if self.pred_sigma else 1)


def layer_norm(x):
    return F.layer_norm(x, x.shape[-1:], eps=EPS)


def modulated_norm(x, shift, scale):
    """LN(x) * (1 + scale) + shift; shift and scale [B, 1 or T, 1, C] against x [B,T,S,C]."""
    return torch.addcmul(shift, layer_norm(x), 1 + scale)


def drop_path(x, p, training):
    """Zeroes whole samples with probability p and scales the others by 1/(1-p)."""
    if p == 0.0 or not training:
        return x
    keep = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(1 - p)
    return x * (keep / (1 - p))


class RMSNorm(nn.Module):
    """RMS norm over the last axis, statistics at least in float32. Measured on a CPU, the dot product form takes
    three quarters of the time of F.rms_norm, forward and backward."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        r = torch.rsqrt(torch.linalg.vecdot(wide, wide).unsqueeze(-1) / x.shape[-1] + EPS)
        return (wide * r).to(x.dtype) * self.weight


class Rope(nn.Module):
    """Holds rope.freqs, the one entry that the rotation has in a checkpoint. It is loaded, never recomputed: trained
    checkpoints hold values rounded to bf16."""

    def __init__(self, head_dim):
        super().__init__()
        exponent = torch.arange(0, head_dim, 2).float() / head_dim
        self.freqs = nn.Parameter(1.0 / 10000.0**exponent, requires_grad=False)

    def rotation(self, frames, dtype):
        """Cosine and sine of position * freq, [T,1,1,D/2] each."""
        angle = torch.outer(torch.arange(frames, device=self.freqs.device, dtype=self.freqs.dtype), self.freqs)
        angle = angle.to(torch.float64 if dtype == torch.float64 else torch.float32)[:, None, None, :]
        return angle.cos(), angle.sin()


def rotate(x, rotation):
    """Turns the pairs (2i, 2i+1) of x [B,T,S,H,D] by the angle of their frame."""
    # Not in complex numbers, for which torch.compile makes no kernels.
    cos, sin = rotation
    wide = x if x.dtype == torch.float64 else x.float()
    even, odd = wide.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


class SelfAttention(nn.Module):
    def __init__(self, c, heads, qk_norm):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(c, 3 * c)
        self.q_norm = RMSNorm(c // heads) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c // heads) if qk_norm else nn.Identity()
        self.proj = nn.Linear(c, c)

    def forward(self, x, rotation=None):
        """Over S within a frame, or over T within a position where `rotation` is given; x [B,T,S,C]."""
        b, t, s, c = x.shape
        h, d = self.heads, c // self.heads
        q, k, v = self.qkv(x).view(b, t, s, 3, h, d).unbind(3)
        q, k = self.q_norm(q), self.k_norm(k)
        if rotation is None:
            q, k, v = (z.reshape(b * t, s, h, d).transpose(1, 2) for z in (q, k, v))
            o = F.scaled_dot_product_attention(q, k, v)
            return self.proj(o.transpose(1, 2).reshape(b, t, s, c))
        # Every (position, head) pair is a head of its own over T: a strided view, nothing is permuted.
        q, k = rotate(q, rotation), rotate(k, rotation)
        q, k, v = (z.reshape(b, t, s * h, d).transpose(1, 2) for z in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v)
        return self.proj(o.transpose(1, 2).reshape(b, t, s, c))


class CrossAttention(nn.Module):
    def __init__(self, c, heads):
        super().__init__()
        self.heads = heads
        self.q_linear = nn.Linear(c, c)
        self.kv_linear = nn.Linear(c, 2 * c)
        self.proj = nn.Linear(c, c)

    def forward(self, x, y, lengths):
        """Sample b attends to its own lengths[b] rows of y [sum L, C]; x [B,T,S,C]."""
        b, t, s, c = x.shape
        h, d = self.heads, c // self.heads
        q = self.q_linear(x).view(b, t * s, h, d).transpose(1, 2)
        kv = self.kv_linear(y).view(-1, 2, h, d)
        if min(lengths) == max(lengths):
            k, v = (z.transpose(1, 2) for z in kv.view(b, lengths[0], 2, h, d).unbind(2))
            o = F.scaled_dot_product_attention(q, k, v)
        else:
            own = [z.permute(1, 2, 0, 3).unsqueeze(1) for z in kv.split(lengths)]
            o = torch.cat([F.scaled_dot_product_attention(q[i:i + 1], k, v) for i, (k, v) in enumerate(own)])
        return self.proj(o.transpose(1, 2).reshape(b, t, s, c))


class Mlp(nn.Module):
    def __init__(self, c_in, hidden, c_out):
        super().__init__()
        self.fc1 = nn.Linear(c_in, hidden)
        self.fc2 = nn.Linear(hidden, c_out)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


def modulation(table, t, t0, x_mask):
    """(table + t) per sample, or per frame where x_mask chooses between t and t0. `table` [K,C], `t` [B,K*C]
    -> K tensors [B, 1 or T, 1, C]."""
    def of(t):
        return (table + t.view(t.shape[0], *table.shape))[:, None]

    m = of(t)
    if x_mask is not None:
        m = torch.where(x_mask[:, :, None, None], m, of(t0))
    return m.unsqueeze(3).unbind(2)


class Block(nn.Module):
    """A spatial or a temporal block; the difference is only whether a rotation is passed."""

    def __init__(self, config, drop_path_p):
        super().__init__()
        c = config.hidden_size
        self.scale_shift_table = nn.Parameter(torch.randn(6, c) / math.sqrt(c))
        self.attn = SelfAttention(c, config.num_heads, config.qk_norm)
        self.cross_attn = CrossAttention(c, config.num_heads)
        self.mlp = Mlp(c, int(c * config.mlp_ratio), c)
        self.drop_path_p = drop_path_p

    def forward(self, x, y, lengths, t, t0, x_mask, rotation=None):
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation(self.scale_shift_table, t, t0, x_mask)
        a = self.attn(modulated_norm(x, shift_a, scale_a), rotation)
        x = self.residual(x, gate_a, a)
        x = x + self.cross_attn(x, y, lengths)
        return self.residual(x, gate_m, self.mlp(modulated_norm(x, shift_m, scale_m)))

    def residual(self, x, gate, a):
        # Dropping a sample of gate * a is the same as dropping it in the gate, which is far smaller.
        return torch.addcmul(x, drop_path(gate, self.drop_path_p, self.training), a)


class FinalLayer(nn.Module):
    def __init__(self, c, outputs):
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.randn(2, c) / math.sqrt(c))
        self.linear = nn.Linear(c, outputs)

    def forward(self, x, t, t0, x_mask):
        """t is the embedding before t_block: one C-vector serves both rows of the table."""
        def of(t):
            return (self.scale_shift_table + t[:, None])[:, :, None, None].unbind(1)

        o = modulated_norm(x, *of(t))
        if x_mask is not None:
            # Conditioning frames are normalised a second time, from o and not from x: the released weights were
            # trained like this.
            o = torch.where(x_mask[:, :, None, None], o, modulated_norm(o, *of(t0)))
        return self.linear(o)


class ScalarEmbedder(nn.Module):
    """A number -> [cos | sin] of 128 frequencies -> C. Serves the timestep and the frame rate."""

    def __init__(self, c, frequencies=256):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(frequencies, c), nn.SiLU(), nn.Linear(c, c))
        self.half = frequencies // 2

    def forward(self, s, dtype):
        # The angle is a float32 product whatever the model computes in: with s near 1000 anything else shifts the
        # output by 1e-4.
        k = torch.arange(self.half, dtype=torch.float32, device=s.device)
        angle = s.float()[:, None] * torch.exp(-math.log(10000.0) * k / self.half)
        return self.mlp(torch.cat((angle.cos(), angle.sin()), dim=-1).to(dtype))


class CaptionEmbedder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.y_proj = Mlp(config.caption_channels, config.hidden_size, config.hidden_size)
        null = torch.randn(config.model_max_length, config.caption_channels) / math.sqrt(config.caption_channels)
        self.register_buffer("y_embedding", null)
        self.p = config.class_dropout_prob

    def forward(self, y, mask):
        """y [B,1,L,Cy], mask [B,L] or None -> rows [sum L, C] of the valid tokens and their number per sample."""
        y = y.squeeze(1)
        if self.training and self.p > 0:
            dropped = torch.rand(y.shape[0]).to(y.device) < self.p
            y = torch.where(dropped[:, None, None], self.y_embedding, y)
        if mask is None:
            return self.y_proj(y.flatten(0, 1)), [y.shape[1]] * y.shape[0]
        lengths = mask.ne(0).sum(1).tolist()
        # A full mask needs no gather, and its backward no scatter.
        y = y.flatten(0, 1) if min(lengths) == y.shape[1] else y[mask.ne(0)]
        return self.y_proj(y), lengths


@functools.lru_cache(maxsize=64)
def position_embedding(c, h, w, scale, dtype, device):
    """[1,1,S,C]: sines and cosines of the column in the first half of the channels, of the row in the second."""
    inv_freq = 1.0 / 10000 ** (torch.arange(0, c // 2, 2, dtype=torch.float32, device=device) / (c // 2))
    if dtype in (torch.bfloat16, torch.float16):
        inv_freq = inv_freq.to(dtype).float()
    base = round(math.sqrt(h * w))
    gx = torch.arange(w, dtype=torch.float32, device=device) / scale * (base / w)
    gy = torch.arange(h, dtype=torch.float32, device=device) / scale * (base / h)

    def waves(g):
        angle = torch.outer(g, inv_freq)
        return torch.cat((angle.sin(), angle.cos()), dim=-1)

    columns = waves(gx)[None, :, :].expand(h, w, c // 2)
    rows = waves(gy)[:, None, :].expand(h, w, c // 2)
    return torch.cat((columns, rows), dim=-1).reshape(1, 1, h * w, c).to(dtype)


class STDiT3(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        c, depth = config.hidden_size, config.depth
        if c % 4 or c % config.num_heads or (c // config.num_heads) % 2:
            raise ValueError(f"hidden_size {c} must be divisible by 4 and give an even head size for "
                             f"{config.num_heads} heads")
        self.rope = Rope(c // config.num_heads)
        self.x_embedder = nn.Module()
        self.x_embedder.proj = nn.Conv3d(config.in_channels, c, tuple(config.patch_size), tuple(config.patch_size))
        self.t_embedder = ScalarEmbedder(c)
        self.fps_embedder = ScalarEmbedder(c)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(c, 6 * c))
        self.y_embedder = CaptionEmbedder(config)
        p = torch.linspace(0, config.drop_path, depth).tolist()
        self.spatial_blocks = nn.ModuleList(Block(config, p[i]) for i in range(depth))
        self.temporal_blocks = nn.ModuleList(Block(config, p[i]) for i in range(depth))
        self.final_layer = FinalLayer(c, math.prod(config.patch_size) * config.out_channels)
        self.initialise()
        self.freeze()

    def initialise(self):
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.fps_embedder.mlp[0].weight, std=0.02)
        nn.init.zeros_(self.fps_embedder.mlp[2].weight)
        for block in self.temporal_blocks:  # a temporal block starts as the identity
            for linear in (block.attn.proj, block.cross_attn.proj, block.mlp.fc2):
                nn.init.zeros_(linear.weight)

    def freeze(self):
        if self.config.only_train_temporal:
            for p in self.parameters():
                p.requires_grad_(False)
            for p in self.temporal_blocks.parameters():
                p.requires_grad_(True)
        if self.config.freeze_y_embedder:
            self.y_embedder.requires_grad_(False)

    def patchify(self, x):
        """[B,Cin,T',H',W'] -> [B,T,S,C] and the patch grid; zeros at the far end of an axis that does not divide."""
        pt, ph, pw = self.config.patch_size
        t, h, w = x.shape[2:]
        pad = (0, -w % pw, 0, -h % ph, 0, -t % pt)
        if any(pad):
            x = F.pad(x, pad)
        b, ci, t, h, w = x.shape
        t, h, w = t // pt, h // ph, w // pw
        x = x.view(b, ci, t, pt, h, ph, w, pw).permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(b, t, h * w, -1)
        # A convolution whose stride is its kernel is a matrix product, which is the faster way to ask for it.
        return F.linear(x, self.x_embedder.proj.weight.flatten(1), self.x_embedder.proj.bias), (t, h, w)

    def unpatchify(self, x, grid):
        t, h, w = grid
        pt, ph, pw = self.config.patch_size
        x = x.view(-1, t, h, w, pt, ph, pw, self.config.out_channels).permute(0, 7, 1, 4, 2, 5, 3, 6)
        return x.reshape(-1, self.config.out_channels, t * pt, h * ph, w * pw)

    def encode_captions(self, y, mask, batch, dtype):
        if mask is not None:
            mask = mask.reshape(-1, mask.shape[-1]).repeat(batch // mask.shape[0], 1)
        return self.y_embedder(y.to(dtype), mask)

    def forward(self, x, timestep, y, mask=None, x_mask=None, fps=None, height=None, width=None, **_):
        """x [B,Cin,T,H,W] noisy latent, timestep [B] in [0,1000], y [B,1,L,Cy], mask [Bm,L], x_mask [B,T] (False =
        conditioning frame), fps [Bf], height and width in pixels (element 0 counts)
        -> [B,Cout,T,H,W], float32 or wider."""
        dtype = self.x_embedder.proj.weight.dtype
        batch, size = x.shape[0], x.shape[2:]
        timestep = timestep.to(dtype)
        frame_rate = self.fps_embedder(fps.repeat(batch // fps.shape[0]), dtype)

        t = self.t_embedder(timestep, dtype) + frame_rate
        t6, t0, t06 = self.t_block(t), None, None
        if x_mask is not None:
            t0 = self.t_embedder(torch.zeros_like(timestep), dtype) + frame_rate
            t06 = self.t_block(t0)

        y, lengths = self.encode_captions(y, mask, batch, dtype)
        x, grid = self.patchify(x.to(dtype))
        scale = math.sqrt(float(height[0]) * float(width[0])) / self.config.input_sq_size
        x = x + position_embedding(self.config.hidden_size, grid[1], grid[2], scale, dtype, x.device)

        rotation = self.rope.rotation(grid[0], dtype)
        for spatial, temporal in zip(self.spatial_blocks, self.temporal_blocks):
            x = spatial(x, y, lengths, t6, t06, x_mask)
            x = temporal(x, y, lengths, t6, t06, x_mask, rotation)

        x = self.unpatchify(self.final_layer(x, t, t0, x_mask), grid)
        x = x[:, :, :size[0], :size[1], :size[2]]
        return x if x.dtype == torch.float64 else x.float()


def to_torch(arrays, dtype=torch.float32):
    """Floating inputs in the model's dtype, the rest as they are."""
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


def build(table, weights, dtype=torch.float32):
    """The model of a deck's [model] table with these arrays, in inference mode."""
    model = STDiT3(Config.from_deck(table)).to(dtype)
    model.load_state_dict(to_torch(weights, dtype), strict=True)
    return model.eval()


def drawn(table, seed=20240617):
    """As it starts, but for zeros of the initialisation, which would leave whole branches without a gradient."""
    torch.manual_seed(seed)
    model = STDiT3(Config.from_deck(table))
    for p in model.parameters():
        if p.requires_grad and not p.any():
            nn.init.normal_(p, std=0.02)
    return model
