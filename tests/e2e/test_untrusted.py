"""Prompts, lists, media and downloads that ask for more than they may have: nothing outside of what was named is read or
written, nothing hangs, and each ends in one clear error."""

import functools
import http.server
import json
import os
import pathlib
import signal
import struct
import threading
import time
import unittest
import zlib

import tiny_models
from harness import WeftTest, make_video

HLS = "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{}\n#EXT-X-ENDLIST\n"


def png(width, height):
    """A grey picture, or the header of one that is too large to be made."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    rows = (b"\0" + b"\x80" * width) * (height if width * height < 1 << 20 else 1)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


class Server:
    """Answers on 127.0.0.1. Paths: /endless (a body without end), /to?URL (a redirection), others: files of `folder`."""

    def __init__(self, folder):
        server = self
        self.sent, self.asked = threading.Event(), []

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                server.asked.append(self.path)
                if self.path.startswith("/to?"):
                    self.send_response(302)
                    self.send_header("Location", self.path[4:])
                    self.end_headers()
                elif self.path.startswith("/endless"):
                    self.send_response(200)
                    self.end_headers()
                    try:
                        while True:
                            self.wfile.write(b"\0" * 65536)
                            server.sent.set()
                            if self.path.endswith("slow"):
                                time.sleep(0.01)  # not to fill the disk while a signal is on its way
                    except OSError:
                        pass
                else:
                    super().do_GET()

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0),
                                                    functools.partial(Handler, directory=folder))
        self.http.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()


class UntrustedTest(WeftTest):
    def setUp(self):
        super().setUp()
        (self.dir / "deck.toml").write_text(tiny_models.TINY_GENERATE_DECK)
        self.outside = self.dir / "outside"
        self.outside.mkdir()
        # A picture that nobody may get at by way of another file.
        make_video(self.outside / "secret.mp4", "testsrc2=s=64x48:r=8:d=1")
        self.before = self.listing()

    def listing(self):
        return {p.name: p.read_bytes() for p in self.outside.iterdir()}

    def tearDown(self):
        self.assertEqual(self.listing(), self.before, "files outside were touched")
        super().tearDown()

    def ask(self, *prompts, overrides=(), expect=None, **options):
        (self.dir / "prompts.txt").write_text("\n".join(prompts) + "\n")
        return self.weft("generate", "deck.toml", "generate.prompt_file=prompts.txt", *overrides, expect=expect, ranks=0,
                         **options)

    def refer(self, reference, **options):
        return self.ask("x " + json.dumps({"reference_path": reference, "mask_strategy": "0"}), **options)

    def cut(self, *paths, listed=True, expect=None, overrides=()):
        if listed:
            (self.dir / "list.jsonl").write_text("".join(json.dumps({"path": p}) + "\n" for p in map(str, paths)))
            paths = ["list.jsonl"]
        inputs = ",".join(f"'{p}'" for p in paths)
        return self.weft("ingest", "deck.toml", f"ingest.inputs=[{inputs}]", "ingest.output=clips.h5", "ingest.frames=[1,3]",
                         "ingest.height=16", "ingest.width=16", *overrides, ranks=0, expect=expect)

    def test_graphs_of_prompts_and_lists_write_nothing(self):
        graph = ("lavfi:testsrc2=s=48x32:d=1,metadata=mode=add:key=a:value=b,"
                 f"metadata=print:file={self.outside}/written")
        self.refused(self.refer(graph), 3, "prompts.txt:1", "is not a file")
        self.refused(self.cut(graph), 3, "may not be named by a prompt or a list")
        # A deck may ask for sources, but not for files by them.
        self.refused(self.cut(graph, listed=False), 3, "filter \"metadata\" is not allowed")
        self.refused(self.ask("x", overrides=[f"generate.references=['{graph}']", "generate.mask_strategies=['0']"]), 3,
                     "filter \"metadata\" is not allowed")
        plain = "lavfi:testsrc2=s=48x32:d=1"
        self.refused(self.refer(plain), 3, "is not a file")
        self.ask("x", overrides=[f"generate.references=['{plain}']", "generate.mask_strategies=['0']"], expect=0)

    def test_sources_without_end_end(self):
        job = self.cut("lavfi:testsrc2=s=32x32", listed=False, overrides=["media.max_frames=40", "ingest.strict=true"])
        self.assertEqual(job.process.returncode, 3, job.err)
        self.assertIn("more frames than media.max_frames = 40", job.err)
        job = self.ask("x", overrides=["generate.references=['lavfi:testsrc2=s=48x32']", "generate.mask_strategies=['0']",
                                       "media.max_frames=40"])
        self.assertEqual(job.process.returncode, 3, job.err)
        self.assertIn("more frames than media.max_frames = 40", job.err)

    def test_playlists_named_as_videos_leak_nothing(self):
        secret = self.outside / "secret.mp4"
        (self.dir / "hls.mp4").write_text(HLS.format(f"file://{secret}"))
        (self.dir / "here.mp4").write_text(HLS.format("outside/secret.mp4"))
        (self.dir / "concat.mp4").write_text(f"ffconcat version 1.0\nfile '{secret}'\n")
        (self.dir / "draw.png").write_text(
            f"<svg xmlns='http://www.w3.org/2000/svg' width='48' height='32'><image href='file://{secret}'/></svg>")
        names = ["hls.mp4", "here.mp4", "concat.mp4", "draw.png"]
        for listed in (True, False):
            job = self.cut(*names, listed=listed)
            self.refused(job, 3, "no clip came out of 3 videos and 1 picture", "of the kind \"concat\"")
            self.assertRegex(job.err, 'of the kind "hls"|Not detecting m3u8/hls')  # weft's words, or FFmpeg 7.1's
            self.assertEqual(job.err.count("WARN: skipped"), 4, job.err)
            self.assertFalse((self.dir / "clips.h5").exists())
        for name in names:
            job = self.refer(name)
            self.assertEqual(job.process.returncode, 3, job.err)
            self.assertIn(f"cannot open video {name}", job.err)
            self.assertFalse(list((self.dir / "out").glob("*.mp4")))

    def test_names_are_not_protocols(self):
        secret = self.outside / "secret.mp4"
        names = [f"concat:{secret}|{secret}", f"subfile,,start,0,end,0,,:{secret}", f"file:{secret}", f"crypto:{secret}",
                 f"cache:{secret}", "pipe:0", "data:video/mp4;base64,AAAA"]
        for name in names:
            self.refused(self.refer(name), 3, "reference file")
        self.refused(self.cut(*names), 3, "7 of 7 items are not there")
        self.refused(self.cut(names[0], listed=False), 3, "1 of 1 item is not there")
        for name in (f"file://{secret}", "HTTP://127.0.0.1/x"):
            self.refused(self.refer(name), 3, "is an address")
        # A link is a name like any other.
        (self.dir / "link.mp4").symlink_to(secret)
        self.cut("link.mp4", expect=0)

    def test_only_regular_files_of_bearable_size(self):
        os.mkfifo(self.dir / "fifo.mp4")
        os.mkfifo(self.dir / "fifo.jsonl")
        os.mkfifo(self.dir / "fifo.txt")
        for name in ("fifo.mp4", "/dev/zero", "."):
            self.refused(self.cut(name, listed=name == "."), 3, "not a file")  # a deck may name folders
            self.refused(self.refer(name), 3, "not a file")
        self.refused(self.cut("fifo.jsonl", listed=False), 3, "fifo.jsonl is a pipe or device")
        for name in ("fifo.txt", "/dev/zero"):
            self.refused(self.weft("generate", "deck.toml", f"generate.prompt_file={name}", ranks=0, expect=None), 3,
                         f"{name} is a pipe or device")
            self.refused(self.weft("text", "deck.toml", name, "--cleaned=cleaned", ranks=0, expect=None), 3,
                         f"{name} is a pipe or device")
        self.refused(self.ask("x" * 3000, overrides=["media.max_list_mib=0.002"]), 3, "media.max_list_mib")
        self.refused(self.ask("a", "b", "c", overrides=["generate.num_samples=1000000"]), 2, "generate.max_clips")
        (self.dir / "huge.png").write_bytes(png(12000, 12000))
        self.refused(self.cut("huge.png"), 3, "no clip came out", "media.max_megapixels")
        (self.dir / "fine.png").write_bytes(png(64, 48))
        self.cut("fine.png", expect=0)
        self.refused(self.cut("fine.png", overrides=["media.max_megapixels=0.003"]), 3, "media.max_megapixels")

    def test_deep_json(self):
        deep = "[" * 50000 + "]" * 50000
        self.refused(self.ask('x {"num_frames": ' + deep + "}"), 3, "prompts.txt:1", "nested deeper than 64")
        (self.dir / "list.jsonl").write_text('{"path": "a.mp4", "text": ' + deep + "}\n")
        self.refused(self.cut("list.jsonl", listed=False), 3, "line 1")
        header = ('{"__metadata__": ' + deep + "}").encode()
        (self.dir / "deep.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
        self.refused(self.ask("x", overrides=["generate.weights=deep.safetensors"]), 3, "deep.safetensors")

    def test_downloads(self):
        web = self.dir / "web"
        web.mkdir()
        secret = self.outside / "secret.mp4"
        (web / "good.mp4").write_bytes(secret.read_bytes())
        (web / "hls.mp4").write_text(HLS.format(f"file://{secret}"))
        (web / "text.mp4").write_text("not found, sorry\n" * 100)
        kept = self.dir / "out" / "references"
        with Server(web) as server:
            for name, said in (("hls.mp4", "holds is not read"), ("text.mp4", "cannot open video"),
                               (f"to?file://{secret}", "cannot fetch"), (f"to?concat:{secret}", "cannot fetch"),
                               ("to?gopher://127.0.0.1:1/", "cannot fetch")):
                self.refused(self.refer(f"{server.address}/{name}"), 3, "prompts.txt:1", said)
                self.assertEqual(list(kept.iterdir()), [], name)
            self.refused(self.refer(f"{server.address}/endless.mp4", overrides=["media.max_download_mib=3"]), 3,
                         "is larger than media.max_download_mib = 3")
            self.refused(self.refer(f"{server.address}/good.mp4", overrides=["media.max_download_mib=0.001"]), 3,
                         "is larger than media.max_download_mib = 0.001")
            self.refused(self.refer(f"{server.address}/good.mp4", overrides=["media.max_download_mib=0"]), 3,
                         "is not fetched")
            self.assertEqual(list(kept.iterdir()), [])
            # What somebody has put in its place beforehand is not written through.
            self.refer(f"{server.address}/to?{server.address}/good.mp4", expect=0)
            # Beside it lies the picture of it for the page, NAME-0.png.
            fetched = [p for p in kept.iterdir() if "-" not in p.name]
            self.assertEqual([p.read_bytes() for p in fetched], [secret.read_bytes()])
            for planted in (fetched[0], fetched[0].with_name(f".{fetched[0].name}.partial")):
                planted.unlink(missing_ok=True)
                planted.symlink_to(self.outside / "planted")
            self.refer(f"{server.address}/to?{server.address}/good.mp4", expect=0)
            self.assertEqual([p.name for p in kept.iterdir() if "-" not in p.name], [fetched[0].name])
            self.assertTrue(fetched[0].is_file() and not fetched[0].is_symlink())

    def test_a_stop_ends_a_download(self):
        for ranks in (2,):
            with Server(self.dir) as server:
                (self.dir / "prompts.txt").write_text("x " + json.dumps(
                    {"reference_path": f"{server.address}/endless.slow", "mask_strategy": "0"}) + "\n")
                job = self.start("generate", "deck.toml", "generate.prompt_file=prompts.txt", ranks=ranks)
                self.assertTrue(server.sent.wait(120), job.err_so_far())
                os.kill(job.ranks()[0] if ranks else job.process.pid, signal.SIGTERM)
                self.assertEqual(job.wait(), 75, job.err)
                self.assertIn("stopped on request while", job.err)
                self.assertEqual(list((self.dir / "out" / "references").iterdir()), [])
                self.assert_gone(job)


if __name__ == "__main__":
    unittest.main()
