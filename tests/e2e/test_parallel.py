"""However the work is divided, a run computes the same: ranks, sharding, accumulation, bucket sizes, sequence parallelism.

Sums over ranks and micro-batches are made in another order, so runs agree within the bound of reordered f32 sums, and to
the bit where the order is the same."""

import unittest

from divisions import ALL, SMALL, WIRE_LOSS, WIRE_WEIGHTS, DivisionTest


class Equality(DivisionTest):
    def test_every_division_of_the_work(self):
        """4 micro-batches a step: 2, or 1 and 2 of them on a rank; every pair of options."""
        reference = self.reference()
        for zero, ranks, bucket in ((0, 2, SMALL), (1, 2, ALL), (0, 3, ALL), (1, 3, SMALL), (1, 1, SMALL)):
            with self.subTest(zero=zero, ranks=ranks, bucket=bucket):
                run = f"z{zero}r{ranks}"
                self.run_of(run, f"parallel.zero={zero}", bucket, ranks=ranks)
                self.assert_equal_run(run, reference)
        with self.subTest("without overlap"):
            self.run_of("plain", "parallel.zero=0", "parallel.overlap=false", SMALL, ranks=2)
            self.assert_same_run("plain", "z0r2")
        for zero in (0, 1):
            with self.subTest("bf16 on the wire", zero=zero):
                self.run_of(f"wire{zero}", "parallel.wire=bf16", f"parallel.zero={zero}", ranks=3)
                self.assert_equal_run(f"wire{zero}", reference, WIRE_LOSS, WIRE_WEIGHTS)

    def test_sequence_parallelism(self):
        for name, forms, overrides in (
                ("plain", ((3, 3, 0), (4, 2, 1)), []),
                ("all", ((2, 2, 1), (3, 3, 1)), ["model.recompute=0.6", "mask.image_head=0.5", "model.drop_path=0.2"])):
            reference = self.reference(name, *overrides)
            for ranks, sp, zero in forms:
                with self.subTest(name, ranks=ranks, sp=sp, zero=zero):
                    run = f"{name}r{ranks}s{sp}z{zero}"
                    self.run_of(run, f"parallel.sp={sp}", f"parallel.zero={zero}",
                                "parallel.bucket_mib=0.1", *overrides, ranks=ranks)
                    self.assert_equal_run(run, reference)

    def test_the_same_bits_when_it_was_stopped_in_the_middle(self):
        for name, ranks, overrides in (("sharded", 3, ["parallel.zero=1", "parallel.wire=bf16", SMALL]),
                                       ("whole", 3, ["parallel.zero=0"]), ("sequence", 2, ["parallel.sp=2"]),
                                       ("bf16", 2, ["model.dtype=bf16", SMALL])):
            with self.subTest(name):
                self.run_of(name, *overrides, ranks=ranks)
                self.run_of(name + "_half", *overrides, "train.steps=3", ranks=ranks)
                self.run_of(name + "_half", *overrides, ranks=ranks)
                self.assert_same_run(name, name + "_half")

    def test_each_step_under_another_division(self):
        """A run that is stopped after every step and goes on with other ranks, shards, buckets and groups."""
        reference = self.reference()
        forms = [(1, ["parallel.zero=0", ALL]), (3, ["parallel.zero=1", SMALL]),
                 (2, ["parallel.sp=2", "parallel.zero=1"]), (4, ["parallel.zero=0", "parallel.sp=2"]),
                 (3, ["parallel.zero=1", ALL]), (2, ["parallel.overlap=false", SMALL])]
        for step, (ranks, overrides) in enumerate(forms, 1):
            job = self.run_of("run", *overrides, "train.checkpoint_every=1", f"train.steps={step}", ranks=ranks)
            self.assertEqual(f"{step - 1} of {step} steps done" in job.err, step > 1)
        self.assert_equal_run("run", reference)

    def test_bf16_models_shard_their_masters(self):
        """The f32 masters of a bf16 model live in shards alone: the same weights as when every rank has them all."""
        self.run_of("whole", "model.dtype=bf16", "parallel.zero=0", ranks=3)
        self.run_of("sharded", "model.dtype=bf16", "parallel.zero=1", ranks=3)
        self.assert_close(self.losses("sharded"), self.losses("whole"), 1e-5)
        gone = self.distance(self.flat("whole"), [0.0] * len(self.flat("whole")))
        self.assertLessEqual(self.distance(self.flat("whole"), self.flat("sharded")) / gone, 1e-6)

    def test_refused(self):
        self.refused(self.train("run", "parallel.sp=2", ranks=3, expect=None), 2, "parallel.sp = 2",
                     "3 ranks")


if __name__ == "__main__":
    unittest.main()
