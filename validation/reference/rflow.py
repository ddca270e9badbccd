"""Rectified flow: training loss and sampler. s = tau/1000 is 1 at pure noise and 0 at data; the network predicts
x0 - noise."""
import torch

STEPS = 1000.0


def transform_timestep(tau, height, width, num_frames, scale=1.0, clamp_frames=True):
    """Moves tau towards noise for large or long clips. height, width, num_frames are the pixel clip's, [B].

    The released code makes the frame factor 0 for 2 to 16 frames, so that tau becomes 0 (and 0/0 at 1000);
    clamp_frames=False brings that back."""
    u = tau / STEPS
    space = torch.sqrt(height.to(tau) * width.to(tau) / (512 * 512))
    if int(num_frames[0]) == 1:  # element 0 decides for the batch, as released
        frames = torch.ones_like(tau)
    else:
        frames = torch.div(num_frames.to(tau), 17, rounding_mode="floor") * 5
        if clamp_frames:
            frames = frames.clamp(min=1)
    r = space * torch.sqrt(frames) * scale
    return STEPS * r * u / (1 + (r - 1) * u)


def losses(model, x, noise, timestep, x_mask=None, **conditions):
    """Loss per sample [B]. x clean latent, noise like x, timestep [B] in [0,1000]; frames with x_mask False are shown
    clean and do not count."""
    s = (timestep / STEPS).view(-1, 1, 1, 1, 1)
    noisy = torch.lerp(x, noise, s.to(x))
    if x_mask is not None:
        frames = x_mask[:, None, :, None, None]
        noisy = torch.where(frames, noisy, x)
    out = model(noisy, timestep, x_mask=x_mask, **conditions)
    velocity = out[:, :x.shape[1]]
    square = (velocity - (x - noise)).square()
    if x_mask is None:
        return square.flatten(1).mean(1)
    kept = (square * frames).flatten(1).sum(1)
    return kept / (x_mask.sum(1) * (x[0].numel() // x.shape[2]))


@torch.no_grad()
def sample(model, z, y, mask, fps, height, width, num_frames, steps, cfg_scale, use_timestep_transform=True,
           clamp_frames=True, edit=None, generator=None):
    """Euler steps from noise z [B,C,T,H,W] to a clip. The null caption stands in for the unconditional half, under
    the prompt's own token mask. `edit` [B,T]: 1 = generate, 0 = keep z's frame, between = regenerate from that
    level of noise on."""
    b, channels = z.shape[:2]
    null = model.y_embedder.y_embedding[None, None].expand(b, -1, -1, -1).to(y)
    y2 = torch.cat((y, null[:, :, :y.shape[2]]))
    taus = [torch.full((b,), (1 - i / steps) * STEPS, dtype=z.dtype) for i in range(steps)]
    if use_timestep_transform:
        taus = [transform_timestep(t, height, width, num_frames, clamp_frames=clamp_frames) for t in taus]
    seen = edit == 1 if edit is not None else None
    for i, tau in enumerate(taus):
        active = x_mask = None
        if edit is not None:
            kept = z.clone()
            active = edit * STEPS >= tau[:, None]
            s = (tau / STEPS).view(-1, 1, 1, 1, 1)
            fresh = torch.lerp(kept, torch.randn(z.shape, generator=generator, dtype=z.dtype), s)
            z = torch.where((active & ~seen)[:, None, :, None, None], fresh, kept)
            seen, x_mask = active, active.repeat(2, 1)
        out = model(torch.cat((z, z)), tau.repeat(2), y2, mask=mask, x_mask=x_mask, fps=fps, height=height,
                    width=width)[:, :channels]
        cond, uncond = out.to(z.dtype).chunk(2)
        velocity = uncond + cfg_scale * (cond - uncond)
        following = taus[i + 1] if i + 1 < steps else torch.zeros_like(tau)
        z = z + velocity * ((tau - following) / STEPS).view(-1, 1, 1, 1, 1)
        if edit is not None:
            z = torch.where(active[:, None, :, None, None], z, kept)
    return z
