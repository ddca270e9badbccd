"""The loss of a text detector with differentiable binarization in PyTorch, from the formulas of docs/models/dbnet.md
(arXiv:1911.08947, weights and details as in mmocr): the other side of weft's ops/text_loss.h.

Run alone it prints what tests/nn/text_loss_test.cpp holds weft to: values and gradients in float64 of inputs that both
sides make by `pattern`.
"""
import torch
import torch.nn.functional as F


def text_loss(probability, threshold, text, counts, wanted, near):
    """Logits of both maps, 0/1 masks of text, of pixels that count and of pixels near text, and the wanted thresholds,
    all of one shape. Returns (loss, its three parts)."""
    positive, negative = text * counts, (1 - text) * counts
    n_positive = int(positive.sum())
    n_negative = min(int(negative.sum()), 3 * n_positive)
    entropy = F.binary_cross_entropy_with_logits(probability, text, reduction="none")
    hardest = (entropy * negative).flatten().topk(n_negative).values
    of_probability = ((entropy * positive).sum() + hardest.sum()) / (n_positive + n_negative + 1e-6)

    p, t = torch.sigmoid(probability), torch.sigmoid(threshold)
    distance = F.smooth_l1_loss(t * near, wanted * near, beta=1e-6, reduction="sum")
    of_threshold = distance / (near.sum() + 1e-6)

    binary = torch.sigmoid(50 * (p - t))
    area = (binary * counts).sum() + (text * counts).sum() + 1e-6
    of_binary = 1 - 2 * (binary * text * counts).sum() / area
    return 5 * of_probability + 10 * of_threshold + of_binary, (of_probability, of_threshold, of_binary)


def targets(flags, thresholds):
    """weft's flags and thresholds u8 [N,H,W] as the arguments of text_loss."""
    bit = lambda value: (flags & value).ne(0).double()
    return bit(1), bit(2), 0.3 + 0.4 * thresholds.double() / 255, bit(4)


def pattern(count, k, scale=1.0):
    """Numbers without a pattern of their own: scale * sin((0.37 + k / 16) i^2 + 1.1 i + k)."""
    i = torch.arange(count, dtype=torch.float64)
    return scale * torch.sin((0.37 + k / 16) * i * i + 1.1 * i + k)


def main():
    shape, weight = (2, 40, 30), 0.7
    count = 2 * 40 * 30
    logits = [pattern(count, k, scale).float().double().view(shape).requires_grad_() for k, scale in ((1, 2.0), (2, 1.5))]
    x = pattern(count, 3)
    flags = (x > 0.97).int() + 2 * (pattern(count, 4) > -0.9).int() + 4 * (pattern(count, 5) > 0.6).int()
    thresholds = (127.5 + 127 * pattern(count, 6)).floor().int()
    loss, parts = text_loss(*logits, *targets(flags.view(shape), thresholds.view(shape)))
    (weight * loss).backward()
    print("loss and parts:", ", ".join(f"{v.item():.12f}" for v in (loss, *parts)))
    for name, x in zip(("probability", "threshold"), logits):
        g = x.grad.flatten()
        print(f"{name}: gradient's length {g.norm().item():.12f}, times pattern 7 {g.dot(pattern(count, 7)).item():.12f}")


if __name__ == "__main__":
    main()
