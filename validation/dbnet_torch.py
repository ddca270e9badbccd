#!/usr/bin/env python3
"""DBNet and DBNet++ in PyTorch, under the names of mmocr's released files: the other side of checks and measurements of the
text detector. Written from the formulas of docs/models/dbnet.md.

    dbnet_torch.py --check GOLDEN     does it reproduce the golden cases ocr_dbnet* of that folder in float64?
    dbnet_torch.py --time CASE.json   seconds of its forward passes and the process's peak memory, as JSON (compare_score.py)

`build(backbone, asf, conv2_gain, deformable)` gives the network, `text_loss` and `targets` what training adds. Pictures are
[N,3,H,W], RGB, normalised, with sides that are multiples of 32; maps are [N,H,W] at the same size.
"""
import argparse
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import tomllib

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import safetensors_io
from text_loss_torch import text_loss  # noqa: F401: what training adds to the network is all here

# blocks a layer, channels of the outputs, bottlenecks?
BACKBONES = {"oclip_resnet50": ((3, 4, 6, 3), (256, 512, 1024, 2048), True),
             "resnet50": ((3, 4, 6, 3), (256, 512, 1024, 2048), True),
             "resnet18": ((2, 2, 2, 2), (64, 128, 256, 512), False)}
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
CHECK_TOLERANCE = 1e-7  # the golden files hold float32


def conv(inputs, outputs, kernel, stride=1, bias=False):
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=bias)


class Deformable(nn.Conv2d):
    """DCNv2: nine offsets (dy, dx) and nine mask logits a pixel, from a convolution of the same geometry."""

    def __init__(self, channels, stride):
        super().__init__(channels, channels, 3, stride, 1, bias=False)
        self.conv_offset = nn.Conv2d(channels, 27, 3, stride, 1)

    def forward(self, x):
        from torchvision.ops import deform_conv2d
        o = self.conv_offset(x)
        return deform_conv2d(x, o[:, :18].contiguous(), self.weight, None, self.stride, self.padding,
                             mask=o[:, 18:].sigmoid())


class BasicBlock(nn.Module):
    def __init__(self, inputs, planes, stride):
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, planes, 3, stride), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = conv(planes, planes, 3), nn.BatchNorm2d(planes)
        self.downsample = None
        if stride > 1 or inputs != planes:
            self.downsample = nn.Sequential(conv(inputs, planes, 1, stride), nn.BatchNorm2d(planes))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """`clip`: the stride is an average pooling behind conv2 and in front of the shortcut's convolution."""

    def __init__(self, inputs, planes, stride, clip, gain, deformable):
        super().__init__()
        inner = 1 if clip else stride
        self.gain, self.pool = gain, stride if clip else 1
        self.conv1, self.bn1 = conv(inputs, planes, 1), nn.BatchNorm2d(planes)
        self.conv2 = Deformable(planes, inner) if deformable else conv(planes, planes, 3, inner)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3, self.bn3 = conv(planes, 4 * planes, 1), nn.BatchNorm2d(4 * planes)
        self.downsample = None
        if stride > 1 or inputs != 4 * planes:
            norm = nn.BatchNorm2d(4 * planes)
            if clip:
                pool = nn.AvgPool2d(stride, stride, ceil_mode=True, count_include_pad=False)
                self.downsample = nn.Sequential(pool, conv(inputs, 4 * planes, 1), norm)
            else:
                self.downsample = nn.Sequential(conv(inputs, 4 * planes, 1, stride), norm)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.conv2(y)
        y = F.relu(self.bn2(y if self.gain == 1 else y * self.gain))
        if self.pool > 1:
            y = F.avg_pool2d(y, self.pool)
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class Backbone(nn.Module):
    def __init__(self, name, gain, deformable):
        super().__init__()
        depths, channels, deep = BACKBONES[name]
        self.clip = name.startswith("oclip")
        if self.clip:
            self.stem = nn.Sequential(conv(3, 32, 3, 2), nn.BatchNorm2d(32), nn.ReLU(), conv(32, 32, 3),
                                      nn.BatchNorm2d(32), nn.ReLU(), conv(32, 64, 3), nn.BatchNorm2d(64), nn.ReLU())
        else:
            self.conv1, self.bn1 = conv(3, 64, 7, 2), nn.BatchNorm2d(64)
        inputs = 64
        for i, (depth, outputs) in enumerate(zip(depths, channels)):
            blocks = []
            for b in range(depth):
                stride = 2 if i > 0 and b == 0 else 1
                blocks.append(Bottleneck(inputs, outputs // 4, stride, self.clip, gain if i > 0 else 1.0, deformable and i > 0)
                              if deep else BasicBlock(inputs, outputs, stride))
                inputs = outputs
            setattr(self, f"layer{i + 1}", nn.Sequential(*blocks))

    def forward(self, x):
        if self.clip:
            x = F.avg_pool2d(self.stem(x), 2)
        else:
            x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        out = []
        for i in range(1, 5):
            x = getattr(self, f"layer{i}")(x)
            out.append(x)
        return out


class Wrapped(nn.Module):
    """A convolution under the name `conv`."""

    def __init__(self, *args, **keys):
        super().__init__()
        self.conv = conv(*args, **keys)

    def forward(self, x):
        return self.conv(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.channel_wise = nn.ModuleList([Wrapped(256, 64, 1), Wrapped(64, 256, 1)])
        self.spatial_wise = nn.ModuleList([Wrapped(1, 1, 3), Wrapped(1, 1, 1)])
        self.attention_wise = Wrapped(256, 4, 1)

    def forward(self, a):
        g = F.relu(self.channel_wise[0](a.mean((2, 3), keepdim=True)))
        t = torch.sigmoid(self.channel_wise[1](g)) + a
        m = F.relu(self.spatial_wise[0](t.mean(1, keepdim=True)))
        return torch.sigmoid(self.attention_wise(torch.sigmoid(self.spatial_wise[1](m)) + t))


class Neck(nn.Module):
    def __init__(self, channels, asf):
        super().__init__()
        self.lateral_convs = nn.ModuleList(Wrapped(c, 256, 1) for c in channels)
        self.smooth_convs = nn.ModuleList(Wrapped(256, 64, 3) for _ in channels)
        if asf:
            self.asf_conv, self.asf_attn = Wrapped(256, 256, 3, bias=True), Attention()
        self.asf = asf

    def forward(self, maps):
        laterals = [conv(x) for conv, x in zip(self.lateral_convs, maps)]
        for i in (3, 2, 1):
            laterals[i - 1] = laterals[i - 1] + F.interpolate(laterals[i], size=laterals[i - 1].shape[2:])
        outs = [conv(x) for conv, x in zip(self.smooth_convs, laterals)]
        outs = [F.interpolate(x, size=outs[0].shape[2:]) for x in outs]
        joined = torch.cat(outs, 1)
        if not self.asf:
            return joined
        weights = self.asf_attn(self.asf_conv(joined))
        return torch.cat([weights[:, i:i + 1] * x for i, x in enumerate(outs)], 1)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("binarize", "threshold"):
            setattr(self, name, nn.Sequential(
                conv(256, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.ConvTranspose2d(64, 64, 2, 2), nn.BatchNorm2d(64),
                nn.ReLU(), nn.ConvTranspose2d(64, 1, 2, 2)))


class DbNet(nn.Module):
    def __init__(self, backbone="oclip_resnet50", asf=True, conv2_gain=1.0, deformable=False):
        super().__init__()
        if not BACKBONES[backbone][2] and (conv2_gain != 1 or deformable):
            raise ValueError(f"{backbone}: conv2_gain and deformable convolutions are for bottlenecks")
        self.backbone = Backbone(backbone, conv2_gain, deformable)
        self.neck = Neck(BACKBONES[backbone][1], asf)
        self.det_head = Head()

    def forward(self, image, want_threshold=False):
        """Logits of the probability [N,H,W]; with want_threshold also those of the threshold."""
        x = self.neck(self.backbone(image))
        logits = self.det_head.binarize(x)[:, 0]
        return (logits, self.det_head.threshold(x)[:, 0]) if want_threshold else logits


def build(backbone="oclip_resnet50", asf=True, conv2_gain=1.0, deformable=False):
    return DbNet(backbone, asf, conv2_gain, deformable)


def build_from_deck(model, names=()):
    """For a deck's [model]; deformable = "auto" is decided by the names of the weights."""
    deformable = model.get("deformable", "auto")
    offsets = any(".conv_offset." in n for n in names) if deformable == "auto" else deformable == "on"
    return build(model.get("backbone", "oclip_resnet50"), model.get("asf", True), model.get("conv2_gain", 1.0), offsets)


def parameters(model):
    """{released name: array}, without the counters of batch norm."""
    return {n: v.detach().cpu().numpy().copy() for n, v in model.state_dict().items() if not n.endswith("num_batches_tracked")}


def load(model, arrays):
    """Sets everything from arrays under released names; the head's threshold, which only training uses, may be missing."""
    missing, surplus = model.load_state_dict({n: torch.from_numpy(a.copy()) for n, a in arrays.items()}, strict=False)
    missing = [n for n in missing if not n.endswith("num_batches_tracked") and ".threshold." not in n]
    if missing or surplus:
        raise ValueError(f"missing {missing[:5]}, not known {surplus[:5]}")
    return model


def draw(model, seed):
    """Weights that keep activations of order one, so that an error shows: all values are drawn."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor, mean, std):
        tensor.copy_(mean + std * torch.randn(tensor.shape, generator=generator))

    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
                fan_in = module.in_channels if isinstance(module, nn.ConvTranspose2d) else module.weight[0].numel()
                normal(module.weight, 0, (2 / fan_in) ** 0.5)
                if module.bias is not None:
                    normal(module.bias, 0, 0.1)
                if name.endswith("conv_offset"):
                    module.weight.mul_(0.5)
            elif isinstance(module, nn.BatchNorm2d):
                normal(module.weight, 1, 0.2)
                normal(module.bias, 0, 0.1)
                normal(module.running_mean, 0, 0.1)
                module.running_var.copy_(0.5 + torch.rand(module.running_var.shape, generator=generator))
        for module in model.modules():  # else activations grow with the depth
            if isinstance(module, Bottleneck):
                module.bn3.weight.mul_(0.3)
            elif isinstance(module, BasicBlock):
                module.bn2.weight.mul_(0.3)
    return model


def text_share(model, image, share=0.004):
    """Moves the last bias so that this share of an image's pixels is above probability 0.3: random weights then give some
    regions, as text does, not one that covers the picture."""
    with torch.no_grad():
        logits = model(image).flatten()
        k = max(1, round(share * logits.numel()))
        model.det_head.binarize[6].bias += math.log(0.3 / 0.7) - logits.topk(k).values[-1]


def normalise(pictures):
    """u8 [N,H,W,3], RGB -> f32 [N,3,H,W]."""
    x = torch.as_tensor(pictures).permute(0, 3, 1, 2).float()
    return (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def offset(polygon, distance):
    """Clipper's offset with round joins; a list of polygons."""
    import pyclipper
    offsetter = pyclipper.PyclipperOffset()
    offsetter.AddPath(polygon, pyclipper.JT_ROUND, pyclipper.ET_CLOSEDPOLYGON)
    return [np.array(p) for p in offsetter.Execute(distance)]


def targets(height, width, polygons, ignored=None, shrink=0.4, least=0.3, most=0.7):
    """Maps of a picture for text_loss, f32 [H,W] each: text, counts, thresholds, near. polygons: [points,2] arrays (x, y)."""
    import cv2
    text, counts = np.zeros((height, width), np.uint8), np.ones((height, width), np.uint8)
    value, near = np.zeros((height, width)), np.zeros((height, width), np.uint8)
    ys, xs = np.mgrid[:height, :width].astype(np.float64)
    for polygon, ignore in zip(polygons, ignored or [False] * len(polygons)):
        polygon = np.asarray(polygon, np.float64)
        following = np.roll(polygon, -1, 0)
        area = abs(float((polygon[:, 0] * following[:, 1] - polygon[:, 1] * following[:, 0]).sum())) / 2
        length = float(np.hypot(*(following - polygon).T).sum())
        invalid = ignore or area < 1 or min(cv2.minAreaRect(polygon.astype(np.float32))[1]) < 8
        # mmocr shrinks the polygon whose corners are cut to whole pixels, and takes its area and length.
        whole = np.trunc(polygon)
        after = np.roll(whole, -1, 0)
        whole_area = abs(float((whole[:, 0] * after[:, 1] - whole[:, 1] * after[:, 0]).sum())) / 2
        whole_length = float(np.hypot(*(after - whole).T).sum())
        inner = [] if invalid else offset(whole, -int(whole_area * (1 - shrink ** 2) / (whole_length + 0.001) + 0.5))
        if not inner:
            cv2.fillPoly(counts, [polygon.astype(np.int32)], 0)
            continue
        cv2.fillPoly(text, [inner[0].astype(np.int32)], 1)
        reach = area * (1 - shrink ** 2) / length
        outer = offset(polygon, reach)
        if not outer:
            continue
        region = np.zeros((height, width), np.uint8)
        cv2.fillPoly(region, [outer[0].astype(np.int32)], 1)
        distance = np.full((height, width), np.inf)
        for (ax, ay), (bx, by) in zip(polygon, following):
            dx, dy = bx - ax, by - ay
            t = np.clip(((xs - ax) * dx + (ys - ay) * dy) / max(dx * dx + dy * dy, 1e-12), 0, 1)
            distance = np.minimum(distance, np.hypot(xs - ax - t * dx, ys - ay - t * dy))
        value = np.maximum(value, 1 - np.clip(distance / reach, 0, 1))
        near |= region
    value *= near
    return (text.astype(np.float32), counts.astype(np.float32), (value * (most - least) + least).astype(np.float32),
            near.astype(np.float32))


def check(golden):
    """Relative errors of the golden cases' outputs and of the maps on the way; the largest."""
    worst = 0.0
    for case in ("ocr_dbnetpp_infer", "ocr_dbnet_r18_infer"):
        with tempfile.TemporaryDirectory() as folder:
            weights = pathlib.Path(folder) / "weights.safetensors"
            subprocess.run([sys.executable, golden / "make_weights.py", golden / f"{case}.manifest.json", weights], check=True)
            arrays = safetensors_io.load(weights)
        model = build_from_deck(tomllib.loads((golden / f"{case}.toml").read_text())["model"], arrays)
        load(model, arrays).double().eval()
        image = torch.from_numpy(safetensors_io.load(golden / f"{case}.inputs.safetensors")["image"].copy()).double()
        wanted = {n: v for part in ("expected", "debug")
                  for n, v in safetensors_io.load(golden / f"{case}.{part}.safetensors").items()}
        with torch.inference_mode():
            maps = model.backbone(image)
            logits = model(image)
            found = {"logits": logits, "probability": logits.sigmoid(), "neck": model.neck(maps)[:1]}
            found |= {f"backbone.c{i + 2}": m for i, m in enumerate(maps)}
        for name, value in wanted.items():
            ours = found[name].numpy()
            ours = ours[:len(value)] if ours.ndim == value.ndim else ours[0]
            error = float(np.linalg.norm(ours.reshape(value.shape) - value) / np.linalg.norm(value))
            print(f"{case} {name:14} {list(value.shape)}: relative error {error:.1e}")
            worst = max(worst, error)
    return worst


def measure(case):
    """Forward passes to the probability of a picture each, after one that does not count."""
    import time

    def memory(what):
        lines = pathlib.Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(what + ":")) * 1024

    torch.set_num_threads(case["threads"])
    arrays = safetensors_io.load(case["weights"])
    model = load(build_from_deck(case["model"], arrays), arrays).eval()
    pictures = torch.from_numpy(safetensors_io.load(case["pictures"])["pictures"].copy())
    if case["channels_last"]:
        model = model.to(memory_format=torch.channels_last)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of the start
    seconds, before = [], memory("VmRSS")
    for i in range(case["passes"] + 1):
        image = normalise(pictures[i % len(pictures)][None])
        if case["channels_last"]:
            image = image.contiguous(memory_format=torch.channels_last)
        began = time.monotonic()
        with torch.inference_mode(case["inference_mode"]):
            probability = model(image).sigmoid()
        seconds.append(time.monotonic() - began)
        del probability
    peak = memory("VmHWM")
    return {"seconds": seconds[1:], "peak_memory": peak, "peak_memory_above_weights": peak - before}


def check_facts():
    """What the specification says of the networks beside their outputs: names, sizes, and DCNv2 whose offsets are all zero."""
    facts = {("oclip_resnet50", True): (375, 26.05), ("resnet18", False): (158, 12.34)}
    for (backbone, asf), (names, millions) in facts.items():
        model = build(backbone, asf)
        found = len(model.state_dict()), sum(p.numel() for p in model.parameters()) / 1e6
        print(f"{backbone}, asf = {asf}: {found[0]} names ({names}), {found[1]:.2f} M parameters ({millions})")
        if found[0] != names or abs(found[1] - millions) > 0.006:
            return False
    image = torch.randn((1, 3, 64, 96), generator=torch.Generator().manual_seed(3)).double()
    for backbone in ("oclip_resnet50", "resnet50"):
        halved = draw(build(backbone, True, 0.5), 1).double().eval()
        deformable = build(backbone, True, 1.0, True).double().eval()
        deformable.load_state_dict(halved.state_dict(), strict=False)
        with torch.inference_mode():
            for name, p in deformable.named_parameters():
                if ".conv_offset." in name:
                    p.zero_()
            difference = float((deformable(image) - halved(image)).abs().max())
        print(f"{backbone}: DCNv2 with zero offsets against conv2_gain = 0.5, largest difference {difference:.1e}")
        if not difference < 1e-9:
            return False
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", type=pathlib.Path, metavar="GOLDEN")
    what.add_argument("--time", type=pathlib.Path, metavar="CASE.json")
    args = parser.parse_args()
    if args.time:
        print(json.dumps(measure(json.loads(args.time.read_text()))))
        return 0
    worst = check(args.check)
    print(f"worst {worst:.1e}, allowed {CHECK_TOLERANCE:g}")
    return 0 if worst <= CHECK_TOLERANCE and check_facts() else 1


if __name__ == "__main__":
    sys.exit(main())
