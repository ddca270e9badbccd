#!/usr/bin/env python3
"""make sbom: the list of everything that weft is linked with, versions and licences, as SPDX 2.3 in JSON. Packages are Debian's:
the shared libraries that the loader brings in, and the headers that are compiled in. tools/bundle.py writes one for a bundle.

    tools/sbom.py --program build/weft --output build/weft.spdx.json

The document is the same for the same program and packages but for its date, which SOURCE_DATE_EPOCH fixes.
"""
import argparse
import datetime
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import uuid
from urllib.parse import quote

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from debian_licences import copyright_file, described, licences, packages_of  # noqa: E402

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
# Libraries that are headers alone.
HEADERS = ("libcli11-dev", "libeigen3-dev", "nlohmann-json3-dev")


def run(*command):
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True).stdout


def linked(program):
    """(files of the libraries that it names, files of those that these bring in)."""
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", "-W", program)))
    direct, indirect = set(), set()
    for soname, file in re.findall(r"(\S+) => (/\S+) \(0x", run("ldd", program)):
        (direct if soname in needed else indirect).add(os.path.realpath(file))
    return direct, indirect


def distribution():
    """"debian-12" of /etc/os-release."""
    facts = dict(re.findall(r'(?m)^(\w+)="?([^"\n]*)', pathlib.Path("/etc/os-release").read_text()))
    return f"{facts.get('ID', 'linux')}-{facts.get('VERSION_ID', 'unknown')}"


def reference(name):
    return "SPDXRef-" + re.sub(r"[^A-Za-z0-9.-]", "-", name)


class Document:
    """An SPDX document about `subject`, "weft" or "weft-bundle", whose --version says `version`."""

    def __init__(self, subject, version):
        version_line = version.splitlines()[0]
        match = re.match(r"weft (\S+) \(commit (\w+)", version_line)
        self.version, self.commit, self.subject = match[1], match[2], subject
        # What it was compiled against; where a library was not found, "-" may stand before it.
        self.libraries = {line[2:15].strip(): line.split()[-1] for line in version.splitlines()[2:] if re.match(r"  \S.*\d$", line)}
        self.packages, self.relationships, self.texts = [], [], {}
        self.add(subject, {"name": subject, "versionInfo": self.version, "licenseDeclared": "Apache-2.0",
                           "sourceInfo": "commit " + self.commit, "comment": version_line, "primaryPackagePurpose": "APPLICATION"})
        self.relate("SPDXRef-DOCUMENT", "DESCRIBES", reference(subject))

    def relate(self, one, kind, other, comment=None):
        self.relationships.append({"spdxElementId": one, "relationshipType": kind, "relatedSpdxElement": other}
                                  | ({"comment": comment} if comment else {}))

    def add(self, name, fields, kind=None, comment=None):
        self.packages.append({"SPDXID": reference(name), "downloadLocation": "NOASSERTION", "filesAnalyzed": False,
                              "licenseConcluded": "NOASSERTION", "copyrightText": "NOASSERTION"} | fields)
        if kind:
            self.relate(reference(self.subject), kind, reference(name), comment)

    def add_debian(self, packages, kind, comment=None, text_of=None):
        """Packages of Debian (debian_licences.Package) that are not there yet; `text_of(name)` is a copyright file's text or None."""
        for package in packages:
            if any(p["SPDXID"] == reference(package.name) for p in self.packages):
                continue
            text = (text_of or self.copyright_of)(package.name)
            fields = {
                "name": package.name, "versionInfo": package.version, "supplier": "Organization: Debian",
                "sourceInfo": f"built from Debian's source package {package.source} {package.source_version}",
                "externalRefs": [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator":
                                  f"pkg:deb/debian/{quote(package.name, safe='')}@{quote(package.version, safe='')}"
                                  f"?arch={package.architecture}&distro={distribution()}"}],
                "licenseDeclared": "NOASSERTION"}
            if text is not None:
                fields["licenseDeclared"], extracted = licences(package.name, text)
                fields["licenseComments"] = ("Every licence that Debian's copyright file names for files of the source; not all of them "
                                             "need be in this package.")
                self.texts |= extracted
            self.add(package.name, fields, kind, comment)

    def add_files(self, files, kind):
        """Files that no package owns, such as those of NVIDIA's installers, whose versions weft --version knows."""
        for file in files:
            name = pathlib.Path(file).name
            library = {"libcublaslt": "cuBLASLt", "libnccl": "NCCL"}.get(name.split(".")[0].lower())
            version = {"versionInfo": self.libraries[library]} if library in self.libraries else {}
            self.add(name, {"name": name, "licenseDeclared": "NOASSERTION", "comment": f"{file}: no Debian package owns it"} | version,
                     kind)

    def add_cuda(self):
        """What the loader does not name: the CUDA runtime is linked statically, cuDNN is loaded with the first convolution."""
        for name, kind, terms in (("CUDA runtime", "STATIC_LINK", "CUDA Toolkit's End User License Agreement"),
                                  ("cuDNN", "DEPENDS_ON", "cuDNN's Software License Agreement")):
            if name in self.libraries:
                self.add(name, {"name": name, "versionInfo": self.libraries[name], "supplier": "Organization: NVIDIA",
                                "licenseDeclared": "NOASSERTION", "licenseComments": f"NVIDIA's terms: {terms}."}, kind)

    @staticmethod
    def copyright_of(name):
        file = copyright_file(name)
        return file.read_text(errors="replace") if file else None

    def text(self):
        seconds = os.environ.get("SOURCE_DATE_EPOCH")
        now = datetime.datetime.now(datetime.timezone.utc) if seconds is None else datetime.datetime.fromtimestamp(
            int(seconds), datetime.timezone.utc)
        content = {"packages": self.packages, "relationships": self.relationships,
                   "hasExtractedLicensingInfos": [{"licenseId": ref, "name": ref.removeprefix("LicenseRef-"), "extractedText": text}
                                                  for ref, text in sorted(self.texts.items())]}
        mark = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(content, sort_keys=True))
        document = {"spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": "SPDXRef-DOCUMENT",
                    "name": f"{self.subject}-{self.version}",
                    "documentNamespace": f"https://spdx.org/spdxdocs/{self.subject}-{self.version}-{mark}",
                    "creationInfo": {"created": now.strftime("%Y-%m-%dT%H:%M:%SZ"), "creators": [f"Tool: weft-sbom-{self.version}"]}}
        return json.dumps(document | content, indent=1, ensure_ascii=False) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", required=True, help="weft")
    parser.add_argument("--output", required=True)
    a = parser.parse_args()
    program = pathlib.Path(a.program)
    if not program.exists() or program.read_bytes()[:4] != b"\x7fELF" or not shutil.which("dpkg-query"):
        raise SystemExit(f"sbom: this needs {program}, the program itself, and Debian's packages. HINT: make build, on Debian or Ubuntu; Spack and EasyBuild "
                         "record what they installed themselves")
    document = Document("weft", run(a.program, "--version"))
    direct, indirect = linked(a.program)
    (near, unowned), (far, unowned_far) = packages_of(direct), packages_of(indirect - direct)
    document.add_debian(near, "DYNAMIC_LINK")
    document.add_debian(described(HEADERS), "CONTAINS", "headers, compiled in")
    document.add_debian(far, "DEPENDS_ON", "through other libraries")
    document.add_files(unowned + unowned_far, "DYNAMIC_LINK")
    document.add_cuda()
    pathlib.Path(a.output).write_text(document.text())
    print(f"sbom: {a.output}: {len(document.packages) - 1} packages, {len(document.texts)} licences that SPDX has no name for")


if __name__ == "__main__":
    main()
