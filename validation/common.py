"""What the scripts of this folder share: weft and MPI as processes, sides that are timed in turn, facts of the machine, results
as JSON.

Times of a comparison come from `in_turn`: every side once a round, another one first each time, so that whatever else the
machine does hits all alike. A comparison counts only if the machine does nothing else.
"""
import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys

import numpy as np

from reference import safetensors_io

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.append(str(ROOT / "tests" / "e2e"))  # tiny_models, harness and launcher, of the end-to-end tests
from launcher import MPI_ON_ONE_HOST, launcher_of  # noqa: E402
# glibc keeps freed memory: PyTorch is 3 % faster and much steadier so, and weft does not mind.
KEEP_MEMORY = {"GLIBC_TUNABLES": "glibc.malloc.top_pad=268435456:glibc.malloc.trim_threshold=8589934592:"
                                 "glibc.malloc.mmap_threshold=33554432"}


# ---- arguments ----

def parser(doc, **defaults):
    """For a script with this docstring: --weft and --json, and an integer option for each of `defaults`."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--weft", type=pathlib.Path, default=ROOT / "build" / "weft")
    made.add_argument("--json", "--output", type=pathlib.Path, help="file for figures, samples and facts of the machine")
    for name, value in defaults.items():
        made.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    return made


def parse(made):
    """The arguments, once the program is there; its path is absolute."""
    args = made.parse_args()
    if not args.weft.is_file():
        sys.exit(f"{args.weft} is not there. HINT: make build, or --weft PATH")
    args.weft = args.weft.resolve()
    return args


# ---- processes ----

def environment(threads=None):
    """Of weft and of PyTorch alike."""
    counts = {} if threads is None else {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return os.environ | MPI_ON_ONE_HOST | KEEP_MEMORY | counts


def mpi(ranks, argv):
    """The command, which begins with the path of weft, on so many ranks."""
    started = [launcher_of(argv[0]), "-n", ranks, *argv] if ranks > 1 else argv
    return [str(word) for word in started]


def run(argv, threads=None, cwd=None, ranks=1, allowed=(0,)):
    """Runs a command to its end; its standard output. Exits with what the command said if it failed."""
    done = subprocess.run(mpi(ranks, argv), env=environment(threads), cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode not in allowed:
        sys.exit(f"exit code {done.returncode}: {' '.join(done.args)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def probe_of(weft):
    return weft.with_name(weft.name.replace("weft", "weft_probe", 1))


def probe(weft, folder, what, inputs, *options, deck="", weights=None):
    """Arrays that `weft_probe WHAT`, the program beside weft, makes of `inputs`. `deck`: its text; `weights`: a file or arrays."""
    given, made = folder / "probe_inputs.safetensors", folder / "probe_outputs.safetensors"
    (folder / "probe.toml").write_text(deck)
    safetensors_io.save(given, {name: np.asarray(value) for name, value in inputs.items()})
    if isinstance(weights, dict):
        safetensors_io.save(folder / "probe_weights.safetensors", weights)
        weights = folder / "probe_weights.safetensors"
    run([probe_of(weft), what, "--deck", folder / "probe.toml", *(["--weights", weights] if weights else []), "--inputs", given,
         "--outputs", made, *options])
    return safetensors_io.load(made)


class Workers:
    """Processes of a PyTorch script of this folder that work on command (workers.py): `case` is what the script reads."""

    def __init__(self, script, case, folder, name, ranks=1, threads=1):
        path, store = folder / f"{name}.json", folder / f"{name}.store"
        path.write_text(json.dumps(case))
        store.unlink(missing_ok=True)
        pipes = [subprocess.PIPE if rank == 0 else subprocess.DEVNULL for rank in range(ranks)]
        self.processes = [
            subprocess.Popen([sys.executable, str(HERE / script), str(path), "--rank", str(rank), "--ranks", str(ranks), "--store",
                              str(store)], env=environment(threads), text=True, stdin=pipe, stdout=pipe)
            for rank, pipe in enumerate(pipes)]
        self.ranks, self.about = ranks, self.answer()

    def answer(self):
        line = self.processes[0].stdout.readline()
        if not line:
            sys.exit(f"{self.processes[0].args[1]} ended early")
        return json.loads(line)

    def run(self, count):
        """What the script says of so many steps: {name: a value a step}."""
        self.processes[0].stdin.write(f"{count}\n")
        self.processes[0].stdin.flush()
        return self.answer()

    def stop(self):
        self.processes[0].stdin.close()
        for process in self.processes:
            process.wait(120)


# ---- decks and their results ----

def toml(tables):
    """A deck of {table: {key: value}}."""
    return "".join(f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
                   for name, table in tables.items())


def json_lines(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def arrays_of(model, prefix=""):
    """A model's weights as arrays, under `prefix`."""
    return {prefix + name: value.numpy() for name, value in model.state_dict().items()}


# ---- figures ----

def in_turn(sides, rounds):
    """Calls every side once a round, another first each time; {name: what the calls returned}."""
    names, results = list(sides), {name: [] for name in sides}
    for i in range(rounds):
        for name in names[i % len(names):] + names[:i % len(names)]:
            load = os.getloadavg()[0]
            results[name].append(sides[name]())
            print(f"    round {i + 1}  {name:24} load {load:.1f}  {short(results[name][-1])}", file=sys.stderr, flush=True)
    return results


def short(value):
    """For the log of a round: numbers to three places, and nothing long."""
    if isinstance(value, dict):
        return {k: round(v, 3) for k, v in value.items() if isinstance(v, float)}
    return [round(float(v), 3) for v in value] if isinstance(value, (list, tuple)) else round(float(value), 3)


def medians(rounds, key=None):
    """{name: the median of all samples}: of numbers, of lists of numbers, or of one key of tables."""
    found = {}
    for name, samples in rounds.items():
        samples = samples if key is None else [s[key] for s in samples if s.get(key) is not None]
        flat = [x for s in samples for x in (s if isinstance(s, (list, tuple)) else [s])]
        if flat:
            found[name] = statistics.median(flat)
    return found


def relative_error(found, wanted):
    """In the L2 norm, in float64; infinite where shapes differ or a number is none."""
    a, e = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    if a.shape != e.shape or not np.all(np.isfinite(a)):
        return float("inf")
    scale = np.linalg.norm(e)
    return float(np.linalg.norm(a - e) / (scale if scale > 0 else 1.0))


# ---- the machine's limit ----

def totals(said):
    """The last line of a profile (docs/monitoring.md, Profile) among what a command printed. `limit`: the least seconds that the
    rates of products and copies allow, which the same run has measured."""
    return json.loads([line for line in said.splitlines() if line.startswith("profile: ")][-1].removeprefix("profile: "))


def limit_of(job, few=1, many=2):
    """Least seconds of one item. `job(n)` runs a job of n items with run.profile=operations and returns what it printed; what a job
    does only once, such as drawing its weights, is in both and does not count."""
    less, more = totals(job(few)), totals(job(many))
    # Each run measures the rates again, and something may have disturbed one of them. Most of a limit is products.
    rate = max(less["f32_products"], more["f32_products"])
    return (more["limit"] * more["f32_products"] - less["limit"] * less["f32_products"]) / rate / (many - few)


def row(what, seconds, limit, theirs):
    """A line of the tables: weft's seconds, its share of the limit, and the fastest of PyTorch's sides {name: seconds}."""
    best = min(theirs, key=theirs.get)
    return {"what": what, "weft": seconds, "limit": limit, "share": limit / seconds, "torch": best, "torch_seconds": theirs[best],
            "torch_share": limit / theirs[best], "ratio": theirs[best] / seconds}


def show_rows(rows):
    """As Markdown."""
    print("\n| | weft | of the limit | best PyTorch | of the limit | ratio |\n|---|---:|---:|---:|---:|---:|")
    for r in rows:
        print(f"| {r['what']} | {r['weft']:.3g} s | {100 * r['share']:.0f} % | {r['torch_seconds']:.3g} s ({r['torch']}) | "
              f"{100 * r['torch_share']:.0f} % | {r['ratio']:.2f} |")


# ---- facts of the machine ----

# By vendor and family; AMD's ranges of models, Intel's models.
AMD = {(23, 0, 47): "Zen", (23, 48, 255): "Zen 2", (25, 0, 15): "Zen 3", (25, 16, 31): "Zen 4", (25, 32, 95): "Zen 3",
       (25, 96, 127): "Zen 4", (25, 160, 175): "Zen 4", (26, 0, 127): "Zen 5"}
INTEL = {63: "Haswell", 79: "Broadwell", 85: "Skylake or Cascade Lake", 106: "Ice Lake", 108: "Ice Lake", 143: "Sapphire Rapids",
         207: "Emerald Rapids", 173: "Granite Rapids", 174: "Granite Rapids"}


def processor(text):
    """Vendor, microarchitecture, family and model, and the widest vectors, from /proc/cpuinfo."""
    facts = dict(reversed([[word.strip() for word in line.split(":", 1)] for line in text.splitlines() if ":" in line]))
    if "cpu family" not in facts:
        return platform.processor() or platform.machine()
    vendor = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}.get(facts["vendor_id"], facts["vendor_id"])
    family, model, flags = int(facts["cpu family"]), int(facts["model"]), facts["flags"].split()
    name = next((n for (f, low, high), n in AMD.items() if f == family and low <= model <= high), "") if vendor == "AMD" else ""
    if vendor == "Intel" and family == 6:
        name = INTEL.get(model, "")
    widest = next((n for flag, n in (("amx_bf16", "AMX"), ("avx512_bf16", "AVX-512 with bf16"), ("avx512f", "AVX-512")) if flag in flags),
                  "AVX2")
    return f"{vendor} {name}".strip() + f" (family {family}, model {model}; {widest})"


def machine():
    cpu = processor(pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    facts = {"cpu": cpu, "cores": os.cpu_count(), "system": platform.platform()}
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def about(args, *packages):
    """What every result names: date, commit, machine, load, versions of these packages and of PyTorch, and the arguments; prints
    the main of it."""
    def git(*words):
        return subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()

    facts = {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
             "commit": git("rev-parse", "--short", "HEAD"), "uncommitted_changes": bool(git("status", "--porcelain", "-uno")),
             "weft": run([args.weft, "--version"]).splitlines()[0], "machine": machine(),
             "load_at_start": round(os.getloadavg()[0], 2), "versions": {"python": platform.python_version()},
             "arguments": {k: str(v) for k, v in vars(args).items() if k not in ("weft", "json")}}
    for name in ("torch", *packages):
        if name in sys.modules:
            facts["versions"][name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    if facts["load_at_start"] > 0.5:
        print(f"WARN: the machine is at work already (load {facts['load_at_start']}): times count only on an idle one",
              file=sys.stderr)
    # For whoever reads the figures below it.
    print(f"{facts['machine']['cpu']}, {facts['machine']['cores']} cores, torch {facts['versions'].get('torch', '-')}, commit "
          f"{facts['commit']}, load {facts['load_at_start']} at the start", flush=True)
    return facts


def write(args, facts, results):
    """To the file of --json, if one is named."""
    if args.json:
        args.json.write_text(json.dumps(facts | results, indent=1) + "\n", encoding="utf-8")
        print(f"written to {args.json}")
