#!/usr/bin/env python3
"""The numbers that two of weft's unit tests are held to, in float64, for inputs that both sides make by `pattern`:

    test_numbers.py

the text detector's loss (tests/nn/image_ops_test.cpp; reference/text_loss.py) and deformable convolution (tests/nn/conv_test.cpp;
torchvision's deform_conv2d), each with its gradients. Tensors are channels last on weft's side.
"""
import torch
from torchvision.ops import deform_conv2d

from reference import text_loss


def pattern(shape, k, scale=1.0):
    """Numbers without a pattern of their own: scale * sin((0.37 + k / 16) i^2 + 1.1 i + k)."""
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (scale * torch.sin((0.37 + k / 16) * i * i + 1.1 * i + k)).view(shape)


def of_float(shape, k, scale):
    return pattern(shape, k, scale).float().double()


def of_text_loss():
    shape, weight = (2, 40, 30), 0.7
    logits = [of_float(shape, k, scale).requires_grad_() for k, scale in ((1, 2.0), (2, 1.5))]
    flags = (pattern(shape, 3) > 0.97).int() + 2 * (pattern(shape, 4) > -0.9).int() + 4 * (pattern(shape, 5) > 0.6).int()
    thresholds = (127.5 + 127 * pattern(shape, 6)).floor().int()
    loss, parts = text_loss.text_loss(*logits, *text_loss.targets(flags, thresholds))
    (weight * loss).backward()
    print("loss and parts:", ", ".join(f"{v.item():.12f}" for v in (loss, *parts)))
    for name, x in zip(("probability", "threshold"), logits):
        product = (x.grad * pattern(shape, 7)).sum().item()
        print(f"{name}: gradient's length {x.grad.norm().item():.12f}, times pattern 7 {product:.12f}")


def of_deform_conv(stride, dilation):
    """Products of y, dx, doffsets and dweight with fixed numbers."""
    N, H, W, C, out = 2, 9, 8, 6, 5
    h, w = (H - 1) // stride + 1, (W - 1) // stride + 1
    inputs = [of_float((N, H, W, C), 1, 1.0), of_float((N, h, w, 27), 2, 2.5), of_float((out, C, 3, 3), 3, 0.3)]
    x, offsets, weight = (t.requires_grad_() for t in inputs)
    first = offsets.permute(0, 3, 1, 2)
    y = deform_conv2d(x.permute(0, 3, 1, 2), first[:, :18], weight, None, stride, dilation, dilation,
                      torch.sigmoid(first[:, 18:])).permute(0, 2, 3, 1)
    g = of_float((N, h, w, out), 4, 1.0)
    (y * g).sum().backward()
    return [(y * g).sum()] + [(t.grad * of_float(t.shape, 5 + k, 1.0)).sum() for k, t in enumerate(inputs)]


def main():
    of_text_loss()
    for name, case in {"stride 1": (1, 1), "stride 2": (2, 1), "dilated": (1, 2)}.items():
        print(f"{name}: y, dx, doffsets, dweight:", ", ".join(f"{v.item():.10f}" for v in of_deform_conv(*case)))


if __name__ == "__main__":
    main()
