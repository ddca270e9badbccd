"""The loss of a text detector with differentiable binarization in PyTorch, from the formulas of docs/models/dbnet.md
(arXiv:1911.08947, weights and details as in mmocr): the other side of weft's ops/loss.h."""
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
