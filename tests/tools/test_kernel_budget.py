"""tools/sass.py and tools/kernel_budget.py on machine code written here: loops, pipes, loads under way, and what --check finds."""
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import kernel_budget  # noqa: E402
import sass  # noqa: E402


def listing(name, *lines):
    """As cuobjdump prints a kernel; labels of lines are their addresses in units of 16."""
    return "\n".join([f"\t\tFunction : {name}"] + [f"        /*{16 * i:04x}*/                   {line} ;" for i, line in enumerate(lines)])


# A warpgroup's product with both operands in shared memory and one with A in registers, an exponential, a branch over an
# instruction that not every iteration takes, and a wait that repeats out of line and comes back into the loop.
TENSOR = listing(
    "tensor",
    "MOV R1, 0x0",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2+URZ], R3",  # 0x10: the loop
    "@!P0 BRA 0xb0",
    "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24",  # 0x30
    "HGMMA.64x72x16.F32.BF16 R88, R152, gdesc[UR8].tnspB, R88, gsb0",
    "@P1 BRA 0x70",
    "FSEL R4, R4, R5, P2",
    "MUFU.EX2 R4, R4",  # 0x70
    "FFMA R5, R4, R4, R5",
    "@P3 BRA 0x10",
    "EXIT",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2+URZ], R3",  # 0xb0
    "@!P0 BRA 0xb0",
    "BRA 0x30",
)
# Two 16-byte loads before the first is used, one after.
STREAM = listing(
    "stream",
    "LDG.E.128.CONSTANT R4, desc[UR4][R2.64]",
    "LDG.E.128.CONSTANT R8, desc[UR4][R2.64+0x200]",
    "FADD R4, R4, R5",
    "LDG.E.128.CONSTANT R12, desc[UR4][R2.64+0x400]",
    "FADD R4, R4, R12",
    "STG.E.128 desc[UR4][R2.64], R4",
    "EXIT",
)

# A loop that reads 16 bytes a lane, and a store behind it.
LOOPING = listing(
    "looping",
    "MOV R1, 0x0",
    "MOV R4, 0x0",
    "LDG.E.128.CONSTANT R8, desc[UR4][R2.64]",  # 0x20
    "FADD R4, R4, R8",
    "ISETP.NE.AND P0, PT, R1, R2, PT",
    "@P0 BRA 0x20",
    "STG.E.128 desc[UR4][R2.64], R4",
    "EXIT",
)


class Sass(unittest.TestCase):
    def test_the_main_loop_and_what_every_iteration_passes(self):
        kernel = sass.parse(TENSOR)["tensor"]
        self.assertEqual(sorted(loop.header for loop in kernel.loops), [0x10, 0xb0])  # 0xd0 -> 0x30 closes no loop
        loop = kernel.main_loop("HGMMA")
        self.assertEqual(loop.header, 0x10)
        ops = [i.op.split(".")[0] for i in kernel.code(loop)]
        self.assertEqual(ops, ["SYNCS", "BRA", "HGMMA", "HGMMA", "BRA", "MUFU", "FFMA", "BRA"])

    def test_cycles_by_pipe(self):
        kernel = sass.parse(TENSOR)["tensor"]
        counts = sass.count(kernel.code(kernel.main_loop("HGMMA")))
        # 64 x n x 16 products take n / 2 cycles of the multiprocessor, of which one warp is a quarter.
        self.assertAlmostEqual(counts.whole["tensor"], (128 + 72) / 2 / 4)
        # B: n rows of 32 bytes; A: 64 rows where it is not in registers; 128 bytes a cycle.
        self.assertAlmostEqual(counts.whole["shared"], ((128 + 64) * 32 + 72 * 32) / 128 / 4)
        self.assertEqual(counts.quarter["xu"], 8)
        self.assertEqual(counts.quarter["fma"], 1)
        self.assertEqual(sass.count(kernel.code(kernel.main_loop("HGMMA")), sass.A100).quarter["fma"], 2)
        self.assertEqual(counts.quarter["issue"], 8)

    def test_bytes_and_loads_under_way(self):
        kernel = sass.parse(STREAM)["stream"]
        self.assertEqual(kernel.loops, [])
        counts = sass.count(kernel.pieces()[-1])
        self.assertEqual(counts.bytes, 4 * 32 * 16)
        self.assertEqual(counts.in_flight, 2 * 32 * 16)


class Budgets(unittest.TestCase):
    def budget(self, passes, goal=0.5, reason=""):
        # 1,000 tiles of 64 x 128 x 16 and 64 x 72 x 16 operations, all useful, if they take one pass each.
        entry = kernel_budget.Entry("a kernel", "a shape", goal, [kernel_budget.Part("tensor", passes)],
                                    operations=1000 * 64 * (128 + 72) * 16 * 2, reason=reason)
        return kernel_budget.tensor_budget(entry, sass.parse(TENSOR))

    def test_share_of_the_roofline(self):
        self.assertAlmostEqual(self.budget(4000).share, 1.0)
        self.assertAlmostEqual(self.budget(8000).share, 0.5)
        self.assertEqual(self.budget(4000).pipe, "tensor")
        self.assertAlmostEqual(self.budget(4000).serial, 100 / (100 + 8))

    def test_a_kernel_that_streams(self):
        entry = kernel_budget.Entry("a stream", "", 0.85, ["stream"], threads=32)
        budget = kernel_budget.stream_budget(entry, sass.parse(STREAM), 64)
        self.assertEqual((budget.pipe, budget.share), ("memory", 1.0))
        self.assertAlmostEqual(budget.serial, min(1.0, 1024 * 32 / (sass.H100.bytes * kernel_budget.LATENCY)))

    def test_loops_repeat_and_caches_serve_some_of_the_bytes(self):
        kernel = {"looping": sass.parse(LOOPING)["looping"]}
        entry = kernel_budget.Entry("a stream", "", 0.85, ["looping"], unit_bytes=3 * 512, moved=512)
        budget = kernel_budget.stream_budget(entry, kernel, 64)
        # Once the first two and the last two instructions, three times the loop's four.
        self.assertAlmostEqual(budget.cycles["issue"], (2 + 3 * 4 + 2) / 4)
        self.assertAlmostEqual(budget.cycles["memory"], 512 / sass.H100.bytes)
        entry.moved = 0
        self.assertAlmostEqual(kernel_budget.stream_budget(entry, kernel, 64).cycles["memory"], 3 * 512 / sass.H100.bytes)

    def test_check_finds_a_lowered_budget(self):
        page = kernel_budget.page_of({sass.H100: [self.budget(4000)]}, "13.0")
        self.assertEqual(list(kernel_budget.faults({sass.H100: [self.budget(4000)]}, page)), [])
        lowered = list(kernel_budget.faults({sass.H100: [self.budget(4400)]}, page))
        self.assertEqual(len(lowered), 1)
        self.assertIn("records 100 %", lowered[0])

    def test_check_finds_a_missed_goal_without_a_reason(self):
        page = kernel_budget.page_of({sass.H100: [self.budget(10000)]}, "13.0")
        self.assertIn("below the goal of 50 %", " ".join(kernel_budget.faults({sass.H100: [self.budget(10000)]}, page)))
        self.assertEqual(list(kernel_budget.faults({sass.H100: [self.budget(10000, reason="because")]}, page)), [])

    def test_check_finds_a_kernel_that_the_page_does_not_have(self):
        self.assertIn("is not on validation/results/kernels_budget.md", " ".join(kernel_budget.faults({sass.H100: [self.budget(4000)]}, "")))


if __name__ == "__main__":
    unittest.main()
