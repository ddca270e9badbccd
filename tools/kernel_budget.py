#!/usr/bin/env python3
"""Limits of the hot kernels, counted from their machine code: writes validation/results/kernels_budget.md.

    kernel_budget.py [--build build] [--write | --check] [--cuobjdump PATH]
    kernel_budget.py --cubin FILE [--kernel PATTERN]      cycles of each pipe per iteration of each loop

Disassembles the objects of a build, counts the cycles of each pipe in a kernel's main loop, and reports which pipe limits
the kernel at which share of its roofline. --write writes the page; it needs a build for all of its GPUs
(WEFT_CUDA_ARCHITECTURES="80;90a;100"). --check compares a build with the page, for the GPUs it was built for: exit status 1
if a limit is below its goal on an H100 without a stated reason, or more than a point below what the page records. It passes
if nothing was built with nvcc, and exits with 77 if cuobjdump is missing: it and nvdisasm come with CUDA, or from PyPI
(tools/python-packages.txt).
"""
import argparse
import dataclasses
import math
import os
import pathlib
import re
import shutil
import sys

import kernel_resources
import sass

PAGE = pathlib.Path(__file__).resolve().parent.parent / "validation/results/kernels_budget.md"
LATENCY = 800  # cycles from a load to its data while memory is busy
HEADS, D = 16, 72  # STDiT3-XL/2
ACCESS = 32 * 16  # bytes of a warp's access of 16 bytes a lane
MACHINES = [sass.H100, sass.A100, sass.B200]


def blocks(n, size):
    return -(-n // size)


@dataclasses.dataclass
class Part:
    """One kernel of an entry: how many times a warp passes through its loop, all warps together, and tiles for its blocks."""
    kernel: str
    passes: float
    tiles: int = 0
    half: bool = False  # passes of the inner loop take its two branches by turns


@dataclasses.dataclass
class Entry:
    name: str
    shape: str
    goal: float  # on an H100
    parts: list  # of kernels on the tensor cores; [kernel] of one that streams
    operations: float = 0  # useful ones
    bytes: float = 0
    threads: int = 256  # of a block that streams
    unit_bytes: float = 0  # of one pass through all of a kernel: its copying loops repeat until they have asked for these
    moved: float = 0  # bytes of a warp's pass that memory moves, where caches serve some of those that are asked for
    reason: str = ""  # of a budget below its goal
    measured: str = ""  # share of a plain product or copy of the same run on an H100 (validation/results/h100.md)


def attention(kind, rows, keys, sequences, forward, tile, goal, measured=("", ""), heads=HEADS, d=D):
    """A forward kernel's and a backward's entry. `forward`: (template arguments, 64-row groups, rows of a key block); `tile`: the
    backward's template arguments."""
    packed = str("cross" in kind).lower()
    arguments, per_block, key_block = forward
    shape = f"S {rows}" if kind == "spatial" else f"L {keys}"
    work = 4.0 * rows * keys * d * heads * sequences
    tensors = 2.0 * d * heads * sequences
    groups, own = (blocks(n, 64) * heads * sequences for n in (rows, keys))
    return [Entry(f"{kind} forward", shape, goal[0],
                  [Part(f"flash_sm90_forward_kernel<Sm90ForwardTile<{arguments}, {packed}> >", 4 * groups * blocks(keys, key_block),
                        blocks(rows, 64 * per_block) * heads * sequences)],
                  work, 2 * tensors * (rows + keys), measured=measured[0]),
            Entry(f"{kind} backward", shape, goal[1],
                  [Part(f"flash_sm90_backward_kernel<Sm90BackwardTile<{tile}, true, {packed}> >", 4 * own * blocks(rows, 64)),
                   Part(f"flash_sm90_backward_kernel<Sm90BackwardTile<{tile}, false, {packed}> >", 4 * groups * blocks(keys, 64))],
                  2.5 * work, 4 * tensors * (rows + keys), measured=measured[1])]


def attention_by_mma_sync(kind, rows, keys, sequences):
    """The same by flash_sm80*.cu: warps of 32 queries forward, of 16 rows backward, 64 of the other side at a time."""
    work = 4.0 * rows * keys * D * HEADS * sequences
    tensors = 2.0 * D * HEADS * sequences
    shape = f"S {rows}" if kind == "spatial" else f"L {keys}"
    heads = HEADS * sequences
    return [Entry(f"{kind} forward", shape, 0.50,
                  [Part("flash_sm80_forward_kernel<Sm80ForwardTile<80, 72> >", 4 * blocks(rows, 128) * heads * blocks(keys, 64))],
                  work, 2 * tensors * (rows + keys)),
            Entry(f"{kind} backward", shape, 0.45,
                  [Part("flash_sm80_keys_kernel<Sm80BackwardTile<80, 72> >", 4 * blocks(keys, 64) * heads * blocks(rows, 64)),
                   Part("flash_sm80_queries_kernel<Sm80BackwardTile<80, 72> >", 4 * blocks(rows, 64) * heads * blocks(keys, 64))],
                  2.5 * work, 4 * tensors * (rows + keys))]


def five_products(kind, rows, sequences, tile, goal, heads=HEADS, d=D):
    """The backward of self attention in one kernel. For D <= 72 a warp makes dQ in every second pass."""
    heads *= sequences
    passes = 8 * blocks(rows, 128) * heads * blocks(rows, 64)
    return Entry(f"{kind} backward, five products", f"S {rows}" if kind == "spatial" else f"L {rows}", goal,
                 [Part(f"flash_sm90_five_kernel<FiveTile<{tile}> >", passes, half=d <= 72)],
                 10.0 * rows * rows * d * heads, (16 + 12) * rows * d * heads)


def temporal(T, tokens, forward, backward, goal, reasons=("", ""), measured=("", "")):
    tile = (2 if T <= 8 else 1) * T * D * 2  # bytes of one head's frames in one pass of a warp
    return [Entry("temporal forward", f"T {T}", goal, [f"temporal::{forward}"], unit_bytes=4 * tile,
                  reason=reasons[0], measured=measured[0], threads=256),
            Entry("temporal backward", f"T {T}", goal, [f"temporal::backward_kernel<{backward}>"], unit_bytes=7 * tile,
                  reason=reasons[1], measured=measured[1], threads=256)]


WGMMA = [
    *attention("spatial", 405, 405, 30, ("80, 72, 2, 112", 2, 112), "80, 72", (0.50, 0.45)),
    *attention("spatial", 1590, 1590, 15, ("80, 72, 3, 112", 3, 112), "80, 72", (0.65, 0.55),
               ("43 % with q/k norm", "37 % with q/k norm")),
    *attention("spatial", 3600, 3600, 5, ("80, 72, 3, 112", 3, 112), "80, 72", (0.65, 0.55)),
    *attention("cross", 23850, 300, 1, ("80, 72, 3, 112", 3, 112), "80, 72", (0.50, 0.50), ("29 %", "23 %")),
    *attention("cross", 23850, 120, 1, ("80, 72, 3, 112", 3, 112), "80, 72", (0.50, 0.50)),
    # Wan2.1 1.3B, a clip of 81 frames of 480x832.
    *attention("Wan, all tokens,", 32760, 32760, 1, ("128, 128, 2, 128", 2, 128), "128, 128", (0.65, 0.55), ("86 %", "65 %"), 12, 128),
    five_products("spatial", 1590, 15, "80, 72", 0.75),
    five_products("Wan, all tokens,", 32760, 1, "128, 128", 0.75, 12, 128),
    *attention("Wan, cross,", 32760, 513, 1, ("128, 128, 2, 128", 2, 128), "128, 128", (0.50, 0.50), ("46 %", "38 %"), 12, 128),
]
MMA_SYNC = [
    *attention_by_mma_sync("spatial", 405, 405, 30),
    *attention_by_mma_sync("spatial", 1590, 1590, 15),
    *attention_by_mma_sync("cross", 23850, 300, 1),
]
STREAMS = [
    *temporal(5, 3600, "forward_tile_kernel<9, (temporal::Tiling)2>", "9, (temporal::Tiling)2", 0.60,
              reasons=("", "the two warps of a tile pass through different loops, of which one warp's are counted; by hand, along both "
                           "warps' loops, the issue of instructions bounds it at 85 %.")),
    *temporal(15, 1590, "forward_tile_kernel<9, (temporal::Tiling)1>", "9, (temporal::Tiling)1", 0.80, measured=("82 %", "76 %")),
    *temporal(30, 1590, "forward_kernel<9, 256>", "9, (temporal::Tiling)0", 0.80),
    Entry("q/k norm forward", "D 72", 0.85, ["qk_norm_forward_kernel<72, bf16>"], measured="61 % (2026-11-22: one load at a time)"),
    Entry("q/k norm backward", "D 72", 0.85, ["qk_norm_backward_kernel<72, bf16>"], measured="75 % (2026-11-22)"),
    Entry("layer norm, modulation forward", "C 1152", 0.85, ["modulate_forward_kernel<bf16, 9>"], measured="90 %"),
    Entry("layer norm, modulation backward", "C 1152", 0.85, ["modulate_backward_kernel<bf16, 9, false>"], measured="80 %"),
    Entry("gate, residual forward", "C 1152", 0.85, ["gate_forward_kernel<bf16, 9>"], measured="95 %"),
    Entry("gate, residual backward", "C 1152", 0.85, ["gate_backward_kernel<bf16, 9>"], measured="82 %"),
    Entry("GELU forward", "bf16", 0.85, ["gelu_forward_kernel<8, bf16>"], measured="99 %"),
    Entry("GELU backward", "bf16", 0.85, ["gelu_backward_kernel<8, bf16>"], measured="101 %"),
    Entry("addition", "bf16", 0.85, ["add_kernel<8, bf16>"], measured="96 %"),
    Entry("conversion to bf16", "f32", 0.85, ["convert_kernel<4, float, bf16>"], measured="97 %"),
    Entry("SiLU forward", "f32", 0.85, ["silu_forward_kernel<4>"], measured="123 %"),
    Entry("AdamW", "f32", 0.85, ["step_kernel<AdamwRule, 4>"]),
    Entry("squares of gradients", "f32", 0.85, ["squares_kernel<4>"]),
    # A token is a pass of four warps; 12 heads share its rotation. Positions of the VAE: two a pass of a warp, or one.
    Entry("RMS norm, rotation", "Wan, bf16", 0.85, ["rms_rope_kernel<bf16, 3, true>"], moved=6656 / 4, threads=128),
    Entry("RMS norm, rotation backward", "Wan, bf16", 0.85, ["rms_rope_backward_kernel<bf16, 3, true>"], moved=9728 / 4, threads=128),
    Entry("layer norm of long rows", "Wan, f32 to bf16", 0.85, ["norm_rows_kernel<float, bf16, 3>"], threads=128),
    Entry("layer norm of long rows backward", "Wan, f32 to bf16", 0.85, ["norm_rows_backward_kernel<float, bf16, 3, true>"], threads=128),
    Entry("channel norm", "Wan's VAE, C 384, bf16", 0.85, ["channel_norm_forward_kernel<bf16, 3, 2, true>"], moved=2 * 2 * 768),
    Entry("channel norm backward", "Wan's VAE, C 384, bf16", 0.85, ["channel_norm_backward_kernel<bf16, 3, true>"], moved=3 * 768),
    Entry("RMS norm", "T5, bf16", 0.85, ["rms_rope_kernel<bf16, 5, false>"]),
    Entry("gated GELU", "T5, bf16", 0.85, ["gated_gelu_kernel<bf16, 8>"]),
    Entry("group norm, moments", "VAE, bf16", 0.85, ["moments_kernel<bf16, 8>"]),
    Entry("group norm, SiLU forward", "VAE, bf16", 0.85, ["group_norm_forward_kernel<bf16, 8, true>"]),
    Entry("group norm, SiLU backward", "VAE, bf16", 0.85, ["group_norm_backward_kernel<bf16, 8, true>"]),
    Entry("phases of an upsampled convolution", "VAE, bf16", 0.85, ["join_phases_kernel<bf16, 8>"]),
    Entry("batch norm", "segmentation, bf16", 0.85, ["apply_kernel<bf16, 8, (Residual)1>"]),
    Entry("batch norm backward", "segmentation, bf16", 0.85, ["batch_norm_backward_kernel<bf16, 8>"]),
    Entry("max pool, 2x2", "LPIPS, bf16", 0.85, ["window_kernel<2, 8, bf16>"], moved=5 * ACCESS),
    # Behind the stem: 4 pixels in for one out; backward, a thread makes 8 times 4 pixels and has an entry pass before them.
    Entry("max pool, 3x3", "segmentation, bf16", 0.85, ["window_kernel<3, 8, bf16>"], moved=5 * ACCESS),
    Entry("max pool, 3x3 backward", "segmentation, bf16", 0.85, ["stem_backward_kernel<8, bf16>"], unit_bytes=9 * 16 * ACCESS,
          moved=8 * 9 * ACCESS, threads=128),
    # 64x64 pixels as 6x6 rectangles, of 11x11 pixels for 32 lines; backward, four accesses of a pixel that is in one of them.
    Entry("means of rectangles", "segmentation, bf16", 0.85, ["adaptive_kernel<8, bf16>"], unit_bytes=121 / 32 * ACCESS,
          moved=121 / 32 * ACCESS),
    Entry("means of rectangles backward", "segmentation, bf16", 0.85, ["adaptive_backward_kernel<8, 4, bf16>"],
          unit_bytes=4 * ACCESS, moved=4 * 2 * ACCESS),
    # Doubled: two accesses of a pixel from four of a quarter as many; backward from four times four. 6x6 to 64x64: an output is
    # asked for by four pixels, 16 lines share the 455 of each.
    Entry("bilinear", "segmentation, bf16", 0.85, ["bilinear_kernel<8, 2, false, bf16>"], moved=2 * 1.25 * ACCESS),
    Entry("bilinear backward, doubled", "segmentation, bf16", 0.85, ["bilinear_near_backward_kernel<8, 2, bf16>"],
          unit_bytes=4 * 8 * ACCESS, moved=2 * 5 * ACCESS),
    Entry("bilinear backward, 6x6 to 64x64", "segmentation, bf16", 0.85, ["bilinear_far_backward_kernel<8, 2, bf16>"],
          unit_bytes=455 / 16 * 2 * ACCESS, moved=455 / 16 / 4 * 2 * ACCESS, threads=128),
    Entry("cross entropy", "segmentation, f32", 0.85, ["class_losses_kernel<float>"]),
    Entry("classes of pixels", "segmentation, bf16", 0.85, ["predict_kernel<bf16>"]),
    Entry("text loss, sums", "text detection, bf16", 0.85, ["sums_kernel<bf16, true>"],
          reason="without the logarithms of text's pixels, one in 25 and beside each other."),
    Entry("text loss, bins", "text detection, bf16", 0.85, ["bins_kernel<bf16, true>"]),
    Entry("text loss, hardest pixels", "text detection, bf16", 0.85, ["chosen_kernel<bf16, true>"],
          reason="without the logarithms of those that are chosen, three for each pixel of text at most."),
    Entry("text loss backward", "text detection, bf16", 0.85, ["text_loss_backward_kernel<bf16, true>"]),
    # Doubled, and added to what is there.
    Entry("nearest", "text detection, bf16", 0.85, ["nearest_kernel<8, bf16>"], moved=2.25 * ACCESS),
    Entry("nearest backward", "text detection, bf16", 0.85, ["nearest_backward_kernel<8, bf16>"], unit_bytes=4 * ACCESS,
          moved=6 * ACCESS),
    Entry("terms a channel and a pixel", "text detection, bf16", 0.85, ["add_outer_kernel<8, bf16>"], moved=2 * ACCESS),
    Entry("sums over channels", "text detection, bf16", 0.85, ["sum_channels_kernel<32, 8, bf16>"], unit_bytes=ACCESS, moved=ACCESS),
    Entry("values repeated over channels", "text detection, bf16", 0.85, ["repeat_kernel<8, bf16>"], moved=2 * ACCESS),
    Entry("scaled groups", "text detection, bf16", 0.85, ["scale_kernel<8, bf16>"], moved=2 * ACCESS),
    Entry("scaled groups backward", "text detection, bf16", 0.85, ["scale_backward_kernel<8, 8, true, true, bf16>"],
          unit_bytes=3 * ACCESS, moved=3 * ACCESS),
    # Columns are nine values for each of x; backward, 36 taps read a pixel of x, each column is one of four's.
    Entry("deformed columns", "text detection, bf16", 0.85, ["columns_kernel<8, 4, bf16>"], moved=4 * (1 + 1 / 9) * ACCESS),
    Entry("deformed convolution, gradients", "text detection, bf16", 0.85, ["gather_kernel<8, bf16>"], unit_bytes=36 * 1.5 * ACCESS,
          moved=(36 / 4 + 4) * ACCESS),
    # 16x64x64 voxels, 15 keypoints; four frames share a volume.
    Entry("volume sampled", "animation, bf16", 0.85, ["sample_kernel<8, 2, bf16>"], moved=2 * 1.25 * ACCESS + 16 * 12),
    Entry("deformed candidates", "animation, bf16", 0.85, ["candidates_kernel<4, bf16>"], unit_bytes=23 * ACCESS,
          moved=32 * 10, reason="ten bytes are written for two exponentials and eight places read."),
    Entry("motion field", "animation, bf16", 0.85, ["field_kernel<2, true, bf16, void>"], unit_bytes=4 * 1.75 * ACCESS,
          moved=4 * 16 * (32 + 12)),
    Entry("expectation of keypoints", "animation, bf16", 0.85, ["expectation_kernel<bf16>"], unit_bytes=7.5 * 2 * 64, moved=7.5 * 64,
          reason="a thread has eight logits of two bytes, each with an exponential and three products; it runs once a source picture, "
                 "over 2 MB."),
    Entry("SPADE, doubled", "animation, bf16", 0.85, ["spade_kernel<bf16, 8, 2>"], moved=2 * 3.25 * ACCESS),
    Entry("SPADE", "animation, bf16", 0.85, ["spade_kernel<bf16, 8, 1>"]),
    Entry("modulated input", "enhancement, bf16", 0.85, ["modulate_kernel<8, bf16>"], moved=2 * ACCESS),
    Entry("modulated input, doubled", "enhancement, bf16", 0.85, ["modulate_up_kernel<8, bf16>"], moved=1.25 * ACCESS),
    Entry("demodulation", "enhancement, f32", 0.85, ["demodulation_kernel"], unit_bytes=512 * 8, moved=512 * 4),
    Entry("column sums", "bf16", 0.85, ["chunk_sums_kernel<bf16, 8>"]),
    Entry("depth to time", "VAE, bf16", 0.85, ["depth_to_time_kernel<bf16, 8, true>"]),
    Entry("weights to the library's layout", "VAE, bf16", 0.85, ["to_library_kernel<bf16, true>"], unit_bytes=27 * 2 * 64),
    Entry("modulated convolution, end", "enhancement, bf16", 0.85, ["finish_kernel<8, bf16>"], moved=3 * ACCESS),
    Entry("colours from channels", "enhancement, bf16", 0.85, ["rgb_kernel<8, bf16>"],
          reason="its loops take turns over the same pixels, of which one's work is counted; by hand, along all of them, 88 % of 64 "
                 "channels, bounded by issue."),
]
TABLE = {"sm_90a": WGMMA + STREAMS, "sm_80": MMA_SYNC + STREAMS, "sm_100": STREAMS}


@dataclasses.dataclass
class Budget:
    entry: Entry
    share: float  # of the roofline, if everything overlaps
    serial: float  # if nothing overlaps the tensor cores; of kernels that stream, by bytes in flight
    pipe: str
    cycles: dict


def tensor_budget(entry, kernels, machine=sass.H100):
    """Cycles of the device, pipe by pipe, for all passes of all parts."""
    cycles, serial, bound = {}, 0.0, 0.0
    for part in entry.parts:
        kernel = kernels[part.kernel]
        loop = kernel.inner_loop("HGMMA") if part.half else kernel.main_loop("HGMMA|HMMA")
        counts = sass.count(kernel.code(loop), machine)
        if part.half:
            whole = sass.count(kernel.all_code(loop), machine)
            for mine, theirs in ((counts.quarter, whole.quarter), (counts.whole, whole.whole)):
                for p in theirs:
                    mine[p] = (mine[p] + theirs[p]) / 2
        ours = {p: c * part.passes / 4 / machine.multiprocessors for p, c in counts.quarter.items()}
        ours |= {p: c * part.passes / machine.multiprocessors for p, c in counts.whole.items()}
        waves = 1.0
        if part.tiles:
            waves = math.ceil(part.tiles / machine.multiprocessors) * machine.multiprocessors / part.tiles
        bound += max(ours.values()) * waves
        serial += (ours["tensor"] + max(c for p, c in ours.items() if p not in ("tensor", "issue", "shared"))) * waves
        for p, c in ours.items():
            cycles[p] = cycles.get(p, 0.0) + c
    cycles["memory"] = entry.bytes / machine.bytes / machine.multiprocessors
    roofline = max(entry.operations / machine.tensor_operations / machine.multiprocessors, cycles["memory"])
    bound, serial = max(bound, cycles["memory"]), max(serial, cycles["memory"])
    return Budget(entry, roofline / bound, roofline / serial, max(cycles, key=cycles.get), cycles)


def stream_budget(entry, kernels, registers, machine=sass.H100):
    """Cycles of a multiprocessor for one warp's pass, against those in which memory moves its bytes."""
    kernel = kernels[entry.parts[0]]
    counts = [sass.count(piece, machine) for piece in kernel.pieces()]
    moving = max(counts, key=lambda c: c.bytes)
    total = sass.Counts(type(moving.quarter)(), type(moving.whole)(), 0, 0)
    if entry.unit_bytes:
        # Once through the kernel; loops that copy repeat until they have asked for the unit's bytes.
        copied = sum(c.bytes for c in counts[:-1]) or 1
        for c in counts[:-1]:
            total.add(c, entry.unit_bytes / copied if c.bytes else 1)
        total.add(counts[-1], 1)
        total.bytes = entry.unit_bytes
    else:
        total = moving
    cycles = {p: c / 4 for p, c in total.quarter.items()} | dict(total.whole)
    cycles["memory"] = (entry.moved or total.bytes) / machine.bytes
    warps = entry.threads // 32
    resident = min(64, 65536 // (-(-registers // 8) * 8 * 32)) // warps * warps
    # A loop that only writes waits for nothing.
    in_flight = min(1.0, total.in_flight * resident / (machine.bytes * LATENCY)) if total.in_flight else 1.0
    return Budget(entry, cycles["memory"] / max(cycles.values()), in_flight, max(cycles, key=cycles.get), cycles)


def budgets(kernels, registers, machine):
    result = []
    for entry in TABLE[machine.architecture]:
        names = [p.kernel if isinstance(p, Part) else p for p in entry.parts]
        missing = [n for n in names if n not in kernels]
        if missing:
            raise KeyError(f"{entry.name} {entry.shape}: no kernel {missing[0]} in this build; see TABLE")
        result.append(tensor_budget(entry, kernels, machine) if entry.operations else
                      stream_budget(entry, kernels, registers.get(names[0], 64), machine))
    return result


def published():
    """What the same counting foretells for FlashAttention-3's forward kernel, beside its published figures."""
    rows = []
    for d, keys, figure in ((64, 128, 497), (128, 176, 648)):
        tensor = 64 * keys * d * 2 * 2 / sass.H100.tensor_operations
        exponential = 64 * keys / 16
        rows.append((d, 989 * tensor / max(tensor, exponential), 989 * tensor / (tensor + exponential), figure))
    return rows


def percent(x):
    return f"{100 * x:.0f} %"


def table_of(machine, found):
    """A section of the page."""
    on_h100 = machine is sass.H100
    lines = [f"## {machine.name} ({machine.architecture})", "",
             f"{machine.tensor_operations * machine.multiprocessors * machine.clock / 1e12:.0f} TFLOP/s of bf16, "
             f"{machine.bandwidth / 1e12:.2f} TB/s; memory needs {machine.bytes * LATENCY / 1024:.0f} KiB a multiprocessor under way.", "",
             "| kernel | shape | " + "goal | " * on_h100 + "limit | bounded by | serial | in flight |" + " measured |" * on_h100,
             "|---|---|---|---|---|---|" + "---|---|" * on_h100]
    for b in found:
        serial, flight = (percent(b.serial), "") if b.entry.operations else ("", percent(b.serial))
        goal, measured = (f"{percent(b.entry.goal)} | ", f" {b.entry.measured} |") if on_h100 else ("", "")
        lines.append(f"| {b.entry.name} | {b.entry.shape} | {goal}{percent(b.share)} | {b.pipe} | {serial} | {flight} |{measured}")
    return [*lines, ""]


def page_of(found, version):
    """`found`: {machine: its budgets}."""
    lines = [
        "# Kernel budgets: limits counted from the machine code", "",
        f"Written by `tools/kernel_budget.py --write` from the machine code that CUDA {version} generates; do not edit. Percentages are",
        "of the GPU's roofline: its tensor cores or its memory, whichever takes longer for the useful operations and bytes.", "",
        "*Limit* is the share at which the busiest pipe is never idle; no faster run is possible. How much slower a kernel is in",
        "practice cannot be counted: latency, waits at barriers, contention for L2, the clock under full load (matrix products",
        "reached 73 % of 989 TFLOP/s on the [H100 measured](h100.md)). *Serial*, for kernels on the tensor cores, is the share if",
        "elementwise work did not overlap with matrix products at all. *In flight*, for the others, is the part of the bytes that",
        f"memory needs in flight for {LATENCY} cycles of latency that the loads request before they wait. If caches serve part of what",
        "a kernel requests, only what memory must move counts.", ""]
    for machine, budgets_of in found.items():
        lines += table_of(machine, budgets_of)
        if machine is not sass.H100:
            continue
        lines += ["Measured figures are shares of a plain product or copy of the same run. Attention's are of 2026-11-26, the others of 2026-11-22",
                  "and of the kernels at that time.", ""]
        lines += [f"- {b.entry.name}, {b.entry.shape}: {b.entry.reason}" for b in budgets_of if b.entry.reason] + [""]
    lines += ["The B200's table has no attention: there it uses mma.sync, whose rate on that GPU is not known here.", "",
              "## How far counting can be trusted", "",
              "FlashAttention-3 forward, bf16, no mask, 16k keys, H100 SXM (Shah et al., 2024, figure 5), in TFLOP/s:", "",
              "| D | limit | serial | published |", "|---|---|---|---|"]
    lines += [f"| {d} | {limit:.0f} | {serial:.0f} | {figure} |" for d, limit, serial, figure in published()]
    lines += ["", "Even the best published kernel is far from the limit and close to the serial figure: products and exponentials of a block",
              "overlap less than they could. So a goal below the limit says that the work fits, not that a GPU will reach it.", ""]
    return "\n".join(lines)


def recorded(page):
    """(architecture, kernel, shape) -> limit in percent."""
    result, architecture = {}, ""
    for line in page.splitlines():
        if m := re.match(r"## .*\((sm_\w+)\)", line):
            architecture = m[1]
        cells = [c.strip() for c in line.strip("|").split("|")] if line.startswith("|") else []
        limit = cells[{8: 3, 6: 2}[len(cells)]] if len(cells) in (6, 8) else ""
        if limit.endswith("%"):
            result[(architecture, cells[0], cells[1])] = float(limit.rstrip(" %"))
    return result


def faults(found, page):
    """What --check reports."""
    old = recorded(page)
    for machine, budgets_of in found.items():
        for b in budgets_of:
            key = (machine.architecture, b.entry.name, b.entry.shape)
            what = f"{key[1]}, {key[2]} ({key[0]}): {percent(b.share)}"
            if key not in old:
                yield f"{what} is not on validation/results/{PAGE.name}; run with --write"
            elif 100 * b.share < old[key] - 1:
                yield f"{what}, bounded by {b.pipe}, where validation/results/{PAGE.name} records {old[key]:.0f} %"
            if machine is sass.H100 and b.share < b.entry.goal and not b.entry.reason:
                yield f"{what}, bounded by {b.pipe}, is below the goal of {percent(b.entry.goal)}"


def tools(given):
    """cuobjdump, and an environment in which it finds nvdisasm; None where there is none."""
    packaged = pathlib.Path(__file__).resolve().parent.parent / "build" / "python" / "nvidia" / "cu13" / "bin"
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin", str(packaged)])
    program = given or shutil.which("cuobjdump", path=path)
    return program, os.environ | {"PATH": path}


def read(files, program, environment, architecture="sm_90a"):
    kernels = {}
    for path in files:
        found = sass.disassemble(path, program, architecture, environment)
        names = kernel_resources.plain_names(sorted(found))
        kernels |= {names[raw]: kernel for raw, kernel in found.items()}
    return kernels


def show(kernels, pattern):
    for name, kernel in sorted(kernels.items()):
        if not re.search(pattern, name):
            continue
        print(f"{name}: {len(kernel.instructions)} instructions")
        for loop in sorted(kernel.loops, key=lambda l: l.header):
            c = sass.count(kernel.code(loop))
            depth = sum(loop.blocks < other.blocks for other in kernel.loops)
            pipes = ", ".join(f"{p} {n:.0f}" for p, n in {**c.quarter, **c.whole}.items() if n)
            print(f"{'  ' * (depth + 1)}loop at {loop.header:x}: {pipes}; {c.bytes} bytes, {c.in_flight} in flight")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build", type=pathlib.Path)
    parser.add_argument("--cubin", type=pathlib.Path)
    parser.add_argument("--kernel", default=".", help="with --cubin")
    parser.add_argument("--cuobjdump")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    program, environment = tools(args.cuobjdump)
    objects = [args.cubin] if args.cubin else kernel_resources.objects(args.build)
    if args.check and not objects:
        print("kernel_budget: not checked, nothing was built with nvcc")
        return 0
    if not objects:
        sys.exit(f"kernel_budget: no *.cu.o under {args.build}: build with nvcc first")
    if program is None:
        print("kernel_budget: no cuobjdump. HINT: pip install --target build/python -r tools/python-packages.txt", file=sys.stderr)
        return 77  # CTest's "skipped"
    if args.cubin:
        show(read(objects, program, environment), args.kernel)
        return 0
    resources = kernel_resources.read(args.build)
    names = kernel_resources.plain_names(sorted({raw for raw, _ in resources}))
    built = {arch for _, arch in resources}
    found = {}
    for machine in MACHINES:
        if machine.architecture not in built:
            continue
        registers = {names[raw]: row[0] for (raw, arch), row in resources.items() if arch == machine.architecture}
        found[machine] = budgets(read(objects, program, environment, machine.architecture), registers, machine)
    if args.write and len(found) < len(MACHINES):
        sys.exit(f"kernel_budget: {args.build} was built for {', '.join(sorted(built))} only. HINT: cmake "
                 f"-DWEFT_CUDA_ARCHITECTURES=\"80;90a;100\"")
    page = page_of(found, kernel_resources.compiler(args.build))
    if args.write:
        PAGE.write_text(page, encoding="utf-8")
    print(page[page.index("## "):page.index("## How far")])
    wrong = list(faults(found, page if args.write else PAGE.read_text(encoding="utf-8"))) if args.check or args.write else []
    for line in wrong:
        print(f"kernel_budget: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
