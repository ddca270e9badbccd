"""The networks that find and describe a face in PyTorch, under the names of the released files: RetinaFace, FAN and the 3DMM
ResNet. Written from the formulas of docs/models/sadtalker.md."""
import math

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

MEAN = (104, 117, 123)
SCORE, IOU = 0.97, 0.4
STEPS, SIZES = (8, 16, 32), ((16, 32), (64, 128), (256, 512))


class Body(nn.Module):
    """ResNet-50 of torchvision without its head; maps of layer2 to layer4."""

    def __init__(self):
        super().__init__()
        net = torchvision.models.resnet50(weights=None)
        for name in ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4"):
            setattr(self, name, getattr(net, name))

    def forward(self, x):
        x = self.layer1(F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1))
        maps = []
        for layer in (self.layer2, self.layer3, self.layer4):
            x = layer(x)
            maps.append(x)
        return maps


def normed(inputs, outputs, kernel):
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs))


class Fpn(nn.Module):
    def __init__(self):
        super().__init__()
        self.output1, self.output2, self.output3 = (normed(c, 256, 1) for c in (512, 1024, 2048))
        self.merge1, self.merge2 = normed(256, 256, 3), normed(256, 256, 3)

    def forward(self, maps):
        fine, middle, coarse = (F.relu(f(x)) for f, x in zip((self.output1, self.output2, self.output3), maps))
        middle = F.relu(self.merge2(middle + F.interpolate(coarse, size=middle.shape[2:])))
        fine = F.relu(self.merge1(fine + F.interpolate(middle, size=fine.shape[2:])))
        return fine, middle, coarse


class Ssh(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv3X3, self.conv5X5_1, self.conv5X5_2 = normed(256, 128, 3), normed(256, 64, 3), normed(64, 64, 3)
        self.conv7X7_2, self.conv7x7_3 = normed(64, 64, 3), normed(64, 64, 3)

    def forward(self, x):
        y = F.relu(self.conv5X5_1(x))
        z = self.conv7x7_3(F.relu(self.conv7X7_2(y)))
        return F.relu(torch.cat([self.conv3X3(x), self.conv5X5_2(y), z], 1))


class Head(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.conv1x1 = nn.Conv2d(256, 2 * outputs, 1)
        self.outputs = outputs

    def forward(self, x):
        return self.conv1x1(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, self.outputs)


def priors(height, width):
    """[P,4]: centre and size, as parts of the picture."""
    out = []
    for step, sizes in zip(STEPS, SIZES):
        for i in range(math.ceil(height / step)):
            for j in range(math.ceil(width / step)):
                out += [((j + 0.5) * step / width, (i + 0.5) * step / height, s / width, s / height) for s in sizes]
    return torch.tensor(out)


class RetinaFace(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.fpn = Body(), Fpn()
        self.ssh1, self.ssh2, self.ssh3 = Ssh(), Ssh(), Ssh()
        self.ClassHead, self.BboxHead, self.LandmarkHead = (nn.ModuleList(Head(n) for _ in range(3)) for n in (2, 4, 10))

    def forward(self, image):
        """Picture [H,W,3], channels as they come -> offsets [P,4], probabilities [P,2], landmark offsets [P,10]."""
        x = (image - torch.tensor(MEAN, dtype=image.dtype)).permute(2, 0, 1)[None]
        maps = [ssh(m) for ssh, m in zip((self.ssh1, self.ssh2, self.ssh3), self.fpn(self.body(x)))]
        loc, conf, landmarks = (torch.cat([head(m) for head, m in zip(heads, maps)], 1)[0]
                                for heads in (self.BboxHead, self.ClassHead, self.LandmarkHead))
        return loc, F.softmax(conf, 1), landmarks

    def detect(self, image):
        """Everything of one picture; detections [k,15]: corners, score, five landmarks (x, y)."""
        loc, conf, landmarks = self(image)
        anchors = priors(*image.shape[:2]).to(image.dtype)
        centre, size = anchors[:, :2], anchors[:, 2:]
        scale = torch.tensor([image.shape[1], image.shape[0]], dtype=image.dtype)
        middle, extent = centre + loc[:, :2] * 0.1 * size, size * torch.exp(loc[:, 2:] * 0.2)
        corner = middle - extent / 2
        boxes = torch.cat([corner, corner + extent], 1) * scale.repeat(2)
        points = (centre[:, None] + landmarks.unflatten(1, (5, 2)) * 0.1 * size[:, None]) * scale
        found = conf[:, 1] > SCORE
        rows = torch.cat([boxes[found], conf[found, 1:], points[found].flatten(1)], 1)
        rows = rows[rows[:, 4].argsort(descending=True, stable=True)]
        rows = rows[torchvision.ops.nms(rows[:, :4].float(), rows[:, 4].float(), IOU)]
        return {"loc": loc[None], "conf": conf[None], "landms": landmarks[None], "priors": anchors, "boxes": boxes,
                "detections": rows}


class ConvBlock(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, outputs // 2, 3, padding=1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(outputs // 2), nn.Conv2d(outputs // 2, outputs // 4, 3, padding=1, bias=False)
        self.bn3, self.conv3 = nn.BatchNorm2d(outputs // 4), nn.Conv2d(outputs // 4, outputs // 4, 3, padding=1, bias=False)
        self.downsample = None
        if inputs != outputs:
            self.downsample = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, outputs, 1, bias=False))

    def forward(self, x):
        a = self.conv1(F.relu(self.bn1(x)))
        b = self.conv2(F.relu(self.bn2(a)))
        c = self.conv3(F.relu(self.bn3(b)))
        return torch.cat([a, b, c], 1) + (x if self.downsample is None else self.downsample(x))


class CoordConv(nn.Module):
    """A convolution that also sees where it is: row, column and distance from the middle, and, where the boundary map is strong,
    row and column again."""

    def __init__(self, inputs, outputs, kernel, stride=1, boundary=False):
        super().__init__()
        self.conv = nn.Conv2d(inputs + (5 if boundary else 3), outputs, kernel, stride, kernel // 2)

    def forward(self, x, maps=None):
        n, _, h, w = x.shape
        row = (2 * torch.arange(h, dtype=x.dtype) / (h - 1) - 1)[:, None].expand(h, w)
        column = (2 * torch.arange(w, dtype=x.dtype) / (w - 1) - 1).expand(h, w)
        distance = torch.sqrt(row ** 2 + column ** 2)
        extra = [m.expand(n, 1, h, w) for m in (row, column, distance / distance.max())]
        if maps is not None:
            strong = maps[:, -1:].clamp(0, 1) > 0.05
            extra += [torch.where(strong, m, 0) for m in extra[:2]]
        return self.conv(torch.cat([x, *extra], 1))


class FanHourglass(nn.Module):
    def __init__(self, boundary):
        super().__init__()
        self.coordconv = CoordConv(256, 256, 1, boundary=boundary)
        for name in [f"b{k}_{level}" for level in range(1, 5) for k in (1, 2, 3)] + ["b2_plus_1"]:
            setattr(self, name, ConvBlock(256, 256))

    def level(self, n, x):
        low = getattr(self, f"b2_{n}")(F.avg_pool2d(x, 2))
        low = self.b2_plus_1(low) if n == 1 else self.level(n - 1, low)
        return getattr(self, f"b1_{n}")(x) + F.interpolate(getattr(self, f"b3_{n}")(low), scale_factor=2)

    def forward(self, x, maps):
        return self.level(4, self.coordconv(x, maps))


class Fan(nn.Module):
    """Picture [H,W,3] u8, RGB, 256 x 256 -> heat maps [1,98,64,64]."""

    def __init__(self, modules=4):
        super().__init__()
        self.modules_count = modules
        self.conv1, self.bn1 = CoordConv(3, 64, 7, 2), nn.BatchNorm2d(64)
        self.conv2, self.conv3, self.conv4 = ConvBlock(64, 128), ConvBlock(128, 128), ConvBlock(128, 256)
        for i in range(modules):
            setattr(self, f"m{i}", FanHourglass(i > 0))
            setattr(self, f"top_m_{i}", ConvBlock(256, 256))
            setattr(self, f"conv_last{i}", nn.Conv2d(256, 256, 1))
            setattr(self, f"bn_end{i}", nn.BatchNorm2d(256))
            setattr(self, f"l{i}", nn.Conv2d(256, 99, 1))
            if i < modules - 1:
                setattr(self, f"bl{i}", nn.Conv2d(256, 256, 1))
                setattr(self, f"al{i}", nn.Conv2d(99, 256, 1))

    def forward(self, image):
        x = (image / 255).flip(2).permute(2, 0, 1)[None]
        x = F.avg_pool2d(self.conv2(F.relu(self.bn1(self.conv1(x)))), 2)
        x, maps = self.conv4(self.conv3(x)), None
        for i in range(self.modules_count):
            def part(name, i=i):
                return getattr(self, name.format(i))
            y = part("top_m_{}")(part("m{}")(x, maps))
            y = F.relu(part("bn_end{}")(part("conv_last{}")(y)))
            maps = part("l{}")(y)
            if i < self.modules_count - 1:
                x = x + part("bl{}")(y) + part("al{}")(maps)
        return maps[:, :98]


def points_of(maps, width, height):
    """Heat maps [98,64,64] -> points [98,2] (x, y) in a picture of that size, with the original's arithmetic on flat indices."""
    flat = np.asarray(maps).reshape(98, 4096)
    best = flat.argmax(1)
    if (best == 4095).any():
        raise IndexError("a maximum at the last cell")  # as in the original
    up = np.full(98, 4095) if (best + 64 >= 4096).any() else best + 64
    down = np.zeros(98, int) if (best - 64 <= 0).any() else best - 64
    k = np.arange(98)
    x = best % 64 + 0.25 * np.sign(flat[k, best + 1] - flat[k, best - 1]) + 0.5
    y = best // 64 + 0.25 * np.sign(flat[k, up] - flat[k, down]) + 0.5
    return np.stack([x * width / 64, y * height / 64], 1)


def points_68(p):
    """98 points -> the usual 68, f32."""
    pairs = ((34, 41), (35, 40), (36, 39), (37, 38), (42, 50), (43, 49), (44, 48), (45, 47))
    brows = [p[33]] + [(p[a] + p[b]) / 2 for a, b in pairs] + [p[46]]
    eyes = [p[i] for i in (60, 61, 63, 64, 65, 67, 68, 69, 71, 72, 73, 75)]
    return np.array([*p[0:33:2], *brows, *p[51:60], *eyes, *p[76:96]], np.float32)


class Recon(nn.Module):
    """Aligned face [N,3,224,224], 0 to 1 -> 257 coefficients."""

    SIZES = (80, 64, 80, 3, 27, 2, 1)

    def __init__(self):
        super().__init__()
        self.backbone = Body()
        self.final_layers = nn.ModuleList(nn.Conv2d(2048, n, 1) for n in self.SIZES)

    def forward(self, image):
        x = self.backbone(image)[-1].mean((2, 3), keepdim=True)
        return torch.cat([layer(x) for layer in self.final_layers], 1).flatten(1)
