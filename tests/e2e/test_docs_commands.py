"""README.md and docs/: each command is run on small inputs, or is checked as far as its inputs allow; keys and messages are
there. Links: tests/tools/test_docs.py. The commands in front of the decks in inputs/ are parsed.

Every line of a code block that names weft, make or sbatch is a command, and each must match a rule of RULES; a command or a line
that no rule knows fails. In the text around, `weft X` and `make X` must at least exist.
    parse   options, deck and keys are read; then a value that is refused, added at the end, ends it
    run     parse, where it takes a deck; then, with WEFT_RUN_COMMANDS=1 (make test-all), the command itself, in a folder with small
            inputs, on two ranks at most
    dry     `make -n`: the target exists and its recipe expands
A job script is checked by what it starts: its deck and the keys that it is given are parsed. jobscripts/pipeline.sh is run with
--dry-run, and each sbatch line that it prints is checked so.
"""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import unittest

from harness import REPOSITORY, TINY_DECK, WeftTest, make_video
from tiny_models import TINY_GENERATE_DECK

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
DECKS = sorted((REPOSITORY / "inputs").glob("*.toml"))
REFUSED = "run.threads=-1"
RUN = os.environ.get("WEFT_RUN_COMMANDS") == "1"
SMALL = "synthetic:clips=4,frames=17,height=32,width=32"

PLACEHOLDERS = {"PATH": "RUN"}  # and files of these names, which inputs() makes

# Pattern of "weft COMMAND ARGUMENTS" or "make TARGET", what is done, and what makes the command small: keys at its end, options
# in place of its own. The first that matches counts.
RULES = [
    # Minutes or hours, or a GPU, for people who wait.
    (r"make (run|test|test-all|test-slurm|fuzz|tsan|build|bench|bundle|dist|sbom|deps|format|check-format|check-includes|clean|help)\b", "dry"),
    # Released weights, footage that is not there, and models of a size to match.
    (r"weft \d", "text"),  # a version
    (r"weft (train|evaluate) \$reference|weft report .*--against", "text"),  # tests/e2e/test_report.py runs them
    (r"weft train (my|footage|lora|RUN/deck).toml", "parse"),
    (r"weft (ingest|encode|generate) (footage|lora).toml", "parse"),
    (r"weft init train(_lora)? (footage|lora).toml", "parse"),
    (r"weft (ingest|train|evaluate|segment) (own_classes|camvid).toml", "parse"),
    (r"weft inspect signs.jsonl", "parse"),
    # Own footage, from files to a sample: all of it, with few steps.
    (r"weft ingest own_footage.toml", "run", "ingest.inputs=videos", "ingest.output=own.h5"),
    (r"weft train own_footage_vae.toml", "run", "data.path=own.h5", "train.steps=2"),
    (r"weft reconstruct own_footage_vae.toml", "run", "reconstruct.inputs=videos"),
    (r"weft encode own_footage.toml", "run", "data.path=own.h5", "encode.output=own_latents.h5"),
    (r"weft plan own_footage.toml", "run", "data.path=own_latents.h5"),
    (r"weft train own_footage.toml", "run", "data.path=own_latents.h5", "train.steps=2"),
    (r"weft generate own_footage.toml", "run", "data.path=own_latents.h5", "sampler.steps=2", "generate.num_samples=2"),
    (r"weft (ingest|generate|encode|animate|evaluate|segment|score|reconstruct|train) inputs/(?!smoke)", "parse"),
    (r"weft ingest deck.toml ingest.inputs=meta.csv", "parse"),
    (r"weft evaluate deck.toml evaluate.clips=", "parse"),
    (r"weft ingest deck.toml ingest.inputs=videos", "run"),
    (r"weft bench scaling ", "parse"),
    (r"weft generate$", "text"),  # the launcher's options are the point
    (r"weft (export runs/lora|inspect my_style|report runs/held_out)", "parse"),
    (r"weft train deck.toml data.path=latents.h5", "run", "model.in_channels=4", "train.steps=2", "run.dir=trained"),
    (r"weft train (deck.toml|DECK.toml|inputs/smoke.toml)", "run", "train.steps=2", "run.dir=trained"),
    (r"weft generate inputs/smoke.toml", "run", "run.dir=smoke", "sampler.steps=2"),
    (r"weft evaluate inputs/smoke.toml", "run", "run.dir=smoke"),
    (r"weft selftest", "text"),  # tests/e2e/test_selftest.py runs it
    (r"weft plan inputs/wan_1.3b_(train|lora).toml", "run", "data.path=synthetic:clips=8,frames=5,height=8,width=8,latent=1,channels=16"),
    (r"weft export\b", "run", "--replace"),
    (r"weft (plan|doctor|report|status|inspect)\b", "run"),
    (r"weft selftest\b", "run"),
    (r"weft init$|weft completion |weft help |weft --(help|version)$", "run"),
    (r"weft init ", "run"),
]
# Lines of code blocks that name weft or make and are no commands: output, trees of folders, formulas.
TEXTS = [
    r"^\s+generated/  report.html    of weft generate and weft report$", r"^\s+status.json  +how far the job is, for weft status$",
    r"^\[rank 1 on n13\] HINT: a bug of weft",
    r"^build/weft\(\+0x",
    r"^(FAIL|WARN|OK) ",
    r"^source <\(weft completion bash\)$", r"^tar xf weft-VERSION", r"^sha256sum ", r"^eb ", r"^reframe ", r"^cd PREFIX/", r"^tools/test_bundle.sh ", r"^validation/", r"^tools/convert_weights.py ", r"^python3 ", r"^spack ", r"^module ",
    r"^apptainer ", r"^cmake ", r"^git clone ", r"^cp -r ",
]


def code_lines(path):
    """(number, line) of code blocks, fenced or indented, with continued lines joined."""
    fenced, after_blank, found = False, True, []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            continue
        indented = line.startswith("    ") and (after_blank or (found and found[-1][0] == number - 1))
        if fenced or indented:
            # A synopsis goes on with what is optional.
            if found and (found[-1][1].endswith("\\") or found[-1][0] == number - 1 and line.strip().startswith("[--")):
                found[-1] = (number, found[-1][1].removesuffix("\\") + " " + line.strip())
            else:
                found.append((number, line if fenced else line[4:]))
        after_blank = not line.strip()
    return found


def decks_of(path):
    """{name: text} of the decks that the page shows: fenced blocks whose first line is "# NAME.toml"."""
    blocks = re.findall(r"(?m)^```toml\n(# (\S+\.toml)\n(?:(?!```).*\n)*)```", path.read_text())
    return {name: text for text, name in blocks}


def simple_commands(line):
    """The commands of a line as lists of words; without comments, launchers, the environment and the name of what is printed."""
    line = re.sub(r"^\w+=\$\((.*)\)$", r"\1", line)
    words = re.findall(r"""(?:[^\s'";&]|'[^']*'|"[^"]*")+|[;&]+""", line)
    words = words[:next((i for i, w in enumerate(words) if w.startswith("#")), None)]
    commands, command = [], []
    for word in [*words, ";"]:
        if set(word) <= set(";&|"):
            commands.append(command)
            command = []
        else:
            command.append(word)
    return [c for c in map(without_launcher, commands) if c]


def without_launcher(words):
    """From the program on; [] where that is none of weft, make, sbatch and pipeline.sh."""
    words = [w for w in words if w not in ("do", "if", "while", "!")]
    for i, word in enumerate(words):
        name = pathlib.PurePath(word).name
        if name in ("weft", "weft_cpu", "make", "sbatch", "pipeline.sh"):
            launched = not words[:i] or words[0] == "srun" or "=" in words[0] or \
                pathlib.PurePath(words[0]).name.startswith(("mpirun", "mpiexec"))
            return [name.removesuffix("_cpu"), *plain(words[i + 1:])] if launched else []
    return []


def plain(words):
    """Words as the shell passes them on; a synopsis with all that is optional."""
    found = []
    for word in words:
        if word.startswith((">", "<")):
            break
        if not re.match(r"[^'\"]*[=]|['\"]", word):
            word = word.strip("[]").split("|")[0].removesuffix("...")
        if word and "section.key=value" not in word:
            word = PLACEHOLDERS.get(word, word.removeprefix("weft-VERSION/"))
            found.append("".join(shlex.split(word.strip("]") if word.count("]") > word.count("[") else word)))
    return found


class Commands(WeftTest):
    @classmethod
    def setUpClass(cls):
        cls.help = {}

    def setUp(self):
        super().setUp()
        for name in ("inputs", "jobscripts", "validation", "docs"):
            (self.dir / name).symlink_to(REPOSITORY / name)
        for name in ("deck.toml", "DECK.toml", "D.toml", "VAE.toml", "ENCODE.toml"):
            (self.dir / name).write_text(TINY_DECK)
        for name, deck in (("footage", "train"), ("lora", "train_lora"), ("own_footage", "own_footage"),
                           ("own_footage_vae", "own_footage_vae")):  # as `weft init` writes them; here it does, of the last two
            if RUN and name.startswith("own"):
                continue
            shutil.copy(REPOSITORY / f"inputs/{deck}.toml", self.dir / f"{name}.toml")

    def inputs(self):
        """What commands that are run read, under the names that the pages give it."""
        self.weft("train", "deck.toml", "run.dir=RUN", "train.steps=4", "train.checkpoint_every=2", ranks=1)
        for name in ("first", "footage", "tuned"):
            shutil.copytree(self.dir / "RUN", self.dir / "runs" / name, symlinks=True)
        self.weft("train", "inputs/smoke.toml", "run.dir=smoke", "train.steps=2", ranks=1)
        self.weft("bench", "scaling", "deck.toml", "--steps", "1", "--warmup", "1", "--rounds", "1", "--json", "SCALING.json", ranks=1)
        (self.dir / "videos").mkdir()
        make_video(self.dir / "videos/a.mp4", "testsrc2=duration=4:size=640x360:rate=24")
        (self.dir / "gen.toml").write_text(TINY_GENERATE_DECK)
        self.weft("encode", "gen.toml", f"data.path={SMALL}", "encode.output=latents.h5", "encode.text=false", ranks=1)

    def small(self, command, more):
        """The command with what its rule says of keys and options."""
        command, keys = list(command), []
        for word in more:
            option, _, value = word.partition(" ")
            if not value:
                keys.append(word if word != "run.dir=trained" else f"{word}{len(self.jobs)}")
            elif option in command:
                command[command.index(option) + 1] = value
            else:
                command += [option, value]
        return command + keys

    def has_deck(self, command):
        """Whether `weft COMMAND` takes keys of a deck."""
        name = tuple(w for w in command[1:3] if re.fullmatch("[a-z0-9]+", w))
        name = name if name[0] == "bench" else name[:1]
        if name not in self.help:
            self.help[name] = self.weft(*name, "--help", ranks=0).out
        return "section.key=value" in self.help[name]

    def parse(self, command, where):
        job = self.weft(*command[1:], REFUSED, ranks=0, expect=2)
        self.assertIn(f"override '{REFUSED}'", job.err, f"{where}: {' '.join(command)}")

    def submitted(self, words, where):
        """A job script is there, and the job that it starts knows the keys that it is given."""
        script, = (w for w in words if w.endswith(".sbatch"))
        text = (self.dir / script).read_text()
        self.assertEqual(subprocess.run(["bash", "-n", script], cwd=self.dir).returncode, 0, where)
        words, deck = [w.replace("%a", "1") for w in words[words.index(script) + 1:]], "inputs/smoke.toml"
        command = words.pop(0) if script == "jobscripts/weft.sbatch" else None
        if script != "jobscripts/smoke.sbatch" or words:
            deck = words.pop(0)
            self.assertTrue(deck.endswith(".toml") and "=" not in deck, f"{where}: {script} wants a deck first")
        job = command or (re.findall(r"(?m)^(?:until_done|run_once|run_weft) (\w+) ", text) or ["train"])[-1]
        self.parse(["weft", job if command else "train" if re.search(r"(?m)^train ", text) or job == "bench" else job, deck, *words], where)

    def pipeline(self, words, where):
        """What jobscripts/pipeline.sh would submit."""
        done = subprocess.run(["jobscripts/pipeline.sh", *words, "--dry-run"], cwd=self.dir, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, f"{where}: pipeline.sh {' '.join(words)}\n{done.stderr}")
        lines = done.stdout.splitlines()
        self.assertTrue(lines, where)
        for line in lines:
            program, *rest = shlex.split(line)
            self.assertEqual(program, "sbatch", where)
            self.submitted(rest, where)

    def check(self, command, where):
        """Does with the command what its rule says; what that was."""
        text = " ".join(command)
        if command[0] == "sbatch":
            self.submitted(command[1:], where)
            return "parse"
        if command[0] == "pipeline.sh":
            self.pipeline(command[1:], where)
            return "parse"
        for pattern, how, *more in RULES:
            if not re.match(pattern, text):
                continue
            if how == "dry":
                done = subprocess.run(["make", "-n", "-C", str(REPOSITORY), *command[1:]], capture_output=True, text=True)
                self.assertEqual(done.returncode, 0, f"{where}: {text}\n{done.stderr}")
            elif how in ("parse", "run"):
                if self.has_deck(command) and any(word.endswith(".toml") for word in command):
                    self.parse(command, where)
                if how == "run" and RUN:
                    ranks = 1 if command[1] == "doctor" else 2  # which rightly refuses two ranks on one core
                    job = self.weft(*self.small(command[1:], more), ranks=ranks, expect=None)
                    self.assertEqual(job.process.returncode, 0, f"{where}: {text}\n{job.out}{job.err}")
            return how
        self.fail(f"{where}: no rule of RULES knows this command: {text}")

    def test_every_command_of_every_page(self):
        if RUN:
            self.inputs()
        else:
            (self.dir / "RUN").mkdir()
            (self.dir / "RUN/deck.toml").write_text(TINY_DECK)
        done, counts = {}, {}
        for page in PAGES:
            for name, text in decks_of(page).items():
                (self.dir / name).write_text(text)
            for number, line in code_lines(page):
                where = f"{page.relative_to(REPOSITORY)}:{number}"
                commands = simple_commands(line)
                if not commands and re.search(r"\b(weft|make|sbatch)\b", line.split(" #")[0]):
                    self.assertTrue(any(re.search(t, line) for t in TEXTS), f"{where}: neither a command nor known as text: {line}")
                for command in commands:
                    if tuple(command) not in done:
                        with self.subTest(where):
                            done[tuple(command)] = how = self.check(command, where)
                            counts[how] = counts.get(how, 0) + 1
        print(f"\n  {len(done)} different commands: {counts}")
        self.assertGreater(counts.get("run", 0), 10)
        self.assertGreater(counts.get("parse", 0), 5)

    def test_the_commands_in_front_of_decks_parse(self):
        for deck in DECKS:
            text = re.sub(r"\\\n# +", "", deck.read_text())
            for line in re.findall(r"(?m)^#   (\S.*)$", text):
                for command in simple_commands(line):
                    with self.subTest(deck.name):
                        if any(word.endswith(".toml") for word in command):
                            self.parse(command, f"inputs/{deck.name}")

    def test_what_is_wrong_is_seen(self):
        self.assertEqual(simple_commands("A=1 mpirun -n 8 build/weft train d.toml x.y='a b' && make run # weft"),
                         [["weft", "train", "d.toml", "x.y=a b"], ["make", "run"]])
        for wrong in (["weft", "dance"], ["weft", "train", "inputs/stage1.toml", "train.lrr=1"], ["make", "tea"],
                      ["weft", "plan", "inputs/stage1.toml", "--gqus", "8"],
                      ["sbatch", "jobscripts/score.sbatch", "DECK.toml", "score.inputt=a.csv"],
                      ["sbatch", "jobscripts/score.sbatch", "score.input=a.csv"],
                      ["pipeline.sh", "DECK.toml", "dance:d.toml"], ["pipeline.sh", "DECK.toml", "train:train.lrr=1"]):
            with self.subTest(wrong), self.assertRaises(AssertionError):
                self.check(wrong, "here")

    def test_what_the_text_names_exists(self):
        commands = set(re.findall(r"(?m)^  ([a-z]+) ", self.weft("--help", ranks=0).out))
        makefile = (REPOSITORY / "Makefile").read_text()
        targets = set(re.findall(r"(?m)^([a-z-]+):", makefile))
        self.assertGreater(len(commands), 15)
        for page in PAGES:
            for program, word in re.findall(r"`(weft|make) ([a-z][a-z-]*)", page.read_text()):
                with self.subTest(f"{page.name}: {program} {word}"):
                    self.assertIn(word, commands if program == "weft" else targets)

    def test_keys_that_the_text_names_exist(self):
        keys, table = set(), ""
        for line in self.weft("help", "deck", ranks=0).out.splitlines():
            if match := re.fullmatch(r"\[(\w+)\]", line):
                table = match[1]
            elif match := re.match(r"(\w+) = ", line):
                keys.add(f"{table}.{match[1]}")
        tables = {key.split(".")[0] for key in keys}
        files = ("json", "jsonl", "toml", "txt", "html", "csv", "h5", "py", "cu", "sbatch")
        for page in PAGES:
            for key in re.findall(r"`(\w+\.\w+)(?=[` =])", page.read_text()):
                if key.split(".")[0] in tables and key.split(".")[1] not in files:
                    with self.subTest(f"{page.name}: {key}"):
                        self.assertIn(key, keys)

    def test_messages_of_troubleshooting_are_weft_s(self):
        """Each quoted piece of a message, up to the "..." of what differs, is in the source; but for what other programs print."""
        source = "".join(p.read_text() for p in sorted((REPOSITORY / "src").rglob("*.cpp")))
        source = re.sub(r'"\s*\n\s*"', "", source).replace('\\"', '"')  # literals in pieces
        ours = (REPOSITORY / "docs/troubleshooting.md").read_text().split("## Slow")[0]
        messages = [quoted for row in re.findall(r"(?m)^\| (.*?) \|", ours) for quoted in re.findall("`([^`]+)`", row)]
        self.assertGreater(len(messages), 20)
        for message in messages:
            for piece in message.split("..."):
                with self.subTest(message):
                    self.assertIn(piece.strip(": ,"), source)


if __name__ == "__main__":
    unittest.main()
