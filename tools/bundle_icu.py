"""A small library of ICU's data for the bundle: of its 28 MiB weft asks for one table, that of the normal form NFKC
(src/text/fix_text.cpp). NFC and lower case are code in libicuuc.

ICU's data is one symbol, icudtVERSION_dat: a header, then a count, as many pairs (offset of a name, offset of its table) in
the order of names, the names and the tables. Offsets count from the count on. From ICU's own documents (ucmndata.h).
"""
import os
import re
import struct

from bundle_stand_ins import defined_symbols, run

WANTED = ("nfkc.nrm",)


def symbol(library):
    """(name, file offset, size) of ICU's data in its library, where addresses and offsets of .rodata agree or do not."""
    name = next(s for s in defined_symbols(library) if re.fullmatch(r"icudt\d+_dat", s))
    row = next(line.split() for line in run("readelf", "--dyn-syms", "-W", library).splitlines() if line.endswith(" " + name))
    address, size = int(row[1], 16), int(row[2], 0)
    for line in run("readelf", "-S", "-W", library).splitlines():
        if match := re.search(r"\.rodata\s+PROGBITS\s+(\w+)\s+(\w+)\s+(\w+)", line):
            start, offset, length = (int(x, 16) for x in match.groups())
            if start <= address and address + size <= start + length:
                return name, address - start + offset, size
    raise SystemExit(f"bundle: {library}: {name} is not where it is expected")


def tables(data):
    """header, [(name, table)] of a package of ICU's data."""
    header = struct.unpack_from("<H", data)[0]
    if data[2:4] != b"\xda\x27" or data[12:16] != b"CmnD":
        raise SystemExit("bundle: ICU's data has a header that is not known here")
    body = data[header:]
    pairs = [struct.unpack_from("<II", body, 4 + 8 * i) for i in range(struct.unpack_from("<I", body)[0])]
    ends = [begin for _, begin in pairs[1:]] + [len(body)]
    return data[:header], [(body[n:body.index(b"\0", n)], body[begin:end]) for (n, begin), end in zip(pairs, ends)]


def package(header, kept):
    names, offsets, at = b"", [], 4 + 8 * len(kept)
    for name, _ in kept:
        offsets.append(at + len(names))
        names += name + b"\0"
    at += len(names)
    pairs, body = b"", b""
    for (_, table), name_at in zip(kept, offsets):
        body += b"\0" * (-(at + len(body)) % 16)
        pairs += struct.pack("<II", name_at, at + len(body))
        body += table
    return header + struct.pack("<I", len(kept)) + pairs + names + body


def make_data(soname, real, target):
    """Writes `target`, which has of the library `real` the tables WANTED."""
    name, offset, size = symbol(real)
    with open(real, "rb") as f:
        f.seek(offset)
        header, all_tables = tables(f.read(size))
    kept = [(n, table) for n, table in all_tables if n.split(b"/")[-1].decode() in WANTED]
    if len(kept) != len(WANTED):
        raise SystemExit(f"bundle: {real} lacks one of {', '.join(WANTED)}")
    base = str(target) + ".build"
    with open(base + ".dat", "wb") as f:
        f.write(package(header, kept))
    with open(base + ".s", "w", encoding="utf-8") as f:
        f.write(f'.section .rodata\n.balign 16\n.globl {name}\n.type {name}, @object\n{name}: .incbin "{base}.dat"\n'
                f'.size {name}, . - {name}\n.section .note.GNU-stack,"",@progbits\n')
    run("gcc", "-shared", "-nostdlib", "-s", f"-Wl,-soname,{soname}", "-o", str(target), base + ".s")
    os.remove(base + ".dat")
    os.remove(base + ".s")
