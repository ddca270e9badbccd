"""SadTalker's renderer and its networks of speech in PyTorch, under the names of the released files: the other side of checks
and measurements of `weft animate`. Written from the formulas of docs/models/sadtalker.md.

`Networks(options)` holds kp_extractor, mapping, generator, audio2exp and audio2pose; `options` has the keys of the deck's
table [sadtalker]. `render` makes the frames of a clip in the arrangement of the original, where each call of the generator
computes the source's features again for each lane, or with the source kept. The networks of faces are in face.py.
"""
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import spectral_norm

from . import weights

RELEASED = {"num_kp": 15, "kp_block_expansion": 32, "kp_max_features": 1024, "kp_num_blocks": 5, "kp_reshape_channel": 16384,
            "kp_reshape_depth": 16, "kp_scale_factor": 0.25, "kp_temperature": 0.1, "gen_block_expansion": 64,
            "gen_max_features": 512, "gen_num_down_blocks": 2, "gen_reshape_channel": 32, "gen_reshape_depth": 16,
            "gen_num_resblocks": 6, "motion_block_expansion": 32, "motion_max_features": 1024, "motion_num_blocks": 5,
            "motion_compress": 4, "mapping_coeff_nc": 70, "mapping_descriptor_nc": 1024, "mapping_layer": 3,
            "fan_num_modules": 4, "pose_style": 0, "size": 256, "batch_size": 2, "preprocess": "crop", "expression_scale": 1.0,
            "still": False}
# Widths at which a clip takes seconds on two cores; the decoder's are fixed in the original.
SMALL = {"kp_block_expansion": 8, "kp_max_features": 64, "kp_num_blocks": 4, "kp_reshape_channel": 512, "kp_reshape_depth": 8,
         "gen_max_features": 128, "gen_reshape_channel": 16, "gen_reshape_depth": 8, "gen_num_resblocks": 2,
         "motion_block_expansion": 8, "motion_max_features": 64, "motion_num_blocks": 3, "mapping_descriptor_nc": 64}
PI = 3.14  # the original's
HALF_WINDOW = 13  # frames before and after the one that a window of coefficients belongs to
POSE_BLOCK = 32  # frames that one call of the pose network makes


def grid(depth, height, width, like):
    """Coordinates x, y, z of a volume's cells, -1 to 1 with both ends: [D,H,W,3]."""
    z, y, x = (2 * torch.arange(n, dtype=like.dtype, device=like.device) / (n - 1) - 1 for n in (depth, height, width))
    return torch.stack(torch.broadcast_tensors(x, y[:, None], z[:, None, None]), -1)


class Block(nn.Module):
    """Convolution and batch norm; `shape` is what else happens, by name."""

    def __init__(self, inputs, outputs, dims, shape, slope=0.0):
        super().__init__()
        conv, norm = (nn.Conv2d, nn.BatchNorm2d) if dims == 2 else (nn.Conv3d, nn.BatchNorm3d)
        self.conv, self.norm = conv(inputs, outputs, 3, padding=1), norm(outputs)
        self.dims, self.shape, self.slope = dims, shape, slope

    def forward(self, x):
        if self.shape == "up":
            x = F.interpolate(x, scale_factor=(1, 2, 2))
        x = F.leaky_relu(self.norm(self.conv(x)), self.slope)
        if self.shape == "down":
            x = F.avg_pool2d(x, 2) if self.dims == 2 else F.avg_pool3d(x, (1, 2, 2))
        return x


class KpPredictor(nn.Module):
    def __init__(self, o):
        super().__init__()
        blocks, self.depth = o["kp_num_blocks"], o["kp_reshape_depth"]

        def width(i):
            return min(o["kp_max_features"], o["kp_block_expansion"] * 2 ** i)

        self.down_blocks = nn.Sequential()
        for i in range(blocks):
            self.down_blocks.add_module(f"down{i}", Block(3 if i == 0 else width(i), width(i + 1), 2, "down"))
        self.conv = nn.Conv2d(width(blocks), o["kp_reshape_channel"], 1)
        self.up_blocks = nn.Sequential()
        for i in range(blocks):
            self.up_blocks.add_module(f"up{i}", Block(width(blocks - i), width(blocks - i - 1), 3, "up"))

    def forward(self, x):
        x = self.conv(self.down_blocks(x))
        return self.up_blocks(x.unflatten(1, (-1, self.depth)))


class Blur(nn.Module):
    """A Gaussian filter, of which every 1/scale-th pixel is kept."""

    def __init__(self, scale):
        super().__init__()
        sigma = (1 / scale - 1) / 2
        size, self.step = 2 * round(4 * sigma) + 1, round(1 / scale)
        line = torch.exp(-(torch.arange(size) - (size - 1) / 2) ** 2 / (2 * sigma ** 2))
        kernel = line[:, None] * line
        self.register_buffer("weight", (kernel / kernel.sum()).expand(3, 1, size, size).clone())

    def forward(self, x):
        return F.conv2d(x, self.weight, padding=self.weight.shape[-1] // 2, groups=3)[:, :, ::self.step, ::self.step]


class KpDetector(nn.Module):
    """Picture [N,3,H,W], 0 to 1 -> canonical keypoints [N,K,3]."""

    def __init__(self, o):
        super().__init__()
        self.predictor = KpPredictor(o)
        self.kp = nn.Conv3d(min(o["kp_max_features"], o["kp_block_expansion"]), o["num_kp"], 3, padding=1)
        self.temperature = o["kp_temperature"]
        self.down = Blur(o["kp_scale_factor"]) if o["kp_scale_factor"] != 1 else nn.Identity()

    def forward(self, image):
        logits = self.kp(self.predictor(self.down(image)))
        heat = F.softmax(logits.flatten(2) / self.temperature, 2)
        return heat @ grid(*logits.shape[2:], logits).reshape(-1, 3)


class MappingNet(nn.Module):
    """Windows of coefficients [N,C,27] -> yaw, pitch, roll (bins), t [N,3], exp [N,3K]."""

    def __init__(self, o):
        super().__init__()
        wide = o["mapping_descriptor_nc"]
        self.first = nn.Sequential(nn.Conv1d(o["mapping_coeff_nc"], wide, 7))
        self.layers = o["mapping_layer"]
        for i in range(self.layers):
            setattr(self, f"encoder{i}", nn.Sequential(nn.LeakyReLU(0.1), nn.Conv1d(wide, wide, 3, dilation=3)))
        for name in ("roll", "pitch", "yaw"):
            setattr(self, f"fc_{name}", nn.Linear(wide, 66))
        self.fc_t, self.fc_exp = nn.Linear(wide, 3), nn.Linear(wide, 3 * o["num_kp"])

    def forward(self, windows):
        h = self.first(windows)
        for i in range(self.layers):
            h = getattr(self, f"encoder{i}")(h) + h[:, :, 3:-3]
        h = h.mean(2)
        return self.fc_yaw(h), self.fc_pitch(h), self.fc_roll(h), self.fc_t(h), self.fc_exp(h)


def degrees(bins):
    return F.softmax(bins, 1) @ torch.arange(bins.shape[1], dtype=bins.dtype, device=bins.device) * 3 - 99


def rotation(yaw, pitch, roll):
    """Degrees [N] -> [N,3,3]."""
    def turn(angle, axis):
        c, s = torch.cos(angle / 180 * PI), torch.sin(angle / 180 * PI)
        one, zero = torch.ones_like(c), torch.zeros_like(c)
        rows = {"x": (one, zero, zero, zero, c, -s, zero, s, c), "y": (c, zero, s, zero, one, zero, -s, zero, c),
                "z": (c, -s, zero, s, c, zero, zero, zero, one)}[axis]
        return torch.stack(rows, 1).view(-1, 3, 3)
    return turn(pitch, "x") @ turn(yaw, "y") @ turn(roll, "z")


def transformed(canonical, mapping, yaw=None, pitch=None, roll=None):
    """Keypoints [N,K,3] of canonical ones and the mapping net's outputs; degrees given here replace the predicted ones."""
    given = [degrees(m) if g is None else g for m, g in zip(mapping, (yaw, pitch, roll))]
    keypoints = canonical @ rotation(*given).transpose(1, 2)
    shift = mapping[3] * torch.tensor([0, 1, 0], dtype=canonical.dtype, device=canonical.device)
    return keypoints + shift[:, None] + mapping[4].view_as(canonical)


class Hourglass(nn.Module):
    def __init__(self, o, inputs):
        super().__init__()
        blocks = o["motion_num_blocks"]

        def width(i):
            return min(o["motion_max_features"], o["motion_block_expansion"] * 2 ** i)

        self.encoder, self.decoder = nn.Module(), nn.Module()
        self.encoder.down_blocks = nn.ModuleList(
            Block(inputs if i == 0 else width(i), width(i + 1), 3, "down") for i in range(blocks))
        self.decoder.up_blocks = nn.ModuleList(
            Block((1 if i == blocks - 1 else 2) * width(i + 1), width(i), 3, "up") for i in reversed(range(blocks)))
        self.channels = width(0) + inputs
        self.decoder.conv = nn.Conv3d(self.channels, self.channels, 3, padding=1)
        self.decoder.norm = nn.BatchNorm3d(self.channels)

    def forward(self, x):
        maps = [x]
        for block in self.encoder.down_blocks:
            maps.append(block(maps[-1]))
        x = maps.pop()
        for block in self.decoder.up_blocks:
            x = torch.cat([block(x), maps.pop()], 1)
        return F.relu(self.decoder.norm(self.decoder.conv(x)))


class DenseMotion(nn.Module):
    def __init__(self, o):
        super().__init__()
        few, self.candidates = o["motion_compress"], o["num_kp"] + 1
        self.compress, self.norm = nn.Conv3d(o["gen_reshape_channel"], few, 1), nn.BatchNorm3d(few)
        self.hourglass = Hourglass(o, self.candidates * (few + 1))
        self.mask = nn.Conv3d(self.hourglass.channels, self.candidates, 7, padding=3)
        self.occlusion = nn.Conv2d(self.hourglass.channels * o["gen_reshape_depth"], 1, 7, padding=3)

    def forward(self, feature, source, driving, kept=None):
        """Mask [N,K+1,D,h,w] before the threshold, occlusion [N,1,h,w], deformation [N,D,h,w,3]. `kept`: of keep()."""
        n, _, depth, height, width = feature.shape
        cells = grid(depth, height, width, feature)
        compressed, heat_source = kept or self.keep(feature, source)
        # A candidate for each keypoint, and the identity in front of all.
        moves = F.pad(source - driving, (0, 0, 1, 0))[:, :, None, None, None]
        motions = cells + moves
        moved = F.grid_sample(compressed.repeat_interleave(self.candidates, 0), motions.flatten(0, 1),
                              align_corners=False).unflatten(0, (n, -1))
        heat = F.pad(self.heat(driving, cells) - heat_source, (0, 0, 0, 0, 0, 0, 1, 0))
        x = self.hourglass(torch.cat([heat[:, :, None], moved], 2).flatten(1, 2))
        mask = F.softmax(self.mask(x), 1)
        strong = torch.where(mask < 1e-3, 0, mask)
        deformation = (strong[..., None] * motions).sum(1)
        return mask, torch.sigmoid(self.occlusion(x.flatten(1, 2))), deformation

    def keep(self, feature, source):
        cells = grid(*feature.shape[2:], feature)
        return F.relu(self.norm(self.compress(feature))), self.heat(source, cells)

    @staticmethod
    def heat(keypoints, cells):
        return torch.exp(-((cells - keypoints[:, :, None, None, None]) ** 2).sum(-1) / 0.02)


class ResBlock3d(nn.Module):
    def __init__(self, channels):
        super().__init__()
        for i in (1, 2):
            setattr(self, f"conv{i}", nn.Conv3d(channels, channels, 3, padding=1))
            setattr(self, f"norm{i}", nn.BatchNorm3d(channels))

    def forward(self, x):
        y = self.conv1(F.relu(self.norm1(x)))
        return self.conv2(F.relu(self.norm2(y))) + x


class Spade(nn.Module):
    def __init__(self, channels, guide):
        super().__init__()
        self.mlp_shared = nn.Sequential(nn.Conv2d(guide, 128, 3, padding=1), nn.ReLU())
        self.mlp_gamma = nn.Conv2d(128, channels, 3, padding=1)
        self.mlp_beta = nn.Conv2d(128, channels, 3, padding=1)

    def forward(self, x, guide):
        h = self.mlp_shared(F.interpolate(guide, size=x.shape[2:]))
        return F.instance_norm(x) * (1 + self.mlp_gamma(h)) + self.mlp_beta(h)


class SpadeBlock(nn.Module):
    def __init__(self, inputs, outputs, guide):
        super().__init__()
        middle = min(inputs, outputs)
        self.norm_0, self.norm_1 = Spade(inputs, guide), Spade(middle, guide)
        self.conv_0 = spectral_norm(nn.Conv2d(inputs, middle, 3, padding=1))
        self.conv_1 = spectral_norm(nn.Conv2d(middle, outputs, 3, padding=1))
        self.norm_s = None
        if inputs != outputs:
            self.norm_s = Spade(inputs, guide)
            self.conv_s = spectral_norm(nn.Conv2d(inputs, outputs, 1, bias=False))

    def forward(self, x, guide):
        y = self.conv_0(F.leaky_relu(self.norm_0(x, guide), 0.2))
        y = self.conv_1(F.leaky_relu(self.norm_1(y, guide), 0.2))
        return y + (x if self.norm_s is None else self.conv_s(self.norm_s(x, guide)))


class SpadeDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Conv2d(256, 512, 3, padding=1)
        for i in range(6):
            setattr(self, f"G_middle_{i}", SpadeBlock(512, 512, 256))
        self.up_0, self.up_1 = SpadeBlock(512, 256, 256), SpadeBlock(256, 64, 256)
        self.conv_img = nn.Conv2d(64, 3, 3, padding=1)

    def forward(self, guide):
        x = self.fc(guide)
        for i in range(6):
            x = getattr(self, f"G_middle_{i}")(x, guide)
        for block in (self.up_0, self.up_1):
            x = block(F.interpolate(x, scale_factor=2), guide)
        return torch.sigmoid(self.conv_img(F.leaky_relu(x, 0.2)))


class Generator(nn.Module):
    def __init__(self, o):
        super().__init__()
        most, steps = o["gen_max_features"], o["gen_num_down_blocks"]
        self.depth = o["gen_reshape_depth"]

        def width(i):
            return min(most, o["gen_block_expansion"] * 2 ** i)

        self.dense_motion_network = DenseMotion(o)
        self.first = Block(3, width(0), 2, "same")
        self.down_blocks = nn.ModuleList(Block(width(i), width(i + 1), 2, "down") for i in range(steps))
        self.second = nn.Conv2d(width(steps), most, 1)
        self.resblocks_3d = nn.Sequential()
        for i in range(o["gen_num_resblocks"]):
            self.resblocks_3d.add_module(f"3dr{i}", ResBlock3d(o["gen_reshape_channel"]))
        outputs = o["gen_block_expansion"] * 2 ** steps
        self.third, self.fourth = Block(most, outputs, 2, "same", slope=0.01), nn.Conv2d(outputs, outputs, 1)
        self.decoder = SpadeDecoder()

    def features(self, image):
        """Of the source [N,3,H,W]: [N,C,D,H/4,W/4]."""
        x = self.first(image)
        for block in self.down_blocks:
            x = block(x)
        return self.resblocks_3d(self.second(x).unflatten(1, (-1, self.depth)))

    def forward(self, image, source, driving, kept=None):
        """Frames [N,3,H,W] of a picture, or of what keep() gave for it; with mask, occlusion and deformation."""
        feature, motion = kept or (self.features(image), None)
        mask, occlusion, deformation = self.dense_motion_network(feature, source, driving, motion)
        warped = F.grid_sample(feature, deformation, align_corners=False)
        guide = self.fourth(self.third(warped.flatten(1, 2))) * occlusion
        return self.decoder(guide), mask, occlusion, deformation

    def keep(self, image, source, lanes):
        """What depends on the source alone, computed once, for so many lanes."""
        feature = self.features(image[:1])
        compressed, heat = self.dense_motion_network.keep(feature, source[:1])
        return (feature.expand(lanes, -1, -1, -1, -1),
                (compressed.expand(lanes, -1, -1, -1, -1), heat.expand(lanes, -1, -1, -1, -1)))


class AudioBlock(nn.Module):
    def __init__(self, inputs, outputs, kernel, stride, padding, residual=False):
        super().__init__()
        self.conv_block = nn.Sequential(nn.Conv2d(inputs, outputs, kernel, stride, padding), nn.BatchNorm2d(outputs))
        self.residual = residual

    def forward(self, x):
        y = self.conv_block(x)
        return F.relu(y + x if self.residual else y)


def audio_encoder():
    """Mel windows [N,1,80,16] -> [N,512,1,1]."""
    blocks, inputs = [], 1
    for outputs, stride, repeats in ((32, 1, 2), (64, (3, 1), 2), (128, 3, 2), (256, (3, 2), 1)):
        blocks.append(AudioBlock(inputs, outputs, 3, stride, 1))
        blocks += [AudioBlock(outputs, outputs, 3, 1, 1, residual=True) for _ in range(repeats)]
        inputs = outputs
    return nn.Sequential(*blocks, AudioBlock(256, 512, 3, 1, 0), AudioBlock(512, 512, 1, 1, 0))


class Audio2Exp(nn.Module):
    def __init__(self):
        super().__init__()
        self.audio_encoder, self.mapping1 = audio_encoder(), nn.Linear(512 + 64 + 1, 64)

    def forward(self, windows, ref, ratio):
        """Windows [T,80,16], the first 64 coefficients [T,64], blinking [T] -> expressions [T,64]; ten frames a call."""
        out = []
        for i in range(0, windows.shape[0], 10):
            x = self.audio_encoder(windows[i:i + 10, None]).flatten(1)
            out.append(self.mapping1(torch.cat([x, ref[i:i + 10], ratio[i:i + 10, None]], 1)))
        return torch.cat(out)


class ResidualConv(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv_block = nn.Sequential(
            nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1))
        self.conv_skip = nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return self.conv_block(x) + self.conv_skip(x)


class Upsample(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.upsample = nn.ConvTranspose2d(channels, channels, (2, 1), (2, 1))

    def forward(self, x):
        return self.upsample(x)


class ResUnet(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layer = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
                                         nn.Conv2d(32, 32, 3, padding=1))
        self.input_skip = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1))
        self.residual_conv_1, self.residual_conv_2 = ResidualConv(32, 64, (2, 1)), ResidualConv(64, 128, (2, 1))
        self.bridge = ResidualConv(128, 256, (2, 1))
        self.upsample_1, self.up_residual_conv1 = Upsample(256), ResidualConv(384, 128, 1)
        self.upsample_2, self.up_residual_conv2 = Upsample(128), ResidualConv(192, 64, 1)
        self.upsample_3, self.up_residual_conv3 = Upsample(64), ResidualConv(96, 32, 1)
        self.output_layer = nn.Sequential(nn.Conv2d(32, 1, 1), nn.Sigmoid())

    def forward(self, x):
        x1 = self.input_layer(x) + self.input_skip(x)
        x2 = self.residual_conv_1(x1)
        x3 = self.residual_conv_2(x2)
        x = self.bridge(x3)
        x = self.up_residual_conv1(torch.cat([self.upsample_1(x), x3], 1))
        x = self.up_residual_conv2(torch.cat([self.upsample_2(x), x2], 1))
        x = self.up_residual_conv3(torch.cat([self.upsample_3(x), x1], 1))
        return self.output_layer(x)


class PoseDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.classbias = nn.Parameter(torch.zeros(46, 64))
        self.linear_audio, self.pose_linear = nn.Linear(512, 6), nn.Linear(6, 6)
        self.MLP = nn.Module()
        self.MLP.L0, self.MLP.L1 = nn.Linear(6 + 64 + 192, 128), nn.Linear(128, 192)
        self.resunet = ResUnet()

    def forward(self, audio, ref, z, style):
        """Encoded windows [32,512], the source's pose [6], z [64] -> motions [32,6]."""
        x = torch.cat([ref, z + self.classbias[style], self.linear_audio(audio).flatten()])
        x = torch.sigmoid(self.MLP.L1(F.relu(self.MLP.L0(x))))
        return self.pose_linear(self.resunet(x.view(1, 1, POSE_BLOCK, 6))[0, 0])


class Audio2Pose(nn.Module):
    """Of the released network what inference runs; netG.encoder and netD_motion are left out."""

    def __init__(self):
        super().__init__()
        self.audio_encoder = nn.Module()
        self.audio_encoder.audio_encoder = audio_encoder()
        self.netG = nn.Module()
        self.netG.decoder = PoseDecoder()

    def forward(self, windows, ref, z, style):
        """Windows [T,80,16], source coefficients [70], z a row a call -> poses [T,6]."""
        frames, pose = windows.shape[0] - 1, ref[64:70]
        x = self.audio_encoder.audio_encoder(windows[1:, None]).flatten(1)
        motions = [self.netG.decoder(x[32 * i:32 * i + 32], pose, z[i], style) for i in range(frames // POSE_BLOCK)]
        rest = frames % POSE_BLOCK
        if rest:
            last = torch.cat([x[:1].expand(max(0, POSE_BLOCK - frames), -1), x[-POSE_BLOCK:]])
            motions.append(self.netG.decoder(last, pose, z[frames // POSE_BLOCK], style)[-rest:])
        return pose + torch.cat([torch.zeros_like(pose)[None], *motions])


class Networks(nn.Module):
    def __init__(self, options=()):
        super().__init__()
        self.options = RELEASED | dict(options)
        if self.options["preprocess"] in ("full", "extfull") and "mapping_coeff_nc" not in dict(options):
            self.options["mapping_coeff_nc"] = 73
        self.kp_extractor, self.mapping = KpDetector(self.options), MappingNet(self.options)
        self.generator = Generator(self.options)
        self.audio2exp, self.audio2pose = Audio2Exp(), Audio2Pose()


def load(model, arrays):
    """Sets a model from {released name: array}; parts of a released file that inference does not use may be there."""
    unused = ("audio2pose.netG.encoder.", "audio2pose.netD_motion.")
    return weights.load(model, arrays, may_have=lambda name: name.startswith(unused) or name.endswith("num_batches_tracked"))


def windows_of(rows):
    """Coefficients [T,C] -> windows [T,C,27]; rows outside are the first and the last."""
    t = torch.arange(rows.shape[0])[:, None] + torch.arange(-HALF_WINDOW, HALF_WINDOW + 1)
    return rows[t.clamp(0, rows.shape[0] - 1)].transpose(1, 2)


def lanes_of(values, lanes):
    """A clip's frames as the original lays them out, [lanes,T/lanes,...]: padded with the last; lane b has the b-th block."""
    more = -values.shape[0] % lanes
    return torch.cat([values, values[-1:].expand(more, *values.shape[1:])]).unflatten(0, (lanes, -1))


def render(networks, image, source_row, rows, angles=(None, None, None), keep_source=False, lanes=None):
    """Frames of a clip: picture [3,H,W], source coefficients [C], rows [T,C] (already scaled), degrees [T] or None for yaw, pitch
    and roll. A generator over steps: keypoints [lanes,K,3] and frames [lanes,3,H,W]; first the source's keypoints."""
    lanes = lanes or networks.options["batch_size"]
    images = image[None].expand(lanes, -1, -1, -1).contiguous()
    driving_windows = lanes_of(windows_of(rows), lanes)
    driving_angles = [None if a is None else lanes_of(a, lanes) for a in angles]
    source_window = source_row[None, :, None].expand(lanes, -1, 2 * HALF_WINDOW + 1)
    if keep_source:
        images, source_window = images[:1], source_window[:1]
    canonical = networks.kp_extractor(images)
    source = transformed(canonical, networks.mapping(source_window))
    kept = None
    if keep_source:
        kept = networks.generator.keep(images, source, lanes)
        canonical, source = canonical.expand(lanes, -1, -1), source.expand(lanes, -1, -1)
    yield source[0], None
    for i in range(driving_windows.shape[1]):
        step = [None if a is None else a[:, i] for a in driving_angles]
        driving = transformed(canonical, networks.mapping(driving_windows[:, i]), *step)
        yield driving, networks.generator(images, source, driving, kept)[0]


def in_order(steps, frames):
    """Values of the steps of render(), [lanes,...] each -> [frames,...] in the clip's order."""
    return torch.stack(steps, 1).flatten(0, 1)[:frames]
