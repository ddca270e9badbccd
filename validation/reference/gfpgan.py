"""The original GFPGAN and ParseNet, with random weights, and facexlib's way of a face out of a picture and back.

Needs the packages themselves: pip install --no-deps gfpgan==1.3.8 facexlib==0.3.0. Of gfpgan two files are loaded by
path: its package imports basicsr, which no longer runs with a recent torchvision, for a registry that models do not
need.
"""
import importlib.util
import math
import pathlib
import sys
import types

import numpy as np
import torch
from facexlib.parsing.parsenet import ParseNet
from facexlib.utils.face_restoration_helper import FaceRestoreHelper

SIDE = 512
NOISE_SIDES = [4] + [2 ** i for i in range(3, 10) for _ in range(2)]


def _architecture():
    """The module gfpganv1_clean_arch."""
    class Registry:
        def register(self):
            return lambda cls: cls

    for name, content in {"basicsr": {}, "basicsr.utils": {}, "basicsr.archs": {},
                          "basicsr.utils.registry": {"ARCH_REGISTRY": Registry()},
                          "basicsr.archs.arch_util": {"default_init_weights": lambda *a, **k: None}}.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        sys.modules[name] = module
    folder = pathlib.Path(importlib.util.find_spec("gfpgan").origin).parent / "archs"
    package = types.ModuleType("gfpgan_archs")
    package.__path__ = [str(folder)]
    sys.modules["gfpgan_archs"] = package
    return importlib.import_module("gfpgan_archs.gfpganv1_clean_arch")


@torch.no_grad()
def _draw(module, gain):
    """Weights that keep activations near 1 through the network, so that every layer counts in its result."""
    for name, p in module.named_parameters():
        if p.dim() >= 2 and name.endswith("weight"):
            fan_in = p[0].numel() if p.dim() < 5 else p[0, 0].numel()
            p.normal_(0, gain(name) / math.sqrt(fan_in))
        elif not name.endswith("constant_input.weight"):
            p.normal_(0, 0.1)


def restorer(seed):
    """GFPGANer's GFPGANv1Clean."""
    torch.manual_seed(seed)
    net = _architecture().GFPGANv1Clean(
        out_size=SIDE, num_style_feat=512, channel_multiplier=2, decoder_load_path=None, fix_decoder=False, num_mlp=8,
        input_is_latent=True, different_w=True, narrow=1, sft_half=True)

    def gain(name):
        if "modulation" in name or (name.startswith("condition") and name.endswith("2.weight")):
            return 0.3
        if "to_rgb" in name:
            return 0.1
        if "skip" in name:
            return 0.5
        # Of what a level of the U-Net adds up, too.
        return 0.9 if "conv_body" in name else 1.4

    _draw(net, gain)
    with torch.no_grad():
        torch.nn.init.normal_(net.stylegan_decoder.constant_input.weight)
        for name, p in net.named_parameters():
            if name.endswith("modulation.bias") or ("condition_scale" in name and name.endswith("2.bias")):
                p.add_(1)
    return net.eval()


def restore(net, image, noise):
    """The face for an image [1,3,S,S] and given noise, as GFPGANer calls the network but for the noise."""
    for i, values in enumerate(noise):
        getattr(net.stylegan_decoder.noises, f"noise{i}").copy_(values)
    with torch.no_grad():
        return net(image, return_rgb=False, randomize_noise=False)[0]


def parser(seed):
    torch.manual_seed(seed)
    net = ParseNet(in_size=SIDE, out_size=SIDE, parsing_ch=19)
    _draw(net, lambda name: 1.4 if "conv1" in name else 1.0)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.weight.normal_(1, 0.1)
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 2)
    return net.eval()


def paste(frame, points, faces, classes, scale):
    """transforms [F,2,3], crops [F,512,512,3], the frame [scale H, scale W, 3] with the faces; RGB."""
    helper = FaceRestoreHelper.__new__(FaceRestoreHelper)  # its constructor would download a detector
    helper.clean_all()
    helper.upscale_factor, helper.face_size, helper.device = scale, (SIDE, SIDE), torch.device("cpu")
    helper.pad_blur, helper.use_parse = False, True
    helper.face_template = np.array([[192.98138, 239.94708], [318.90277, 240.1936], [256.63416, 314.01935],
                                     [201.26117, 371.41043], [313.08905, 371.15118]])
    pending = [torch.nn.functional.one_hot(torch.from_numpy(c.astype(np.int64)), 19).movedim(2, 0)[None].float()
               for c in classes]
    helper.face_parse = lambda image: [pending.pop(0)]
    helper.input_img = np.ascontiguousarray(frame[:, :, ::-1])
    helper.all_landmarks_5 = list(points)
    helper.align_warp_face()
    for face in faces:
        helper.add_restored_face(np.ascontiguousarray(face[:, :, ::-1]))
    transforms = np.array(helper.affine_matrices, np.float32)
    crops = np.array(helper.cropped_faces)[..., ::-1]
    helper.get_inverse_affine(None)
    return transforms, crops, helper.paste_faces_to_input_image()[:, :, ::-1]


def bytes_of(face):
    """tensor2img of basicsr: [1,3,S,S] in -1 to 1 -> u8 [S,S,3], RGB."""
    levels = (face.clamp(-1, 1)[0].movedim(0, 2).float() + 1) / 2
    return (levels.numpy() * 255.0).round().astype(np.uint8)
