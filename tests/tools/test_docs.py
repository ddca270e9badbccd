"""The pages: links and anchors of every Markdown file lead somewhere, tables have all their cells, and a page is found from the
index and in the site's navigation. Commands and messages of the pages: tests/e2e/test_docs_commands.py."""
import os
import pathlib
import re
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import docs_links  # noqa: E402

# What engineers of this field search for (each in docs/faq.md, as it is written here).
SEARCHED = ["gradient checkpointing", "gradient accumulation", "global batch", "mixed precision", "DDP", "ZeRO-1", "ZeRO-3", "FSDP",
            "overfit", "fine-tuning", "tutorial", "LoRA", "validation loss", "resume", "early stopping", "W&B", "TensorBoard",
            "CUDA out of memory", "NCCL timeout", "loss is nan", "rank 0 waiting", "torchrun", "EMA", "learning-rate schedule",
            "checkpoint", "own footage", "datasets", "Slurm", "MPICH", "Arm", "fp16", "fp8", "noise", "FVD", "Docker"]
PICTURES = 1 << 20  # bytes of docs/images, so that a clone stays small


def pages():
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(f for f in folders if not f.startswith((".", "build")) and f not in ("runs", "bundle", "__pycache__"))
        yield from (pathlib.Path(folder, name) for name in sorted(names) if name.endswith(".md"))


def prose(text):
    """[(number, line)] without code: fenced and indented blocks, `spans`."""
    lines, fenced, indented, after_blank = [], False, False, True
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            continue
        indented = line.startswith("    ") and (after_blank or indented) or indented and not line.strip()
        after_blank = not line.strip()
        if not fenced and not indented:
            lines.append((number, re.sub(r"(`+)(?:(?!\1).)*\1", lambda m: "`" * len(m[0]), line)))
    return lines


def anchors(text):
    """Of each heading, as GitHub and the site make them."""
    found = set()
    for number, line in prose(text):
        if re.match(r"#{1,6} ", line):
            title = text.splitlines()[number - 1].lstrip("#").strip()
            title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
            slug = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
            # GitHub numbers the second of a name with -, the site with _: do not link to it.
            found.add(slug)
    return found


def links(text):
    for number, line in prose(text):
        for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", line) + re.findall(r"^\[[^\]]+\]:\s+(\S+)", line):
            if not re.match(r"[a-z]+:", target):
                yield number, target


def broken(page, text, root):
    """What is wrong with the links of a page."""
    for number, target in links(text):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists():
            yield f"{page.relative_to(root)}:{number}: {target}: no such file"
        elif root not in there.parents:
            yield f"{page.relative_to(root)}:{number}: {target}: outside of the repository"
        elif anchor and there.suffix == ".md" and anchor not in anchors(there.read_text() if path else text):
            yield f"{page.relative_to(root)}:{number}: {target}: no such heading"


class Pages(unittest.TestCase):
    def test_links_lead_somewhere(self):
        count = 0
        for page in pages():
            text = page.read_text()
            count += len(list(links(text)))
            self.assertEqual(list(broken(page, text, ROOT)), [])
        self.assertGreater(count, 300)

    def test_what_is_wrong_is_seen(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder).resolve()
            (root / "b.md").write_text("# One `two` three\n## [zero](x) = 3\n```\n# none\n```\n")
            text = ("# A\n[1](b.md#one-two-three) [2](#a) [3](https://x.org) `[4](c.md)`\n\n    [5](c.md)\n\n[6](b.md#zero--3)\n"
                    "[7](c.md) ![8](d.png) [9](b.md#none) [10](../..)\n")
            (root / "a.md").write_text(text)
            self.assertEqual([line.split(": ")[1] for line in broken(root / "a.md", text, root)],
                             ["c.md", "d.png", "b.md#none", "../.."])

    def test_rows_of_tables_have_all_cells(self):
        for page in pages():
            head = None
            for number, line in prose(page.read_text()):
                if not line.startswith("|"):
                    head = None
                    continue
                cells = len(re.findall(r"(?<!\\)\|", line))
                head = head or cells
                self.assertEqual(cells, head, f"{page.relative_to(ROOT)}:{number}")

    def test_lists_begin_after_a_blank_line(self):
        """GitHub makes a list of "text\\n- item", the site does not."""
        for page in pages():
            before = ""
            for number, line in prose(page.read_text()):
                if line.startswith("- ") and before.strip() and not before.startswith((" ", "- ")):
                    self.fail(f"{page.relative_to(ROOT)}:{number}: a list needs a blank line before it")
                before = line

    def test_every_page_is_in_the_index_and_in_the_navigation(self):
        mine = {p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md")}
        site = set(re.findall(r"(?m)^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text()))
        self.assertEqual(mine - site, set(), "add them to nav of mkdocs.yml")
        self.assertEqual({p for p in site if not (ROOT / p).exists()}, set(), "mkdocs.yml names them")
        index = {(ROOT / "docs" / target.partition("#")[0]).resolve() for _, target in links((ROOT / "docs/index.md").read_text())}
        self.assertEqual({p for p in mine if (ROOT / p) not in index} - {"docs/index.md"}, set(), "add them to docs/index.md")

    def test_words_that_are_searched_are_in_the_faq(self):
        text = re.sub(r"\s+", " ", (ROOT / "docs/faq.md").read_text())
        missing = [word for word in SEARCHED if not re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE)]
        self.assertEqual(missing, [])

    def test_pictures_are_small_and_shown(self):
        shown = {(page.parent / target).resolve() for page in pages() for _, target in links(page.read_text())}
        pictures = list((ROOT / "docs/images").iterdir())
        self.assertEqual([p.name for p in pictures if p not in shown], [])
        self.assertLess(sum(p.stat().st_size for p in pictures), PICTURES)


class Site(unittest.TestCase):
    def test_links_to_sources_become_paths(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name in ("src/main.cpp", "tests/a/README.md", "docs/b.md"):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text("")
            pages = {"docs/b.md", "tests/a/README.md", "docs/c.md"}
            text = ("[main](../src/main.cpp), [src/main.cpp](../src/main.cpp#L1), [b](b.md#x), [tests](../tests/a/), "
                    "[gone](../src/gone.cpp)\n    [code](../src/main.cpp)")
            self.assertEqual(docs_links.without_links_to_sources(text, "docs/c.md", pages, root),
                             "main (`src/main.cpp`), `src/main.cpp`, [b](b.md#x), [tests](../tests/a/README.md), "
                             "[gone](../src/gone.cpp)\n    [code](../src/main.cpp)")


if __name__ == "__main__":
    unittest.main()
