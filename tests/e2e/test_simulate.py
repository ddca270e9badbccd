"""weft_simulate: tables and JSON; measured costs of a real run; refusals."""

import json
import pathlib
import unittest

from harness import REPOSITORY, WEFT, WeftTest

USAGE = 2
STAGE = REPOSITORY / "inputs" / "stage2.toml"
SIMULATE = pathlib.Path(WEFT).parent / "weft_simulate"
QUICK = ("--per-gpu", "4", "--steps", "2", "--warmup", "1")


@unittest.skipUnless(SIMULATE.exists(), "built without SimGrid")
class Simulate(WeftTest):
    def simulate(self, *arguments, deck=STAGE):
        out = self.dir / "out.json"
        run = self.weft(deck, *arguments, "--json", out, ranks=0, program=SIMULATE)
        return run.out, json.loads(out.read_text())["cases"]

    def test_two_fabrics(self):
        text, cases = self.simulate("--gpus", "16,1", "--fabric", "8x400,1x200", *QUICK)
        self.assertIn("not measured", text)
        self.assertEqual([c["fabric"] for c in cases], ["8x400", "1x200"])
        for case in cases:
            one, many = case["results"]
            self.assertEqual((one["ranks"], many["ranks"]), (1, 16))
            self.assertAlmostEqual(one["exposed_share"], 0, places=9)
            self.assertLess(many["efficiency"], 1)
        wide, thin = (case["results"][1] for case in cases)
        self.assertEqual(wide["micro_batches"], 64)
        self.assertGreater(thin["exposed_share"], wide["exposed_share"])

    def test_targets_on_128_ranks(self):
        wanted = ("--gpus", "128", "--per-gpu", "8", "--steps", "5")
        for stage in (1, 2, 3):
            deck = REPOSITORY / "inputs" / f"stage{stage}.toml"
            _, cases = self.simulate(*wanted, "--cv", "0", deck=deck)
            self.assertLess(cases[0]["results"][0]["spread"], 0.015, deck)
            _, cases = self.simulate(*wanted, deck=deck)
            self.assertGreater(cases[0]["results"][0]["efficiency"], 0.94, deck)
        uniform = ('data.path="synthetic:name=480p-51,latent=1,frames=15,height=60,width=106,clips=50000"',
                   'train.batch_sizes=["480p-51=5"]')
        _, cases = self.simulate(*uniform, *wanted)
        self.assertGreater(cases[0]["results"][0]["efficiency"], 0.97)

    def test_runs_repeat(self):
        results = []
        for _ in range(2):
            _, cases = self.simulate("--gpus", "8", *QUICK)
            results.append({k: v for k, v in cases[0]["results"][0].items() if k != "simulation_seconds"})
        for key, value in results[0].items():
            self.assertAlmostEqual(results[1][key], value, places=9, msg=key)

    def test_the_step_that_weft_plan_gives(self):
        plan = self.dir / "plan.json"
        machine = ("train.micro_batches=64", "--gpu", "h100", "--gpus", "8", "--per-node", "4")
        self.weft("plan", STAGE, *machine, "--json", plan, ranks=0)
        text, cases = self.simulate(*machine, "--cv", "0", "--steps", "20", "--warmup", "1")
        self.assertIn("weft on 4x400, nodes of 4, costs H100", text)
        planned = json.loads(plan.read_text())["step"]["seconds"]
        self.assertAlmostEqual(cases[0]["results"][0]["step_seconds"] / planned, 1, delta=0.02)

    def test_measured_costs_of_a_run(self):
        # Costs are agreed on after the fourth step at the earliest.
        self.train("run", "train.steps=10", ranks=1)
        local = ("--fabric", "local", "--cores", "2", "--costs", self.dir / "run", "--cv", "0")
        _, cases = self.simulate("--gpus", "1", *local, deck="deck.toml")
        one = cases[0]["results"][0]["step_seconds"]
        self.assertTrue(cases[0]["costs"].startswith("given in"))
        # Of the run's own figures, whatever they are.
        bucket, optimizer = cases[0]["buckets"][0], cases[0]["optimizer_seconds"]
        batch = bucket["forward_seconds"] + bucket["backward_seconds"]
        self.assertGreater(batch, 0)
        self.assertEqual(optimizer, sorted(m["split"]["optimizer"] for m in self.metrics("run")[5:])[2])
        self.assertGreaterEqual(one, 4 * batch + optimizer)

    def test_costs_from_a_file(self):
        costs = self.dir / "costs.json"
        costs.write_text(json.dumps({"seconds": {"synthetic-3-16x16": 0.5}, "optimizer": 0.25}))
        _, cases = self.simulate("--gpus", "1,2,4", "--fabric", "local", "--cores", "2", "--costs", costs, "--cv", "0",
                                 deck="deck.toml")
        one, two, four = (r["step_seconds"] for r in cases[0]["results"])
        self.assertAlmostEqual(one, 4 * 0.5 + 0.25, places=6)
        # Two micro-batches on each of two ranks, half of the optimizer's state, and milliseconds to exchange gradients; four
        # ranks share two cores.
        self.assertAlmostEqual(two, 2 * 0.5 + 0.25 / 2, delta=0.01)
        self.assertGreater(four, two - 0.25 / 2)

    def refuse(self, *said, arguments):
        self.refused(self.weft(*arguments, ranks=0, expect=None, program=SIMULATE), USAGE, *said)

    def test_refusals(self):
        self.refuse("--fabric 8y400", arguments=(STAGE, "--fabric", "8y400"))
        self.refuse("--gpus 0", arguments=(STAGE, "--gpus", "0"))
        self.refuse("measured costs", arguments=("deck.toml", "--fabric", "local"))
        (self.dir / "costs.json").write_text('{"seconds": {"other": 1}}')
        self.refuse("bucket synthetic-3-16x16 has no time",
                    arguments=("deck.toml", "--fabric", "local", "--costs", "costs.json"))


if __name__ == "__main__":
    unittest.main()
