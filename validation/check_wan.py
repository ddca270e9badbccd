#!/usr/bin/env python3
"""Does `weft generate` make the clips of diffusers' Wan pipelines, and take adapters that PEFT trained, in every layout?

    check_wan.py [--weft build/weft] [--tolerance 1e-5] [--json FILE]        (diffusers 0.35 or newer, peft and xxhash, besides torch)

Clips: WanPipeline and WanImageToVideoPipeline in the shapes of Wan2.2, narrow, with random weights in f32: T2V and I2V with two
experts, TI2V with a timestep for each token. weft reads the folders that save_pretrained writes, in shards. Both sides get prompt,
negative prompt and picture; the noise is the same because philox.py computes weft's. diffusers' schedulers get the noise levels of
Wan's code, which weft has (docs/generate.md, Solvers); how far clips of diffusers' own levels are is printed too. A picture of another
size is fitted here as Wan's code fits it, since diffusers' pipeline stretches it with Pillow.

Adapters: PEFT trains one for each expert. Files with names of diffusers, ComfyUI and kohya, in f32, f16 and bf16: weft's clips must
have the same bits for all three, and be those of diffusers, which loads the same file and fuses it. Options of PEFT that change the
factor must count or be refused, and files that do not fit must be refused.

Figures are relative L2 errors of the latents and levels of 255. Exit status 0 if errors are below the tolerance, no pixel is more
than one level off, and the rest holds.
"""
import copy
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"

import diffusers
import numpy as np
import peft
import torch
import transformers
import xxhash
from PIL import Image
from safetensors.torch import load_file, save_file

import common
from reference import philox, safetensors_io, t5

SEED, STEPS, LENGTH, FRAMES = 11, 8, 40, 9
PROMPT, NEGATIVE = "a boat  between the mountains &amp; the sea", "grey, blurred"  # cleaned on both sides
T5 = {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "num_layers": 2}
WIDTH, DEPTH, MODEL = 48, 2, {"num_heads": 2, "ffn_dim": 64, "freq_dim": 32}
VAE = {"filters": 8, "num_res_blocks": 1}
SHAPES = {  # cfg_scale: at low and at high noise
    "T2V": {"model": {}, "vae": {}, "sampler": {"boundary": 0.875, "shift": 12.0, "cfg_scale": [3.0, 4.0]}},
    "I2V": {"model": {"variant": "i2v", "in_channels": 36, "out_channels": 16}, "vae": {},
            "sampler": {"boundary": 0.9, "shift": 5.0, "cfg_scale": [3.0, 3.5]}},
    "TI2V": {"model": {"variant": "ti2v", "in_channels": 48}, "sampler": {"shift": 5.0, "cfg_scale": 5.0},
             "vae": {"variant": "2.2", "z_channels": 48, "patch_size": 2, "decoder_filters": 12}},
}
PICTURES = {"wide": (70, 40), "square": (32, 32), "large": (64, 64)}
CLIPS = [  # shape, solver, generate.image_size, the size that follows, picture
    ("T2V", "unipc", [32, 48], (32, 48), None), ("T2V", "euler", [32, 48], (32, 48), None), ("T2V", "dpm++", [32, 48], (32, 48), None),
    ("I2V", "unipc", [32, 48], (16, 48), "wide"), ("I2V", "unipc", [32, 32], (32, 32), "square"),
    ("I2V", "euler", [32, 48], (16, 48), "wide"), ("TI2V", "unipc", [64, 96], (64, 96), None),
    ("TI2V", "unipc", [64, 96], (64, 96), "wide"), ("TI2V", "unipc", [64, 64], (64, 64), "large"),
    ("TI2V", "euler", [64, 96], (64, 96), "wide")]
RANK, ALPHA, FACTOR = 4, 8, 0.75
LAYOUTS = {"diffusers": "diffusers", "comfyui": "ComfyUI", "kohya": "kohya"}  # what weft inspect calls them
NAMES = (("attn1", "self_attn"), ("attn2", "cross_attn"), ("to_out.0", "o"), ("to_", ""), ("ffn.net.0.proj", "ffn.0"),
         ("ffn.net.2", "ffn.2"))


# ---- Models

def statistics_of_22():
    """Means and deviations of VAE 2.2's latents, from weft's source, which the golden cases hold to the original's."""
    text = (common.ROOT / "src/models/wan/vae.cpp").read_text()
    lists = re.findall(r"{([-0-9.f,\s]+)}", text[text.index(" wan22 = "):])[:2]
    return [[float(v) for v in one.replace("f", "").split(",")] for one in lists]


def drawn(model):
    """Random weights that keep the size of what goes through, and gains near 1."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1 or name.endswith("gamma"):
                p.add_(0.2 * torch.randn_like(p))
            else:
                p.normal_(0, p[0].numel() ** -0.5)
    return model.eval()


def transformer_of(model, width=WIDTH):
    channels = model.get("in_channels", 16)
    return drawn(diffusers.WanTransformer3DModel(
        num_attention_heads=MODEL["num_heads"], attention_head_dim=width // MODEL["num_heads"], in_channels=channels,
        out_channels=model.get("out_channels", channels), text_dim=T5["d_model"], freq_dim=MODEL["freq_dim"],
        ffn_dim=MODEL["ffn_dim"], num_layers=DEPTH))


def scheduler_of(solver, shift, own_levels=False):
    """`own_levels`: diffusers' noise levels instead of those of Wan's code."""
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": shift}
    made = {"unipc": lambda: diffusers.UniPCMultistepScheduler(**flow), "dpm++": lambda: diffusers.DPMSolverMultistepScheduler(**flow),
            "euler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)}[solver]()
    theirs = made.set_timesteps

    def set_timesteps(n, device=None):
        theirs(n, device=device)
        u = (float(np.float32(0.999)) if solver == "unipc" else 1.0) * (1 - np.arange(n) / n)
        sigmas = shift * u / (1 + (shift - 1) * u)
        made.sigmas = torch.tensor([*sigmas, 0.0], dtype=torch.float32)
        made.timesteps = torch.tensor(1000 * sigmas).to(torch.float32 if solver == "euler" else torch.int64)
    if not own_levels:
        made.set_timesteps = set_timesteps
    return made


def save_pipeline(shape, where):
    """The pipeline; its folder as diffusers writes it, with a deck for weft."""
    torch.manual_seed(1)
    vae, boundary = {"base_dim": VAE["filters"], "num_res_blocks": VAE["num_res_blocks"]}, shape["sampler"].get("boundary")
    if shape["vae"]:
        means, deviations = statistics_of_22()
        vae |= {"decoder_base_dim": shape["vae"]["decoder_filters"], "z_dim": 48, "is_residual": True, "in_channels": 12,
                "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16, "latents_mean": means, "latents_std": deviations}
    tokenizer = transformers.T5Tokenizer.from_pretrained(str(where.parent))
    text = transformers.UMT5Config(vocab_size=len(tokenizer), feed_forward_proj="gated-gelu", dropout_rate=0.0, **T5)
    made = diffusers.WanPipeline(
        tokenizer, drawn(transformers.UMT5EncoderModel(text)), drawn(diffusers.AutoencoderKLWan(**vae)), scheduler_of("unipc", 1.0),
        transformer_of(shape["model"]), transformer_of(shape["model"]) if boundary else None, boundary_ratio=boundary,
        expand_timesteps=shape["model"].get("variant") == "ti2v")
    made.save_pretrained(where, max_shard_size="100KB")
    shutil.copy(where.parent / "spiece.model", where / "tokenizer")  # as the released folders have it
    model = {"name": "wan", "hidden_size": WIDTH, "depth": DEPTH, "text_dim": T5["d_model"], "text_len": LENGTH} | MODEL | shape["model"]
    (where / "deck.toml").write_text(common.toml({
        "run": {"dir": str(where / "run"), "seed": SEED, "threads": 1}, "sampler": shape["sampler"] | {"steps": STEPS}, "model": model,
        "vae": {"weights": str(where / "vae")} | VAE | shape["vae"],
        "generate": {"weights": str(where if boundary else where / "transformer"), "num_frames": str(FRAMES), "image_size": [32, 48],
                     "prompts": [PROMPT], "negative_prompt": NEGATIVE, "tensors": True}})
        + t5.deck(T5, len(tokenizer), weights=str(where / "text_encoder"), max_length=LENGTH))
    return made


# ---- Clips

def fitted(picture, shape, size):
    """For diffusers: stretched by torch's bicubic filter, or covered by Pillow's Lanczos and cut, in [-1,1]."""
    if (picture.height, picture.width) == size:
        return picture
    as_tensor = lambda image: torch.tensor(np.asarray(image)).permute(2, 0, 1)[None] / 127.5 - 1
    if shape["model"]["variant"] == "i2v":
        return torch.nn.functional.interpolate(as_tensor(picture), size=size, mode="bicubic")
    scale = max(size[1] / picture.width, size[0] / picture.height)
    scaled = picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.LANCZOS)
    left, top = (scaled.width - size[1]) // 2, (scaled.height - size[0]) // 2
    return as_tensor(scaled.crop((left, top, left + size[1], top + size[0])))


def of_diffusers(base, shape, size, solver, picture=None, own_levels=False):
    """Latents, and pixels [T,H,W,3] as bytes."""
    kind = diffusers.WanImageToVideoPipeline if picture else diffusers.WanPipeline
    parts = {n: p for n, p in base.components.items() if n != "scheduler"}
    pipeline = kind(**parts, scheduler=scheduler_of(solver, shape["sampler"]["shift"], own_levels),
                    boundary_ratio=base.config.boundary_ratio, expand_timesteps=base.config.expand_timesteps)
    pipeline.set_progress_bar_config(disable=True)
    side, guidance = base.vae.config.scale_factor_spatial, shape["sampler"]["cfg_scale"]
    latent = (1, base.vae.config.z_dim, (FRAMES - 1) // 4 + 1, size[0] // side, size[1] // side)
    asked = {"latents": torch.tensor(philox.normals(SEED, philox.purposes()["sampler"], 0, 0, latent), dtype=torch.float32)}
    asked |= {"guidance_scale": guidance[1], "guidance_scale_2": guidance[0]} if base.transformer_2 else {"guidance_scale": guidance}
    if picture:
        asked["image"] = fitted(picture, shape, size)

    def run(output_type):
        return pipeline(prompt=PROMPT, negative_prompt=NEGATIVE, height=size[0], width=size[1], num_frames=FRAMES,
                        num_inference_steps=STEPS, max_sequence_length=LENGTH, output_type=output_type, **asked).frames[0]
    return run("latent").numpy(), np.round(run("np") * 255).astype(np.uint8)


def of_weft(args, folder, output, *options):
    """The same of `weft generate`; what it said where it refused."""
    done = subprocess.run([args.weft, "generate", folder / "deck.toml", f"generate.output={folder / output}", *options],
                          capture_output=True, text=True, env=common.environment(), check=False)
    if done.returncode == 3:
        return " ".join(line for line in done.stderr.splitlines() if line.startswith(("ERROR", "HINT"))).replace(f"{folder}/", "")
    if done.returncode:
        sys.exit(done.stderr)
    made = safetensors_io.load(folder / output / "sample_0000.safetensors")
    pixels = np.floor(np.clip((made["frames"] + 1) * 127.5, 0, 255) + 0.5).astype(np.uint8)
    line, = common.json_lines(folder / output / "generated.jsonl")
    if xxhash.xxh3_128_hexdigest(pixels.tobytes()) != line["pixels"]:
        sys.exit(f"{output}: the tensors are not those of weft's video, by its hash")
    return made["latent_0"], pixels


class Report:
    def __init__(self, tolerance):
        self.tolerance, self.good, self.figures = tolerance, True, {}

    def hold(self, what, good):
        self.good = self.good and good
        print(f"{what}: {'ok' if good else 'WRONG'}", flush=True)

    def clip(self, what, ours, theirs, same=True):
        """Two clips, which must be the same unless `same` is false."""
        (z, u), (w, v) = ours, theirs
        if u.shape != v.shape:
            sys.exit(f"{what}: weft's clip is {u.shape}, diffusers' {v.shape}")
        apart, off = np.abs(u.astype(int) - v), np.abs(z - w)
        d = {"latents": common.relative_error(z, w), "latents_max": float(off.max()), "latents_mean": float(off.mean()),
             "pixels_max": int(apart.max()), "pixels_mean": float(apart.mean()), "pixels_deviation": float(v.std())}
        self.figures[what] = d
        said = (f"{what}: latents {d['latents']:.1e}, difference at most {d['latents_max']:.1e}, mean {d['latents_mean']:.1e}; pixels at "
                f"most {d['pixels_max']}, mean {d['pixels_mean']:.5f}, deviation of all {d['pixels_deviation']:.0f}")
        if same:
            self.hold(said, d["latents"] <= self.tolerance and d["pixels_max"] <= 1)
        else:
            print(said)


def check_clips(args, where, report):
    colours = np.random.default_rng(4).integers(0, 256, (20, 35, 3), np.uint8)
    pictures = {name: Image.fromarray(colours).resize(size, Image.BICUBIC) for name, size in PICTURES.items()}
    for name, picture in pictures.items():
        picture.save(where / f"{name}.png")
    bases = {}
    for name, solver, area, size, picture in CLIPS:
        shape, folder = SHAPES[name], where / name
        if name not in bases:
            bases[name] = save_pipeline(shape, folder)
        given = [f'generate.references=["{where / picture}.png"]'] if picture else []
        ours = of_weft(args, folder, f"{solver}_{picture}", f"sampler.solver={solver}", f"generate.image_size={area}", *given)
        what = f"{name}, {solver}, {picture + ' picture' if picture else 'text alone'}"
        report.clip(what, ours, of_diffusers(bases[name], shape, size, solver, pictures.get(picture)))
        if name == "T2V":
            report.clip("    diffusers' own noise levels", ours, of_diffusers(bases[name], shape, size, solver, own_levels=True), False)
    return bases["T2V"]


# ---- Adapters

def trained_adapter(transformer, **options):
    """Matrices A and B by diffusers' names, after some steps of PEFT's on random data, and PEFT's configuration."""
    torch.manual_seed(2)
    model = copy.deepcopy(transformer)
    model.add_adapter(peft.LoraConfig(r=RANK, lora_alpha=ALPHA, init_lora_weights="gaussian", **options, target_modules=[
        "to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    with torch.enable_grad():
        for _ in range(5):
            x, y = torch.randn(2, model.config.in_channels, 2, 4, 6), torch.randn(2, LENGTH, T5["d_model"])
            out = model(x, torch.rand(2) * 1000, y, return_dict=False)[0]
            (out - torch.randn_like(out)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {n: v.contiguous() for n, v in peft.get_peft_model_state_dict(model).items()}, model.peft_config["default"].to_dict()


def write_layouts(adapter, config, folder, name):
    """{layout: file}, of the same values."""
    files = {layout: folder / f"{name}_{layout}.safetensors" for layout in LAYOUTS}
    diffusers.WanPipeline.save_lora_weights(folder, adapter, weight_name=files["diffusers"].name,
                                            transformer_lora_adapter_metadata=config)
    comfyui, kohya = {}, {}
    for tensor, value in adapter.items():
        layer, half = tensor.rsplit(".lora_", 1)
        for theirs, released in NAMES:
            layer = layer.replace(theirs, released)
        flat = "lora_unet_" + layer.replace(".", "_")
        comfyui[f"diffusion_model.{layer}.lora_{half}"] = value
        kohya[f"{flat}.lora_{'down' if half[0] == 'A' else 'up'}.weight"] = value
        comfyui[f"diffusion_model.{layer}.alpha"] = kohya[f"{flat}.alpha"] = torch.tensor(float(ALPHA), dtype=value.dtype)
    save_file(comfyui, files["comfyui"])
    save_file(kohya, files["kohya"])
    return files


def clips_with(args, base, folder, output, low, high):
    """With a file of adapters for each expert, of weft and of diffusers."""
    ours = of_weft(args, folder, output, f'generate.adapters=["{low}={FACTOR}"]', f'generate.adapters_high_noise=["{high}={FACTOR}"]')
    made = copy.deepcopy(base)
    made.load_lora_weights(folder, weight_name=high.name, adapter_name="high")
    made.load_lora_weights(folder, weight_name=low.name, adapter_name="low", load_into_transformer_2=True)
    made.fuse_lora(components=["transformer", "transformer_2"], lora_scale=FACTOR)
    return ours, of_diffusers(made, SHAPES["T2V"], (32, 48), "unipc")


def check_adapters(args, base, folder, report):
    experts = {"low": trained_adapter(base.transformer_2), "high": trained_adapter(base.transformer)}
    for kind in "float32", "float16", "bfloat16":
        files = {name: write_layouts({n: v.to(getattr(torch, kind)) for n, v in adapter.items()}, config, folder, f"{name}_{kind}")
                 for name, (adapter, config) in experts.items()}
        made = {}
        for layout, called in LAYOUTS.items():
            made[layout], theirs = clips_with(args, base, folder, f"{kind}_{layout}", files["low"][layout], files["high"][layout])
            report.clip(f"adapters, {layout}, {kind}", made[layout], theirs)
            said, = [s for s in common.run([args.weft, "inspect", files["low"][layout]]).splitlines() if s.startswith("adapter of")]
            report.hold(f"    inspect: {said}", "20 layers: rank 4, alpha 8" in said and said.endswith("names of " + called))
        same = [np.array_equal(a, b) for clip in made.values() for a, b in zip(clip, made["diffusers"])]
        report.hold(f"    the same bits in {kind}", all(same))
    report.clip("    without adapters", made["kohya"], of_diffusers(base, SHAPES["T2V"], (32, 48), "unipc"), False)
    for option in {"use_rslora": True}, {"alpha_pattern": {"ffn.net.2": 2}}, {"rank_pattern": {"to_q": 2}}:
        file = write_layouts(*trained_adapter(base.transformer, **option), folder, "option")["diffusers"]
        ours, theirs = clips_with(args, base, folder, "option_" + "".join(option), file, file)
        if isinstance(ours, str):
            report.hold(f"adapters with {option}: refused: {ours}", True)
        else:
            report.clip(f"adapters with {option}", ours, theirs)


def check_refusals(args, folder, report):
    adapter = load_file(folder / "low_float32_comfyui.safetensors")
    layer = "diffusion_model.blocks.0.self_attn.q."
    pair = {"lora_A.weight": torch.ones(RANK, WIDTH), "lora_B.weight": torch.ones(WIDTH, RANK)}
    wider = trained_adapter(transformer_of({}, 2 * WIDTH))[0]
    for what, tensors in {
            "a wider Wan": {f"transformer.{n}": v for n, v in wider.items()},
            "another model": {f"transformer.single_transformer_blocks.0.attn.to_q.{n}": v for n, v in pair.items()},
            "a layer too many": adapter | {f"diffusion_model.blocks.{DEPTH}.self_attn.q.{n}": v for n, v in pair.items()},
            "half of a pair": {n: v for n, v in adapter.items() if n != layer + "lora_B.weight"},
            "LoHa": {layer + "hada_w1_a": torch.ones(RANK, WIDTH)},
            "DoRA": adapter | {layer + "dora_scale": torch.ones(WIDTH, 1)}}.items():
        save_file(tensors, folder / "other.safetensors")
        said = of_weft(args, folder, "refused", f'generate.adapters=["{folder / "other.safetensors"}"]')
        report.hold(f"{what}: {said if isinstance(said, str) else 'taken'}", isinstance(said, str))


def main():
    parser = common.parser(__doc__)
    parser.add_argument("--tolerance", type=float, default=1e-5)
    args = common.parse(parser)
    facts, report = common.about(args, "diffusers", "transformers", "peft"), Report(args.tolerance)
    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")  # of pictures in [-1,1]
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        where = pathlib.Path(name)
        t5.train_tokenizer(where)
        base = check_clips(args, where, report)
        check_adapters(args, base, where / "T2V", report)
        check_refusals(args, where / "T2V", report)
    common.write(args, facts, {"clips": report.figures})
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
