"""A talking picture as the original makes it, with NumPy, SciPy, OpenCV, Pillow and the networks of sadtalker.py and
face.py: from a picture and speech to frames in 8 bits, before they are encoded. Every step is a function of its own,
from the formulas of docs/models/sadtalker.md; blinking and the pose's noise, which the original draws without a seed, are
arguments.
"""
import wave

import cv2
import numpy as np
import torch
from PIL import Image
from scipy.signal import lfilter, savgol_filter

from . import face as face_nets
from . import philox, sadtalker, safetensors_io

RATE, FPS = 16000, 25
SAMPLES_PER_FRAME = RATE // FPS
MEAN_FACE = np.array([(-0.31148657, 0.29036078, 0.13377953), (0.30979887, 0.28972036, 0.13179526),
                      (0.0032534988, -0.046179324, 0.55244243), (-0.25216928, -0.38133916, 0.22405732),
                      (0.24846619, -0.38128236, 0.22235769)], np.float32)
REFERENCE_SIZE = 256  # of the frames of a reference video, whatever the clip's size


class NoFace(ValueError):
    """The detector found nothing, or its box leaves the picture; the original raises, too."""


# ---- speech ----

def read_wav(path):
    """16 kHz, mono, 16 bits -> f32 in [-1, 1)."""
    with wave.open(str(path)) as f:
        if (f.getframerate(), f.getnchannels(), f.getsampwidth()) != (RATE, 1, 2):
            raise ValueError(f"{path}: not 16 kHz, mono, 16 bits")
        return np.frombuffer(f.readframes(f.getnframes()), "<i2").astype(np.float32) / 32768


def mel_basis(bands=80, size=800, low=55.0, high=7600.0):
    """Slaney's triangles, each with area one: f32 [80,401]."""
    def to_mel(f):
        return np.where(f < 1000, f * 3 / 200, 15 + np.log(np.maximum(f, 1) / 1000) / (np.log(6.4) / 27))

    def to_hertz(m):
        return np.where(m < 15, m * 200 / 3, 1000 * np.exp((m - 15) * (np.log(6.4) / 27)))

    corners = to_hertz(np.linspace(to_mel(np.array(low)), to_mel(np.array(high)), bands + 2))
    f = np.linspace(0, RATE / 2, size // 2 + 1)
    rising = (f - corners[:-2, None]) / np.diff(corners)[:-1, None]
    falling = (corners[2:, None] - f) / np.diff(corners)[1:, None]
    return (np.maximum(0, np.minimum(rising, falling)) * 2 / (corners[2:] - corners[:-2])[:, None]).astype(np.float32)


def mel_spectrogram(samples):
    """[frames,80], -4 to 4; samples are cut to whole video frames."""
    x = samples[:len(samples) // SAMPLES_PER_FRAME * SAMPLES_PER_FRAME]
    x = np.pad(lfilter([1, -0.97], [1], x), 400)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(800) / 800)
    pieces = np.lib.stride_tricks.sliding_window_view(x, 800)[::200]
    magnitude = np.abs(np.fft.rfft(pieces * window, axis=1))
    decibels = 20 * np.log10(np.maximum(1e-5, magnitude @ mel_basis().T.astype(np.float64))) - 20
    return np.clip(8 * (decibels + 100) / 100 - 4, -4, 4)


def mel_windows(mel, frames):
    """[T,80,16]."""
    start = np.trunc(80 * (np.arange(frames) - 2) / FPS).astype(int)
    rows = np.clip(start[:, None] + np.arange(16), 0, len(mel) - 1)
    return mel[rows].transpose(0, 2, 1)


def drawn(frames, seed):
    """Blinking [T] and z [calls,64] as weft draws them of a seed."""
    purposes = philox.purposes()
    blink, pauses, at = np.zeros(frames, np.float32), min(frames // 2, 70) - 10, 0
    words = philox.words(seed, purposes["blink"], 0, 0, frames)
    for word in words.tolist() if pauses > 0 else []:
        at += 10 + (word * pauses >> 32)
        if at + 5 > frames - 1:
            break
        blink[at:at + 5] = 0.5, 0.9, 1, 0.9, 0.5
        at += 5
    calls = -(-(frames - 1) // sadtalker.POSE_BLOCK)
    return blink, np.stack([philox.normals(seed, purposes["head_pose"], call, 0, (64,)) for call in range(calls)])


def smoothed(pose):
    """Savitzky-Golay over the frames [T,6], T >= 3."""
    frames = len(pose)
    return savgol_filter(pose, 13 if frames >= 13 else (frames - 1) // 2 * 2 + 1, 2, axis=0)


def looped(rows, frames):
    return rows[np.arange(frames) % len(rows)]


def motion(nets, samples, source, blink, z, style, eyeblink=None, pose=None):
    """Coefficients [T,70] of speech; `source`: the face's first 70, `eyeblink` and `pose`: rows of reference videos."""
    frames = len(samples) // SAMPLES_PER_FRAME
    windows = torch.from_numpy(mel_windows(mel_spectrogram(samples), frames).astype(np.float32))
    ref = np.repeat(source[None, :70], frames, 0).astype(np.float32)
    if eyeblink is not None:
        ref[:, :64] = looped(eyeblink, frames)[:, :64]
        blink = np.zeros(frames)
    expression = nets.audio2exp(windows, torch.from_numpy(ref[:, :64]), torch.from_numpy(np.asarray(blink, np.float32)))
    head = nets.audio2pose(windows, torch.from_numpy(ref[0]), torch.from_numpy(np.asarray(z, np.float32)), style)
    rows = np.concatenate([expression.numpy(), smoothed(head.numpy())], 1).astype(np.float32)
    if pose is not None:
        rows[:, 64:] += looped(pose[:, 64:70] - pose[:1, 64:70], frames)
    return rows


def driving_rows(rows, source, options):
    """Rows [T,70] -> what the renderer is driven with [T,C]; source [1,C]."""
    rows = np.array(rows, np.float64)
    rows[:, :64] *= options["expression_scale"]
    if options["preprocess"] in ("full", "extfull") and rows.shape[1] == 70:
        rows = np.concatenate([rows, np.repeat(source[:, 70:73], len(rows), 0)], 1)
    if options["still"]:
        rows[:, 64:] = source[:, 64:rows.shape[1]]
    return rows


def camera(degrees, frames):
    """Whole degrees -> a value a frame: straight lines, of which the last end is never reached."""
    if len(degrees) == 1:
        return np.full(frames, float(degrees[0]))
    pairs = list(zip(degrees[:-1], degrees[1:]))
    step = sum(abs(b - a) for a, b in pairs) / (frames - 1)
    values = np.concatenate([np.arange(a, b, step * np.sign(b - a)) for a, b in pairs])[:frames]
    return np.concatenate([values, np.full(frames - len(values), values[-1])])


def angles_of(options, frames):
    given = [options.get(f"input_{name}") for name in ("yaw", "pitch", "roll")]
    return [torch.from_numpy(camera(g, frames)) if g else None for g in given]


# ---- pictures ----

def resize(image, width, height):
    return cv2.resize(image, (width, height))


def as_bytes(values):
    """0 to 1 -> u8, halves to even, from f32."""
    return np.rint(np.asarray(values, np.float32) * np.float32(255)).astype(np.uint8)


def resized_frame(frame, crop_size, size):
    return resize(frame, size, int(size * int(crop_size[1]) / int(crop_size[0])))


def crop_boxes(points, width, height):
    """Boxes of a face with 68 points in a picture of that size: the picture's size after shrinking, the outer box in it, and
    the inner one in the outer, before and after truncation."""
    left, right = points[36:42].mean(0), points[42:48].mean(0)
    eyes, across = (left + right) * 0.5, right - left
    down = (points[48] + points[54]) * 0.5 - eyes
    x = across - down[::-1] * [-1, 1]
    x = x / np.hypot(*x) * max(np.hypot(*across) * 2.0, np.hypot(*down) * 1.8)
    y, middle = x[::-1] * [-1, 1], eyes + down * 0.1
    quad = np.stack([middle - x - y, middle - x + y, middle + x + y, middle + x - y])
    side = np.hypot(*x) * 2
    shrink = int(np.floor(side / 512 * 0.5))
    if shrink > 1:
        width, height = int(np.rint(width / shrink)), int(np.rint(height / shrink))
        quad, side = quad / shrink, side / shrink
    border = max(int(np.rint(side * 0.1)), 3)
    low, high = np.floor(quad.min(0)).astype(int) - border, np.ceil(quad.max(0)).astype(int) + border
    crop = [max(low[0], 0), max(low[1], 0), min(high[0], width), min(high[1], height)]
    q = quad - crop[:2] + 0.5
    # The last one is held to the width, as in the original.
    inner = [max(min(q[0, 0], q[1, 0]), 0), max(min(q[0, 1], q[3, 1]), 0), min(max(q[2, 0], q[3, 0]), width),
             min(max(q[1, 1], q[2, 1]), width)]
    return {"resized": [width, height], "crop": [int(v) for v in crop], "quad": inner, "quad_int": [int(v) for v in inner]}


def aligned(image, points):
    """Picture [H,W,3] u8 and 68 points (y from the top) -> face [224,224,3] u8, (w0,h0,s,tx,ty), the points in it."""
    height, width = image.shape[:2]
    lm = np.array(points, np.float64)
    lm[:, 1] = height - 1 - lm[:, 1]
    five = np.stack([lm[[36, 39]].mean(0), lm[[42, 45]].mean(0), lm[30], lm[48], lm[54]])
    a = np.zeros((10, 8))
    a[::2, :3], a[::2, 3], a[1::2, 4:7], a[1::2, 7] = MEAN_FACE, 1, MEAN_FACE, 1
    k = np.linalg.lstsq(a, five.reshape(10), rcond=None)[0]
    scale = 102 / ((np.linalg.norm(k[:3]) + np.linalg.norm(k[4:7])) / 2)
    tx, ty = k[3], k[7]
    w, h = int(width * scale), int(height * scale)
    left = int(w / 2 - 112 + float((tx - width / 2) * scale))
    up = int(h / 2 - 112 + float((height / 2 - ty) * scale))
    face = Image.fromarray(image).resize((w, h), Image.Resampling.BICUBIC).crop((left, up, left + 224, up + 224))
    moved = (lm - [tx, ty] + [width / 2, height / 2]) * scale - [w / 2 - 112, h / 2 - 112]
    return np.asarray(face), np.array([width, height, scale, tx, ty]), moved


def pasted(picture, frame, box):
    """A frame in the picture's box (x1, y1, x2, y2), without seams: the resized frame and the picture."""
    patch = resize(frame, box[2] - box[0], box[3] - box[1])
    middle = ((box[0] + box[2]) // 2, (box[1] + box[3]) // 2)
    return patch, cv2.seamlessClone(patch, picture, np.full_like(patch, 255), middle, cv2.NORMAL_CLONE)


# ---- the whole ----

class Chain:
    """All networks, f32. `files`: safetensors whose names tell what they are of."""

    def __init__(self, files, options=()):
        arrays = {}
        for file in files.values():
            arrays[file] = safetensors_io.load(file)
        self.nets = sadtalker.Networks(options)
        clip = {n: a for part in ("sadtalker", "mapping") for n, a in arrays[files[part]].items()}
        recon = {n: clip.pop(n) for n in list(clip) if n.startswith("face_3drecon.")}
        sadtalker.load(self.nets, clip).eval()
        holder = torch.nn.Module()
        holder.face_3drecon = face_nets.Recon()
        self.recon = sadtalker.load(holder, recon).eval().face_3drecon
        self.detector = sadtalker.load(face_nets.RetinaFace(), arrays[files["detector"]]).eval()
        self.fan = sadtalker.load(face_nets.Fan(self.nets.options["fan_num_modules"]), arrays[files["landmarks"]]).eval()

    def landmarks(self, image, swap):
        """68 points of the best face; `swap`: the detector is shown BGR."""
        shown = image[:, :, ::-1].copy() if swap else image
        found = self.detector.detect(torch.from_numpy(shown.astype(np.float32)))["detections"]
        if not len(found):
            raise NoFace("no face")
        x1, y1, x2, y2 = (int(v) for v in found[0, :4])
        face = image[y1:y2, x1:x2]
        if not face.size:
            raise NoFace(f"the face's box {x1}, {y1}, {x2}, {y2} leaves the picture")
        maps = self.fan(torch.from_numpy(resize(face, 256, 256).astype(np.float32)))[0].numpy()
        points = face_nets.points_68(face_nets.points_of(maps, face.shape[1], face.shape[0]))
        return points + np.array([x1, y1], np.float32)

    def faces(self, pictures, mode, size):
        """Of a video's frames or one picture, RGB: coefficients [n,73]; of the first also the crop [size,size,3], the size that
        frames take their shape from, and the box for pasting (or None)."""
        height, width = pictures[0].shape[:2]
        shape, box = (width, height), None
        if mode != "resize":
            b = crop_boxes(self.landmarks(pictures[0], swap=False), width, height)
            (cx1, cy1, cx2, cy2), (x1, y1, x2, y2) = b["crop"], b["quad_int"]
            shape = (x2 - x1, y2 - y1)
            box = b["crop"] if mode.startswith("ext") else [cx1 + x1, cy1 + y1, cx1 + x2, cy1 + y2]
            cut = []
            for p in pictures:
                p = resize(p, *b["resized"])[cy1:cy2, cx1:cx2]
                cut.append(p if mode.startswith("ext") else p[y1:y2, x1:x2])
            pictures = cut
        rows, crops = [], [resize(p, size, size) for p in pictures]
        for crop in crops:
            face, params, _ = aligned(crop, self.landmarks(crop, swap=True))
            values = self.recon(torch.from_numpy(face / 255).float().permute(2, 0, 1)[None])[0].numpy()
            rows.append(np.concatenate([values[80:144], values[224:227], values[254:257], params[2:]]))
        return np.array(rows, np.float32), crops[0], shape, box

    @torch.inference_mode()
    def animate(self, picture, samples, blink, z, settings=(), eyeblink=None, pose=None, keep_source=False):
        """Frames [h,w,3] u8, RGB. `settings`: keys of [sadtalker] that are not widths; `eyeblink`, `pose`: frames of reference
        videos, RGB."""
        o = self.nets.options | dict(settings)
        rows, crop, shape, box = self.faces([picture], o["preprocess"], o["size"])
        refs = [None if v is None else self.faces(v, o["preprocess"], REFERENCE_SIZE)[0] for v in (eyeblink, pose)]
        columns = o["mapping_coeff_nc"]
        driven = driving_rows(motion(self.nets, samples, rows[0], blink, z, o["pose_style"], *refs), rows[:1], o)
        steps = sadtalker.render(self.nets, torch.from_numpy(crop).permute(2, 0, 1) / 255,
                                       torch.from_numpy(rows[0, :columns].copy()), torch.from_numpy(driven).float(),
                                       [None if a is None else a.float() for a in angles_of(o, len(driven))], keep_source,
                                       o["batch_size"])
        next(steps)
        images = sadtalker.in_order([frames for _, frames in steps], len(driven))
        frames = [resized_frame(f, shape, o["size"]) for f in as_bytes(images.permute(0, 2, 3, 1).numpy())]
        if o["preprocess"] in ("full", "extfull"):
            frames = [pasted(picture, f, box)[1] for f in frames]
        return frames
