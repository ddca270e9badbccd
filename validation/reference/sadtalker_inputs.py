"""What the checks of `weft animate` run on: a drawn face, speech that is nobody's, and weights of all networks, drawn so that
a clip looks sane. Everything is a function of the seed.

Random weights would find no face, so two networks get one path that does: RetinaFace sees the green nose of the drawn face and
answers with a box around it; FAN answers with a face of usual proportions. All their other values are random and move boxes and
points a little, so an error in any of them shows.
"""
import pathlib
import wave

import cv2
import numpy as np
import torch
from torch import nn

from . import face as face_nets
from . import sadtalker, sadtalker_chain, safetensors_io, weights

FILES = {"sadtalker": "sadtalker.safetensors", "mapping": "mapping.safetensors", "mapping_full": "mapping_full.safetensors",
         "detector": "detector.safetensors", "landmarks": "landmarks.safetensors"}
BOX = 48  # pixels of a found face, whatever the picture's size


# ---- pictures and sound ----

def face(width=176, height=208, middle=(88, 104), seed=1, shut=0.0, opened=0.3):
    """A face on a smooth ground, u8 [height,width,3] RGB; `shut`: eyelids, `opened`: mouth, both 0 to 1."""
    random = np.random.default_rng(seed)
    ground = random.integers(60, 200, (5, 5, 3), np.uint8)
    ground[:, :, 1] = np.minimum(ground[:, :, 1], ground[:, :, ::2].min(2) // 2)  # nothing greenish but the nose
    image = cv2.resize(ground, (width, height), interpolation=cv2.INTER_LINEAR)
    x, y = middle

    def ellipse(dx, dy, a, b, colour, angle=0):
        shift = 4
        centre = tuple(round((v + d) * 2 ** shift) for v, d in ((x, dx), (y, dy)))
        cv2.ellipse(image, centre, (round(a * 2 ** shift), round(b * 2 ** shift)), angle, 0, 360, colour, -1, cv2.LINE_AA, shift)

    ellipse(0, -8, 35, 46, (70, 30, 60))
    ellipse(0, 0, 30, 40, (225, 150, 165))
    for side in (-1, 1):
        ellipse(11 * side, -13, 7, 1.6, (80, 30, 50), 6 * side)
        ellipse(11 * side, -5, 5.5, max(0.6, 3.2 * (1 - shut)), (245, 220, 240))
        if shut < 0.7:
            ellipse(11 * side, -5, 2, 2 * (1 - shut), (60, 20, 90))
    ellipse(0, 21, 10, 2 + 5 * opened, (170, 40, 70))
    ellipse(0, 22, 7, 0.5 + 3 * opened, (80, 10, 30))
    ellipse(0, 6, 7, 7, (20, 235, 30))
    noise = random.normal(0, 2, image.shape)
    return np.clip(np.rint(image + noise), 0, 255).astype(np.uint8)


def speech(seconds, seed=1):
    """Syllables of a voice with two formants, and some hiss: i16 at 16 kHz."""
    random, rate = np.random.default_rng(seed), sadtalker_chain.RATE
    count = round(seconds * rate)
    t, out = np.arange(count) / rate, np.zeros(count)
    phase = 2 * np.pi * np.cumsum(120 + 20 * np.sin(2 * np.pi * 0.9 * t)) / rate
    at = 0.0
    while at < seconds:
        length, first, second = random.uniform(0.12, 0.3), random.uniform(300, 850), random.uniform(900, 2400)
        heard = slice(max(0, int(at * rate)), int((at + length) * rate) + 2)
        envelope = np.clip(1 - ((t[heard] - at - length / 2) / (length / 2)) ** 2, 0, 1)
        for k in range(1, 40):
            loud = sum(np.exp(-((120 * k - f) / 150) ** 2) for f in (first, second)) + 0.01
            out[heard] += envelope * loud * np.sin(k * phase[heard]) / 6
        at += length + random.uniform(0.0, 0.08)
    out += 0.003 * random.standard_normal(count)
    return np.clip(np.rint(out / np.abs(out).max() * 0.6 * 32767), -32768, 32767).astype("<i2")


def write_wav(path, samples):
    with wave.open(str(path), "wb") as f:
        f.setnchannels(1), f.setsampwidth(2), f.setframerate(sadtalker_chain.RATE)
        f.writeframes(samples.tobytes())


def write_png(path, image):
    if not cv2.imwrite(str(path), image[:, :, ::-1]):
        raise OSError(f"{path} cannot be written")


def write_video(path, frames):
    """Without loss: pictures as PNG in an AVI."""
    height, width = frames[0].shape[:2]
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MPNG"), 25, (width, height))
    if not writer.isOpened():
        raise OSError(f"{path} cannot be written")
    for frame in frames:
        writer.write(frame[:, :, ::-1].copy())
    writer.release()


def blinking(frames=9):
    return [face(seed=3, shut=float(np.sin(np.pi * i / frames) ** 2), opened=0.1 + 0.05 * (i % 4)) for i in range(frames)]


def nodding(frames=7):
    return [face(seed=4, middle=(88 + 3 * np.sin(i), 104 + 5 * np.cos(0.8 * i))) for i in range(frames)]


# ---- weights ----

def draw(model, seed):
    """All values at random; spectral norms as after training."""
    def after(name, module, normal):
        if "weight_orig" not in module._parameters:
            return
        matrix = module.weight_orig.flatten(1)
        normal(module.weight_v, 0, 1)
        for _ in range(8):
            module.weight_u.copy_(nn.functional.normalize(matrix @ module.weight_v, dim=0))
            module.weight_v.copy_(nn.functional.normalize(matrix.T @ module.weight_u, dim=0))

    return weights.draw(model, seed, transposed_fan_in=2, after=after).eval()


def settle(model, call, spread=()):
    """Runs `call`, and scales each layer's weights at its first use so that what it gives has deviation 1, or `spread[name]`."""
    handles, seen = [], set()
    spread = dict(spread)

    def hook(name):
        def scale(module, inputs, output):
            if name in seen:
                return None
            seen.add(name)
            bias = 0 if module.bias is None else module.bias.view(-1, *[1] * (output.dim() - 2))
            deviation = float((output - bias).std())
            if not np.isfinite(deviation) or deviation == 0:
                return None
            factor = spread.get(name, 1.0) / deviation
            module.weight.mul_(factor)
            return (output - bias) * factor + bias
        return scale

    for name, module in model.named_modules():
        if isinstance(module, weights.CONVOLUTIONS) and "weight_orig" not in module._parameters:
            handles.append(module.register_forward_hook(hook(name)))
    call()
    for handle in handles:
        handle.remove()


def plain(norm, channels, gain=1.0, bias=0.0):
    """Batch norm of these channels as gain * x + bias."""
    norm.weight[channels], norm.bias[channels] = gain, bias
    norm.running_mean[channels], norm.running_var[channels] = 0, 1


def finds_green(net):
    """Makes RetinaFace's channel 0 the green of the picture, and its finest level find what is green."""
    green = torch.tensor([-0.5, 1, -0.5])
    net.body.conv1.weight[0] = green[:, None, None].expand(3, 7, 7) / 49
    plain(net.body.bn1, 0, 1 / 200)
    for layer in (net.body.layer1, net.body.layer2):
        layer[0].downsample[0].weight[0] = 0
        layer[0].downsample[0].weight[0, 0] = 1
        plain(layer[0].downsample[1], 0)
        for block in layer:
            plain(block.bn3, 0, 0.0)
    net.fpn.output1[0].weight[0] = 0
    net.fpn.output1[0].weight[0, 0] = 1
    plain(net.fpn.output1[1], 0)
    net.fpn.merge2[0].weight[0] = 0
    plain(net.fpn.merge2[1], 0)
    # A level from 0 to 1 between two thresholds: one channel begins at the lower, one at the upper one.
    blur = torch.tensor([1.0, 2, 1])
    for channel, threshold in ((0, 0.2), (1, 0.3)):
        net.fpn.merge1[0].weight[channel] = 0
        net.fpn.merge1[0].weight[channel, 0] = blur[:, None] * blur / 16
        plain(net.fpn.merge1[1], channel, 1.0, -threshold)
        net.ssh1.conv3X3[0].weight[channel] = 0
        net.ssh1.conv3X3[0].weight[channel, channel, 1, 1] = 1
        plain(net.ssh1.conv3X3[1], channel)
    for level in range(3):
        head = net.ClassHead[level].conv1x1
        head.weight.mul_(0.02), head.bias.copy_(torch.tensor([5.0, -5, 5, -5]))
        net.BboxHead[level].conv1x1.weight.mul_(0.02)
    head = net.ClassHead[0].conv1x1
    head.bias[2:] = torch.tensor([3.0, -3])
    head.weight[2:, :2] = torch.tensor([[-50.0, 49], [50, -49]])[:, :, None, None]
    box = net.BboxHead[0].conv1x1
    box.bias.zero_()
    box.bias[6:] = float(np.log(BOX / 32) / 0.2)
    box.weight[:, :2] = 0


def template():
    """98 points of a face, (x, y) in cells of 64 x 64."""
    p = np.zeros((98, 2))
    angle = np.linspace(np.pi, 0, 33)
    p[:33] = np.stack([32 + 24 * np.cos(angle), 26 + 32 * np.sin(angle)], 1)
    brow = np.linspace(-1, 1, 5)
    for start, x in ((33, 20), (42, 44)):
        p[start:start + 5] = np.stack([x + 8 * brow, 15 + 2 * brow ** 2], 1)
        p[start + 5:start + 9] = np.stack([x + 7 * brow[::-1][:4], 18 + 2 * brow[:4] ** 2], 1)
    p[51:55] = np.stack([np.full(4, 32.0), np.linspace(23, 34, 4)], 1)
    p[55:60] = np.stack([32 + 5 * brow, 38 - brow ** 2], 1)
    for start, x in ((60, 21), (68, 43)):
        a = np.pi + np.arange(8) * np.pi / 4
        p[start:start + 8] = np.stack([x + 5 * np.cos(a), 24 + 2.5 * np.sin(a)], 1)
    for start, count, wide, high in ((76, 12, 10, 5), (88, 8, 7, 2)):
        a = np.pi + np.arange(count) * 2 * np.pi / count
        p[start:start + count] = np.stack([32 + wide * np.cos(a), 47 + high * np.sin(a)], 1)
    p[96], p[97] = (21, 24), (43, 24)
    return np.clip(np.rint(p), 2, 61).astype(int)


def answers_with_a_face(net, picture):
    """Makes FAN's channels 0 and 1 row and column, from which the last layer makes maps with one top each; the other channels are
    left as they are, and move tops by a cell here and there."""
    last = net.modules_count - 1
    stack, top = getattr(net, f"m{last}"), getattr(net, f"top_m_{last}")
    for block in [m for m in stack.modules() if isinstance(m, face_nets.ConvBlock)] + [top]:
        block.conv1.weight[:2] = 0
    conv = stack.coordconv.conv
    conv.weight[:2], conv.bias[:2] = 0, 0
    conv.weight[0, 256] = conv.weight[1, 257] = 1
    seen = {}
    handle = top.register_forward_hook(lambda module, inputs, output: seen.update(x=output))
    net(picture)
    handle.remove()
    lines = [seen["x"][0, 0].mean(1), seen["x"][0, 1].mean(0)]
    join, norm, out = (getattr(net, f"{n}{last}") for n in ("conv_last", "bn_end", "l"))
    plain(norm, slice(0, 128))
    out.weight[:98, :128], out.bias[:98] = 0, 0
    where = template()
    for axis, line in enumerate(lines):  # rows, columns
        steps = line[1:] - line[:-1]
        knots = torch.cat([line[:1] - 1, line[1:-1] + 0.3 * steps[1:], line[-1:]])
        join.weight[64 * axis:64 * axis + 64] = 0
        join.weight[64 * axis:64 * axis + 64, axis], join.bias[64 * axis:64 * axis + 64] = 1, -knots
        for k in range(98):
            out.weight[k, 64 * axis] = 1
            out.weight[k, 64 * axis + int(where[k, 1 - axis])] = -2
    features = {}
    handle = norm.register_forward_hook(lambda module, inputs, output: features.update(x=torch.relu(output)))
    net(picture)
    handle.remove()
    moved = torch.einsum("kc,chw->khw", out.weight[:98, 128:, 0, 0], features["x"][0, 128:])
    slope = float(torch.cat([line[1:] - line[:-1] for line in lines]).median())
    out.weight[:98, 128:] *= 0.2 * slope / float(moved.std())


def tells_faces_apart(net, pictures):
    """Random features of faces are nearly the same: the last layers take what differs between these, with deviation 0.3."""
    faces = [sadtalker_chain.resize(p[70:150, 48:128], 224, 224) for p in pictures]
    shown = torch.from_numpy(np.stack(faces).astype(np.float32)).permute(0, 3, 1, 2) / 255
    settle(net, lambda: net(shown[:2]))
    features = net.backbone(shown)[-1].mean((2, 3))
    for layer in net.final_layers:
        given = features @ layer.weight.flatten(1).T
        layer.weight.mul_(0.3 / float((given - given.mean(0)).std()))
        layer.bias.sub_(features.mean(0) @ layer.weight.flatten(1).T)


@torch.no_grad()
def write_weights(folder, options=sadtalker.SMALL, seed=1, size=64, modules=2):
    """Writes FILES into the folder; their paths by what they are. `options`: the widths; `size`: of a crop to settle them on."""
    folder = pathlib.Path(folder)
    picture = face()
    rows = torch.randn((1, 70, 27), generator=torch.Generator().manual_seed(seed)) * 0.3
    nets = draw(sadtalker.Networks(options), seed)
    crop = torch.from_numpy(sadtalker_chain.resize(picture[40:180, 18:158], size, size)).permute(2, 0, 1)[None] / 255
    settle(nets.kp_extractor, lambda: nets.kp_extractor(crop), {"kp": 0.25})
    few = {"fc_yaw": 0.8, "fc_pitch": 0.8, "fc_roll": 0.8, "fc_t": 0.03, "fc_exp": 0.04}
    settle(nets.mapping, lambda: nets.mapping(rows), few)
    canonical = nets.kp_extractor(crop)
    source = sadtalker.transformed(canonical, nets.mapping(rows))
    driving = sadtalker.transformed(canonical, nets.mapping(rows.flip(2)))
    settle(nets.generator, lambda: nets.generator(crop, source, driving),
           {"decoder.conv_img": 1.2, "dense_motion_network.mask": 1.5})
    windows = torch.from_numpy(sadtalker_chain.mel_windows(sadtalker_chain.mel_spectrogram(
        speech(1.4, seed).astype(np.float32) / 32768), 35).astype(np.float32))
    settle(nets.audio2exp, lambda: nets.audio2exp(windows[:10], rows[:, :64, :10].permute(2, 0, 1).flatten(1), torch.zeros(10)),
           {"mapping1": 0.5})
    z = torch.randn((2, 64), generator=torch.Generator().manual_seed(seed + 1))
    nets.audio2pose.netG.decoder.classbias.copy_(torch.randn((46, 64), generator=torch.Generator().manual_seed(seed + 2)))
    settle(nets.audio2pose, lambda: nets.audio2pose(windows, rows[0, :, 0], z, 0), {"netG.decoder.pose_linear": 0.2})

    recon = draw(face_nets.Recon(), seed + 3)
    tells_faces_apart(recon, [picture, *blinking(3), *nodding(3)])
    detector = draw(face_nets.RetinaFace(), seed + 4)
    shown = torch.from_numpy(picture.astype(np.float32))
    settle(detector, lambda: detector(shown))
    finds_green(detector)
    fan = draw(face_nets.Fan(modules), seed + 5)
    near = torch.from_numpy(sadtalker_chain.resize(picture[86:134, 64:112], 256, 256).astype(np.float32))
    settle(fan, lambda: fan(near))
    answers_with_a_face(fan, near)

    full = draw(sadtalker.MappingNet(nets.options | {"mapping_coeff_nc": 73}), seed + 6)
    settle(full, lambda: full(torch.cat([rows, rows[:, :3]], 1)), few)
    full.first[0].weight[:, 70:] /= 100  # scale and place count in tens of pixels
    clip = {n: v for n, v in weights.parameters(nets).items() if not n.startswith("mapping.")}
    # A released file has these too; inference does not use them.
    clip |= {"audio2pose.netG.encoder.classbias": np.zeros((46, 64), np.float32),
             "audio2pose.netD_motion.seq.3.bias": np.zeros(1, np.float32)}
    written = {"sadtalker": clip | weights.parameters(recon, "face_3drecon."),
               "mapping": weights.parameters(nets.mapping, "mapping."), "mapping_full": weights.parameters(full, "mapping."),
               "detector": weights.parameters(detector), "landmarks": weights.parameters(fan)}
    for name, values in written.items():
        safetensors_io.save(folder / FILES[name], values)
    return {name: folder / file for name, file in FILES.items()}
