"""DBNet and DBNet++ in PyTorch, under the names of mmocr's released files, from the formulas of docs/models/dbnet.md.

`build(backbone, asf, conv2_gain, deformable)` gives the network, `targets` what training adds beside the loss (text_loss.py).
Pictures are [N,3,H,W], RGB, normalised, with sides that are multiples of 32; maps are [N,H,W] at the same size.
"""
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from . import weights
from .text_loss import text_loss  # noqa: F401
from .weights import parameters  # noqa: F401

# blocks a layer, channels of the outputs, bottlenecks?
BACKBONES = {"oclip_resnet50": ((3, 4, 6, 3), (256, 512, 1024, 2048), True),
             "resnet50": ((3, 4, 6, 3), (256, 512, 1024, 2048), True),
             "resnet18": ((2, 2, 2, 2), (64, 128, 256, 512), False)}
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


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


def load(model, arrays):
    """Sets everything; the head's threshold, which only training uses, may be missing."""
    return weights.load(model, arrays, lambda name: ".threshold." in name)


def draw(model, seed):
    """At random; residual branches are damped, else activations grow with the depth."""
    def after(name, module, _):
        if name.endswith("conv_offset"):
            module.weight.mul_(0.5)
        elif isinstance(module, (Bottleneck, BasicBlock)):
            damped.append(module.bn3 if isinstance(module, Bottleneck) else module.bn2)

    damped = []
    weights.draw(model, seed, after=after)
    with torch.no_grad():
        for norm in damped:
            norm.weight.mul_(0.3)
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
