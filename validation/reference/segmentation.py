"""Encoders and decoders of semantic segmentation in PyTorch, under the released names, from the formulas of
docs/models/segmentation.md.

`build(encoder, decoder, num_classes, dropout)` gives a module with the parts `encoder.` and `decoder.`; released files
hold each part by itself, without that prefix. Images are [N,3,H,W], labels i64 [N,H/rate,W/rate] with -1 for unlabelled.
"""
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from . import weights
from .weights import parameters  # noqa: F401

ENCODERS = ["resnet18dilated", "resnet50dilated", "resnet101dilated", "resnet18", "resnet50", "resnet101", "resnext101",
            "mobilenetv2dilated", "hrnetv2"]
DECODERS = ["c1", "c1_deepsup", "ppm", "ppm_deepsup", "upernet_lite", "upernet"]
PYRAMID = (1, 2, 3, 6)


def fits(encoder, decoder):
    """Whether the pair exists: upernet takes ResNet's maps of 256 to 2048 channels, deep supervision a second map."""
    if decoder.startswith("upernet"):
        return encoder.startswith("res") and not encoder.startswith("resnet18")
    return not (decoder.endswith("deepsup") and encoder == "hrnetv2")


class SharedStatistics(torch.autograd.Function):
    """Batch norm over all processes: one exchange of 2C + 1 sums forward, one of 2C backward. The variance is clamped to
    eps from below, as in the original's training on several GPUs; `sums` leaves mean and unbiased variance behind."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, sums):
        channels = x.shape[1]
        parts = torch.cat((x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), x.new_tensor([x.numel() / channels])))
        dist.all_reduce(parts)
        count = parts[-1]
        mean = parts[:channels] / count
        squares = parts[channels:2 * channels] - parts[:channels] * mean
        variance = squares / count
        sums.append((mean, squares / (count - 1)))
        scale = variance.clamp(min=eps).rsqrt()
        normal = (x - mean[:, None, None]) * scale[:, None, None]
        ctx.save_for_backward(normal, weight, scale, variance >= eps)
        ctx.count = count
        return normal * weight[:, None, None] + bias[:, None, None]

    @staticmethod
    def backward(ctx, dy):
        normal, weight, scale, free = ctx.saved_tensors
        dbias, dweight = dy.sum((0, 2, 3)), (dy * normal).sum((0, 2, 3))
        means = torch.cat((dbias, dweight))
        dist.all_reduce(means)
        mean_dy, mean_product = (means / ctx.count).chunk(2)
        dx = dy - mean_dy[:, None, None] - normal * (mean_product * free)[:, None, None]
        return dx * (scale * weight)[:, None, None], dweight, dbias, None, None


class BatchNorm(nn.BatchNorm2d):
    """With the three buffers that training on several processes keeps. `shared` is set by share_statistics."""

    shared = False

    def __init__(self, channels, momentum=0.001):
        super().__init__(channels, momentum=momentum)
        self.register_buffer("_tmp_running_mean", torch.zeros(channels))
        self.register_buffer("_tmp_running_var", torch.ones(channels))
        self.register_buffer("_running_iter", torch.ones(1))

    def forward(self, x):
        if not (self.training and self.shared):
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training,
                                self.momentum, self.eps)
        sums = []
        y = SharedStatistics.apply(x, self.weight, self.bias, self.eps, sums)
        keep = 1 - self.momentum
        with torch.no_grad():
            mean, variance = sums[0]
            self._tmp_running_mean.mul_(keep).add_(mean)
            self._tmp_running_var.mul_(keep).add_(variance)
            self._running_iter.mul_(keep).add_(1)
            self.running_mean.copy_(self._tmp_running_mean / self._running_iter)
            self.running_var.copy_(self._tmp_running_var / self._running_iter)
        return y


def share_statistics(model):
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.shared = True


def conv(inputs, outputs, kernel, stride=1, dilation=1, groups=1):
    return nn.Conv2d(inputs, outputs, kernel, stride, dilation * (kernel // 2), dilation, groups, bias=False)


def conv_bn(inputs, outputs, kernel, stride=1, relu=True, momentum=0.001):
    parts = [conv(inputs, outputs, kernel, stride), BatchNorm(outputs, momentum)]
    return nn.Sequential(*parts, nn.ReLU(inplace=True)) if relu else nn.Sequential(*parts)


def resize(x, like):
    return F.interpolate(x, like.shape[-2:], mode="bilinear", align_corners=False)


class Block(nn.Module):
    """A residual block: two 3x3 convolutions, or three with the 3x3 in the middle."""

    def __init__(self, inputs, width, outputs, stride, dilations, groups=1, bottleneck=True, momentum=0.001):
        super().__init__()
        if bottleneck:
            layers = [(inputs, width, 1, 1, 1, 1), (width, width, 3, stride, dilations[0], groups),
                      (width, outputs, 1, 1, 1, 1)]
        else:
            layers = [(inputs, width, 3, stride, dilations[0], 1), (width, outputs, 3, 1, dilations[1], 1)]
        self.depth = len(layers)
        for i, (a, b, kernel, s, d, g) in enumerate(layers, 1):
            setattr(self, f"conv{i}", conv(a, b, kernel, s, d, g))
            setattr(self, f"bn{i}", BatchNorm(b, momentum))
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = conv_bn(inputs, outputs, 1, stride, relu=False, momentum=momentum)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = x
        for i in range(1, self.depth + 1):
            y = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(y))
            if i < self.depth:
                y = self.relu(y)
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self, blocks, bottleneck=True, dilated=False, resnext=False):
        super().__init__()
        self.channels = []
        for i, (a, b, stride) in enumerate(((3, 64, 2), (64, 64, 1), (64, 128, 1)), 1):
            setattr(self, f"conv{i}", conv(a, b, 3, stride))
            setattr(self, f"bn{i}", BatchNorm(b))
        inputs = 128
        for layer, count in enumerate(blocks, 1):
            width = (128 if resnext else 64) << (layer - 1)
            outputs = width * (2 if resnext else 4) if bottleneck else width
            # With output stride 8, the last two layers keep the size; a first convolution that had a stride sees half
            # the dilation of those after it.
            full = {3: 2, 4: 4}.get(layer, 1) if dilated else 1
            parts = []
            for i in range(count):
                stride = 2 if i == 0 and layer > 1 and full == 1 else 1
                first = full // 2 if i == 0 and full > 1 else full
                parts.append(Block(inputs, width, outputs, stride, (first, full), 32 if resnext else 1, bottleneck))
                inputs = outputs
            setattr(self, f"layer{layer}", nn.Sequential(*parts))
            self.channels.append(outputs)

    def forward(self, x):
        for i in (1, 2, 3):
            x = F.relu(getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(x)), inplace=True)
        x = F.max_pool2d(x, 3, 2, 1)
        maps = []
        for i in (1, 2, 3, 4):
            x = getattr(self, f"layer{i}")(x)
            maps.append(x)
        return maps


class Inverted(nn.Module):
    """MobileNetV2's block: expand, filter every channel by itself, project."""

    def __init__(self, inputs, outputs, expand, stride, dilation, residual):
        super().__init__()
        wide, parts = inputs * expand, []
        if expand != 1:
            parts += [conv(inputs, wide, 1), BatchNorm(wide), nn.ReLU6(inplace=True)]
        parts += [conv(wide, wide, 3, stride, dilation, wide), BatchNorm(wide), nn.ReLU6(inplace=True),
                  conv(wide, outputs, 1), BatchNorm(outputs)]
        self.conv = nn.Sequential(*parts)
        self.residual = residual

    def forward(self, x):
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNet(nn.Module):
    def __init__(self):
        super().__init__()
        parts = [nn.Sequential(conv(3, 32, 3, 2), BatchNorm(32), nn.ReLU6(inplace=True))]
        inputs = 32
        for expand, outputs, count, stride in ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1),
                                               (6, 160, 3, 2), (6, 320, 1, 1)):
            for i in range(count):
                s = stride if i == 0 else 1
                full = 4 if len(parts) >= 14 else 2 if len(parts) >= 7 else 1
                dilation = full // 2 if full > 1 and s == 2 else full
                parts.append(Inverted(inputs, outputs, expand, 1 if full > 1 else s, dilation,
                                      residual=s == 1 and inputs == outputs))
                inputs = outputs
        self.features = nn.Sequential(*parts)
        self.channels = [24, 32, 64, 160, 320]

    def forward(self, x):
        maps = []
        for i, part in enumerate(self.features):
            x = part(x)
            if i in (2, 4, 7, 14, 17):
                maps.append(x)
        return maps


class Fusion(nn.Module):
    """One module of HRNet: blocks on every resolution, then each takes the sum of all."""

    def __init__(self, widths):
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(*(Block(w, w, w, 1, (1, 1), bottleneck=False, momentum=0.1) for _ in range(4))) for w in widths)
        rows = []
        for i, own in enumerate(widths):
            row = []
            for j, other in enumerate(widths):
                if j > i:
                    row.append(conv_bn(other, own, 1, relu=False, momentum=0.1))
                elif j == i:
                    row.append(nn.Identity())
                else:
                    row.append(nn.Sequential(
                        *(conv_bn(other, other, 3, 2, momentum=0.1) for _ in range(i - j - 1)),
                        conv_bn(other, own, 3, 2, relu=False, momentum=0.1)))
            rows.append(nn.ModuleList(row))
        self.fuse_layers = nn.ModuleList(rows)

    def forward(self, maps):
        maps = [branch(x) for branch, x in zip(self.branches, maps)]
        out = []
        for i, row in enumerate(self.fuse_layers):
            total = 0
            for j, (layer, x) in enumerate(zip(row, maps)):
                y = layer(x)
                total = total + (resize(y, maps[i]) if j > i else y)
            out.append(F.relu(total))
        return out


class HrNet(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [48, 96, 192, 384]
        self.conv1, self.bn1 = conv(3, 64, 3, 2), BatchNorm(64, 0.1)
        self.conv2, self.bn2 = conv(64, 64, 3, 2), BatchNorm(64, 0.1)
        self.layer1 = nn.Sequential(*(Block(64 if i == 0 else 256, 64, 256, 1, (1, 1), momentum=0.1) for i in range(4)))
        keep = nn.Identity
        self.transition1 = nn.ModuleList([conv_bn(256, 48, 3, momentum=0.1),
                                          nn.Sequential(conv_bn(256, 96, 3, 2, momentum=0.1))])
        self.transition2 = nn.ModuleList([keep(), keep(), nn.Sequential(conv_bn(96, 192, 3, 2, momentum=0.1))])
        self.transition3 = nn.ModuleList([keep(), keep(), keep(), nn.Sequential(conv_bn(192, 384, 3, 2, momentum=0.1))])
        self.stage2 = nn.Sequential(Fusion(widths[:2]))
        self.stage3 = nn.Sequential(*(Fusion(widths[:3]) for _ in range(4)))
        self.stage4 = nn.Sequential(*(Fusion(widths) for _ in range(3)))
        self.channels = [720]

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = F.relu(self.bn2(self.conv2(x)), inplace=True)
        x = self.layer1(x)
        maps = self.stage2([layer(x) for layer in self.transition1])
        maps = self.stage3(maps + [self.transition2[2](maps[-1])])
        maps = self.stage4(maps + [self.transition3[3](maps[-1])])
        return [torch.cat([maps[0]] + [resize(m, maps[0]) for m in maps[1:]], 1)]


class C1(nn.Module):
    def __init__(self, channels, classes, deep):
        super().__init__()
        wide = channels[-1]
        self.cbr, self.conv_last = conv_bn(wide, wide // 4, 3), nn.Conv2d(wide // 4, classes, 1)
        self.deep = deep
        if deep:
            self.cbr_deepsup, self.conv_last_deepsup = conv_bn(wide // 2, wide // 4, 3), nn.Conv2d(wide // 4, classes, 1)

    def forward(self, maps, aux):
        second = self.conv_last_deepsup(self.cbr_deepsup(maps[-2])) if self.deep and aux else None
        return self.conv_last(self.cbr(maps[-1])), second


class Pyramid(nn.Module):
    """ppm and ppm_deepsup."""

    def __init__(self, channels, classes, deep, dropout):
        super().__init__()
        wide = channels[-1]
        self.ppm = nn.ModuleList(nn.Sequential(nn.AdaptiveAvgPool2d(size), *conv_bn(wide, 512, 1)) for size in PYRAMID)
        self.conv_last = nn.Sequential(*conv_bn(wide + 512 * len(PYRAMID), 512, 3), nn.Dropout2d(dropout),
                                       nn.Conv2d(512, classes, 1))
        self.deep = deep
        if deep:
            self.cbr_deepsup, self.dropout_deepsup = conv_bn(wide // 2, wide // 4, 3), nn.Dropout2d(dropout)
            self.conv_last_deepsup = nn.Conv2d(wide // 4, classes, 1)

    def forward(self, maps, aux):
        x = maps[-1]
        logits = self.conv_last(torch.cat([x] + [resize(branch(x), x) for branch in self.ppm], 1))
        second = None
        if self.deep and aux:
            second = self.conv_last_deepsup(self.dropout_deepsup(self.cbr_deepsup(maps[-2])))
        return logits, second


class UperNet(nn.Module):
    def __init__(self, channels, classes, width):
        super().__init__()
        wide = channels[-1]
        self.ppm_conv = nn.ModuleList(conv_bn(wide, 512, 1) for _ in PYRAMID)
        self.ppm_last_conv = conv_bn(wide + 512 * len(PYRAMID), width, 3)
        self.fpn_in = nn.ModuleList(conv_bn(c, width, 1) for c in channels[:-1])
        self.fpn_out = nn.ModuleList(nn.Sequential(conv_bn(width, width, 3)) for _ in channels[:-1])
        self.conv_last = nn.Sequential(conv_bn(4 * width, width, 3), nn.Conv2d(width, classes, 1))

    def forward(self, maps, aux):
        x = maps[-1]
        pools = [layer(resize(F.adaptive_avg_pool2d(x, size), x)) for layer, size in zip(self.ppm_conv, PYRAMID)]
        f = self.ppm_last_conv(torch.cat([x] + pools, 1))
        levels = [f]
        for i in (2, 1, 0):
            lateral = self.fpn_in[i](maps[i])
            f = lateral + resize(f, lateral)
            levels.insert(0, self.fpn_out[i](f))
        return self.conv_last(torch.cat([levels[0]] + [resize(y, levels[0]) for y in levels[1:]], 1)), None


class Segmentation(nn.Module):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, image, aux=True):
        """Logits, and those of the second map or None."""
        return self.decoder(self.encoder(image), aux)

    def probabilities(self, image, size=None):
        logits, _ = self(image, aux=False)
        return F.interpolate(logits, size or image.shape[-2:], mode="bilinear", align_corners=False).softmax(1)

    def loss(self, image, label, deep_sup_scale=0.4):
        """Loss and pixel accuracy on the logits' own grid."""
        logits, second = self(image)
        loss = F.cross_entropy(logits, label, ignore_index=-1)
        if second is not None:
            loss = loss + deep_sup_scale * F.cross_entropy(second, label, ignore_index=-1)
        known = label >= 0
        accuracy = ((logits.argmax(1) == label) & known).sum() / (known.sum() + 1e-10)
        return loss, accuracy


def build_encoder(name):
    blocks = [3, 4, 23, 3] if "101" in name else [3, 4, 6, 3] if "50" in name else [2, 2, 2, 2]
    if name.startswith("res"):
        return ResNet(blocks, "18" not in name, name.endswith("dilated"), name.startswith("resnext"))
    return HrNet() if name == "hrnetv2" else MobileNet()


def build_decoder(name, channels, classes, dropout=0.1):
    if name.startswith("upernet"):
        return UperNet(channels, classes, 256 if name.endswith("lite") else 512)
    deep = name.endswith("deepsup")
    return C1(channels, classes, deep) if name.startswith("c1") else Pyramid(channels, classes, deep, dropout)


def build(encoder, decoder, num_classes=150, dropout=0.1):
    if not fits(encoder, decoder):
        raise ValueError(f"{decoder} does not go with {encoder}")
    net = build_encoder(encoder)
    return Segmentation(net, build_decoder(decoder, net.channels, num_classes, dropout))


def label_rate(encoder, decoder):
    """Sides of the image over those of the logits."""
    if encoder.endswith("dilated"):
        return 4 if decoder.startswith("upernet") else 8
    return 4 if decoder.startswith("upernet") or encoder == "hrnetv2" else 32


def load(model, arrays):
    """Sets all parameters and buffers; the three buffers of shared statistics may be missing."""
    return weights.load(model, arrays, lambda name: name.endswith(("_tmp_running_mean", "_tmp_running_var", "_running_iter")))


def draw(model, seed):
    """At random. A residual branch of full strength in every block would let activations grow with the depth."""
    def after(name, module, _):
        if isinstance(module, Block):
            damped.append(getattr(module, f"bn{module.depth}"))

    damped = []
    weights.draw(model, seed, after=after)
    with torch.no_grad():
        for norm in damped:
            norm.weight.mul_(0.3)
    return model


def groups(module, weight_decay):
    """Parameters of one part for an optimizer: norms and biases take no weight decay."""
    matrices = [p for p in module.parameters() if p.dim() > 1]
    vectors = [p for p in module.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def train_results(model, image, label, autocast=False):
    """Loss, accuracy, gradients and running statistics of one training step's forward and backward pass, as arrays."""
    model.train()
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, accuracy = model.loss(image, label)
    loss.backward()
    found = {"loss": loss.detach().reshape(1), "accuracy": accuracy.reshape(1)}
    found |= {"grad." + n: p.grad for n, p in model.named_parameters()}
    found |= {"buffer." + n: b for n, b in model.named_buffers() if not n.endswith("num_batches_tracked")}
    return {n: t.double().numpy() for n, t in found.items()}


def scores_of(model, picture, data):
    """Scores [classes, H, W] of a PIL image at all short sides of a deck's [data], resized by Pillow."""
    from PIL import Image

    width, height = picture.size
    total = 0
    for short in data["short_sides"]:
        scale = min(short / min(height, width), data["max_side"] / max(height, width))
        sizes = [(int(side * scale) - 1) // data["padding"] * data["padding"] + data["padding"] for side in (width, height)]
        pixels = np.float32(np.asarray(picture.resize(sizes, Image.BILINEAR))) / np.float32(255)
        pixels = (pixels - np.float32([0.485, 0.456, 0.406])) / np.float32([0.229, 0.224, 0.225])
        with torch.no_grad():
            total = total + model.probabilities(torch.from_numpy(pixels.transpose(2, 0, 1)[None].copy()), (height, width))
    return (total / len(data["short_sides"]))[0].numpy()


def counts_of(predictions, label, classes):
    """Intersection and union of each class over the labelled pixels."""
    known = label >= 0
    right = np.bincount(label[known & (predictions == label)], minlength=classes)
    union = (np.bincount(predictions[known], minlength=classes) + np.bincount(label[known], minlength=classes)) - right
    return right, union
