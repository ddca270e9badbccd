"""Hooks of mkdocs (mkdocs.yml): links to files that are no pages of the site, such as ../src/main.cpp, become their paths, and
nothing is fetched from elsewhere when a page is read."""
import pathlib
import posixpath
import re

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def without_links_to_sources(text, page, pages, root):
    """`text` of the page `page`, with such links replaced; `pages` are the paths of the site's files."""
    def replaced(match):
        shown, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        if path in pages or not (root / path).exists():  # what does not exist is mkdocs' to report
            return match[0]
        if f"{path}/README.md" in pages:
            return f"[{shown}]({target.rstrip('/')}/README.md{anchor or ''})"
        return f"`{path}`" if posixpath.basename(path) in shown else f"{shown} (`{path}`)"

    lines, fenced = [], False
    for line in text.split("\n"):
        fenced ^= line.lstrip().startswith("```")
        lines.append(line if fenced or line.startswith("    ") else LINK.sub(replaced, line))
    return "\n".join(lines)


def on_page_markdown(markdown, page, config, files):
    root = pathlib.Path(config.config_file_path).parent
    return without_links_to_sources(markdown, page.file.src_uri, {f.src_uri for f in files}, root)


def on_post_page(output, page, config):
    """The theme would fetch what makes its search work in pages that are opened as files: docs/site.js does that."""
    here = posixpath.dirname(page.file.dest_uri)
    return output.replace("https://unpkg.com/iframe-worker/shim", posixpath.relpath("docs/site.js", here or "."))
