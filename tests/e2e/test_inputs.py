"""The decks of inputs/, as `weft init` writes them into an empty folder: `weft plan` takes each, by a command that is written in the
deck itself."""

import re
import unittest

from harness import REPOSITORY, WeftTest
from test_docs_commands import simple_commands

# What they read must be there: footage, pictures, sound. No job of theirs is planned without.
NOT_PLANNED = {"animate", "animate_demo", "animate_full", "reconstruct", "score", "score_opensora"}


class Inputs(WeftTest):
    def test_every_deck_is_planned_as_it_says(self):
        for deck in sorted((REPOSITORY / "inputs").glob("*.toml")):
            name = deck.stem
            self.weft("init", name, ranks=0)
            text = (self.dir / f"{name}.toml").read_text()
            lines = re.findall(r"(?m)^#   (weft plan .*)$", text)
            self.assertEqual(not lines, name in NOT_PLANNED, name)
            planned = 0
            for line in lines:
                command, = simple_commands(line)
                self.assertEqual(command[2], f"{name}.toml")
                with self.subTest(line):
                    job = self.weft(*command[1:], ranks=0, expect=None)
                    if job.process.returncode == 0:
                        planned += 1
                        self.assertRegex(job.out, r"memory of a rank|every rank")
                    else:  # after other commands of the deck, which make the data
                        self.refused(job, 3, "synthetic:")
            self.assertEqual(planned == 0, name in NOT_PLANNED, name)


if __name__ == "__main__":
    unittest.main()
