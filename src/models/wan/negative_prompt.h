// What guidance steers away from where the deck asks for nothing else (Denoiser::clip_defaults).
#pragma once

namespace weft {

// The negative prompt that Wan2.1 is released with (wan/configs/shared_config.py), as it stands
// there: cleaning makes its commas ASCII ones. Roughly: garish colours, overexposed, static,
// blurred details, subtitles, a painting, a still, grey, worst quality, JPEG artefacts, ugly, extra
// fingers, badly drawn hands and faces, deformed, fused fingers, a motionless picture, a cluttered
// background, three legs, many people in the background, walking backwards.
inline constexpr const char* wan_negative_prompt =
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，"
    "低质量，JPEG压缩残留，丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，"
    "毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走";

}  // namespace weft
