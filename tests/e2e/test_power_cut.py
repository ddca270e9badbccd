"""A power cut at any moment of a save: what was not synced may be lost, reordered, or there in part. A library between weft
and the system (tests/shim) records what a run does to its checkpoints; each case builds one directory that a cut could
leave, and weft must find the state of the last save that was finished, or of the one under way.

WEFT_POWER_CUTS: how many cases (60 if not set). WEFT_POWER_CUT_SEED: the first of their seeds.
"""

import copy
import os
import random
import re
import shutil
import unittest

from harness import WeftTest

CASES = int(os.environ.get("WEFT_POWER_CUTS", "60"))
FIRST_SEED = int(os.environ.get("WEFT_POWER_CUT_SEED", "0"))
TORN = 8  # of so many pieces a write may be there in part


def read_log(path):
    """The acts in order, as tuples; an inode's number is made unique over time, since the system uses it again."""
    data, at, acts, version = path.read_bytes(), 0, [], {}
    fresh = iter(range(10**9))
    while at < len(data):
        end = data.index(b"\n", at)
        verb, *words = data[at:end].decode().split(" ")
        at = end + 1
        if verb in ("file", "directory"):
            version[words[2]] = (words[2], next(fresh))
            acts.append((verb, version.get(words[0], words[0]), words[1], version[words[2]]))
        elif verb == "write":
            size = int(words[2])
            acts.append((verb, version.get(words[0], words[0]), int(words[1]), data[at:at + size]))
            at += size + 1
        elif verb == "cut":
            acts.append((verb, version.get(words[2], words[2])))
        elif verb == "sync":
            acts.append((verb, version.get(words[0], words[0])))
        elif verb == "link":
            acts.append((verb, version.get(words[0], words[0]), words[1], words[2]))
        elif verb == "rename":
            acts.append((verb, version.get(words[0], words[0]), words[1],
                         version.get(words[2], words[2]), words[3]))
        elif verb == "unlink":
            acts.append((verb, version.get(words[0], words[0]), words[1]))
        else:
            raise ValueError(verb)
    return acts


class Disk:
    """Directories {inode: {name: what}}, files {inode: bytes}; `what` is ("file", i), ("directory", i) or ("link", target)."""

    def __init__(self):
        self.names, self.files = {}, {}

    def apply(self, act):
        verb = act[0]
        if verb in ("file", "directory"):
            self.names.setdefault(act[1], {})[act[2]] = (verb, act[3])
        elif verb == "link":
            self.names.setdefault(act[1], {})[act[2]] = ("link", act[3])
        elif verb == "write":
            data = self.files.setdefault(act[1], bytearray())
            data.extend(bytes(max(0, act[2] - len(data))))
            data[act[2]:act[2] + len(act[3])] = act[3]
        elif verb == "cut":
            self.files[act[1]] = bytearray()
        elif verb == "rename":
            what = act[5] if len(act) > 5 else self.names.get(act[1], {}).get(act[2])
            self.names.setdefault(act[1], {}).pop(act[2], None)
            if what is not None:
                self.names.setdefault(act[3], {})[act[4]] = what
        elif verb == "unlink":
            self.names.setdefault(act[1], {}).pop(act[2], None)

    def build(self, inode, path):
        path.mkdir()
        for name, (kind, what) in self.names.get(inode, {}).items():
            if kind == "directory":
                self.build(what, path / name)
            elif kind == "link":
                (path / name).symlink_to(what)
            else:
                (path / name).write_bytes(self.files.get(what, b""))


def of_checkpoints(act, run):
    """Whether an act is within a checkpoint, or puts one in its place."""
    names = [word for at, word in zip(act[1:], act[2:]) if at == run and isinstance(word, str)]
    return not names or any(name.startswith(("step_", "latest")) for name in names)


def after_a_cut(acts, moment, chance):
    """What may be on the disk when the power goes after `moment` acts: what was synced, and any part of the rest. A rename
    carries what its name meant when it was made, wherever the making of the old name got lost."""
    now, disk, synced_at = Disk(), Disk(), {}
    for i, act in enumerate(acts[:moment]):
        if act[0] == "sync":
            synced_at[act[1]] = i
    all_names = chance.choice((0, 0.5, 1))  # sometimes all that is pending is lost, or nothing
    all_data = chance.choice((0, 0.5, 1))
    for i, act in enumerate(acts[:moment]):
        carried = act
        if act[0] == "rename":
            carried = (*act, now.names.get(act[1], {}).get(act[2]))
        now.apply(act)
        if act[0] == "sync":
            continue
        safe = synced_at.get(act[1], -1) > i
        if act[0] == "rename":
            safe = safe and synced_at.get(act[3], -1) > i
        if act[0] in ("write", "cut"):
            if safe or chance.random() < all_data:
                if not safe and act[0] == "write" and chance.random() < 0.5:
                    act = (*act[:3], act[3][:len(act[3]) * chance.randrange(TORN) // TORN])
                disk.apply(act)
        elif safe or chance.random() < all_names:
            disk.apply(carried)
    return disk


class PowerCut(WeftTest):
    def setUp(self):
        super().setUp()
        run, log = self.dir / "run", self.dir / "log"
        run.mkdir()
        inode = str(run.stat().st_ino)
        # Three saves: the third takes the first away.
        self.weft("train", "deck.toml", "train.steps=6", "train.checkpoint_every=2",
                  shim=f"record={log}:{run}")
        self.acts = [a for a in read_log(log) if of_checkpoints(a, inode)]
        self.run_inode = inode
        whole = Disk()
        for act in self.acts:
            whole.apply(act)
        whole.build(inode, self.dir / "replayed")
        # The record is complete: all of it gives what is there.
        for path in ("step_4", "step_6"):
            names = sorted(p.name for p in (run / path).iterdir())
            self.assertEqual(names, sorted(p.name for p in (self.dir / "replayed" / path).iterdir()))
            for name in names:
                self.assertEqual((run / path / name).read_bytes(),
                                 (self.dir / "replayed" / path / name).read_bytes(), f"{path}/{name}")
        self.assertEqual(sorted(p.name for p in run.iterdir() if p.name.startswith(("step_", "latest"))),
                         sorted(p.name for p in (self.dir / "replayed").iterdir()))
        self.hashes = self.states_of(Disk.build)

    def states_of(self, build):
        """{step: hash of its state}, from the record: each save when `latest` had just come to name it."""
        found, disk = {}, Disk()
        for i, act in enumerate(self.acts):
            disk.apply(act)
            if act[0] != "rename" or act[4] != "latest":
                continue
            place = self.dir / f"state_{i}"
            build(disk, self.run_inode, place)
            found.update([self.inspect(place / "latest")])
        self.assertEqual(sorted(found), [2, 4, 6])
        return found

    def inspect(self, path):
        text = self.weft("inspect", path, ranks=0).out
        return (int(re.search(r"^  step +(\d+)", text, re.M).group(1)),
                re.search(r"hash of the state +(\w+)", text).group(1))

    @staticmethod
    def manifest_is_whole(step):
        path = step / "manifest.json"
        return path.exists() and path.read_bytes().endswith(b"}\n") and b'"state_hash"' in path.read_bytes()

    def allowed(self, moment):
        """(step of the last finished save or None, steps that a loader may take)."""
        finished, linked, begun = None, None, set()
        for act in self.acts[:moment]:
            if act[0] == "directory" and act[2].startswith("step_"):
                begun.add(int(re.search(r"\d+", act[2]).group()))
            if act[0] == "rename" and act[4] == "latest":
                linked = max(begun)
            if act[0] == "sync" and act[1] == self.run_inode and linked is not None:
                finished = linked
        return finished, {step for step in begun if finished is None or step >= finished}

    def test_a_cut_leaves_the_old_state_or_the_new_one(self):
        counts = {"new": 0, "old": 0, "none yet": 0}
        for seed in range(FIRST_SEED, FIRST_SEED + CASES):
            chance = random.Random(seed)
            moment = chance.randrange(1, len(self.acts) + 1)
            disk = after_a_cut(self.acts, moment, chance)
            place = self.dir / f"cut_{seed}"
            disk.build(self.run_inode, place)
            shutil.copy(self.dir / "run" / "run.json", place)
            finished, steps = self.allowed(moment)
            # What each manifest says before weft sees it: what is loaded was compared with that.
            found = {int(p.name[5:]): re.search(r'"state_hash": "(\w+)"', (p / "manifest.json").read_text()).group(1)
                     for p in place.glob("step_*[0-9]") if self.manifest_is_whole(p)}
            with self.subTest(seed=seed, moment=moment, of=len(self.acts), finished=finished):
                # A start of training chooses what to go on from and reads every byte of it; all steps are done there.
                ahead = max(steps, default=2)
                job = self.weft("train", "deck.toml", f"run.dir={place}", f"train.steps={ahead}",
                                "train.checkpoint_every=0", ranks=0, expect=None)
                taken = re.search(r"resuming from \S*/step_(\d+) ", job.err)
                self.assertEqual(job.process.returncode, 0, job.err)
                if taken is None:
                    self.assertIsNone(finished, job.err)  # nothing was published yet: a new start
                    counts["none yet"] += 1
                    continue
                step = int(taken.group(1))
                self.assertIn(step, steps)
                self.assertEqual(found[step], self.hashes[step])
                counts["old" if step == finished else "new"] += 1
            shutil.rmtree(place, ignore_errors=True)
        print(f"{CASES} power cuts:", counts)
        if CASES >= 60:
            self.assertTrue(all(counts.values()), counts)

    def test_a_lost_sync_would_show(self):
        """The cases have teeth: without syncs some of them leave a finished save unusable."""
        without = [a for a in self.acts if a[0] != "sync"]
        broken = 0
        for seed in range(12):
            place = self.dir / f"unsynced_{seed}"
            disk = after_a_cut(copy.deepcopy(without), len(without), random.Random(seed))
            disk.build(self.run_inode, place)
            job = self.weft("inspect", place / "latest", ranks=0, expect=None)
            broken += job.process.returncode != 0
        self.assertGreater(broken, 0)


if __name__ == "__main__":
    unittest.main()
