"""Parses machine code of CUDA kernels as printed by cuobjdump: instructions, loops, and their cycles on each pipe.

Throughputs are in cycles of one warp's instruction on a quarter of a multiprocessor, or of the whole multiprocessor where the
quarters share a unit (CUDA Programming Guide, table "Throughput of Native Arithmetic Instructions"; wgmma and mma.sync: Luo
et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture", 2024).
"""
import collections
import dataclasses
import re
import subprocess

# Pipes of a quarter, cycles on compute capability 9.0. An opcode belongs to the first pattern that fits.
QUARTER = [
    ("xu", 8, r"MUFU|F2I|I2F$|I2F\.|F2F\b|F2F\.|POPC|FLO|BREV"),
    ("alu", 2, r"IADD|LOP3|SHF|SHL|SHR|ISETP|FSETP|DSETP|SEL|FSEL|FMNMX|IMNMX|VIMNMX|PRMT|LEA|F2FP|PLOP3|MOV|VIADD|I2FP|IABS|SGXT"
                r"|BMSK|P2R|R2P|HSETP|HMNMX|LDC|VOTE|R2UR|S2R|CS2R|VABSDIFF"),
    ("fma", 1, r"FADD|FMUL|FFMA|HFMA2|HADD2|HMUL2|FSWZADD"),
    ("fma", 2, r"IMAD|IDP"),
    ("fp64", 2, r"DADD|DMUL|DFMA|DMMA"),
]
SHARED_BYTES = 128  # a cycle and multiprocessor


@dataclasses.dataclass(frozen=True)
class Machine:
    """A GPU: its clock in Hz, bytes a second of its memory, bf16 operations of its tensor cores a cycle and multiprocessor."""
    name: str
    architecture: str
    multiprocessors: int
    clock: float
    bandwidth: float
    tensor_operations: int
    mma_sync_share: float = 1.0  # of those, by mma.sync
    slower: tuple = ()  # pipes that take twice the cycles of compute capability 9.0

    @property
    def bytes(self):
        """Of memory a cycle and multiprocessor."""
        return self.bandwidth / self.clock / self.multiprocessors


H100 = Machine("H100 SXM", "sm_90a", 132, 1.83e9, 3.35e12, 4096, 0.63)
A100 = Machine("A100 SXM", "sm_80", 108, 1.41e9, 2.04e12, 2048, slower=("fma", "fp64"))
B200 = Machine("B200", "sm_100", 148, 1.85e9, 8.0e12, 8192)

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")


@dataclasses.dataclass
class Instruction:
    address: int
    guard: str
    op: str
    operands: str

    @property
    def target(self):
        """Where a branch goes."""
        if not re.match(r"BRA|BRX|JMP|CALL", self.op):
            return None
        m = re.search(r"0x([0-9a-f]+)\s*$", self.operands)
        return int(m[1], 16) if m else None

    @property
    def bytes(self):
        """Of one lane's access."""
        m = re.search(r"\.(?:U|S)?(8|16|32|64|128)\b", self.op)
        return int(m[1]) // 8 if m else 4

    def registers(self):
        """Written, read; only as exact as loads that wait for each other need."""
        parts = [p.strip() for p in self.operands.split(",")]
        stores = re.match(r"ST|RED|BRA|BAR|SYNCS|EXIT|UTMA|LDGSTS", self.op)
        written, read = set(), set()
        for i, part in enumerate(parts):
            for m in re.finditer(r"(?<![\w.])R(\d+)(\.64)?", part):
                first = int(m[1])
                if i == 0 and not stores:
                    width = max(1, self.bytes // 4) if re.match(r"LD[GSLM]", self.op) else 1
                    written |= set(range(first, first + width))
                else:
                    read |= {first, first + 1} if m[2] else {first}
        return written, read


@dataclasses.dataclass
class Loop:
    header: int
    blocks: set
    always: set  # blocks that every iteration passes


class Kernel:
    """Instructions of one kernel in basic blocks, with its natural loops."""

    def __init__(self, name, instructions):
        self.name, self.instructions = name, instructions
        starts = {instructions[0].address} if instructions else set()
        for a, b in zip(instructions, instructions[1:]):
            if a.target is not None or re.match(r"EXIT|RET|BRX|BREAK|KILL", a.op):
                starts.add(b.address)
            if a.target is not None:
                starts.add(a.target)
        self.blocks = {}
        for i in instructions:
            if i.address in starts:
                block = self.blocks.setdefault(i.address, [])
            block.append(i)
        order = sorted(self.blocks)
        following = dict(zip(order, order[1:]))
        self.next = {}
        for at, block in self.blocks.items():
            last, to = block[-1], set()
            if last.target is not None and not last.op.startswith("CALL"):
                to.add(last.target)
            ends = re.match(r"EXIT|RET|BRX|KILL|JMP", last.op) or (last.target is not None and last.op.startswith("BRA"))
            if (not ends or last.guard or "UP" in last.operands.split(",")[0] or ".DIV" in last.op) and at in following:
                to.add(following[at])
            self.next[at] = {t for t in to if t in self.blocks}
        self.loops = self._loops()

    def _dominators(self, entry, blocks, reverse=False):
        edges = collections.defaultdict(set)  # into a block
        for a in blocks:
            for b in self.next[a] & blocks:
                (edges[a].add(b) if reverse else edges[b].add(a))
        dominators = {b: set(blocks) for b in blocks}
        dominators[entry] = {entry}
        changed = True
        while changed:
            changed = False
            for b in sorted(blocks, reverse=reverse):
                if b == entry:
                    continue
                into = [dominators[p] for p in edges[b]]
                new = {b} | (set.intersection(*into) if into else set())
                if new != dominators[b]:
                    dominators[b], changed = new, True
        return dominators

    def _loops(self):
        if not self.blocks:
            return []
        entry = min(self.blocks)
        reached, todo = {entry}, [entry]
        while todo:
            for b in self.next[todo.pop()] - reached:
                reached.add(b)
                todo.append(b)
        dominators = self._dominators(entry, reached)
        into = collections.defaultdict(set)
        for a in reached:
            for b in self.next[a]:
                into[b].add(a)
        loops = {}
        for a in reached:
            for header in self.next[a] & dominators[a]:
                body, todo = {header, a}, [a] if a != header else []
                while todo:
                    for p in into[todo.pop()] - body:
                        body.add(p)
                        todo.append(p)
                latches, blocks = loops.setdefault(header, (set(), set()))
                latches.add(a)
                blocks |= body
        return [Loop(h, blocks, set.intersection(*(dominators[a] for a in latches)) & blocks)
                for h, (latches, blocks) in loops.items()]

    def main_loop(self, pattern):
        """The loop whose every iteration has the most instructions that `pattern` names; None where no loop has any."""
        def named(loop):
            return sum(bool(re.match(pattern, i.op)) for i in self.code(loop))
        best = max(self.loops, key=lambda l: (named(l), -len(l.blocks)), default=None)
        return best if best and named(best) else None

    def inner_loop(self, pattern):
        """The smallest loop that has an instruction that `pattern` names."""
        return min((l for l in self.loops if any(re.match(pattern, i.op) for i in self.all_code(l))), key=lambda l: len(l.blocks))

    def code(self, loop):
        """What every iteration passes."""
        return [i for b in sorted(loop.always) for i in self.blocks[b]]

    def all_code(self, loop):
        """What iterations pass that take every branch; loops within it, which wait, once."""
        return [i for b in sorted(loop.blocks) for i in self.blocks[b]]

    def pieces(self):
        """Every loop's own instructions, those of loops within it left out, both ways of a branch; last those of no loop."""
        free, result = set(self.blocks), []
        for loop in sorted(self.loops, key=lambda l: len(l.blocks)):
            result.append([i for b in sorted(loop.blocks & free) for i in self.blocks[b]])
            free -= loop.blocks
        return result + [[i for b in sorted(free) for i in self.blocks[b]]]


@dataclasses.dataclass
class Counts:
    """Of one warp's instructions, in cycles: of a quarter (issue, alu, fma, xu, fp64) or of the multiprocessor (the rest)."""
    quarter: collections.Counter
    whole: collections.Counter
    bytes: int  # of global memory, all lanes
    in_flight: int  # most bytes asked for at a time before one of them is used

    def add(self, other, times):
        for mine, theirs in ((self.quarter, other.quarter), (self.whole, other.whole)):
            for pipe, cycles in theirs.items():
                mine[pipe] += cycles * times
        self.bytes += other.bytes * times
        self.in_flight = max(self.in_flight, other.in_flight)


def tensor_and_shared(i, machine):
    """Cycles of the tensor cores and of shared memory's 128 bytes; of a warpgroup's product one warp counts a quarter."""
    if m := re.match(r"HGMMA\.64x(\d+)x16", i.op):
        n = int(m[1])
        from_registers = re.match(r"R\d+, R\d+", i.operands)
        read = n * 32 + (0 if from_registers else 64 * 32)
        return 64 * n * 16 * 2 / machine.tensor_operations / 4, read / SHARED_BYTES / 4
    if i.op.startswith("HMMA"):
        inner = 8 if i.op.startswith("HMMA.1688") else 16
        return 16 * 8 * inner * 2 / (machine.tensor_operations * machine.mma_sync_share), 0
    if i.op.startswith(("LDSM", "STSM")):
        m = re.search(r"\.(\d)$", i.op)
        return 0, 128 * int(m[1] if m else 1) / SHARED_BYTES
    if re.match(r"LDS|STS|ATOMS", i.op):
        return 0, max(1.0, i.bytes * 32 / SHARED_BYTES)
    return 0, float(i.op.startswith("SHFL"))


def count(code, machine=H100):
    result = Counts(collections.Counter(), collections.Counter(), 0, 0)
    pending = []  # loads under way: bytes, registers
    for i in code:
        if i.op == "NOP":
            continue
        result.quarter["issue"] += 1
        tensor, shared = tensor_and_shared(i, machine)
        result.whole["tensor"] += tensor
        result.whole["shared"] += shared
        for pipe, cycles, pattern in QUARTER:
            if re.match(pattern, i.op):
                result.quarter[pipe] += cycles * (2 if pipe in machine.slower else 1)
                break
        written, read = i.registers()
        used = written | read
        last = max((n for n, (_, registers) in enumerate(pending) if registers & used), default=-1)
        pending = pending[last + 1:]
        if i.op.startswith("LDGDEPBAR"):
            pending = []
        elif re.match(r"LDG|STG|RED|ATOMG", i.op):
            result.bytes += i.bytes * 32
            if i.op.startswith("LDG"):
                pending.append((i.bytes * 32, written if not i.op.startswith("LDGSTS") else set()))
                result.in_flight = max(result.in_flight, sum(size for size, _ in pending))
    return result


def parse(text):
    """{mangled name: Kernel} of what cuobjdump -sass prints."""
    kernels, name, found = {}, None, []
    for line in text.splitlines():
        if m := re.search(r"Function : (\S+)", line):
            if name and found:
                kernels[name] = Kernel(name, found)
            name, found = m[1], []
        elif name and (m := INSTRUCTION.match(line)):
            found.append(Instruction(int(m[1], 16), m[2] or "", m[3], m[4]))
    if name and found:
        kernels[name] = Kernel(name, found)
    return kernels


def disassemble(path, cuobjdump, architecture, environment):
    done = subprocess.run([cuobjdump, "-sass", "-arch", architecture, str(path)], capture_output=True, text=True, check=False,
                          env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"{path}: {done.stderr.strip()}")
    return parse(done.stdout)
