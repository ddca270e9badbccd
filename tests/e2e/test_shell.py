"""What a shell knows of weft: completion in bash, zsh and fish, manual pages, and decks to start from."""

import functools
import json
import pathlib
import re
import shutil
import subprocess
import unittest

from harness import REPOSITORY, WEFT, WeftTest

try:
    import jsonschema
    import tomllib
except ImportError:
    jsonschema = None


def needs(program):
    return unittest.skipUnless(shutil.which(program), f"no {program} here (tools/debian-packages-test.txt)")


class Shell(WeftTest):
    def said(self, *arguments):
        return self.weft(*arguments, ranks=0).out

    @functools.cache
    def commands(self):
        """Of weft --help."""
        listed = self.said("--help").split("Subcommands:\n")[1].split("\n\n")[0]
        found = [line.split()[0] for line in listed.splitlines()]
        self.assertIn("train", found)
        return found

    @functools.cache
    def keys(self):
        keys, section = [], None
        for line in self.said("help", "deck").splitlines():
            if match := re.fullmatch(r"\[(\w+)\]", line):
                section = match[1]
            elif match := re.match(r"(\w+) = ", line):
                keys.append(f"{section}.{match[1]}=")
        self.assertGreater(len(keys), 300)
        return keys

    def run_shell(self, *command, text=None):
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, cwd=self.dir)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        return done.stdout.splitlines()

    def bash(self, line):
        """What bash offers behind `line`, as Readline hands it over: words are parted at "=" too."""
        words = re.findall(r"=|[^\s=]+", line)
        if line.endswith(" "):
            words.append("")
        script = (f"source completion.bash\nCOMP_LINE={shquote(line)} COMP_POINT={len(line)} COMP_CWORD={len(words) - 1}\n"
                  f"COMP_WORDS=({' '.join(map(shquote, words))})\n_weft\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"\n")
        return [word for word in self.run_shell("bash", "-u", "-c", script.replace("_weft\n", "set +u; _weft\n", 1)) if word]

    def test_bash(self):
        (self.dir / "completion.bash").write_text(self.said("completion", "bash"))
        (self.dir / "my.toml").touch()
        self.run_shell("bash", "-n", "completion.bash")
        self.assertEqual(sorted(self.bash("weft ")), sorted([*self.commands(), "--help", "--version"]))
        self.assertEqual(self.bash("weft tr"), ["train"])
        self.assertEqual(self.bash("weft bench sc"), ["scaling"])
        self.assertEqual(self.bash("weft train m"), [k for k in self.keys() if k.startswith("m")] + ["my.toml"])
        self.assertEqual(self.bash("weft train my.toml train.lr_enc"), ["train.lr_encoder="])
        self.assertEqual(self.bash("weft train my.toml device.kind="), ["auto", "cpu", "cuda"])
        self.assertEqual(self.bash("weft train my.toml device.kind=c"), ["cpu", "cuda"])
        self.assertEqual(self.bash("weft train my.toml run.resume=t"), ["true"])
        self.assertEqual(self.bash("weft train my.toml run.dir="), [])  # bash's own: files
        self.assertIn("train", self.bash("weft plan my.toml --job "))
        self.assertIn("--job", self.bash("weft plan my.toml --"))
        self.assertEqual(self.bash("weft completion "), ["bash", "zsh", "fish", "--help"])
        self.assertEqual([k for k in self.bash("weft train ") if k.endswith("=")], self.keys())

    @needs("fish")
    def test_fish(self):
        (self.dir / "completion.fish").write_text(self.said("completion", "fish"))
        (self.dir / "my.toml").touch()

        def offered(line):
            found = self.run_shell("fish", "--no-config", "-c", f"source completion.fish; complete -C {shquote(line)}")
            return [word.split("\t")[0] for word in found]

        self.assertEqual(sorted(offered("weft ")), sorted(self.commands()))
        self.assertEqual(offered("weft tra"), ["train"])
        self.assertEqual(offered("weft bench sca"), ["scaling"])
        self.assertEqual(offered("weft train my.toml train.lr_enc"), ["train.lr_encoder="])
        self.assertEqual(sorted(offered("weft train my.toml device.kind=")), [f"device.kind={k}" for k in ("auto", "cpu", "cuda")])
        self.assertIn("run.dir=my.toml", offered("weft train my.toml run.dir="))
        self.assertIn("train", offered("weft plan my.toml --job "))
        self.assertIn("--fabric", offered("weft plan my.toml --fab"))

    @needs("zsh")
    def test_zsh(self):
        """The functions that zsh's completion hands candidates to are replaced by ones that print them."""
        (self.dir / "_weft").write_text(self.said("completion", "zsh"))
        printers = ("compadd() { shift $(( ${@[(i)--]} )); print -l -- $@ }\n_files() { print -- FILES $@ }\n"
                 "_describe() { local c; for c in ${(P)4} ${(P)5}; do print -r -- ${c%%:*}; done }\n"
                 "compset() { :; }\n")

        def offered(line):
            words = line.split(" ")
            text = f"{printers}words=({' '.join(shquote(w) if w else chr(39) * 2 for w in words)}); CURRENT={len(words)}\nsource ./_weft\n"
            return self.run_shell("zsh", "-f", text=text)

        self.assertEqual(sorted(offered("weft ")), sorted([*self.commands(), "--help", "--version"]))
        self.assertEqual(offered("weft train my.toml device.kind=c"), ["auto", "cpu", "cuda"])
        self.assertEqual(offered("weft train my.toml run.dir="), ["FILES"])
        self.assertEqual(offered("weft train "), [*self.keys(), "FILES -g *.toml"])
        self.assertIn("train", offered("weft plan my.toml --job "))
        self.assertIn("--fabric", offered("weft plan my.toml --"))
        self.assertIn("scaling", offered("weft bench "))

    def test_help_of_a_command(self):
        for words in ((), ("bench", "comm")):
            said = self.weft("help", *words, ranks=0).out
            self.assertEqual(said, self.weft(*words, "--help", ranks=0).out)
            self.assertIn(f"Usage: {' '.join(('weft', *words))} [OPTIONS]", said)

    def test_help_of_a_key(self):
        said = self.said("help", "train.lr")
        self.assertRegex(said, r"^\[train\]\n# This table is read by: train\. Explained in docs/train\.md\.\n\n"
                         r"# Learning rate; [^\n]* \(number, 0 to 1000\)\nlr = 0.0001\n$")
        self.assertEqual(self.said("help", "deck", "train.lr"), said)
        self.assertIn("\nlr = ", self.said("help", "deck", "train"))
        self.assertIn("of: auto, cpu, cuda)", self.said("help", "device.kind"))
        for typed, meant in (("train.lrr", "train.lr"), ("warmup_step", "train.warmup_steps"), ("trian.lr", "train.lr"),
                             ("generat", "generate"), ("vae.lr", "train.lr"), ("model.filters", "vae.filters")):
            self.refused(self.weft("help", typed, ranks=0, expect=None), 2, typed, "did you mean", meant)

    def test_words_that_help_does_not_take(self):
        for words, said in ((("train.lr", "extra"), "not expected: extra"), (("train", "extra"), 'unknown command "train extra"'),
                            (("bench", "com"), 'unknown command "bench com"'), (("man", "extra"), 'weft help man takes no "extra"'),
                            (("schema", "train"), 'weft help schema takes no "train"'), (("-x",), 'unknown option "-x"')):
            with self.subTest(words):
                self.refused(self.weft("help", *words, ranks=0, expect=None), 2, said)

    def test_an_empty_word(self):
        """As of a variable of a script that is not set."""
        for words in (("report", ""), ("status", ""), ("init", "", "x.toml"), ("train", "")):
            with self.subTest(words):
                self.refused(self.weft(*words, ranks=0, expect=None), 2, "is an empty word")

    def test_an_empty_value_among_those_of_a_key(self):
        self.assertIn('(text, of: "", operations, shapes)', self.said("help", "run.profile"))
        self.refused(self.weft("plan", "deck.toml", "run.profile=ops", ranks=0, expect=None), 2, 'is not one of: "", operations, shapes')

    def test_help_names_readers_and_pages_of_every_table(self):
        said = self.said("help", "deck")
        self.assertIn("[data]\n# This table is read by: train, encode, generate, evaluate, segment. ", said)
        for table in dict.fromkeys(key.split(".")[0] for key in self.keys()):
            with self.subTest(table):
                page = re.search(rf"(?m)^\[{table}\]\n# This table is read by: .*\. Explained in (docs/[\w/]+\.md)\.$", said)
                text = (REPOSITORY / page[1]).read_text()
                self.assertRegex(text, rf"\[{table}\]|`{table}\.\w", f"{page[1]} does not name [{table}]")

    def schema(self):
        return json.loads(self.said("help", "schema"))

    def test_schema_has_every_key(self):
        schema = self.schema()
        known = {f"{table}.{key}=" for table, t in schema["properties"].items() for key, k in t["properties"].items()
                 if "default" in k}
        self.assertEqual(known, set(self.keys()))
        for table in schema["properties"].values():
            self.assertIs(table["additionalProperties"], False)
        self.assertEqual(json.loads((REPOSITORY / "inputs/deck.schema.json").read_text()), schema)

    @unittest.skipUnless(jsonschema, "no jsonschema here (tools/debian-packages-test.txt)")
    def test_schema_and_parser_agree(self):
        """What the schema takes weft takes, and what it refuses weft refuses."""
        validator = jsonschema.Draft4Validator(self.schema())
        validator.check_schema(validator.schema)
        for deck in sorted((REPOSITORY / "inputs").glob("*.toml")):
            with self.subTest(deck.name):
                text = deck.read_text()
                self.assertEqual(text.splitlines()[0], "#:schema ./deck.schema.json")
                self.assertEqual([e.message for e in validator.iter_errors(tomllib.loads(text))], [])
        taken = ('[train]\nlr = 1\nsteps = 5', '[train]\nema_decay = 0.9', '[train]\nema_decay = [0.9, 0.99]', '[data]\npath = "a.h5"',
                 '[data]\npath = ["a.h5", "b.h5"]', '[model]\nname = "wan"\nhidden_size = 96', '[device]\nkind = "cpu"',
                 '[model]\nfilters = 8', '[model]\npatch_size = [1, 2, 2]', '[run]\nresume = false')
        refused = ('[train]\nlrr = 1', '[trian]\nlr = 1', 'lr = 1', '[train]\nlr = "1"', '[train]\nsteps = 1.5', '[train]\nsteps = 0',
                   '[train]\nema_decay = 2', '[device]\nkind = "gpu"', '[data]\npath = []', '[data]\npath = 3',
                   '[ingest]\nresolutions = ["144"]', '[run]\nresume = 1', '[model]\npatch_size = [1, 2.5, 2]')
        for texts, code in ((taken, 0), (refused, 2)):
            for text in texts:
                with self.subTest(text):
                    self.assertEqual(validator.is_valid(tomllib.loads(text)), code == 0)
                    (self.dir / "d.toml").write_text(text + "\n")
                    # A deck that it takes goes as far as the file that the command asks for.
                    job = self.weft("text", "d.toml", "nothing.txt", "--cleaned", "c.txt", ranks=0, expect=None)
                    self.assertEqual("ERROR: d.toml" in job.err, code == 2, job.err)

    @needs("groff")
    def test_manual_pages(self):
        for topic, named in (("man", [*self.commands(), "EXIT STATUS", "--fabric"]),
                             ("man-deck", [k.removesuffix("=") for k in self.keys()])):
            page = self.dir / f"{topic}.roff"
            page.write_text(self.said("help", topic))
            text = "\n".join(self.run_shell("groff", "-man", "-ww", "-Tascii", "-P-cbou", page))
            for name in named:
                self.assertIn(name, text)

    def test_decks_to_start_from(self):
        decks = {p.stem: p for p in (REPOSITORY / "inputs").glob("*.toml")}
        listed = self.said("init")
        for name in decks:
            self.assertRegex(listed, rf"(?m)^{name} +\S")
        for name in ("smoke", "stage1", "demo_vae"):
            deck = decks[name]
            self.said("init", name)
            text = (self.dir / f"{name}.toml").read_text()
            # Its commands are those of a user with weft on the PATH and the deck where it was written; its schema is the one
            # beside the program, if there is one.
            wanted = re.sub(r"inputs/(\w+\.toml)", r"\1", deck.read_text()).replace("build/weft", "weft")
            schema = pathlib.Path(WEFT).parent.parent / "inputs/deck.schema.json"
            line = f"#:schema {schema.as_uri()}\n" if schema.exists() else ""
            self.assertEqual(text, line + wanted.removeprefix("#:schema ./deck.schema.json\n"))
        self.said("init", "ingest", "mine.toml")
        text = (self.dir / "mine.toml").read_text()
        self.assertIn("weft ingest mine.toml", text)
        self.assertIn("its comments name demo_vae.toml, which `weft init demo_vae` writes\n", self.said("init", "demo", "demo2.toml"))
        text = (self.dir / "demo2.toml").read_text()
        self.assertIn("mpirun -n 2 weft encode demo2.toml ", text)
        self.assertIn("mpirun -n 2 weft train demo_vae.toml\n", text)
        # As a shell takes the name; a comment that a line's break ends would be none.
        self.said("init", "ingest", "my deck.toml")
        self.assertIn("weft ingest 'my deck.toml'", (self.dir / "my deck.toml").read_text())
        self.refused(self.weft("init", "ingest", "a\nb.toml", ranks=0, expect=None), 2, '"a\\nb.toml" has control characters')
        # An address of a file, whatever the folders are called.
        installed = self.dir / "my tools #1 é%"
        for folder in ("bin", "share/weft/inputs"):
            (installed / folder).mkdir(parents=True)
        shutil.copy(WEFT, installed / "bin/weft")
        (installed / "share/weft/inputs/deck.schema.json").touch()
        self.weft("init", "smoke", "linked.toml", ranks=0, program=installed / "bin/weft")
        self.assertEqual((self.dir / "linked.toml").read_text().splitlines()[0],
                         f"#:schema {(installed / 'share/weft/inputs/deck.schema.json').as_uri()}")
        self.refused(self.weft("init", "smoke", ranks=0, expect=None), 2, "smoke.toml already exists")
        self.refused(self.weft("init", "smok", ranks=0, expect=None), 2, 'no deck "smok"', 'did you mean "smoke"?')
        self.refused(self.weft("init", "smoke", "nowhere/a.toml", ranks=0, expect=None), 2, "cannot create nowhere/a.toml")
        # As its user goes on: the deck as it was written.
        self.weft("train", "smoke.toml", "train.steps=2", "run.dir=run")
        self.assertEqual(len(self.losses("run")), 2)


def shquote(text):
    return "'" + str(text).replace("'", "'\\''") + "'"


if __name__ == "__main__":
    unittest.main()
