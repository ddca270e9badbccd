"""The model and the clips on which compare_scaling.py and compare_runs.py train; needs no PyTorch."""
import common

MODEL = {"in_channels": 4, "patch_size": [1, 2, 2], "hidden_size": 256, "depth": 3, "num_heads": 4,
         "caption_channels": 256, "model_max_length": 32, "class_dropout_prob": 0.0}
TRAIN = {"lr": 1e-4, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "weight_decay": 0.0, "grad_clip": 1.0,
         "warmup_steps": 0, "ema_decay": 0.99}
# Latents [frames, height, width] and clips of an epoch. Micro-batches of a rank and step divide the epoch.
SHAPES = {"uniform": [([16, 16, 16], 16)],
          "mixed": [([16, 24, 24], 3), ([4, 32, 32], 4), ([8, 16, 16], 4), ([1, 32, 32], 5)]}
MICRO_BATCHES = {"uniform": 3, "mixed": 4}
BUCKET_MIB = 4


def model(tiny):
    """The [model] table without its weights; tiny for trying out a script."""
    return MODEL | {"hidden_size": 32, "depth": 1, "num_heads": 2} if tiny else MODEL


def write_deck(mix, folder, tiny=False, weights=None):
    """The deck's path. Without `weights`, a file, they are drawn from run.seed."""
    deck = folder / "deck.toml"
    parts = [f"latent=1,channels=4,clips={n},frames={s[0]},height={s[1]},width={s[2]}" for s, n in SHAPES[mix]]
    deck.write_text(common.toml({
        "run": {"threads": 1, "seed": 7}, "data": {"path": "synthetic:" + ";".join(parts)},
        "model": {"name": "stdit3"} | ({"weights": str(weights)} if weights else {}) | model(tiny),
        "train": TRAIN | {"batch_size": 1, "micro_batches": MICRO_BATCHES[mix]}, "parallel": {"bucket_mib": BUCKET_MIB}}))
    return deck
