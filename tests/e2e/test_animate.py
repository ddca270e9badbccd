"""weft animate with networks drawn at random: the same clips at any number of ranks and after a kill;
lists, modes, references, the enhancer; and what becomes of input that is not as it should be. Networks that are drawn
find no faces, so landmarks are given; where a detector is wanted, its heads are set so that it finds them."""

import json
import math
import os
import shutil
import signal
import struct
import time
import unittest
import wave
import zlib

from harness import WeftTest, make_video, write_safetensors
from test_evaluate import chunk, png

# The decoder's widths are fixed: at 32 pixels a frame takes some tenths of a second.
DECK = """
[run]
threads = 1
[model]
name = "sadtalker"
[sadtalker]
size = 32
kp_block_expansion = 4
kp_max_features = 16
kp_num_blocks = 2
kp_reshape_channel = 64
kp_reshape_depth = 4
gen_max_features = 16
gen_reshape_channel = 4
gen_reshape_depth = 4
gen_num_resblocks = 1
motion_block_expansion = 4
motion_max_features = 16
motion_num_blocks = 2
mapping_descriptor_nc = 16
fan_num_modules = 1
[animate]
output = "out"
weights = "random:1"
mapping_weights = "random:2"
mapping_full_weights = "random:3"
detector_weights = "random:4"
landmark_weights = "random:5"
gfpgan_weights = "random:6"
gfpgan_channels = 32
parsenet_channels = 4
parsenet_weights = "random:7"
landmarks = "points.csv"
piece = 2
"""


def face_points(x, y, width):
    """68 landmarks of a face seen from the front, `width` pixels wide around (x, y)."""
    def line(count, x0, y0, x1, y1):
        return [(x0 + (x1 - x0) * i / (count - 1), y0 + (y1 - y0) * i / (count - 1)) for i in range(count)]

    def ring(count, cx, cy, rx, ry):
        return [(cx - rx * math.cos(2 * math.pi * i / count), cy - ry * math.sin(2 * math.pi * i / count)) for i in range(count)]
    jaw = [(-0.5 * math.cos(math.pi * i / 16), -0.1 + 0.65 * math.sin(math.pi * i / 16)) for i in range(17)]
    points = (jaw + line(5, -0.4, -0.32, -0.1, -0.34) + line(5, 0.1, -0.34, 0.4, -0.32) + line(4, 0, -0.2, 0, 0.05)
              + line(5, -0.1, 0.1, 0.1, 0.1) + ring(6, -0.22, -0.18, 0.08, 0.03) + ring(6, 0.22, -0.18, 0.08, 0.03)
              + ring(12, 0, 0.3, 0.18, 0.07) + ring(8, 0, 0.3, 0.12, 0.03))
    return [(x + width * u, y + width * v) for u, v in points]


def drawn_face(width, height):
    """A face as pixel(x, y): skin, eyes, mouth, before a sloped ground."""
    cx, cy, r = width / 2, height / 2, min(width, height) * 0.36

    def pixel(x, y):
        u, v = (x - cx) / r, (y - cy) / r
        if math.hypot(u / 0.95, v / 1.25) > 1:
            return 40 + 2 * x % 90, 70 + y % 100, 120
        if min(math.hypot(u - 0.4, v + 0.3), math.hypot(u + 0.4, v + 0.3)) < 0.13:
            return 30, 30, 40
        if abs(v - 0.6) < 0.1 and abs(u) < 0.35:
            return 160, 50, 60
        return 210 - int(30 * v), 180, 150
    return pixel


def write_wav(path, seconds, rate=16000, channels=1, silent=False):
    count = int(seconds * rate)
    samples = [0 if silent else int(9000 * math.sin(2 * math.pi * (180 + 40 * math.sin(i / rate * 5)) * i / rate)
                                    * abs(math.sin(3 * i / rate))) for i in range(count)]
    with wave.open(str(path), "wb") as w:
        w.setnchannels(channels)
        w.setsampwidth(2)
        w.setframerate(rate)
        w.writeframes(b"".join(struct.pack("<h", s) * channels for s in samples))


def write_detector(path, levels, points=()):
    """RetinaFace whose weights are all 0 but for the biases of its heads: on each of `levels` (priors of 16, 64 and 256
    pixels) every prior is a face, whose five points lie at `points`, in pixels from its middle."""
    shapes = {}

    def conv_norm(conv, norm, out, into, kernel):
        shapes[f"{conv}.weight"] = (out, into, kernel, kernel)
        shapes.update({f"{norm}.{n}": (out,) for n in ("weight", "bias", "running_mean", "running_var")})
    conv_norm("body.conv1", "body.bn1", 64, 3, 7)
    into = 64
    for layer, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
        for block in range(blocks):
            name = f"body.layer{layer}.{block}."
            for i, (out, before, kernel) in enumerate(((width, into, 1), (width, width, 3), (4 * width, width, 1)), 1):
                conv_norm(f"{name}conv{i}", f"{name}bn{i}", out, before, kernel)
            if block == 0:
                conv_norm(f"{name}downsample.0", f"{name}downsample.1", 4 * width, into, 1)
            into = 4 * width
    for i, channels in enumerate((512, 1024, 2048), 1):
        conv_norm(f"fpn.output{i}.0", f"fpn.output{i}.1", 256, channels, 1)
        for name, out, before in (("conv3X3", 128, 256), ("conv5X5_1", 64, 256), ("conv5X5_2", 64, 64), ("conv7X7_2", 64, 64),
                                  ("conv7x7_3", 64, 64)):
            conv_norm(f"ssh{i}.{name}.0", f"ssh{i}.{name}.1", out, before, 3)
    for i in (1, 2):
        conv_norm(f"fpn.merge{i}.0", f"fpn.merge{i}.1", 256, 256, 3)
    values = {}
    for level in range(3):
        side = (16, 64, 256)[level]
        offsets = [v / (0.1 * side) for point in points for v in point] or [0.0] * 10
        for head, biases in (("ClassHead", (-5, 5, 5, -5) if level in levels else (5, -5, 5, -5)), ("BboxHead", (0,) * 8),
                             ("LandmarkHead", 2 * offsets)):
            shapes[f"{head}.{level}.conv1x1.weight"] = (len(biases), 256, 1, 1)
            shapes[f"{head}.{level}.conv1x1.bias"] = (len(biases),)
            values[f"{head}.{level}.conv1x1.bias"] = biases
    header, at = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + 4 * math.prod(shape)]}
        at += 4 * math.prod(shape)
    text = json.dumps(header).encode()
    with open(path, "wb") as f:  # zeros take no room
        f.write(struct.pack("<Q", len(text)) + text)
        begin = f.tell()
        f.truncate(begin + at)
        for name, biases in values.items():
            f.seek(begin + header[name]["data_offsets"][0])
            f.write(struct.pack(f"<{len(biases)}f", *biases))


class Animate(WeftTest):
    def setUp(self):
        super().setUp()
        (self.dir / "deck.toml").write_text(DECK)
        (self.dir / "face.png").write_bytes(png(64, 56, drawn_face(64, 56)))
        points = face_points(32, 28, 36)
        (self.dir / "points.csv").write_text("".join(f"{x:.3f},{y:.3f}\n" for x, y in points))
        write_wav(self.dir / "a.wav", 0.2)   # 5 frames
        write_wav(self.dir / "b.wav", 0.12)  # 3

    def animate(self, output, *overrides, ranks=0, expect=0, **options):
        return self.weft("animate", "deck.toml", f"animate.output={output}", *overrides, ranks=ranks, expect=expect,
                         **options)

    def one(self, output, *overrides, **options):
        return self.animate(output, "animate.picture=face.png", "animate.speech=a.wav", *overrides, **options)

    def clip(self, output, name="face_a"):
        return (self.dir / output / f"{name}.mp4").read_bytes()

    def clips(self, output):
        return {p.stem: p.read_bytes() for p in (self.dir / output).glob("*.mp4")}

    def report(self, output):
        return json.loads((self.dir / output / "animate_report.json").read_text())

    def frames(self, output, name="face_a"):
        return [p.read_bytes() for p in sorted((self.dir / output / f"{name}_frames").iterdir())]


class Frames(Animate):
    def test_they_are_those_of_the_clip(self):
        kept = ("animate.keep_frames=true", "animate.name=x")
        self.one("out", *kept)
        wanted = self.frames("out", "x")
        self.assertEqual(len(wanted), 5)
        self.assertEqual(self.cited("out/cite.bib"), ["weft", "sadtalker"])
        self.assertEqual(self.summary("out")["speed"]["items"], 5)
        self.assertRegex(self.one("out", *kept).err, r"(\d+) of \1 parts made before")
        # One that was cut, and one that is gone.
        frame = self.dir / "out/x_frames/000001.png"
        frame.write_bytes(frame.read_bytes()[:60])
        (self.dir / "out/x_frames/000003.png").unlink()
        self.one("out", *kept)
        self.assertEqual(self.frames("out", "x"), wanted)
        # A shorter speech; what is no frame stays.
        (self.dir / "out/x_frames/notes.txt").write_text("mine")
        (self.dir / "out/x_frames/7.png").write_text("mine")
        self.one("out", *kept, "animate.speech=b.wav")
        self.assertEqual(sorted(os.listdir(self.dir / "out/x_frames")),
                         ["000000.png", "000001.png", "000002.png", "7.png", "notes.txt"])

    def test_none_replaces_the_picture(self):
        folder = self.dir / "out/x_frames"
        folder.mkdir(parents=True)
        shutil.copy(self.dir / "face.png", folder / "000000.png")
        before = (folder / "000000.png").read_bytes()
        job = self.animate("out", "animate.picture=out/x_frames/000000.png", "animate.speech=a.wav", "animate.name=x",
                           "animate.keep_frames=true", expect=None)
        self.refused(job, 2, "a result would replace the input out/x_frames/000000.png", "animate.output")
        self.assertEqual((folder / "000000.png").read_bytes(), before)


class Clips(Animate):
    def test_a_list_at_any_number_of_ranks(self):
        (self.dir / "list.csv").write_text(
            "picture,speech,name,expression_scale,still,input_yaw,seed\n"
            'face.png,a.wav,,,,,\nface.png,b.wav,"slow, still",1.5,true,,4\nface.png,b.wav,,,,"0 20",\n')
        job = self.animate("one", "animate.input=list.csv")
        wanted = self.clips("one")
        self.assertEqual(set(wanted), {"face_a", "slow, still", "face_b"})
        self.assertEqual(len(set(wanted.values())), 3)
        self.assertIn("clips     3 of 3 done", job.err)
        report = self.report("one")
        self.assertEqual((report["clips"], report["clips_there"], report["frames"]), (3, 3, 11))
        self.weft("report", "one", ranks=0)
        page = (self.dir / "one/report.html").read_text()
        self.assertEqual(page.count("data:video/mp4;base64,"), 3)
        shown = {c["name"]: c["line"] for c in self.page_data("one/report.html")["galleries"][0]["clips"]}
        self.assertEqual((shown["face_a"]["picture"], shown["face_a"]["speech"]), ("face.png", "a.wav"))
        self.assertFalse((self.dir / "one/.work").exists())
        # The same as JSON lines, in pieces over three ranks.
        (self.dir / "list.jsonl").write_text("".join(json.dumps(j) + "\n" for j in (
            {"picture": "face.png", "speech": "a.wav"},
            {"picture": "face.png", "speech": "b.wav", "name": "slow, still", "expression_scale": 1.5, "still": True, "seed": 4},
            {"picture": "face.png", "speech": "b.wav", "input_yaw": [0, 20]})))
        job = self.animate("two", "animate.input=list.jsonl", "animate.plan=frames", ranks=3)  # obsolete, and ignored
        self.assertIn("animate.plan", job.err)
        self.assertEqual(self.clips("two"), wanted)
        self.assertEqual(sum(r["frames"] for r in self.report("two")["ranks"]), 11)
        # Nothing is left to do.
        self.assertIn("parts made before", self.animate("two", "animate.input=list.jsonl").err)

    def test_a_clip_does_not_need_its_pictures_for_the_report(self):
        (self.dir / "one").mkdir()
        (self.dir / "one/references").write_text("in the way")
        job = self.one("one")
        self.assertRegex(job.err, "WARN: face_a: weft report will not show its picture face.png: cannot make the folder .*references")
        self.assertEqual(set(self.clips("one")), {"face_a"})
        self.assertEqual((self.dir / "one/references").read_text(), "in the way")

    def test_paths_of_a_list_begin_in_its_folder(self):
        (self.dir / "in").mkdir()
        shutil.copy(self.dir / "face.png", self.dir / "in/other.png")
        (self.dir / "in/list.csv").write_text("Picture, speech\nother.png, ../a.wav\ngone.png, ../a.wav\n")
        job = self.animate("one", "animate.input=in/list.csv", expect=3)
        self.assertIn("WARN: 1 of 4 files is not there: in/gone.png", job.err)
        self.assertEqual(set(self.clips("one")), {"other_a"})

    def test_one_clip_is_shared_by_all_ranks(self):
        self.one("one", "animate.keep_frames=true")
        self.one("two", "animate.keep_frames=true", ranks=2)
        self.assertEqual(self.clip("two"), self.clip("one"))
        names = sorted(p.name for p in (self.dir / "two/face_a_frames").iterdir())
        self.assertEqual(names, [f"{i:06d}.png" for i in range(5)])
        self.assertEqual(self.frames("two"), self.frames("one"))
        # Another seed is another clip; a damaged one is made anew.
        self.one("two", "animate.seed=5", ranks=2)
        self.assertNotEqual(self.clip("two"), self.clip("one"))
        good = self.clip("one")
        damaged = bytearray(good)
        damaged[len(damaged) // 2] ^= 1
        (self.dir / "one/face_a.mp4").write_bytes(damaged)
        self.one("one", "animate.keep_frames=true")
        self.assertEqual(self.clip("one"), good)

    def test_modes(self):
        write_wav(self.dir / "a.wav", 0.05)
        clips = []
        for mode in ("extcrop", "resize", "full", "extfull"):
            self.one(mode, f"sadtalker.preprocess={mode}", "animate.keep_frames=true")
            frame = next((self.dir / mode / "face_a_frames").iterdir()).read_bytes()
            clips.append(struct.unpack(">II", frame[16:24]))
        self.assertEqual(clips[0][0], 32)
        self.assertEqual(clips[1], (32, 28))  # the picture's aspect
        self.assertEqual(clips[2:], [(64, 56)] * 2)  # the picture

    def test_the_plan_of_a_job(self):
        job = self.weft("plan", "deck.toml", "--job", "animate", "--gpus", "3", "--memory", "8", "--json", "plan.json",
                        "animate.picture=face.png", "animate.speech=a.wav", ranks=0)
        plan = json.loads((self.dir / "plan.json").read_text())
        self.assertGreater(plan["seconds"], 0)
        self.assertEqual(plan["frames"], 5)
        self.assertIn("frames/s", job.out)
        self.refused(self.weft("plan", "deck.toml", "--job", "animate", "--memory", "0.1", "animate.picture=face.png",
                               "animate.speech=a.wav", ranks=0, expect=None), 2, "face_a needs", "GB of weights")

    def test_given_coefficients(self):
        rows = [[0.01 * (t + i) for i in range(70)] for t in range(3)]
        (self.dir / "rows.json").write_text(json.dumps(rows))
        write_safetensors(self.dir / "rows.safetensors",
                          {"coeff_3dmm": ("F32", (3, 73), b"".join(struct.pack("<73f", *r, 1, 2, 3) for r in rows))})
        self.one("json", "animate.coefficients=rows.json")
        self.one("tensors", "animate.coefficients=rows.safetensors")
        self.assertEqual(self.clip("json"), self.clip("tensors"))
        self.assertEqual(self.report("json")["frames"], 3)


class Faces(Animate):
    """A detector that finds what it is told to, and landmarks of a network drawn at random."""

    def setUp(self):
        super().setUp()
        (self.dir / "deck.toml").write_text(DECK.replace('landmarks = "points.csv"\n', "")
                                            .replace('"random:4"', '"faces.safetensors"'))
        write_wav(self.dir / "a.wav", 0.08)

    def test_none_one_and_several(self):
        write_detector(self.dir / "faces.safetensors", ())
        job = self.one("none", expect=3)
        self.assertIn("failed    face_a: ", job.err)
        self.assertIn("face.png", job.err)
        self.assertEqual(self.clips("none"), {})
        write_detector(self.dir / "faces.safetensors", (2,))
        job = self.one("one")
        self.assertNotIn("faces in face.png", job.err)
        write_detector(self.dir / "faces.safetensors", (1,))
        job = self.one("several", ranks=2)
        self.assertEqual(len(set(self.clips("several"))), 1)
        self.assertRegex(job.err, "WARN.* face_a: [0-9]+ faces in face.png")

    def test_a_picture_that_cannot_be_read_fails_alone(self):
        write_detector(self.dir / "faces.safetensors", (2,))
        whole = (self.dir / "face.png").read_bytes()
        for name, content in (("cut", whole[:len(whole) // 2]), ("empty", b""), ("text", b"no picture\n" * 20)):
            (self.dir / f"{name}.png").write_bytes(content)
        (self.dir / "folder.png").mkdir()
        (self.dir / "list.csv").write_text("picture,speech\n" + "".join(
            f"{name}.png,a.wav\n" for name in ("cut", "empty", "text", "folder", "face")))
        job = self.animate("alone", "animate.input=list.csv", expect=3)
        self.assertIn("4 of 5 clips failed", job.err)
        for name in ("cut", "empty", "text", "folder"):
            self.assertRegex(job.err, f"failed    {name}_a: .*{name}.png")
        self.assertEqual(list(self.clips("alone")), ["face_a"])

    def test_reference_videos(self):
        write_detector(self.dir / "faces.safetensors", (2,))
        write_wav(self.dir / "a.wav", 0.12)
        make_video(self.dir / "ref.mp4", "testsrc2=duration=0.2:rate=10:size=64x48")
        for name, keys in (("plain", ()), ("eyes", ("animate.ref_eyeblink=ref.mp4",)), ("pose", ("animate.ref_pose=ref.mp4",)),
                           ("still", ("sadtalker.still=true",))):
            self.one(name, "animate.keep_frames=true", *keys)
        # Networks that are drawn turn the head by little: the pictures differ where the encoder's need not.
        frames = {n: tuple(self.frames(n)) for n in ("plain", "eyes", "pose", "still")}
        self.assertEqual({len(f) for f in frames.values()}, {3})
        self.assertEqual(len(set(frames.values())), 4)

    def test_the_enhancer_keeps_or_doubles_the_size(self):
        points = [(-5, -3), (5, -3), (0, 1), (-4, 5), (4, 5)]
        write_detector(self.dir / "faces.safetensors", (2,), points)
        write_wav(self.dir / "a.wav", 0.05)
        self.one("plain", "animate.keep_frames=true")
        sizes = []
        for scale in (1, 2):
            job = self.one(f"x{scale}", "animate.enhancer=gfpgan", f"animate.enhancer_scale={scale}", "animate.keep_frames=true")
            self.assertRegex(job.err, "gfpgan    restored a face in ([1-9][0-9]*) of \\1 frames?")
            sizes.append(struct.unpack(">II", (self.dir / f"x{scale}/face_a_frames/000000.png").read_bytes()[16:24]))
        plain = (self.dir / "plain/face_a_frames/000000.png").read_bytes()
        size = struct.unpack(">II", plain[16:24])
        self.assertEqual(sizes, [size, (2 * size[0], 2 * size[1])])
        self.assertNotEqual((self.dir / "x1/face_a_frames/000000.png").read_bytes(), plain)


class Restarts(Animate):
    def test_killed_it_goes_on_and_damaged_segments_are_made_anew(self):
        """Segments are an item's parts, which no other job has. Stops: tests/jobs/engine, test_generate.py."""
        self.one("one")
        job = self.start("animate", "deck.toml", "animate.output=two", "animate.picture=face.png", "animate.speech=a.wav",
                         ranks=2)
        while job.process.poll() is None and not list((self.dir / "two").glob(".work/*/*.mp4")):
            time.sleep(0.002)
        job.kill()
        job.wait()
        for segment in (self.dir / "two/.work/face_a").glob("*.mp4"):
            segment.write_bytes(segment.read_bytes()[:-9])
        self.one("two", ranks=2)
        self.assertEqual(self.clip("two"), self.clip("one"))

    def test_a_death_fails_no_good_clip(self):
        """A rank dies with all parts of a clip in hand: they are made one at a time, and the clip is joined after them."""
        (self.dir / "list.csv").write_text("picture,speech,name\n" + "".join(f"face.png,a.wav,clip{i}\n" for i in range(4)))
        self.animate("one", "animate.input=list.csv")
        job = self.start("animate", "deck.toml", "animate.output=two", "animate.input=list.csv", ranks=2,
                         shim=f"held_names={self.dir / 'never'}:.0000002.mp4")  # each rank in the middle of a clip
        self.until(job, lambda: len({p.parent for p in (self.dir / "two").glob(".work/*/*.mp4")}) > 1)
        os.kill(job.ranks()[1], signal.SIGKILL)
        job.wait()
        self.assert_gone(job)
        job = self.animate("two", "animate.input=list.csv", ranks=2)
        self.assertRegex(job.err, "WARN.* in progress when a rank died: .*clip")
        self.assertEqual(self.clips("two"), self.clips("one"))


class BadInput(Animate):
    def test_each_is_said_once_and_the_others_are_made(self):
        def gray(kind, pixel):
            rows = b"".join(b"\0" + b"".join(bytes(pixel(x, y)) for x in range(64)) for y in range(56))
            return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 64, 56, 8, kind, 0, 0, 0))
                    + (chunk(b"PLTE", bytes(range(256)) * 3) if kind == 3 else b"")
                    + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))
        face = drawn_face(64, 56)
        (self.dir / "grey.png").write_bytes(gray(0, lambda x, y: face(x, y)[:1]))
        (self.dir / "palette.png").write_bytes(gray(3, lambda x, y: face(x, y)[:1]))
        (self.dir / "rgba.png").write_bytes(gray(6, lambda x, y: (*face(x, y), 128)))
        (self.dir / "small.png").write_bytes(png(20, 20, drawn_face(20, 20)))
        (self.dir / "small.csv").write_text("".join(f"{x},{y}\n" for x, y in face_points(10, 10, 12)))
        (self.dir / "text.png").write_text("no picture")
        (self.dir / "rows.mat").write_bytes(b"MATLAB 5.0 MAT-file")
        (self.dir / "rows.json").write_text("[[1, 2], [3, 4]]")
        (self.dir / "few.csv").write_text("1,2\n3,4\n")
        write_wav(self.dir / "frame.wav", 0.05)
        write_wav(self.dir / "short.wav", 0.03)
        write_wav(self.dir / "silent.wav", 0.08, silent=True)
        write_wav(self.dir / "stereo.wav", 0.08, rate=48000, channels=2)
        make_video(self.dir / "mute.mp4", "testsrc2=duration=1:rate=5:size=64x48")
        good = [("stereo", {"speech": "stereo.wav"}), ("silent", {"speech": "silent.wav"}), ("frame", {"speech": "frame.wav"}),
                ("grey", {"picture": "grey.png"}), ("palette", {"picture": "palette.png"}), ("rgba", {"picture": "rgba.png"}),
                ("small", {"picture": "small.png", "landmarks": "small.csv"})]
        bad = [("short", {"speech": "short.wav"}, "40 ms"), ("lost", {"picture": "lost.png"}, "lost.png is not there"),
               ("mute", {"speech": "mute.mp4"}, "mute.mp4"), ("text", {"picture": "text.png"}, "text.png"),
               ("matlab", {"coefficients": "rows.mat"}, "MATLAB"), ("thin", {"coefficients": "rows.json"}, "2 coefficients"),
               ("few", {"landmarks": "few.csv"}, "4 numbers, not 136")]
        rows = [{"picture": "face.png", "speech": "frame.wav", "name": name, **more} for name, more, *_ in good + bad]
        (self.dir / "list.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        job = self.animate("out", "animate.input=list.jsonl", ranks=2, expect=3)
        self.assertEqual(set(self.clips("out")), {name for name, _ in good})
        self.assertIn(f"clips     {len(good)} of {len(rows)} done", job.err)
        self.assertIn(f"{len(bad)} of {len(rows)} clips failed", job.err)
        for name, _, said in bad:
            failed = [line for line in job.err.splitlines() if f"failed    {name}: " in line]
            self.assertEqual(len(failed), 1, f"{name}\n{job.err}")
            self.assertIn(said, failed[0])
        self.assertEqual(len([line for line in job.err.splitlines() if "failed    " in line]), len(bad), job.err)
        report = self.report("out")
        self.assertEqual(len(report["failures"]), len(bad))
        # Grey, alpha and RGB are the same picture where they show the same; the next start tries failed ones alone.
        write_wav(self.dir / "short.wav", 0.05)
        job = self.animate("out", "animate.input=list.jsonl", expect=3)
        self.assertIn(f"clips     {len(good) + 1} of {len(rows)} done", job.err)

    def test_refusals(self):
        def lines(*rows):
            (self.dir / "list.csv").write_text("\n".join(rows) + "\n")
        row = "face.png,a.wav"
        for rows, overrides, code, said in (
                (("picture,speech,pose_stile", row + ",1"), [], 3, ('"pose_stile"', '"pose_style"')),
                (("picture,speech,pose_style", row + ",46"), [], 2, ("list.csv, line 2", "pose_style = 46")),
                (("picture,speech,still", row + ",perhaps"), [], 2, ("list.csv, line 2", "still")),
                (("picture,speech,preprocess", row + ",ful"), [], 2, ("ful", "full")),
                (("picture,speech,name", row + ",x", row + ",x"), [], 3, ("line 2", "line 3", '"x"')),
                (("picture,speech,name", row + ",../x"), [], 3, ('"../x"',)),
                (("picture,name", "face.png,x"), [], 3, ("line 2: no speech",)),
                (("picture,speech",), [], 3, ("lists no clip",)),
                (("picture,speech", row), ["animate.name=x"], 2, ("animate.name",)),
                (("picture,speech", row), ["animate.weights="], 2, ("animate.weights is empty",)),
                (("picture,speech", row), ["animate.weights=none.safetensors"], None, ("none.safetensors",)),
                (("picture,speech", row), ["sadtalker.size=33"], 2, ("33",))):
            with self.subTest(said=said):
                lines(*rows)
                job = self.animate("refused", "animate.input=list.csv", *overrides, expect=None)
                self.refused(job, code or job.process.returncode, *said)
                self.assertNotEqual(job.process.returncode, 0)
        self.refused(self.animate("refused", expect=None), 2, "nothing to animate")
        self.refused(self.animate("refused", "animate.input=lost.csv", expect=None), 3, "lost.csv is not there")
        lines("picture,speech", "lost.png,a.wav", "face.png,lost.wav")
        self.refused(self.animate("refused", "animate.input=list.csv", expect=None), 3, "2 of 5 files are not there: lost.png, lost.wav")
        for other in (".", "*.png", "face.png"):
            self.refused(self.animate("refused", f"animate.input={other}", expect=None), 3, "come in pairs")
        shutil.copy(self.dir / "a.wav", self.dir / "face_a.mp4")
        self.refused(self.animate(".", "animate.picture=face.png", "animate.speech=face_a.mp4", "animate.name=face_a",
                                  expect=None), 2, "would replace the input face_a.mp4")


if __name__ == "__main__":
    unittest.main()
