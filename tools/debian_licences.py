"""Which Debian packages files come from, and what their copyright files say in SPDX's words. tools/bundle.py and tools/sbom.py
share it."""
import collections
import pathlib
import re
import shutil
import subprocess

Package = collections.namedtuple("Package", "name version architecture source source_version")

# SPDX's identifiers for Debian's short names, which are the same but for these and for the GNU licences (gnu_licence).
SPDX = {name.lower(): name for name in (
    "Apache-2.0 Artistic-2.0 BSD-2-Clause BSD-3-Clause BSD-4-Clause BSL-1.0 CC0-1.0 CC-BY-3.0 CC-BY-4.0 curl FTL HPND IJG ISC "
    "Libpng libtiff MIT MPL-1.1 MPL-2.0 NCSA OFL-1.1 OpenSSL PSF-2.0 TCL Unlicense WTFPL X11 Zlib").split()}
SPDX |= {"expat": "MIT", "apache-2": "Apache-2.0", "artistic": "Artistic-1.0-Perl", "boost-1.0": "BSL-1.0", "bsd-2": "BSD-2-Clause",
         "bsd-3": "BSD-3-Clause", "cc0": "CC0-1.0", "freetype": "FTL", "sil-1.1": "OFL-1.1"}
EXCEPTIONS = {"autoconf": "Autoconf-exception-{}.0", "bison": "Bison-exception-2.2", "classpath": "Classpath-exception-2.0",
              "gcc runtime library": "GCC-exception-3.1", "libtool": "Libtool-exception"}


def packages_of(files):
    """The packages that own these files, sorted by name; and the files that none owns."""
    if not shutil.which("dpkg-query"):
        return [], sorted(files)
    # Before /usr was merged, packages installed into /lib; dpkg knows either name.
    names = {}
    for file in files:
        for name in {file, file.replace("/usr/lib/", "/lib/", 1), file.replace("/usr/bin/", "/bin/", 1)}:
            names[name] = file
    found, owned = set(), set()
    if names:
        said = subprocess.run(["dpkg-query", "-S", *sorted(names)], capture_output=True, text=True, check=False).stdout
        for line in said.splitlines():
            owners, _, file = line.partition(": /")
            if file and "/" + file in names:
                found.add(owners.split(",")[0])
                owned.add(names["/" + file])
    return described(found), sorted(set(files) - owned)


def described(names):
    """The installed ones of these packages, sorted by name."""
    fields = "\t".join(("${Package}", "${Version}", "${Architecture}", "${source:Package}", "${source:Version}", "${db:Status-Status}"))
    if not names:
        return []
    said = subprocess.run(["dpkg-query", "-W", "-f", fields + "\n", *sorted(names)], capture_output=True, text=True, check=False).stdout
    rows = (line.split("\t") for line in said.splitlines())
    return sorted(Package(*row[:5]) for row in rows if row[5] == "installed")


def copyright_file(name):
    """/usr/share/doc/NAME/copyright, or None."""
    path = pathlib.Path("/usr/share/doc") / name / "copyright"
    return path if path.exists() else None


def paragraphs(text):
    """[{field: value}] of a control file; values keep their lines."""
    found = []
    for block in re.split(r"\n(?:[ \t]*\n)+", text.strip("\n")):
        fields, name = {}, None
        for line in block.splitlines():
            if match := re.match(r"([A-Za-z][\w-]*):[ \t]*(.*)", line):
                name = match[1].lower()
                fields[name] = match[2]
            elif name:
                fields[name] += "\n" + line
        found.append(fields)
    return found


def gnu_licence(name):
    """GPL-2+ as GPL-2.0-or-later; None where it is no GNU licence."""
    match = re.fullmatch(r"(A|L)?GPL-?v?(\d)(?:\.(\d))?(?:\.0)?(\+|-only|-or-later)?", name, re.IGNORECASE)
    if not match:
        return None
    kind = f"{(match[1] or '').upper()}GPL-{match[2]}.{match[3] or 0}"
    return kind + ("-or-later" if match[4] in ("+", "-or-later") else "-only")


def identifier(name):
    """SPDX's identifier of one licence by its Debian name; None where SPDX has none that is surely the same."""
    if match := re.fullmatch(r"(\S+) with (?:the )?([\w -]+?)(?: |-)exception", name, re.IGNORECASE):
        gnu, exception = gnu_licence(match[1]), EXCEPTIONS.get(match[2].lower())
        return f"{gnu} WITH {exception.format(match[1][4:5])}" if gnu and exception else None
    return gnu_licence(name) or SPDX.get(name.lower())


def licences(package, text):
    """(expression, {LicenseRef: text}): every licence that the copyright file names for any file of the source but Debian's own,
    joined by AND, for packages do not say which file of the source is in which of them. Without a machine-readable form the
    whole text is one licence."""
    prefix = "LicenseRef-" + re.sub(r"[^A-Za-z0-9.-]", "-", package)
    blocks = paragraphs(text)
    if not blocks or "copyright-format" not in blocks[0].get("format", "") and "dep5" not in blocks[0].get("format", "").lower():
        return prefix, {prefix: text}
    texts, synopses = {}, []
    for block in blocks:
        if "license" not in block:
            continue
        synopsis, _, body = block["license"].partition("\n")
        synopsis = " ".join(synopsis.split())
        if body.strip():
            texts.setdefault(synopsis.lower(), body)
        if "files" in block and not all(f.startswith("debian/") for f in block["files"].split()) and synopsis not in synopses:
            synopses.append(synopsis)
    extracted = {}

    def one(name):
        if known := identifier(name):
            return known
        ref = prefix + "-" + re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-")
        extracted[ref] = texts.get(name.lower(), text)
        return ref

    def joined(word, parts):
        parts = list(dict.fromkeys(parts))
        return parts[0] if len(parts) == 1 else "(" + f" {word} ".join(parts) + ")"

    def alternatives(part):
        comma = r",\s+" if re.search(r"\sor\s", part) else r"(?!)"  # "A, B or C"
        choices = re.split(rf",?\s+(?:and/)?or\s+|{comma}", part)
        return joined("OR", [joined("AND", map(one, re.split(r",?\s+and\s+|,\s+", choice))) for choice in choices])

    terms = []
    for synopsis in synopses:
        # A comma before "and" binds less than "or".
        terms.append(joined("AND", map(alternatives, re.split(r",\s+and\s+", synopsis))) if synopsis else one("unnamed"))
    if not terms:
        return prefix, {prefix: text}
    return " AND ".join(dict.fromkeys(terms)), extracted
