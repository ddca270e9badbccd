#!/usr/bin/env python3
"""Does `weft generate` make the clips that a PyTorch pipeline makes, from the prompt to the pixels?

    check_generate.py [--weft build/weft] [--ranks 1] [--tolerance 1e-4] [--json FILE]

Tiny models with random weights: transformers' T5EncoderModel, STDiT3 and the sampler of reference/, diffusers' AutoencoderKL
and the temporal VAE. The noise is the same because it is a function of (seed, purpose, step, clip): philox.py
computes it once more. Clips: text to video (two chunks, an odd latent width), text to picture, a picture as an edited first
frame, and two loops, the second going on from the re-encoded first with an edit ratio. PyTorch runs in f64 (T5 in f32), weft in
f32; figures are relative L2 errors of the latents and of the frames before they are rounded to 8 bits, and the largest
difference of a frame's value. Exit status 0 if all relative errors are below the tolerance.
"""
import json
import pathlib
import sys
import tempfile
from unittest import mock

import numpy as np
import torch
from PIL import Image

import common
from reference import philox, rflow, safetensors_io, stdit3, t5, vae

SEED, STEPS, GUIDANCE, HEIGHT, WIDTH, FPS = 11, 6, 7.0, 32, 56, 24
T5 = {"d_model": 48, "d_kv": 8, "num_heads": 4, "d_ff": 64, "num_layers": 2}
LENGTH = 40
MODEL = {"in_channels": 4, "hidden_size": 64, "depth": 2, "num_heads": 4, "caption_channels": 48,
         "model_max_length": LENGTH}
SPATIAL = {"channels": [16, 16, 32, 32], "blocks": 1, "groups": 4}
TEMPORAL = {"filters": 16, "blocks": 1, "multipliers": [1, 2, 2, 4], "halves": [False, True, True], "groups": 4}
CHUNK = 17
SCALE, SHIFT = [3.85, 2.32, 2.33, 3.06], [-0.10, 0.34, 0.27, 0.98]
PURPOSE = philox.purposes()


def noise(purpose, step, sample, shape):
    return torch.tensor(philox.normals(SEED, PURPOSE[purpose], step, sample, shape))


class Pipeline:
    """The models in PyTorch, written as files for weft."""

    def __init__(self, where):
        torch.manual_seed(1)
        self.tokenizer = t5.train_tokenizer(where)
        self.vocab = self.tokenizer.get_piece_size() + 100
        self.t5 = t5.model_of(T5, self.vocab)
        t5.write_weights(self.t5, where / "t5.safetensors")
        self.model = stdit3.STDiT3(stdit3.Config(**MODEL)).eval()
        with torch.no_grad():
            for p in self.model.parameters():  # what starts at zero would hide itself
                if not p.any():
                    p.normal_(0, 0.3 * (p.shape[0] / p.numel()) ** 0.5)
        self.spatial = vae.spatial(*SPATIAL.values()).eval()
        self.temporal = vae.Temporal(*TEMPORAL.values()).eval()
        safetensors_io.save(where / "model.safetensors", common.arrays_of(self.model))
        safetensors_io.save(where / "vae.safetensors", common.arrays_of(self.spatial, "spatial_vae.module.")
                            | common.arrays_of(self.temporal, "temporal_vae."))
        for m in (self.model, self.spatial, self.temporal):
            m.double().requires_grad_(False)
        self.scale, self.shift = (torch.tensor(v).double().view(1, 4, 1, 1, 1) for v in (SCALE, SHIFT))

    def encode_text(self, text):
        ids = self.tokenizer.encode(text)[:LENGTH - 1] + [1]
        y = t5.encode_padded(self.t5, [ids], LENGTH).double()
        mask = (torch.arange(LENGTH) < len(ids)).long()[None]
        return y[:, None], mask

    def encode(self, frames, sample):
        """[3,T,H,W] -> latent [1,4,Tl,h,w], both posteriors drawn."""
        x = frames.transpose(0, 1)
        z2 = []
        for t in range(x.shape[0]):
            moments = self.spatial.quant_conv(self.spatial.encoder(x[t:t + 1]))
            h, w = moments.shape[2:]
            z2.append(vae.draw(moments, noise("posterior", 1 + t, sample, (h, w, 4)).permute(2, 0, 1)[None]))
        z2 = vae.SCALING * torch.stack(z2, 2)
        moments = torch.cat([self.temporal.moments(c) for c in z2.split(CHUNK, 2)], 2)
        z = vae.draw(moments, noise("posterior", 0, sample, (4, *moments.shape[2:]))[None])
        return (z - self.shift) / self.scale

    def decode(self, z, frames):
        z, out = z * self.scale + self.shift, []
        for chunk in z.split(5, 2):
            n = min(CHUNK, frames - len(out) * CHUNK)
            z2 = self.temporal.decode(chunk, n)[0].transpose(0, 1) / vae.SCALING
            out.append(self.spatial.decoder(self.spatial.post_quant_conv(z2)))
        return torch.cat(out).transpose(0, 1)  # [3,T,H,W]

    def generate(self, case, index):
        """The latents of each loop and all frames [T,H,W,3]."""
        frames, (h, w) = case["frames"], (HEIGHT // 8, WIDTH // 8)
        length = sum(-(-min(CHUNK, frames - i) // 4) for i in range(0, frames, CHUNK))
        references = [self.encode(r, index + (1 << 48)) for r in case.get("references", [])]
        groups, latents, shown = list(case.get("groups", [])), [], []
        y, mask = self.encode_text(case["text"])
        for loop in range(case.get("loops", 1)):
            if loop:
                references.append(self.encode(last, index + (len(references) + 1 << 48)))
                groups.append((loop, len(references) - 1, references[-1].shape[2] - 5, 0, 5, case["condition_edit"]))
            z = noise("sampler", loop, index, (1, 4, length, h, w))
            edit = torch.ones(1, length).double()
            for of, which, start, target, count, ratio in groups:
                if of == loop:
                    z[:, :, target:target + count] = references[which][:, :, start:start + count]
                    edit[:, target:target + count] = ratio
            # All ones are as good as none, but for a first tau that rounding puts above 1000: such a frame would sit out a step.
            edit = None if bool((edit == 1).all()) else edit
            steps = iter(range(STEPS))
            fresh = lambda *_, **__: noise("noise", loop * STEPS + next(steps), index, z.shape)
            of_clip = lambda v: torch.tensor([float(v)]).double()
            with mock.patch.object(torch, "randn", fresh):
                z = rflow.sample(self.model, z, y, mask, of_clip(120 if frames == 1 else FPS), of_clip(HEIGHT), of_clip(WIDTH),
                                 torch.tensor([frames]), STEPS, GUIDANCE, edit=edit)
            latents.append(z[0])
            last = self.decode(z, frames)
            shown.append(last[:, CHUNK if loop else 0:])
        return latents, torch.cat(shown, 1).permute(1, 2, 3, 0)


def deck(where, pipeline, prompts, output, more):
    return common.toml({
        "run": {"dir": str(where), "seed": SEED}, "model": MODEL,
        "vae": {"weights": str(where / "vae.safetensors"), "spatial_channels": SPATIAL["channels"],
                "spatial_res_blocks": SPATIAL["blocks"], "spatial_groups": SPATIAL["groups"], "filters": TEMPORAL["filters"],
                "num_res_blocks": TEMPORAL["blocks"], "channel_multipliers": TEMPORAL["multipliers"], "num_groups": TEMPORAL["groups"]},
        "sampler": {"steps": STEPS, "cfg_scale": GUIDANCE},
        "generate": {"weights": str(where / "model.safetensors"), "image_size": [HEIGHT, WIDTH], "fps": FPS, "aes": 0, "tensors": True,
                     "prompts": prompts, "output": str(output), **more},
    }) + t5.deck(T5, pipeline.vocab, weights=str(where / "t5.safetensors"), max_length=LENGTH, clean=False)


def check(weft, ranks, where, pipeline, name, cases, more):
    prompts = [c["text"] + " " + json.dumps(c["options"]) for c in cases]
    (where / f"{name}.toml").write_text(deck(where, pipeline, prompts, where / name, more))
    common.run([weft, "generate", where / f"{name}.toml"], ranks=ranks)
    results = {}
    for i, case in enumerate(cases):
        ours = safetensors_io.load(where / name / f"sample_{i:04d}.safetensors")
        with torch.no_grad():
            latents, frames = pipeline.generate(case, i)
        if ours["frames"].shape != tuple(frames.shape):
            sys.exit(f"{case['name']}: frames {ours['frames'].shape}, wanted {tuple(frames.shape)}")
        r = {"latents": [common.relative_error(ours[f"latent_{k}"], z.numpy()) for k, z in enumerate(latents)],
             "frames": common.relative_error(ours["frames"], frames.numpy()),
             "largest": float(np.abs(ours["frames"] - frames.numpy()).max()),
             "rms": float(frames.square().mean().sqrt())}
        print(f"{case['name']}: latents {', '.join(f'{e:.2e}' for e in r['latents'])}, frames {r['frames']:.2e}, largest "
              f"difference {r['largest']:.2e} at a root mean square of {r['rms']:.2f}")
        results[case["name"]] = r
    return results


def main():
    parser = common.parser(__doc__, ranks=1)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    a = common.parse(parser)
    facts = common.about(a, "diffusers", "transformers")
    with tempfile.TemporaryDirectory() as folder:
        where = pathlib.Path(folder)
        pipeline = Pipeline(where)
        rgb = np.random.default_rng(4).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
        Image.fromarray(rgb).save(where / "picture.png")
        picture = torch.tensor(rgb).double().permute(2, 0, 1)[:, None] / 127.5 - 1
        file = str(where / "picture.png")
        results = check(a.weft, a.ranks, where, pipeline, "once", [
            {"name": "text to video", "text": "a river between mountains", "frames": 34, "options": {"num_frames": 34}},
            {"name": "text to picture", "text": "a small house", "frames": 1, "options": {"num_frames": 1}},
            {"name": "edited picture to video", "text": "the sea at night", "frames": 17, "references": [picture],
             "groups": [(0, 0, 0, 0, 1, 0.6)],
             "options": {"num_frames": 17, "reference_path": file, "mask_strategy": "0,0,0,0,1,0.6"}}], {})
        results |= check(a.weft, a.ranks, where, pipeline, "loops", [
            {"name": "picture to video, two loops", "text": "people in a street", "frames": 34, "loops": 2,
             "condition_edit": 0.5, "references": [picture], "groups": [(0, 0, 0, 0, 1, 0.0)],
             "options": {"num_frames": 34, "reference_path": file, "mask_strategy": "0"}}],
            {"loop": 2, "condition_frame_edit": 0.5})
    common.write(a, facts, {"cases": results})
    return 0 if all(max([*r["latents"], r["frames"]]) <= a.tolerance for r in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
