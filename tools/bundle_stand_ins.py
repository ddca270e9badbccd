"""Stand-ins for shared libraries that the bundle leaves out.

A distribution's FFmpeg needs two hundred libraries, most of them for what weft never asks of it: speech synthesis, sound
servers, windows, network protocols. The loader wants all of them before main(). A stand-in has the name, the versions and
the symbols that the carried files ask of such a library, and no code behind them: a call ends the process with one line
that names the library. tools/bundle.py decides what is left out; this file makes the stand-ins.
"""
import collections
import os
import platform
import re
import subprocess

# %s: soname. Only system calls, since a stand-in must not itself need a library.
SOURCE = r"""
#if defined(__x86_64__)
enum { number_write = 1, number_exit_group = 231 };
static long call(long n, long a, long b, long c) {
  long r;
  __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
  return r;
}
#elif defined(__aarch64__)
enum { number_write = 64, number_exit_group = 94 };
static long call(long n, long a, long b, long c) {
  register long x8 __asm__("x8") = n, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c;
  __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
  return x0;
}
#endif
static void say(const char* text) {
  long n = 0;
  while (text[n]) ++n;
  call(number_write, 2, (long)text, n);
}
__attribute__((noreturn, used, visibility("hidden"))) void weft_left_out(const char* symbol) {
  say("ERROR: this needs %s, which the weft bundle leaves out (");
  say(symbol);
  say(" was called)\nHINT: convert the file with a full ffmpeg to H.264 in mp4, or build weft here (make build)\n");
  for (;;) call(number_exit_group, 3, 0, 0);
}
"""
# The code of a symbol: its name as the first argument, and on to weft_left_out.
STUB = {"x86_64": "lea {name}(%rip), %rdi\njmp weft_left_out",
        "aarch64": "adrp x0, {name}\nadd x0, x0, :lo12:{name}\nb weft_left_out"}


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True,
                          env=dict(os.environ, LC_ALL="C")).stdout


def defined_symbols(path):
    """name -> (type, size) of what a library exports."""
    found = {}
    for line in run("readelf", "--dyn-syms", "-W", path).splitlines():
        f = line.split()
        if len(f) >= 8 and f[0].endswith(":") and f[6] != "UND" and f[4] in {"GLOBAL", "WEAK", "UNIQUE"}:
            found[f[7].split("@")[0]] = (f[3], int(f[2], 0))
    return found


def wanted_symbols(path):
    """([(name, version or None, library that the version belongs to)], {library: versions}) that a file asks for."""
    versions, library, libraries = {}, None, collections.defaultdict(set)
    for line in run("readelf", "-V", "-W", path).splitlines():
        if match := re.search(r"File: (\S+)\s+Cnt:", line):
            library = match[1]
        elif library and (match := re.search(r"Name: (\S+)\s+Flags:.*Version: (\d+)", line)):
            versions[match[2]] = (match[1], library)
            libraries[library].add(match[1])
    symbols = []
    for line in run("readelf", "--dyn-syms", "-W", path).splitlines():
        f = line.split()
        if len(f) < 8 or not f[0].endswith(":") or f[6] != "UND":
            continue
        name = f[7].split("@")[0]
        number = f[8].strip("()") if len(f) > 8 else None
        symbols.append((name, *versions.get(number, (None, None))))
    return symbols, libraries


def make_stand_in(soname, real, consumers, target):
    """Writes `target`, standing in for `real`. `consumers`: what wanted_symbols() says of each carried file that needs it."""
    machine = platform.machine()
    if machine not in STUB:
        raise SystemExit(f"bundle: no stand-ins can be made for {machine}, only for {' and '.join(STUB)}")
    exported = defined_symbols(real)
    wanted, versions = set(), set()
    for symbols, libraries in consumers:
        versions |= libraries.get(soname, set())
        wanted |= {(name, version) for name, version, library in symbols
                   if library == soname or (library is None and name in exported)}
    text, code, data = [], [], []
    for i, (name, version) in enumerate(sorted(wanted, key=str)):
        kind, size = exported.get(name, ("FUNC", 0))
        label = f"stand_in_{i}" if version else name
        text.append(f'name_{i}: .asciz "{name}"')
        if kind in {"FUNC", "NOTYPE", "IFUNC"}:
            code.append(f".globl {label}\n.type {label}, @function\n{label}: {STUB[machine].format(name=f'name_{i}')}")
        else:
            data.append(f".globl {label}\n.type {label}, @object\n.size {label}, {size}\n{label}: .zero {max(size, 8)}")
        if version:
            (code if kind in {"FUNC", "NOTYPE", "IFUNC"} else data).append(f".symver {label}, {name}@{version}, remove")
    base = str(target) + ".build"
    with open(base + ".c", "w", encoding="utf-8") as f:
        f.write(SOURCE % soname)
    with open(base + ".s", "w", encoding="utf-8") as f:
        f.write("\n".join([".section .rodata", *text, ".text", *code, ".section .data", *data,
                           '.section .note.GNU-stack,"",@progbits', ""]))
    with open(base + ".map", "w", encoding="utf-8") as f:
        f.write("".join(f"{v} {{ }};\n" for v in sorted(versions)) or "{ global: *; };\n")
    try:
        run("gcc", "-shared", "-nostdlib", "-fPIC", "-O2", "-fno-stack-protector", "-s", f"-Wl,-soname,{soname}",
            f"-Wl,--version-script,{base}.map", "-o", str(target), base + ".c", base + ".s")
    except subprocess.CalledProcessError as e:
        raise SystemExit(f"bundle: the stand-in for {soname} cannot be made:\n{e.stderr[-2000:]}")
    for end in ".c", ".s", ".map":
        os.remove(base + end)
    return len(wanted)
