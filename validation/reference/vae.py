"""Open-Sora's VAE of v1.2 and what it is trained for.

The 2D VAE is diffusers' AutoencoderKL; the temporal one, the losses and the PatchGAN are written from the formulas of
docs/models/video_vae.md (Temporal VAE, Losses, Discriminator). Module names give the released parameter names.
"""
import diffusers
import torch
from torch import nn
from torch.nn import functional as F

SCALING = 0.18215
BLOCKS = ("ResnetBlock2D", "ResBlock")  # which most of the time goes to: classes of diffusers and below


def spatial(channels, blocks, groups):
    """diffusers' AutoencoderKL in the deck's shape."""
    n = len(channels)
    return diffusers.AutoencoderKL(block_out_channels=tuple(channels), layers_per_block=blocks, norm_num_groups=groups,
                                   latent_channels=4, down_block_types=("DownEncoderBlock2D",) * n,
                                   up_block_types=("UpDecoderBlock2D",) * n)


class CausalConv(nn.Module):
    def __init__(self, c_in, c_out, k, stride=1, bias=True):
        super().__init__()
        self.pad = (k // 2,) * 4 + (k - 1 + (1 - stride), 0)
        self.conv = nn.Conv3d(c_in, c_out, k, (stride, 1, 1), bias=bias)

    def forward(self, x):
        return self.conv(F.pad(x, self.pad))


class ResBlock(nn.Module):
    def __init__(self, c_in, c_out, groups):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(groups, c_in), nn.GroupNorm(groups, c_out)
        self.conv1, self.conv2 = CausalConv(c_in, c_out, 3, bias=False), CausalConv(c_out, c_out, 3, bias=False)
        self.conv3 = CausalConv(c_in, c_out, 1, bias=False) if c_in != c_out else None

    def forward(self, x):
        y = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        return y + (x if self.conv3 is None else self.conv3(x))


class Encoder(nn.Module):
    def __init__(self, filters, blocks, multipliers, halves, groups):
        super().__init__()
        self.conv_in, c = CausalConv(4, filters, 3, bias=False), filters
        self.block_res_blocks, self.conv_blocks = nn.ModuleList(), nn.ModuleList()
        for i, m in enumerate(multipliers):
            self.block_res_blocks.append(nn.ModuleList(ResBlock(c if j == 0 else m * filters, m * filters, groups)
                                                       for j in range(blocks)))
            c = m * filters
            if i + 1 < len(multipliers):
                self.conv_blocks.append(CausalConv(c, c, 3, 2) if halves[i] else nn.Identity())
        self.res_blocks = nn.ModuleList(ResBlock(c, c, groups) for _ in range(blocks))
        self.norm1, self.conv2 = nn.GroupNorm(groups, c), CausalConv(c, 8, 1)

    def forward(self, x):
        x = self.conv_in(x)
        for i, level in enumerate(self.block_res_blocks):
            for block in level:
                x = block(x)
            if i < len(self.conv_blocks):
                x = self.conv_blocks[i](x)
        for block in self.res_blocks:
            x = block(x)
        return self.conv2(F.silu(self.norm1(x)))


class Decoder(nn.Module):
    def __init__(self, filters, blocks, multipliers, halves, groups):
        super().__init__()
        c = filters * multipliers[-1]
        self.conv1, self.halves = CausalConv(4, c, 3), halves
        self.res_blocks = nn.ModuleList(ResBlock(c, c, groups) for _ in range(blocks))
        levels, convs = [], []
        for i in reversed(range(len(multipliers))):
            out = multipliers[i] * filters
            levels.insert(0, nn.ModuleList(ResBlock(c if j == 0 else out, out, groups) for j in range(blocks)))
            c = out
            if i > 0:
                convs.insert(0, CausalConv(c, 2 * c, 3) if halves[i - 1] else nn.Identity())
        self.block_res_blocks, self.conv_blocks = nn.ModuleList(levels), nn.ModuleList(convs)
        self.norm1, self.conv_out = nn.GroupNorm(groups, c), CausalConv(c, 4, 3)

    def forward(self, x):
        x = self.conv1(x)
        for block in self.res_blocks:
            x = block(x)
        for i in reversed(range(len(self.block_res_blocks))):
            for block in self.block_res_blocks[i]:
                x = block(x)
            if i > 0 and self.halves[i - 1]:
                x = self.conv_blocks[i - 1](x)
                b, c, t, h, w = x.shape
                x = x.view(b, c // 2, 2, t, h, w).permute(0, 1, 3, 2, 4, 5).reshape(b, c // 2, 2 * t, h, w)
        return self.conv_out(F.silu(self.norm1(x)))


class Temporal(nn.Module):
    def __init__(self, filters, blocks, multipliers, halves, groups):
        super().__init__()
        shape = (filters, blocks, multipliers, halves, groups)
        self.encoder, self.decoder = Encoder(*shape), Decoder(*shape)
        self.quant_conv, self.post_quant_conv = CausalConv(8, 8, 1), CausalConv(4, 4, 1)
        self.factor = 2 ** sum(halves)

    def moments(self, x):
        return self.quant_conv(self.encoder(F.pad(x, (0,) * 4 + (-x.shape[2] % self.factor, 0))))

    def decode(self, z, frames):
        x = self.decoder(self.post_quant_conv(z))
        return x[:, :, x.shape[2] - frames:]


def patch_gan():
    """pix2pix's discriminator with three layers, as VQGAN and Open-Sora have it; BatchNorm as in training."""
    layers, c = [nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2)], 64
    for m, stride in ((2, 2), (4, 2), (8, 1)):
        layers += [nn.Conv2d(c, 64 * m, 4, stride, 1, bias=False), nn.BatchNorm2d(64 * m), nn.LeakyReLU(0.2)]
        c = 64 * m
    model = nn.Module()
    model.main = nn.Sequential(*layers, nn.Conv2d(c, 1, 4, 1, 1))
    return model.train()


def draw(moments, eps):
    mean, logvar = moments.chunk(2, 1)
    return mean + torch.exp(0.5 * logvar.clamp(-30, 20)) * eps


def losses(parts, x, noise, settings):
    """The loss of a clip x [1,3,T,H,W] and its terms; and the discriminator's, which is not in the sum, and its terms."""
    two_d, temporal, lpips, critic = parts
    frames = x.shape[2]
    flat = x[0].transpose(0, 1)  # [T,3,H,W]
    with torch.set_grad_enabled(not settings["freeze_spatial"]):
        z2 = SCALING * draw(two_d.quant_conv(two_d.encoder(flat)), noise[0])
    z2 = z2.transpose(0, 1)[None]
    moments = temporal.moments(z2)
    z = draw(moments, noise[1])
    z_rec = temporal.decode(z, frames)
    rec = two_d.decoder(two_d.post_quant_conv(z_rec[0].transpose(0, 1) / SCALING))
    pixel = (flat - rec).abs().sum() / frames
    perceptual = flat.new_zeros(())
    if lpips is not None:
        perceptual = settings["perceptual_weight"] * flat[0].numel() * lpips(flat, rec).sum() / frames
    terms = {}
    if settings["pixel_loss"]:
        mean, logvar = moments.chunk(2, 1)
        logvar = logvar.clamp(-30, 20)
        terms["pixel"], terms["perceptual"] = pixel, perceptual
        terms["kl"] = settings["kl_weight"] * 0.5 * (mean.square() + logvar.exp() - 1 - logvar).sum()
    if settings["latent_loss"]:
        terms["latent"] = (z2 - z_rec).abs().sum() / frames
    if settings["identity_loss"] and frames == 1:
        terms["identity"] = (z2 - z).abs().sum()
    critics = None
    if critic is not None:
        kind = settings["discriminator_loss"]
        generator = -critic.main(rec).mean() if kind != "non-saturating" else F.softplus(-critic.main(rec)).mean()
        last = temporal.decoder.conv_out.conv.weight
        of_pixels = torch.autograd.grad(pixel + perceptual, last, retain_graph=True)[0].norm()
        of_critic = torch.autograd.grad(generator, last, retain_graph=True)[0].norm()
        weight = (of_pixels / (of_critic + 1e-4)).clamp(0, 1e4).detach() * settings["discriminator_weight"]
        terms["adversarial"] = weight * generator
        real, fake = critic.main(flat), critic.main(rec.detach())
        if kind == "hinge":
            critics = 0.5 * (F.relu(1 - real).mean() + F.relu(1 + fake).mean())
        else:
            critics = 0.5 * (F.softplus(-real).mean() + F.softplus(fake).mean())
        extra = {"discriminator": critics, "logit_real": real.mean(), "logit_made": fake.mean()}
        if settings["lecam_weight"]:
            of_real, of_made = settings["averages"]
            extra["lecam"] = settings["lecam_weight"] * (F.relu(real.mean() - of_made).square()
                                                         + F.relu(of_real - fake.mean()).square())
        if settings["gradient_penalty_weight"]:
            at = flat.detach().requires_grad_()
            slopes = torch.autograd.grad(critic.main(at).sum(), at, create_graph=True)[0].flatten(1).norm(dim=1)
            extra["gradient_penalty"] = settings["gradient_penalty_weight"] * (slopes - 1).square().mean()
        critics = sum(v for name, v in extra.items() if not name.startswith("logit")), extra
    return sum(terms.values()), terms, critics


class Codec:
    """Both VAEs with random weights as whoever wants speed runs them: inference, channels last, micro-batches of four frames and
    chunks of 17. The released shape."""

    def __init__(self, dtype=torch.float32, device="cpu"):
        torch.manual_seed(1)
        to = {"device": device, "dtype": dtype}
        self.two_d = spatial([128, 256, 512, 512], 2, 32).eval().to(memory_format=torch.channels_last, **to)
        self.temporal = Temporal(128, 4, [1, 2, 2, 4], [False, True, True], 32).eval()
        self.temporal = self.temporal.to(memory_format=torch.channels_last_3d, **to)

    def encode(self, frames):
        """[T,3,H,W] -> [1,4,T',h,w], both posteriors drawn."""
        z2 = []
        for part in frames.split(4):
            moments = self.two_d.quant_conv(self.two_d.encoder(part))
            z2.append(SCALING * draw(moments, torch.randn_like(moments[:, :4])))
        z = []
        for chunk in torch.cat(z2).split(17):
            moments = self.temporal.moments(chunk.transpose(0, 1)[None].contiguous(memory_format=torch.channels_last_3d))
            z.append(draw(moments, torch.randn_like(moments[:, :4])))
        return torch.cat(z, 2)

    def decode(self, z, frames):
        """[1,4,T',h,w] -> [T,3,H,W]."""
        out, left = [], frames
        for chunk in z.split(5, 2):
            chunk = self.temporal.decode(chunk.contiguous(memory_format=torch.channels_last_3d), min(17, left))
            left -= 17
            for part in (chunk[0].transpose(0, 1) / SCALING).split(4):
                part = part.contiguous(memory_format=torch.channels_last)
                out.append(self.two_d.decoder(self.two_d.post_quant_conv(part)))
        return torch.cat(out)
