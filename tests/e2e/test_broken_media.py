"""Damaged footage through `weft ingest`: every file is read or named, none ends the job or hangs it.

Small videos and pictures of each kind are made by ffmpeg and changed by a seeded generator: bytes flipped, pieces cut out, doubled, filled or
exchanged, sizes in headers made huge. WEFT_BROKEN_MEDIA=300 tries so many instead of 40; WEFT_BROKEN_SEED another seed.
"""

import os
import random
import re
import subprocess
import unittest

from harness import WeftTest

COUNT = int(os.environ.get("WEFT_BROKEN_MEDIA", "40"))
SEED = int(os.environ.get("WEFT_BROKEN_SEED", "1"))
KINDS = {  # file: options of ffmpeg
    "a.mp4": "-pix_fmt yuv420p -c:v libx264 -g 4", "b.mp4": "-c:v mpeg4", "a.mkv": "-pix_fmt yuv420p -c:v libx264",
    "a.webm": "-pix_fmt yuv420p -c:v libvpx -deadline realtime", "a.avi": "-c:v mjpeg -pix_fmt yuvj420p", "b.avi": "-c:v ffv1",
    "a.ts": "-pix_fmt yuv420p -c:v mpeg2video", "a.mpg": "-pix_fmt yuv420p -c:v mpeg1video -r 25", "a.flv": "-c:v flv",
    "a.y4m": "-pix_fmt yuv420p", "a.gif": "", "a.png": "-frames:v 1", "a.jpg": "-frames:v 1 -pix_fmt yuvj420p",
    "a.tiff": "-frames:v 1", "a.bmp": "-frames:v 1", "a.webp": "-frames:v 1", "a.mxf": "-pix_fmt yuv420p -c:v mpeg2video -r 25",
    "a.ogv": "-pix_fmt yuv420p -c:v libtheora", "a.wmv": "-c:v wmv2"}


def mutate(data, other, rng):
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        if not data:
            break
        at = rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(min(len(data), 400))
        size = rng.choice((1, 2, 4, 8, 64, 1000))
        how = rng.randrange(7)
        if how == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            data[at:at + size] = rng.randbytes(size)
        elif how == 2:
            del data[at:at + size]
        elif how == 3:
            data[at:at] = data[at:at + size]
        elif how == 4:  # a size or a number in a header
            data[at:at + 4] = rng.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\x80\0\0\0"))
        elif how == 5:
            del data[at:]
        else:
            from_there = rng.randrange(len(other))
            data[at:at + size] = other[from_there:from_there + size]
    return bytes(data)


class BrokenMedia(WeftTest):
    def test_every_file_is_read_or_named(self):
        rng = random.Random(SEED)
        whole = {}
        for name, options in KINDS.items():
            made = subprocess.run(["ffmpeg", "-v", "error", "-f", "lavfi", "-i", "testsrc2=s=64x48:r=8:d=1", *options.split(),
                                   str(self.dir / name)], stdin=subprocess.DEVNULL, capture_output=True)
            if made.returncode == 0:  # not every FFmpeg has every encoder
                whole[name] = (self.dir / name).read_bytes()
        self.assertGreater(len(whole), 8)
        (self.dir / "broken").mkdir()
        names = []
        for i in range(COUNT):
            name = sorted(whole)[i % len(whole)]
            names.append(f"{i:04d}_{name}")
            (self.dir / "broken" / names[-1]).write_bytes(mutate(whole[name], whole[rng.choice(sorted(whole))], rng))
        good = sorted(whole)
        (self.dir / "list.csv").write_text("path\n" + "".join(f"broken/{n}\n" for n in names) +
                                           "".join(f"{n}\n" for n in good))
        job = self.weft("ingest", "deck.toml", "ingest.inputs=['list.csv']", "ingest.output=clips.h5", "ingest.frames=[1,3]",
                        "ingest.height=16", "ingest.width=16", "media.max_megapixels=4", "media.max_frames=500",
                        ranks=2, timeout=600)
        for name in good:  # what is whole is read
            self.assertNotRegex(job.err, rf"WARN: .*[ /]{re.escape(name)}\b")
        counted = re.search(r"(\d+) videos and (\d+) pictures: (\d+) broken, (\d+) without a clip", job.err)
        self.assertTrue(counted, job.err)
        self.assertEqual(int(counted[1]) + int(counted[2]), COUNT + len(good))
        said = [line for line in job.err.splitlines() if "WARN: " in line and "captions: 0" not in line]
        self.assertEqual(len(said), int(counted[3]) + int(counted[4]), job.err)
        self.assertGreater(int(counted[3]), 0)
        self.weft("inspect", "clips.h5", ranks=0)
        self.assert_gone(job)


if __name__ == "__main__":
    unittest.main()
