"""The training steps that compare_step.py times: deck, weights and one batch a case, drawn from a fixed seed."""
import dataclasses
import pathlib

import torch

import safetensors_io
import stdit3

TRAIN = {"lr": 1e-4, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "weight_decay": 0.0, "grad_clip": 0.0,
         "warmup_steps": 0,
         "ema_decay": 0.0}  # PyTorch keeps no moving average either


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    what: str
    hidden_size: int
    depth: int
    num_heads: int
    batch: int
    frames: int = 5
    side: int = 32  # of the latent: S = (side / 2)^2 tokens a frame
    tokens: int = 32
    caption_channels: int = 512

    @property
    def model(self):
        return {"in_channels": 4, "patch_size": [1, 2, 2], "hidden_size": self.hidden_size, "depth": self.depth,
                "num_heads": self.num_heads, "caption_channels": self.caption_channels,
                "model_max_length": self.tokens, "class_dropout_prob": 0.0}


CASES = {case.name: case for case in (
    Case("a", "C=384, 6 pairs, 6 heads, T=5, S=256, batch 2, 32 text tokens of 512", 384, 6, 6, 2),
    Case("b", "C=1152, 1 pair, 16 heads, T=5, S=256, batch 1, 32 text tokens of 512", 1152, 1, 16, 1),
)}


def toml(tables):
    """Enough TOML for a deck: tables of numbers, texts, switches and lists of numbers."""
    def value(v):
        if isinstance(v, bool):
            return str(v).lower()
        return f'"{v}"' if isinstance(v, str) else str(v)

    return "\n".join(f"[{name}]\n" + "".join(f"{k} = {value(v)}\n" for k, v in table.items())
                     for name, table in tables.items())


def write(case, folder, threads):
    """Writes deck.toml, weights.safetensors and inputs.safetensors of a case; returns their paths."""
    folder = pathlib.Path(folder)
    torch.manual_seed(20240617)
    model = stdit3.STDiT3(stdit3.Config.from_deck(case.model))
    for p in model.parameters():
        # Zeros of the initialisation would leave whole branches without a gradient: nothing to compare there.
        if p.requires_grad and not p.any():
            torch.nn.init.normal_(p, std=0.02)
    b, pixels = case.batch, 8.0 * case.side
    latent = (b, 4, case.frames, case.side, case.side)
    inputs = {"x": torch.randn(latent), "noise": torch.randn(latent), "timestep": torch.rand(b) * 1000,
              "y": torch.randn(b, 1, case.tokens, case.caption_channels),
              "mask": torch.ones(b, case.tokens, dtype=torch.int64), "fps": torch.full((b,), 24.0),
              "height": torch.full((b,), pixels), "width": torch.full((b,), pixels)}
    paths = [folder / "deck.toml", folder / "weights.safetensors", folder / "inputs.safetensors"]
    paths[0].write_text(toml({"run": {"threads": threads}, "model": {"name": "stdit3"} | case.model, "train": TRAIN}))
    safetensors_io.save(paths[1], {k: v.numpy() for k, v in model.state_dict().items()})
    safetensors_io.save(paths[2], {k: v.numpy() for k, v in inputs.items()})
    return paths
