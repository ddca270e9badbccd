"""Several stores in one training: shares, metrics of each store, any number of ranks, restarts, bad input."""

import json
import unittest

from harness import WeftTest

A = "synthetic:clips=12,frames=3,height=16,width=16,seed=1"
B = "synthetic:clips=5,frames=1,height=16,width=16,seed=2;clips=7,frames=3,height=16,width=16,seed=3"
TWO = (f"data.path={json.dumps([A, B])}", "data.weights=[3, 1]")
VAE = ("model.in_channels=4", "vae.spatial_channels=[8, 8, 8, 8]", "vae.spatial_res_blocks=1", "vae.spatial_groups=4",
       "vae.filters=8", "vae.num_res_blocks=1", "vae.channel_multipliers=[1, 1, 1, 1]", "vae.num_groups=4")


class Mix(WeftTest):
    def test_two_stores_on_two_ranks_and_one(self):
        job = self.train("two", *TWO, ranks=2)
        self.assertIn(f"mix       75 % {A}, 25 % {B}", job.err)
        self.train("one", *TWO, ranks=1)
        self.assertEqual(self.samples("one"), self.samples("two"))
        self.assert_close(self.losses("one"), self.losses("two"))
        drawn = {A: 0, B: 0}
        for m, other in zip(self.metrics("two"), self.metrics("one")):
            self.assertEqual(m["stores"][A]["samples"], sum(s < 12 for s in m["samples"]))
            self.assertEqual(m["stores"][B]["samples"], sum(s >= 12 for s in m["samples"]))
            whole = 0
            for store, values in m["stores"].items():
                drawn[store] += values["samples"]
                self.assertEqual(values["samples"], other["stores"][store]["samples"])
                self.assertEqual("loss" in values, values["samples"] > 0)
                if values["samples"] > 0:
                    whole += values["samples"] * values["loss"]
                    self.assert_close([values["loss"]], [other["stores"][store]["loss"]])
            self.assertAlmostEqual(whole / len(m["samples"]), m["loss"], delta=1e-6 * m["loss"])
        # 20 steps of 4 times 2 samples; a bucket's shares wait for whole micro-batches.
        self.assertAlmostEqual(drawn[A], 120, delta=4)

        # Killed half way, and resumed on the same ranks: the same bits.
        self.train("half", *TWO, "train.steps=7")
        job = self.train("half", *TWO)
        self.assertIn("7 of 20 steps done", job.err)
        self.assertNotIn("WARN", job.err)
        self.assert_same_run("half", "two")
        self.assertIn("with a changed deck: data.weights ", self.train("half", *TWO, "data.weights=[1, 1]", "train.steps=21").err)

        self.weft("report", "two", ranks=0)
        columns = self.page_data("two/report.html")["runs"][0]["steps"]["columns"]
        self.assertEqual(sum(c.startswith("stores/") and c.endswith("/samples") for c in columns), 2)

    def test_kept_shares_and_prefixes(self):
        job = self.train("keep", f"data.path={B}", "data.keep=synthetic-3=0.5", "data.prompt_prefixes=old film: ",
                         "train.batch_size=1", "train.micro_batches=8", "train.steps=3")
        self.assertIn(", 8 samples an epoch", job.err)  # 8.5: a micro-batch more now and then
        self.assertIn("WARN: data.prompt_prefixes has no effect", job.err)
        self.assertNotIn("stores", self.metrics("keep")[0])
        for m in self.metrics("keep"):
            self.assertIn(sum(s >= 5 for s in m["samples"]), (3, 4))

    def test_bad_input(self):
        a = f"data.path={json.dumps([A, B])}"
        for options, said in (((a, "data.weights=[0, 0]"), "data.weights are all 0"),
                              ((a, "data.weights=[1]"), "data.weights has 1 entry"),
                              ((a, 'data.prompt_prefixes=["x"]'), "data.prompt_prefixes has 1 entry"),
                              ((a, "data.keep=synthetic-4=0.5"), 'data.keep names "synthetic-4"'),
                              (('data.path=["synthetic:", "shapes:"]',), "holds labelled images")):
            with self.subTest(said=said):
                self.refused(self.train("refused", *options, expect=None), 2, said)
        self.refused(self.weft("encode", "deck.toml", a, "encode.output=x.h5", expect=None), 2, "weft encode takes one store")
        self.refused(self.weft("evaluate", "deck.toml", a, "model.name=segmentation", expect=None), 2,
                     "weft evaluate takes one store")

    def test_prefixes_are_encoded(self):
        """weft encode puts the prefix before the captions, and another prefix makes another store."""
        options = (f"data.path={A}", "encode.output=latents.h5", "encode.text=false", "vae.weights=random:1", *VAE)
        self.weft("encode", "deck.toml", *options, "data.prompt_prefixes=old film: ")
        self.assertIn('"old film: a ', self.weft("inspect", "latents.h5", ranks=0).out)
        again = self.weft("encode", "deck.toml", *options, "data.prompt_prefixes=old film: ")
        self.assertIn("up to date", again.err + again.out)
        self.weft("encode", "deck.toml", *options)
        self.assertIn(' "a ', self.weft("inspect", "latents.h5", ranks=0).out)


if __name__ == "__main__":
    unittest.main()
