"""What tests/nn/deform_conv_test.cpp holds weft's deformable convolution to: products of torchvision's
deform_conv2d and its gradients in float64 with fixed numbers, for inputs that both sides make by
text_loss_torch.pattern. Tensors are channels last on weft's side."""
import torch
from torchvision.ops import deform_conv2d

from text_loss_torch import pattern

CASES = {"stride 1": (1, 1), "stride 2": (2, 1), "dilated": (1, 2)}


def main():
    N, H, W, C, out = 2, 9, 8, 6, 5
    for name, (stride, dilation) in CASES.items():
        h, w = (H - 1) // stride + 1, (W - 1) // stride + 1
        made = lambda shape, k, scale: pattern(torch.Size(shape).numel(), k, scale).float().double().view(shape)
        x, offsets = made((N, H, W, C), 1, 1.0), made((N, h, w, 27), 2, 2.5)
        weight = made((out, C, 3, 3), 3, 0.3)
        for t in (x, offsets, weight):
            t.requires_grad_()
        first = offsets.permute(0, 3, 1, 2)
        y = deform_conv2d(x.permute(0, 3, 1, 2), first[:, :18], weight, None, stride, dilation, dilation,
                          torch.sigmoid(first[:, 18:])).permute(0, 2, 3, 1)
        g = made((N, h, w, out), 4, 1.0)
        (y * g).sum().backward()
        products = [(y * g).sum()] + [(t.grad * made(t.shape, 5 + k, 1.0)).sum()
                                      for k, t in enumerate((x, offsets, weight))]
        print(f"{name}: y, dx, doffsets, dweight:", ", ".join(f"{v.item():.10f}" for v in products))


if __name__ == "__main__":
    main()
