"""Weights of a model: drawn so that an error shows, as arrays, and from arrays."""
import torch
from torch import nn

NORMS = (nn.BatchNorm2d, nn.BatchNorm3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.Linear)


def drawer(seed):
    """normal(tensor, mean, std) in place, of one generator."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor, mean, std):
        tensor.copy_(mean + std * torch.randn(tensor.shape, generator=generator))

    return normal, generator


@torch.no_grad()
def draw(model, seed, transposed_fan_in=1, after=None):
    """All values at random, activations of order one. A transposed convolution's fan-in is its inputs times
    `transposed_fan_in`; `after(name, module, normal)` changes a module that has been drawn."""
    normal, generator = drawer(seed)
    for name, module in model.named_modules():
        if isinstance(module, CONVOLUTIONS):
            weight = module._parameters.get("weight_orig", module._parameters.get("weight"))
            transposed = isinstance(module, nn.ConvTranspose2d)
            fan_in = module.in_channels * transposed_fan_in if transposed else weight[0].numel()
            normal(weight, 0, (2 / fan_in) ** 0.5)
            if module.bias is not None:
                normal(module.bias, 0, 0.1)
        elif isinstance(module, NORMS):
            normal(module.weight, 1, 0.2)
            normal(module.bias, 0, 0.1)
            normal(module.running_mean, 0, 0.1)
            module.running_var.copy_(0.5 + torch.rand(module.running_var.shape, generator=generator))
        if after:
            after(name, module, normal)
    return model


def parameters(model, prefix=""):
    """{released name: array}, without the counters of batch norm, which nothing reads."""
    return {prefix + name: value.detach().cpu().numpy().copy() for name, value in model.state_dict().items()
            if not name.endswith("num_batches_tracked")}


def load(model, arrays, may_lack=lambda name: False, may_have=lambda name: False):
    """Sets everything from arrays under released names, but what may be missing and what may be there besides."""
    state = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    missing, surplus = model.load_state_dict(state, strict=False)
    missing = [n for n in missing if not n.endswith("num_batches_tracked") and not may_lack(n)]
    surplus = [n for n in surplus if not may_have(n)]
    if missing or surplus:
        raise ValueError(f"missing {missing[:5]}, not known {surplus[:5]}")
    return model
