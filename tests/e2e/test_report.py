"""weft report and weft status on what jobs have left: pages that need nothing else, event files that TensorBoard reads, and
how far each job is."""

import contextlib
import json
import math
import os
import pathlib
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
import unittest
from html import unescape
from unittest import mock

from harness import MPI_ON_ONE_HOST, MPIEXEC, REPOSITORY, WEFT, WeftTest, make_video, open_mpi
from test_evaluate import png
from tiny_models import TINY_GENERATE_DECK

DATA, NON_FINITE, HARDWARE, STOPPED = 3, 5, 6, 75
# Where tools/test.sh installs what tests need from PyPI.
PACKAGES = REPOSITORY / "build" / "python"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def fields(message):
    """(number, value) of each field of a protobuf message; bytes but for a variable-length number."""
    at = 0

    def number():
        nonlocal at
        value = shift = 0
        while True:
            value |= (message[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if message[at - 1] < 128:
                return value

    while at < len(message):
        key = number()
        if key & 7 == 0:
            yield key >> 3, number()
        else:
            length = {1: 8, 5: 4}.get(key & 7) or number()
            at += length
            yield key >> 3, message[at - length:at]


def images(path):
    """(step, tag, height, width, file) of each image of an event file."""
    data = path.read_bytes()
    while data:
        length, = struct.unpack("<Q", data[:8])
        event = dict(fields(data[12:12 + length]))
        for _, value in fields(event.get(5, b"")):
            value = dict(fields(value))
            if 4 in value:
                image = dict(fields(value[4]))
                yield event[2], value[1].decode(), image[1], image[2], image[4]
        data = data[16 + length:]


class Page(WeftTest):
    def page(self, *inputs):
        """The page of `weft report`, which must need no other file."""
        job = self.weft("report", *inputs, ranks=0)
        path = self.dir / job.out.strip()
        html = path.read_text()
        for outside in ("http-equiv", "<link", "@import", "src=\"http", "src=\"/", "href=\"http", "url("):
            self.assertNotIn(outside, html)
        self.assertEqual(re.findall(r'src="(?!data:)[^"]*"', html), [])
        self.assertIn("prefers-color-scheme: dark", html)
        return path, self.page_data(path)

    def after_script(self, path, script, width="auto"):
        """What `script`, JavaScript that runs after the page's own and what it has drawn, returns in a browser."""
        page = self.dir / "scripted.html"
        page.write_text((self.dir / path).read_text().replace("</body>", f"<style>main {{ width: {width}; }}</style><script>const poll = () => "
                        "[...document.querySelectorAll('.chart')].every(c => c.clientWidth === 0 || c.firstChild) && "
                        f"document.readyState === 'complete' ? document.title = JSON.stringify((() => {{ {script} }})()) : "
                        "setTimeout(poll, 50); setTimeout(poll, 500)</script></body>"))
        job = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={self.dir}/browser",
                              "--window-size=1280,2000", "--virtual-time-budget=60000", "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120)
        title = re.search(r"<title>(.*?)</title>", job.stdout)
        self.assertTrue(title, job.stderr)
        return json.loads(unescape(title[1]))

    def status(self, *paths):
        return json.loads(self.weft("status", *paths, "--json", ranks=0).out)


class Training(Page):
    def test_status_follows_a_run(self):
        job = self.start("train", "deck.toml", "run.dir=run", "train.steps=1000000", ranks=2)
        self.wait_for_steps(job, "run", 20)
        state = self.status("run")[0]
        self.assertEqual((state["command"], state["state"], state["unit"], state["total"], state["ranks"]),
                         ("train", "running", "step", 1000000, 2))
        job.process.send_signal(signal.SIGUSR1)
        # MPICH's mpiexec sometimes ends with 0 once it has passed on a signal; the status has weft's own code.
        self.assertIn(job.wait(), (STOPPED,) if open_mpi() else (STOPPED, 0), job.err)
        state = self.status("run")[0]
        steps = len(self.metrics("run"))
        self.assertEqual((state["state"], state["done"], state["exit_code"]), ("stopped", steps, STOPPED))
        self.assertEqual(state["checkpoint"], f"step_{steps}")
        self.assertAlmostEqual(state["loss"], self.losses("run")[-1], delta=1e-6)
        self.train("run", f"train.steps={steps + 3}")
        state = self.status("run")[0]
        self.assertEqual((state["state"], state["done"], state["done_before"]), ("finished", steps + 3, steps))
        text = self.weft("status", "run", ranks=0).out
        self.assertIn("state     finished\n", text)
        self.assertIn(f"({100:.1f} %), {steps} of them by earlier starts", text)

    def test_status_says_why_a_run_failed(self):
        with mock.patch.dict(os.environ, WEFT_FAULT="nan:1:7:0"):
            job = self.train("run", expect=NON_FINITE)
        state = self.status("run")[0]
        self.assertEqual((state["state"], state["exit_code"], state["total"]), ("failed", NON_FINITE, 20))
        self.assertIn(f"ERROR: {state['error']}", job.err)

    def line(self, step):
        return json.dumps({"step": step, "loss": step + 0.5, "seconds": 1}) + "\n"

    def follow(self, *paths):
        """`weft status --follow`, whose lines are read one by one."""
        job = subprocess.Popen([WEFT, "status", "--follow", *paths], cwd=self.dir, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(job.communicate)
        self.addCleanup(job.kill)
        return job

    def test_following_a_run_to_its_end(self):
        run = self.dir / "run"
        run.mkdir()
        status = {"command": "train", "noun": "step", "state": "running", "code": 0, "done": 1, "total": 3, "before": 0, "rate": 0,
                  "left": 0, "ranks": 1, "host": "", "started": 1, "updated": 4e9, "advanced": 1, "values": {}, "warnings": []}
        (run / "status.json").write_text(json.dumps(status))
        (run / "metrics.jsonl").write_text(self.line(0))
        job = self.follow("run")
        self.assertRegex(job.stdout.readline(), "^run +train +running  1 of 3 steps$")
        self.assertRegex(job.stdout.readline(), "^step      1/3  loss 0.50000 ")
        with open(run / "metrics.jsonl", "a") as f:
            f.write(self.line(1))
        self.assertRegex(job.stdout.readline(), "^step      2/3  loss 1.50000 ")
        self.assertIsNone(job.poll())
        with open(run / "metrics.jsonl", "a") as f:
            f.write(self.line(2))
        (run / "new.json").write_text(json.dumps(dict(status, state="finished", done=3, warnings=["a last word"])))
        os.replace(run / "new.json", run / "status.json")
        rest, errors = job.communicate(timeout=60)
        self.assertRegex(rest, "^step      3/3  loss 2.50000 .*\nWARN: a last word\nrun +train +finished  3 of 3 steps")
        self.assertEqual((job.returncode, errors), (0, ""))

    def test_following_a_job_that_fails(self):
        with mock.patch.dict(os.environ, WEFT_FAULT="nan:1:7:0"):
            self.train("run", expect=NON_FINITE)
        job = self.weft("status", "--follow", "run", "run/", ranks=0, expect=1)
        self.assertRegex(job.out, rf"^run +train +failed \(exit code {NON_FINITE}\) .*\n$")

    def test_following_waits_for_a_job_until_interrupted(self):
        job = self.follow("nowhere")
        self.assertIn(f"no job has begun its work in {self.dir / 'nowhere'} yet, which does not exist", job.stderr.readline())
        job.send_signal(signal.SIGINT)
        self.assertEqual(job.wait(60), -signal.SIGINT)  # 130 in a shell
        self.refused(self.weft("status", ".", "--follow", "--json", ranks=0, expect=None), 2, "--json and --follow cannot be combined")

    def test_no_job_is_said_so(self):
        self.refused(self.weft("status", ".", ranks=0, expect=None), DATA, "holds no job's status")

    def test_a_log_tells_the_time_left(self):
        job = self.train("run", "train.steps=12", "train.log_every=3")
        lines = re.findall(r"^step +\d+/.*", job.err, re.M)
        self.assertEqual(len(lines), 4)
        self.assertRegex(lines[1], r"\), \d+ s left$")
        self.assertNotIn("\x1b", job.err, "no terminal, nothing is redrawn")

    def test_a_terminal_has_one_line_that_is_redrawn(self):
        start = [WEFT, "train", "deck.toml", "train.log_every=10"]
        for command in (start, [MPIEXEC, "-n", "2", *start]):
            ours, theirs = pty.openpty()
            job = subprocess.Popen(command, cwd=self.dir, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=theirs,
                                   env=dict(os.environ, TERM="xterm", OMP_NUM_THREADS="1", **MPI_ON_ONE_HOST))
            os.close(theirs)
            shown = b""
            # A terminal whose other end is closed is an error, not an end.
            with contextlib.suppress(OSError):
                while piece := os.read(ours, 65536):
                    shown += piece
            os.close(ours)
            text = shown.decode(errors="replace")
            self.assertEqual(job.wait(), 0, text)
            self.assertRegex(text, r"\r\x1b\[K\[[#.]{20}\] \d+ of 20 steps")
            self.assertRegex(text, r"\r\x1b\[Kstep +10/20  loss")
            # What follows the work is told without it.
            self.assertNotIn("\x1b", text[text.index("memory    ", text.index("20/20")):])
            shutil.rmtree(self.dir / "run")

    def test_all_jobs_of_a_folder_on_one_page(self):
        self.train("runs/one", "train.steps=3", ranks=1)
        self.train("runs/three", "train.steps=4", ranks=2)
        path, data = self.page("runs")
        self.assertEqual(path, self.dir / "runs" / "index.html")
        self.assertEqual([(r["page"], r["job"]["done"]) for r in data["rows"]], [("one/report.html", 3), ("three/report.html", 4)])
        for page, steps in (("one", 3), ("three", 4)):
            self.assertEqual(self.page_data(f"runs/{page}/report.html")["runs"][0]["steps"]["last"], steps)
        # The current folder is the one where no other is named.
        job = self.weft("status", ranks=0)
        self.assertEqual([line.split()[0] for line in job.out.splitlines()], ["runs/one", "runs/three"])

    def test_opening_a_page(self):
        self.train("run", "train.steps=2", ranks=1)
        tools = self.dir / "tools"
        tools.mkdir()
        (tools / "xdg-open").write_text(f'#!/bin/sh\nprintf "%s" "$1" > {self.dir}/opened\n')
        (tools / "xdg-open").chmod(0o755)
        desktop = {"PATH": f"{tools}:{os.environ['PATH']}", "DISPLAY": ":0"}
        with mock.patch.dict(os.environ, desktop):
            job = self.weft("report", "--open", "run", ranks=0)
            self.assertEqual((job.out, job.err), ("run/report.html\n", ""))
            end = time.monotonic() + 120
            while not (self.dir / "opened").exists() or not (self.dir / "opened").read_text():
                self.assertLess(time.monotonic(), end, "xdg-open was not started")
                time.sleep(0.003)
            (tools / "xdg-open").write_text("#!/bin/sh\nexit 3\n")
            failed = self.weft("report", "--open", "run", ranks=0)
        self.assertEqual((self.dir / "opened").read_text(), f"{self.dir}/run/report.html")
        self.assertRegex(failed.err, f"xdg-open fails here; on your own machine: scp .*:{self.dir}/run/report.html")
        with mock.patch.dict(os.environ):
            for name in ("DISPLAY", "WAYLAND_DISPLAY"):
                os.environ.pop(name, None)
            job = self.weft("report", "--open", "run", ranks=0)
            self.assertRegex(job.err, f"no desktop here; on your own machine: scp .*:{self.dir}/run/report.html")
            job = self.weft("report", "--open", ".", ranks=0)
            self.assertEqual(job.out, "./index.html\n")
            self.assertIn(f":{self.dir}/ {self.dir.name}\n", job.err)
            self.assertIn("--include='*.mp4'", job.err)
            # What a shell would act on is in no command: the old scp and the new one quote differently.
            os.rename(self.dir / "run", self.dir / "it's $(one)")
            job = self.weft("report", "--open", "it's $(one)", ranks=0)
            self.assertNotIn("scp", job.err)
            self.assertRegex(job.err, rf"copy it to your own machine: .*:{self.dir}/it's \$\(one\)/report.html\n")

    def test_files_of_others_are_kept(self):
        self.train("run", "train.steps=2", ranks=1)
        (self.dir / "index.html").write_text("mine")
        self.refused(self.weft("report", ".", ranks=0, expect=None), DATA, "index.html is not a page of weft", "rename it or remove it")
        self.assertEqual((self.dir / "index.html").read_text(), "mine")

    def test_two_runs_on_one_page(self):
        self.train("one", ranks=1)
        self.train("two", ranks=2)
        path, data = self.page("one", "two")
        self.assertEqual(path, self.dir / "one" / "report.html")
        self.assertEqual([(r["name"], r["ranks_number"], r["steps"]["last"]) for r in data["runs"]], [("one", 1, 20), ("two", 2, 20)])

    def test_sample_clips_are_images_of_tensorboard(self):
        for step in (1, 3):
            (self.dir / f"run/samples/{step}").mkdir(parents=True)
            make_video(self.dir / f"run/samples/{step}/clip.mp4", "testsrc2=duration=1:size=48x32:rate=10")
        (self.dir / "run/metrics.jsonl").write_text("".join(map(self.line, range(3))))
        events = self.dir / self.weft("report", "--tensorboard", "events", "run", ranks=0).out.strip()
        found = list(images(events))
        self.assertEqual([image[:4] for image in found], [(1, "samples/clip.mp4", 32, 48), (3, "samples/clip.mp4", 32, 48)])
        for *_, png in found:
            self.assertEqual(png[:8] + png[16:24], b"\x89PNG\r\n\x1a\n" + struct.pack(">II", 48, 32))

    @unittest.skipUnless((PACKAGES / "tensorboard").is_dir(), f"{PACKAGES} has no TensorBoard (tools/test.sh)")
    def test_tensorboard_reads_the_metrics(self):
        self.train("run", "train.steps=30")
        os.makedirs(self.dir / "other")
        os.symlink(self.dir / "run", self.dir / "other" / "run")
        out = self.weft("report", "--tensorboard", "events", "run", "other/run", ranks=0).out.split()
        self.assertEqual(out, [f"events/{name}/events.out.tfevents.weft" for name in ("run", "run_2")])
        self.assertFalse((self.dir / "run" / "report.html").exists())
        sys.path.insert(0, str(PACKAGES))
        from tensorboard.backend.event_processing import event_accumulator, event_file_loader
        events = list(event_file_loader.EventFileLoader(str(self.dir / out[0])).Load())
        self.assertEqual(events[0].file_version, "brain.Event:2")
        self.assertEqual(len(events), 31)
        read = event_accumulator.EventAccumulator(str(self.dir / out[0]), size_guidance={"scalars": 0})
        read.Reload()
        metrics = self.metrics("run")
        tags = set(read.Tags()["scalars"])
        self.assertLessEqual({"loss", "grad_norm", "lr", "seconds", "memory/resident_bytes", "split/compute",
                              "split/data_wait", "ranks/spread"}, tags)
        for tag, value in (("loss", lambda m: m["loss"]), ("grad_norm", lambda m: m["grad_norm"]),
                           ("lr", lambda m: m["lr"]), ("seconds", lambda m: m["seconds"]),
                           ("memory/resident_bytes", lambda m: m["memory"]["resident_bytes"]),
                           ("split/compute", lambda m: m["split"]["compute"])):
            scalars = read.Scalars(tag)
            self.assertEqual([s.step for s in scalars], [m["step"] + 1 for m in metrics])
            for s, m in zip(scalars, metrics):
                self.assertTrue(math.isclose(s.value, value(m), rel_tol=1e-6, abs_tol=1e-12), (tag, s, value(m)))
        times = [s.wall_time for s in read.Scalars("loss")]
        self.assertEqual(times, sorted(times))
        self.assertAlmostEqual(times[-1], (self.dir / "run" / "metrics.jsonl").stat().st_mtime, delta=1e-3)


class Clips(Page):
    def setUp(self):
        super().setUp()
        (self.dir / "deck.toml").write_text(TINY_GENERATE_DECK)
        (self.dir / "prompts.txt").write_text("a <b>cat</b>\na dog {\"num_frames\": 1}\n")
        self.job = self.weft("generate", "deck.toml", "generate.prompt_file=prompts.txt", ranks=2)

    def test_a_gallery(self):
        path, data = self.page("out")
        self.assertEqual(path, self.dir / "out" / "report.html")
        clips = data["galleries"][0]["clips"]
        self.assertEqual([c["media"]["data"].partition(";")[0] for c in clips], ["data:video/mp4", "data:image/png"])
        self.assertNotIn("<b>cat</b>", path.read_text())
        lines = list(map(json.loads, (self.dir / "out" / "generated.jsonl").read_text().splitlines()))
        self.assertCountEqual([c["line"]["seed"] for c in clips], [line["seed"] for line in lines])

    def test_the_status_of_a_list(self):
        state = self.status("out")[0]
        self.assertEqual((state["command"], state["state"], state["done"], state["total"], state["unit"]),
                         ("generate", "finished", 2, 2, "clip"))
        # The same command finds all made, and one with another clip makes that alone.
        (self.dir / "prompts.txt").write_text("a <b>cat</b>\na dog {\"num_frames\": 1}\na bird {\"num_frames\": 1}\n")
        self.weft("generate", "deck.toml", "generate.prompt_file=prompts.txt", ranks=1)
        state = self.status(".")[0]
        self.assertEqual((pathlib.Path(state["path"]).name, state["done"], state["total"], state["done_before"]),
                         ("out", 3, 3, 2))


def sealed(**line):
    """A line of a manifest that a page accepts; without a hash, as of another program."""
    return json.dumps({"key": "k", "rank": 0, "bytes": 1, "file_xxh3": "0", **line}) + "\n"


@unittest.skipUnless(BROWSER, "no Chromium on this host")
class Browser(Page):
    """What page.js makes of the data."""

    TEXT = "return document.querySelector('main').innerText"
    RANKS = [  # of two ranks, step by step: seconds of work, of waiting for the other and for clips
        {"rank_busy": [0.65, 0.85], "rank_wait": [0.2, 0.0], "rank_data_wait": [0.05, 0.25], "slowest_rank": 1},
        {"rank_busy": [0.85, 0.75], "rank_wait": [0.0, 0.1], "rank_data_wait": [0.05, 0.05], "slowest_rank": 0}]

    def run_of(self, run, steps, **files):
        """A run with these steps; run_json: of run.json, and so on."""
        folder = self.dir / run
        folder.mkdir(parents=True)
        split = {"compute": 0.7, "wait_slowest": 0.1, "comm_exposed": 0.1, "data_wait": 0.05}
        (folder / "metrics.jsonl").write_text("".join(
            json.dumps({"step": i, "loss": 100 / (i + 1) ** 2, "seconds": 1, "split": split, "spread": 0.1, "samples": [i], "lr": 2e-3,
                        "memory": {"resident_bytes": 5e9, "arena_peak_bytes": 1.1e9}, **step}) + "\n" for i, step in enumerate(steps)))
        for name, content in files.items():
            (folder / name.replace("_json", ".json")).write_text(json.dumps(content))
        return self.page(run)[0]

    def test_a_training(self):
        steps = [dict(s, terms={"kl <b>": i, "still": 3}, stores={"a": {"samples": 3, "loss": 2}, "b": {"samples": 1, "loss": 5}},
                      start=i == 4) for i, s in enumerate(self.RANKS * 4)]
        page = self.run_of("run", steps, run_json={"ranks": "2", "memory_plan": {"weights": 2e9, "<b>": 3e8, "activations": 1e9}},
                           scaling_json={"mode": "weak", "mix": "mixed", "points": [
                               {"ranks": 4, "seconds": 1.1, "efficiency": 0.91, "wait": 0.011}, {"ranks": 1, "seconds": 1, "efficiency": 1}]})
        text = self.after_script(page, self.TEXT)
        for line in ("8\nsteps done", "1.5625\nloss, from 100", "7.5 %\nwaiting for the slowest, mean of the ranks (5.0 % to 10 %)",
                     "5.00 GB\nresident at most, rank 0", "Dotted: where the run was resumed.", "Constant: still = 3", "kl <b>",
                     "a 75 % of the samples", "compute 70 %", "rank 1\nbusy 800 ms, slowest in 50 % of steps", "weights 2.00 GB", "<b> 300 MB",
                     "activations, peak\n1.10 GB (+10.0 %)", "planned, a rank\n3.30 GB", "weak, mixed\t4\t1.10 s\t91.0 %\t-\t1.0 %",
                     "resumed after step\t4", "steps\t8", "loss (log)", "memory (GB)", "rate (1e-3)", "spread of ranks (%)"):
            self.assertIn(line, text)
        for wrong in ("NaN", "undefined", "memory_plan"):
            self.assertNotIn(wrong, text)
        widths, dotted, titles = self.after_script(page, """
            const ranks = [...document.querySelectorAll('section')].find(s => s.innerText.startsWith('Ranks'));
            return [[...ranks.querySelectorAll('.bar')].map(b => b.style.width), document.querySelectorAll('.restart').length,
                    [...ranks.querySelectorAll('.bar div')].map(d => d.title)];""")
        self.assertEqual(widths, ["100%", "100%"], "a rank's bar is as long as its step")
        self.assertIn("compute: 650 ms", titles, "rank 1's busy time without its wait for clips")
        self.assertEqual(dotted, 7)  # loss, a term, stores, step time, spread, memory, rate

    def test_charts_fit_the_screen(self):
        page = self.run_of("run", [{} for _ in range(120)])
        ticks = "return [...document.querySelectorAll('svg')[0].querySelectorAll('.tick')].map(t => t.textContent)"
        self.assertEqual(self.after_script(page, ticks)[-6:], ["20", "40", "60", "80", "100", "120"])
        self.assertEqual(self.after_script(page, ticks, width="390px")[-2:], ["50", "100"])

    def test_values_under_the_pointer_and_the_order_of_jobs(self):
        for run, steps in (("b", 3), ("a", 5)):
            self.run_of(f"runs/{run}", [{} for _ in range(steps)])
            (self.dir / f"runs/{run}/status.json").write_text(json.dumps(
                {"command": "train", "noun": "step", "state": "finished", "code": 0, "done": steps, "total": steps, "before": 0, "rate": 1,
                 "left": 0, "ranks": 1, "host": "", "started": 1, "updated": 2, "advanced": 1, "values": {}, "warnings": ["<i>"]}))
        shown = self.after_script("runs/a/report.html", """
            const svg = document.querySelector('.chart svg'), r = svg.getBoundingClientRect();
            svg.dispatchEvent(new PointerEvent('pointermove', {clientX: r.left + 0.98 * r.width, clientY: r.top + 50}));
            const box = document.getElementById('value');
            return [box.style.display, box.innerText, document.querySelector('.chart').curves[1].y.at(-1)];""")
        self.assertEqual(shown[0], "block")
        self.assertRegex(shown[1], f"^step 5\\s+a {float(f'{shown[2]:.5g}'):g}$")
        self.page("runs")
        names = self.after_script("runs/index.html", """
            const shown = () => [...document.querySelectorAll('.jobs a')].map(a => a.innerText + ' ' + a.getAttribute('href'));
            const click = () => document.querySelectorAll('.jobs th button')[2].click();
            const loss = () => document.querySelectorAll('.jobs th button')[3].click();
            return [(loss(), shown()), (loss(), shown()), document.querySelector('.jobs li').textContent];""")
        a, b = "a ./a/report.html", "b ./b/report.html"
        self.assertEqual(names, [[a, b], [b, a], "<i>"])

    def test_clips(self):
        def folder(name, prompt, **more):
            (self.dir / name / "references").mkdir(parents=True)
            for file, width in (("b.png", 65), ("references/b-0.png", 64)):
                (self.dir / name / file).write_bytes(png(width, 32, lambda x, y: (90, 90, 90)))
            (self.dir / name / "generated.jsonl").write_text(
                sealed(name="b-3", file="b.png", prompt=prompt, seed=7, sample=3, frames=9, height=48, width=64, seconds=1.25,
                       references=["references/b-0.png"], **more))
        folder("out", "a <dog>", shares=[{"name": "sky", "share": 0.5, "colour": "#0a0b0c"}, {"name": "sea", "share": 0.5, "colour": "red"}, 3])
        folder("later", "a cat", seed_of_another="x")
        (self.dir / "out/generate_report.json").write_text(json.dumps(
            {"failures": ["d: <no>"], "ranks": [{"clips": 1, "busy": 0.5, "last_end": 2}, {"clips": 2, "busy": 1.5, "last_end": 1.9}]}))
        self.page("out")
        text = self.after_script("out/report.html", self.TEXT)
        for line in ("1\nclip", "1\nfailed", "1.25 s\na clip (median)", "d: <no>", "reference 0\nof b-3",
                     "a <dog>\nb-3 · clip 3 of seed 7 · 64 x 48 · 9 frames · sky 50 % · sea 50 % · ", " · 1.25 s · rank 0", "1 clip, busy 25 %", "2 clips, busy 75 %"):
            self.assertIn(line, text)
        colours = self.after_script("out/report.html", "return [...document.querySelectorAll('.legend i')].map(i => i.style.background)")
        self.assertEqual(colours[:2], ["rgb(10, 11, 12)", ""], "a style takes colours alone")
        wide = self.after_script("out/report.html", "return [...document.querySelectorAll('figure')].map(f => f.className)")
        self.assertEqual(wide, ["", "wide"])
        self.page("later")
        self.assertRegex(self.after_script("later/report.html", self.TEXT), "Clips\n+reference 0\n", "no legend")
        self.page("out", "later")
        text = self.after_script("out/report.html", self.TEXT)
        self.assertRegex(text, "b-3\n(.*\n)*out: a <dog>\n(.*\n)*later: a cat\n(.*\n)*reference 0\nof out")

    def test_nothing_from_files_becomes_markup(self):
        evil = "<img src=x onerror='window.evil=1'></script><script>window.evil=1</script>\u202e\x1b"
        (self.dir / "run/generated").mkdir(parents=True)
        (self.dir / "run/generated/generated.jsonl").write_text(sealed(name=evil, file="a.png", prompt=evil, marked=evil, picture={"a": evil}))
        (self.dir / "run/metrics.jsonl").write_text(json.dumps({"step": 0, "loss": 1, "seconds": 1, "terms": {evil: 1}, "__proto__": {"x": 1}}) + "\n")
        (self.dir / "run/run.json").write_text(json.dumps({evil: evil, "build": evil, "memory_plan": {evil: 1e9}}))
        (self.dir / "run/deck.toml").write_text(evil)
        self.page("run")
        found, images, text = self.after_script("run/report.html", """
            return [window.evil ?? null, document.querySelectorAll('main script, img[src=x]').length, document.querySelector('main').innerText];""")
        self.assertEqual((found, images), (None, 0))
        self.assertIn("onerror", text)
        self.assertNotIn("\u202e", text)
        self.assertIn("\\u202e", text)


class Against(WeftTest):
    REFERENCES = REPOSITORY / "inputs/reference"

    def against(self, run, reference, expect=0):
        return self.weft("report", run, "--against", reference, ranks=0, expect=expect)

    def setUp(self):
        super().setUp()
        shutil.copytree(self.REFERENCES / "segmentation.1", self.dir / "run")

    def change(self, name, old, new):
        text = (self.dir / "run" / name).read_text()
        self.assertIn(old, text)
        (self.dir / "run" / name).write_text(text.replace(old, new, 1))

    def test_this_installation(self):
        """The references of all ranks agree with each other, and what this build computes with them."""
        reference = self.REFERENCES / "wan.2"
        self.weft("train", reference / "deck.toml", "run.dir=new", ranks=2)
        job = self.against("new", reference)
        self.assertRegex(job.out, r"(?m)^OK +metrics.jsonl loss: 10 steps, (all equal|agree to \d+\.\d digits at the worst \(step \d+: )")
        self.assertRegex(job.out, r"(?m)^reference .*wan\.2; weft .*; 2 \(data parallel\)")
        self.assertTrue(job.out.endswith("against: all agree\n"))
        for name in ("smoke", "wan", "vae", "segmentation"):
            for ranks in "24":
                self.against(self.REFERENCES / f"{name}.{ranks}", self.REFERENCES / f"{name}.1")

    def test_a_wrong_value_is_named(self):
        line = json.loads((self.dir / "run/metrics.jsonl").read_text().splitlines()[2])
        self.change("metrics.jsonl", f'"loss":{line["loss"]}', f'"loss":{line["loss"] * 1.01}')
        self.change("evaluation/evaluation.json", '"mean_iou": 0.1', '"mean_iou": 0.2')
        self.change("deck.toml", "batch_size = 2", "batch_size = 4")
        job = self.against("run", self.REFERENCES / "segmentation.1", expect=HARDWARE)
        for wrong in (r"deck: train.batch_size = 4, reference 2", r"metrics.jsonl loss: 6 steps, agree to 2\.0 digits at the worst \(step 3: .*; 3\.0 are expected",
                      r"evaluation/evaluation.json mean_iou: agree to 0\.\d digits \(.*; 1\.0 are expected", "against: 3 results"):
            self.assertRegex(job.out, wrong)
        self.assertEqual(job.out.count("FAIL"), 3)

    def test_what_is_missing_is_named(self):
        reference = self.dir / "reference"
        shutil.copytree(self.dir / "run", reference)
        lines = (self.dir / "run/metrics.jsonl").read_text().splitlines(True)
        (self.dir / "run/metrics.jsonl").write_text("".join(lines[:4]))
        shutil.rmtree(self.dir / "run/evaluation")
        job = self.against("run", "reference", expect=HARDWARE)
        self.assertIn("FAIL  metrics.jsonl: 2 are missing in the run: step 5, step 6\n", job.out)
        self.assertIn("FAIL  evaluation/evaluation.json is missing in the run\n", job.out)
        job = self.against("reference", "run")
        self.assertIn("only in the run, not compared: 2 steps of metrics.jsonl, evaluation/evaluation.json\n", job.out)

    def test_a_step_that_was_validated_on_two_sets(self):
        lines = [json.dumps({"step": step, "set": held, "loss": loss}) for step, held, loss in ((2, "a", 3), (4, "a", 2), (4, "b", 5))]
        (self.dir / "run/validation.jsonl").write_text("\n".join(lines) + "\n")
        self.assertIn("OK    validation.jsonl loss: 3 steps, all equal\n", self.against("run", "run").out)

    def test_clips_and_tables(self):
        clips = self.REFERENCES / "clips.1"
        self.weft("generate", clips / "deck.toml", "generate.output=clips", ranks=2)
        self.assertRegex(self.against("clips", clips).out, r"OK    generated.jsonl: 2 clips (equal to the bit|alike, at the worst PSNR \d+)")
        self.weft("generate", clips / "deck.toml", "generate.output=others", "vae.weights=random:3", ranks=2)
        self.assertRegex(self.against("others", clips, expect=HARDWARE).out, r"FAIL  generated.jsonl: sample_0000-0 is apart: PSNR [\d.]+ dB")
        os.truncate(self.dir / "clips/sample_0000-0.mp4", 1000)
        os.remove(self.dir / "clips/sample_0000-1.mp4")
        job = self.against("clips", clips, expect=HARDWARE)
        self.assertIn("sample_0000-0: clips/sample_0000-0.mp4 is damaged or was changed\n", job.out)
        self.assertIn("sample_0000-1: cannot open clips/sample_0000-1.mp4", job.out)
        (self.dir / "a.csv").write_text("path,aes\nx.mp4,5.25\ny.mp4,4.5\n")
        (self.dir / "b.csv").write_text("path,aes\nx.mp4,5.25\ny.mp4,9.0\n")
        self.assertIn("(row 2: 4.5, reference 9)", self.against("a.csv", "b.csv", expect=HARDWARE).out)

    def test_what_cannot_be_compared(self):
        (self.dir / "nothing").mkdir()
        run = self.REFERENCES / "wan.1"
        self.refused(self.against(run, "nothing", expect=None), DATA, "nothing has no results that can be compared")
        self.refused(self.against(self.REFERENCES / "clips.1", run, expect=None), DATA, "have no results in common")
        self.refused(self.against(run / "metrics.jsonl", self.REFERENCES / "clips.1/generated.jsonl", expect=None), DATA,
                     "have no results in common")
        self.change("metrics.jsonl", '{"step":1,', '{"step:1,')
        self.refused(self.against("run", self.REFERENCES / "segmentation.1", expect=None), DATA, "metrics.jsonl has a damaged line")
        # The last line of a run may be on its way; a reference's may not.
        whole = (self.REFERENCES / "segmentation.1/metrics.jsonl").read_text()
        for kept, fault in ((whole[:-20], "metrics.jsonl has a damaged line"), ("", "metrics.jsonl is empty")):
            (self.dir / "run/metrics.jsonl").write_text(kept)
            self.refused(self.against(self.REFERENCES / "segmentation.1", "run", expect=None), DATA, fault)
        self.refused(self.weft("report", run, run, "--against", run, ranks=0, expect=None), 2, "--against compares one run")
        self.refused(self.against(run, "", expect=None), 2, "--against: is an empty word")


if __name__ == "__main__":
    unittest.main()
