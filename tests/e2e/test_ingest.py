"""weft ingest on lists, folders and WebDataset shards of small real videos: filters, joined scores, duplicates, --plan, and a
kill in the middle."""

import io
import json
import re
import shutil
import subprocess
import tarfile
import unittest

from harness import WeftTest, make_video

USAGE, DATA = 2, 3
# Size, seconds: at 10 frames a second.
VIDEOS = {"wide.mp4": ("64x36", 2), "tall.mp4": ("36x64", 2), "square.mp4": ("48x48", 3), "short.mp4": ("48x48", 1)}
HEADER = "path,text,num_frames,height,width,aspect_ratio,fps,resolution,aes,flow,match,ocr,cmotion,id,other\n"
SIZE = ("ingest.frames=[4]", "ingest.height=32", "ingest.width=32")


class Ingest(WeftTest):
    def setUp(self):
        super().setUp()
        (self.dir / "v").mkdir()
        for i, (name, (size, seconds)) in enumerate(VIDEOS.items()):
            make_video(self.dir / "v" / name, f"testsrc2=duration={seconds}:size={size}:rate=10,hue=h={40 * i}")
        make_video(self.dir / "v" / "still.png", "mandelbrot=size=40x40:rate=1,trim=end_frame=1")

    def ingest(self, inputs, *more, output="clips.h5", ranks=0, expect=0):
        return self.weft("ingest", "deck.toml", f"ingest.inputs={inputs}", f"ingest.output={output}", *SIZE, *more,
                         ranks=ranks, expect=expect)

    def table(self, *rows, name="meta.csv"):
        (self.dir / name).write_text(HEADER + "".join(row + "\n" for row in rows))

    def opensora(self):
        """Rows as Open-Sora's tools write them, with paths from here."""
        self.table('v/wide.mp4,"a wide, striped picture",20,36,64,0.5625,10.0,2304,4.9,3.0,21.5,0,static,wide,?',
                   "v/tall.mp4,a tall one,20,64,36,1.778,10.0,2304,4.2,3.0,21.5,0,static,tall,?",
                   "v/square.mp4,a square,30.0,48,48,1.0,10.0,2304,5.5,0.1,30.25,9,zoom_in,square,?",
                   "v/short.mp4,,10,48,48,1.0,10.0,2304,6.0,2.0,,1,,short,?")

    def clips(self, store):
        """Of the store: what weft inspect says, which reads all of it, and the sources and captions of all clips."""
        said = self.weft("inspect", store, ranks=0).out
        return said + (self.dir / store).read_bytes().decode("latin-1")

    def written(self):
        return sorted(p.name for p in self.dir.glob("clips*"))

    def test_the_store_replaces_no_input(self):
        self.opensora()
        for inputs, output in (("v/wide.mp4", "v/wide.mp4"), ("meta.csv", "meta.csv"), ("meta.csv", "v/tall.mp4"),
                               ("v", "deck.toml")):
            before = (self.dir / output).read_bytes()
            self.refused(self.ingest(inputs, output=output, expect=None), 2, "a result would replace the input", output)
            self.assertEqual((self.dir / output).read_bytes(), before)

    def test_open_sora_table_with_filters(self):
        self.opensora()
        job = self.ingest("meta.csv", ranks=2)
        self.assertIn("4 kept of 4: 4 videos (100.0 %), 0 pictures", job.err)
        self.assertIn("a wide, striped picture", self.clips("clips.h5"))
        job = self.ingest("meta.csv", "--min-aes", "4.5", "--min-flow=1", "--max-ocr", "5", "--min-frames", "12")
        for rule, items in (("min_aes = 4.5", 1), ("min_flow = 1", 1), ("max_ocr = 5", 0), ("min_frames = 12", 1)):
            self.assertRegex(job.err, rf" {items} dropped by {re.escape(rule)}")
        self.assertIn("1 kept of 4", job.err)
        # 20 frames give five clips of 4, as was expected.
        self.assertRegex(job.err, r"32x32-4 +5 +100\.0 %")
        self.assertRegex(job.err, r"INFO: 5 clips|5 clips, ")
        self.assertNotIn("tall", self.clips("clips.h5"))
        # A caption is shown on one line.
        self.table('v/wide.mp4,"a \x1b[31m red\nERROR: forged",20,36,64,0.5625,10.0,2304,4.9,3.0,21.5,0,static,wide,?')
        self.ingest("meta.csv")
        said = self.weft("inspect", "clips.h5", ranks=0).out
        self.assertIn(r"a \x1b[31m red\nERROR: forged", said)
        self.assertNotIn("\x1b", said)
        # The same from JSON lines, where the deck has the bounds.
        rows = [{"path": "v/wide.mp4", "aes": 4.9, "cmotion": "static"}, {"path": "v/tall.mp4", "aes": 4.2, "text": "x"},
                {"path": "v/square.mp4", "aes": None}]
        (self.dir / "meta.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        job = self.ingest("meta.jsonl", "ingest.min_aes=4.5")
        self.assertIn("2 dropped by min_aes = 4.5, 1 of them without a value", job.err)

    def test_plan_writes_nothing_and_measures_what_no_list_says(self):
        job = self.ingest("v", "--plan", "ingest.frames=[4,1]")
        self.assertRegex(job.err, r"5 kept of 5: 4 videos \(80\.0 %\), 1 picture \(20\.0 %\)")
        self.assertRegex(job.err, r"32x32-1 +1 ")
        self.assertRegex(job.err, r"32x32-4 +19 ")  # 5 + 5 + 7 + 2
        self.assertEqual(self.written(), [])
        job = self.ingest("v", "--max-frames=20", "--min-pixels=2304", "--plan")
        self.assertIn("1 dropped by max_frames = 20", job.err)
        self.assertIn("1 dropped by min_pixels = 2304", job.err)
        job = self.ingest("v", "--min-fps=11", "--plan")
        self.assertIn("1 kept of 5: 0 videos (0.0 %), 1 picture", job.err)  # a picture has no rate
        self.refused(self.ingest("v", "--min-fps=11", "--min-frames=2", "--plan", expect=None), DATA, "none of 5 items is left")

    def test_plan_names_what_cannot_be_opened(self):
        for i in range(5):
            (self.dir / f"v/broken{i}.mp4").write_bytes(b"no video %d" % i)
        job = self.ingest("v", "--plan", ranks=2)
        self.assertRegex(job.err, r"32x32-4 +1\d ")
        line = re.search(r"WARN: 5 items not counted: (.*)", job.err)[1]
        self.assertEqual(re.findall(r"cannot open video v/broken(\d).mp4: [^;]+; ", line), ["0", "1", "2"])
        self.assertTrue(line.endswith("; and 2 more"), line)

    def test_rates_and_intervals_are_of_videos_alone(self):
        """As Open-Sora's buckets have it; and of a video all frames up to the end of the last one are there, as of ffmpeg's."""
        more = ("ingest.frames=[1,6]", "ingest.fps=12", "ingest.frame_interval=2")
        plan = self.ingest("['v/short.mp4','v/still.png']", "--plan", *more)
        job = self.ingest("['v/short.mp4','v/still.png']", *more)
        for told in (plan, job):  # 12 frames of the second
            self.assertRegex(told.err, r"32x32-1 +1 ")
            self.assertRegex(told.err, r"32x32-6 +1 ")

    def test_one_clip_of_a_picture_with_more_behind_it(self):
        subprocess.run(["ffmpeg", "-v", "error", "-f", "lavfi", "-i", "testsrc2=size=64x48", "-frames:v", "2", "%d.jpg"],
                       cwd=self.dir, check=True, stdin=subprocess.DEVNULL)
        first, second = ((self.dir / f"{n}.jpg").read_bytes() for n in (1, 2))
        (self.dir / "phone.jpg").write_bytes(first + second)
        png = (self.dir / "v/still.png").read_bytes()
        (self.dir / "bytes.png").write_bytes(png + b"\n\n")
        job = self.ingest("['phone.jpg','bytes.png']", "ingest.frames=[1,4]", "--strict")
        self.assertRegex(job.err, r"32x32-1 +2 ")

    def test_what_is_no_medium_is_named(self):
        (self.dir / "a.mp4").write_bytes(b"PAR1" + bytes(90))
        (self.dir / "b.jpg").write_bytes(b"<!DOCTYPE html><html>404</html>")
        (self.dir / "c.webp").write_bytes(b"RIFF\x68\1\0\0WEBPVP8X\x0a\0\0\0\2\0\0\0" + bytes(60))
        job = self.ingest("['a.mp4','b.jpg','c.webp','v/wide.mp4']")
        for name, kind in (("a.mp4", "a Parquet table"), ("b.jpg", "a web page"), ("c.webp", "an animated WebP")):
            self.assertIn(f"cannot open video {name}: it is {kind}", job.err)

    def test_files_that_are_not_there(self):
        job = self.ingest("['v/wide.mp4','nix.mp4']", "--plan", expect=None)
        self.refused(job, DATA, "1 of 2 items is not there: nix.mp4", "begin where weft was started")
        self.assertEqual(self.written(), [])
        self.refused(self.ingest("nix.mp4", expect=None), DATA, "nix.mp4", "begin where weft was started")
        (self.dir / "meta.csv").write_text("path,text\nv/wide.mp4,x\n" + "".join(f"v/gone{i:02}.mp4,x\n" for i in range(12)))
        job = self.ingest("meta.csv", "--plan", expect=None)
        self.refused(job, DATA, "12 of 13 items are not there: v/gone00.mp4", "and 2 more", "in the list's folder")

    def test_folder_of_the_store(self):
        for ranks in (0, 2):
            self.ingest("v/wide.mp4", output=f"new{ranks}/deep/clips.h5", ranks=ranks)
            self.assertIn("every hash verified", self.weft("inspect", f"new{ranks}/deep/clips.h5", ranks=0).out)
            job = self.ingest("v/wide.mp4", output="v/wide.mp4/clips.h5", ranks=ranks, expect=None)
            self.refused(job, DATA, "v/wide.mp4/", "Not a directory")

    def test_scores_of_weft_score_are_joined(self):
        self.opensora()
        deck = self.dir / "score.toml"
        deck.write_text('[model]\nname = "dbnet"\nbackbone = "resnet18"\nasf = false\n[score]\nside = 64\nweights = "random:3"\n')
        (self.dir / "plain.csv").write_text("path,text\n" + "".join(f"v/{name},x\n" for name in VIDEOS))
        self.weft("score", "score.toml", "score.input=plain.csv", "score.output=ocr.csv", ranks=0)
        counts = [int(line.rsplit(",", 1)[1]) for line in (self.dir / "ocr.csv").read_text().splitlines()[1:]]
        most = sorted(counts)[1]
        job = self.ingest("plain.csv", "ingest.scores=['ocr.csv']", f"--max-ocr={most}", "--plan")
        self.assertIn("ocr.csv has scores of 4 of 4 items", job.err)
        self.assertIn(f"{sum(c > most for c in counts)} dropped by max_ocr = {most}", job.err)
        self.refused(self.ingest("plain.csv", "--max-ocr=5", expect=None), DATA, "none of 4 items has a value ocr",
                     "ingest.scores")

    def test_folder_with_captions_and_duplicates(self):
        (self.dir / "v" / "wide.txt").write_text("of the folder\n")
        shutil.copy(self.dir / "v" / "wide.mp4", self.dir / "v" / "z_copy.mp4")
        job = self.ingest("v", "ingest.frames=[4,1]")
        self.assertIn("1 dropped by duplicates; v/z_copy.mp4 has the bytes of v/wide.mp4", job.err)
        said = self.clips("clips.h5")
        self.assertIn("of the folder", said)
        self.assertIn("32x32-1", said)
        job = self.ingest("v", "--keep-duplicates", "ingest.frames=[4,1]")
        self.assertNotIn("duplicates", job.err)
        self.assertIn("6 kept of 6", job.err)

    def shard(self, name, members):
        with tarfile.open(self.dir / name, "w", format=tarfile.PAX_FORMAT) as tar:
            for member, data in members:
                info = tarfile.TarInfo(member)
                if data is None:
                    info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
                    tar.addfile(info)
                    continue
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))

    def test_webdataset_shards(self):
        video = {name: (self.dir / "v" / name).read_bytes() for name in VIDEOS}
        self.shard("s-000.tar", [("0001.mp4", video["wide.mp4"]), ("0001.txt", b"first\n"),
                                 ("0001.json", json.dumps({"aes": 5.5, "caption": "no"}).encode()),
                                 ("0002.json", json.dumps({"aes": 4.0, "caption": "second"}).encode()),
                                 ("0002.mp4", video["tall.mp4"])])
        self.shard("s-001.tar", [("../../escaped.mp4", video["square.mp4"]), ("link.mp4", None),
                                 ("0003.png", (self.dir / "v" / "still.png").read_bytes()), ("again.mp4", video["wide.mp4"])])
        before = sorted(p.name for p in self.dir.parent.glob("escaped*"))
        job = self.ingest("s-*.tar", "ingest.frames=[4,1]")
        self.assertIn("s-001.tar has 1 link, left out", job.err)
        self.assertIn("1 dropped by duplicates", job.err)
        self.assertIn("4 kept of 5", job.err)
        said = self.clips("clips.h5")
        for text in ("first", "second", "s-000.tar/0001.mp4", "32x32-1"):
            self.assertIn(text, said)
        self.assertEqual(sorted(p.name for p in self.dir.parent.glob("escaped*")), before)
        # The pixels are those of the same files in a folder.
        (self.dir / "w").mkdir()
        shutil.copy(self.dir / "v" / "wide.mp4", self.dir / "w" / "a.mp4")
        self.shard("w.tar", [("a.mp4", video["wide.mp4"])])
        hashes = []
        for inputs in ("w", "w.tar"):
            self.ingest(inputs, output="one.h5")
            found = subprocess.run(["h5dump", "-d", "/clips/32x32-4/frames", self.dir / "one.h5"], capture_output=True, text=True)
            self.assertEqual(found.returncode, 0, found.stderr)
            hashes.append(found.stdout)
        self.assertEqual(hashes[0], hashes[1])
        self.ingest("s-000.tar", "--min-aes=5")
        self.assertNotIn("second", self.clips("clips.h5"))

        whole = (self.dir / "s-000.tar").read_bytes()
        (self.dir / "cut.tar").write_bytes(whole[:2000])
        self.refused(self.ingest("cut.tar", expect=None), DATA, "cut.tar", "0001.mp4 is cut off")
        (self.dir / "text.tar").write_bytes(b"no tar")
        self.refused(self.ingest("text.tar", expect=None), DATA, "text.tar")

    def test_bad_tables(self):
        for row, said in (("v/wide.mp4,x,20,36,64,0.5,10,2304,good,1,1,1,,a,?", 'meta.csv, line 2, column aes: "good"'),
                          ("v/wide.mp4,x,many,36,64,0.5,10,2304,1,1,1,1,,a,?", 'line 2, column num_frames: "many"'),
                          ("v/wide.mp4,x,20", "line 2 has 3 values, and there are 15 columns"),
                          (",x,20,36,64,0.5,10,2304,1,1,1,1,,a,?", "line 2, column path: no value")):
            self.table(row)
            self.refused(self.ingest("meta.csv", expect=None), DATA, said)
        self.refused(self.ingest("meta.csv", "--min-aes=high", expect=None), USAGE, "ingest.min_aes")
        (self.dir / "meta.jsonl").write_text('{"path": "v/wide.mp4"}\n{"path": "v/tall.mp4", "ocr": "3"}\n')
        self.refused(self.ingest("meta.jsonl", expect=None), DATA, 'meta.jsonl, line 2, column ocr: "3"')
        (self.dir / "nothing").mkdir()
        self.refused(self.ingest("nothing", expect=None), DATA, "folder nothing has no videos")

    def test_lists_as_people_write_them(self):
        """Names of columns, missing values and numbers as pandas reads them; the log counts captions."""
        for text, count in (("path, text\nv/wide.mp4, a cat\nv/tall.mp4, a dog\n", 2),
                            ("Path,caption\nv/wide.mp4,a cat\nv/tall.mp4,None\n", 1),
                            ("path,text,match\nv/wide.mp4,a cat,-1.0\nv/tall.mp4,a dog,20\n", 2),
                            ("path,text\nv/wide.mp4,nan\nv/tall.mp4,\n", 0)):
            (self.dir / "list.CSV").write_text(text)
            job = self.ingest("list.CSV")
            self.assertIn(f"captions: {count} of 2", job.err)
            self.assertEqual("WARN: captions" in job.err, count == 0, job.err)
            self.assertEqual("a cat" in self.clips("clips.h5"), count > 0)
        (self.dir / "list.csv").write_bytes(b"path,text\nv/wide.mp4,caf\xe9\n")
        self.refused(self.ingest("list.csv", expect=None), DATA, "list.csv, line 2, column text: the byte 0xe9 is not UTF-8",
                     "iconv -f")
        (self.dir / "list.csv").write_bytes("path,text\nv/wide.mp4,x\n".encode("utf-16"))
        self.refused(self.ingest("list.csv", expect=None), DATA, "list.csv is UTF-16 text", "iconv -f UTF-16 -t UTF-8 list.csv")
        (self.dir / "list.parquet").write_bytes(b"PAR1" + bytes(20))
        self.refused(self.ingest("list.parquet", expect=None), DATA, "list.parquet is a Parquet table", "to_csv")

    def test_what_a_folder_leaves_out(self):
        for name in (".Trash-1000/files/deleted.mp4", ".ipynb_checkpoints/x.png", "deep/er/a.MTS", "raw.cr2", "about.txt"):
            (self.dir / "v" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.dir / "v" / "tall.mp4", self.dir / "v" / name)
        (self.dir / "linked").mkdir()
        (self.dir / "v" / "link").symlink_to("../linked")
        (self.dir / "v" / "wide.txt").write_bytes(b"\xef\xbb\xbfa cat\r\n")
        (self.dir / "v" / "tall_caption.txt").write_text("a tower\n")
        job = self.ingest("v", "--keep-duplicates", "ingest.frames=[4,1]")
        self.assertIn("left out of v: 2 files (.cr2 1, .txt 1), 1 linked folder, 2 hidden", job.err)
        self.assertIn("6 kept of 6: 5 videos", job.err)
        self.assertIn("captions: 2 of 6", job.err)
        self.assertIn("5 videos and 1 picture: 0 broken", job.err)
        self.assertNotIn("\xef\xbb\xbf", self.clips("clips.h5"))
        self.assertIn("1 picture: 0 broken", self.ingest("v/*.png", "ingest.frames=[1]").err)

    def test_files_that_are_not_there_do_not_end_the_job(self):
        (self.dir / "l").mkdir()
        (self.dir / "l" / "meta.csv").write_text("path,text\n../v/wide.mp4,x\n../v/gone.mp4,x\n")
        job = self.ingest("l/meta.csv")
        self.assertIn("WARN: 1 of 2 items is not there: l/../v/gone.mp4", job.err)
        self.assertLess(job.err.index("gone.mp4"), job.err.index("ingest: 1 video over"))
        self.assertIn("1 of 2 items are broken, 1 of them not there", self.ingest("l/meta.csv", "--strict", expect=DATA).err)

    def test_killed_in_the_middle_it_makes_the_same_store(self):
        for i in range(40):
            shutil.copy(self.dir / "v" / "square.mp4", self.dir / "v" / f"s{i:02}.mp4")
        more = ("--keep-duplicates", "ingest.fps=200")
        self.ingest("v", *more, output="whole.h5")
        job = self.start("ingest", "deck.toml", "ingest.inputs=v", "ingest.output=clips.h5", *SIZE, *more, ranks=3,
                         shim=f"held_writes={self.dir / 'never'}:clips.h5.part1")
        self.until(job, lambda: any(".part2" in name for name in self.written()))
        job.kill()
        job.wait()
        self.assert_gone(job)
        self.assertNotIn("clips.h5", self.written())
        (self.dir / "clips.h5.parts").mkdir()  # of another kind of ingest
        self.ingest("v", *more, ranks=2)  # of fewer ranks: nothing of the third is left
        self.assertEqual((self.dir / "clips.h5").read_bytes(), (self.dir / "whole.h5").read_bytes())
        self.assertEqual(self.written(), ["clips.h5", "clips.h5.parts", "clips.h5.status.json", "clips.h5.summary.json"])


if __name__ == "__main__":
    unittest.main()
