#!/usr/bin/env bash
# Builds a site of README.md, docs/ and the other Markdown files, with search, in build/docs (mkdocs.yml). The first call fetches
# mkdocs from PyPI (docs/requirements.txt) into build/docs_python; later ones need no network. A link that leads nowhere fails.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=build/docs_python pages=build/docs_pages
if ! cmp -s docs/requirements.txt "$tools/requirements.txt"; then
  rm -rf "$tools"
  mkdir -p build
  if ! python3 -m venv "$tools" >build/docs.log 2>&1; then
    tail -n 5 build/docs.log >&2
    echo "docs: python3 -m venv failed. HINT: on Debian, apt-get install python3-venv" >&2
    exit 1
  fi
  if ! "$tools/bin/pip" install --quiet --disable-pip-version-check -r docs/requirements.txt; then
    echo "docs: pip could not fetch docs/requirements.txt. HINT: is there a network, or PIP_INDEX_URL of a mirror?" >&2
    exit 1
  fi
  cp docs/requirements.txt "$tools"
fi
# The pages keep their places, so that links are the same as in the checkout. Generated tables of registers would fill the search.
rm -rf "$pages"
mkdir -p "$pages"
find ./*.md docs validation tests ! -name 'kernels_*.md' \( -name '*.md' -o -path 'docs/*.png' -o -path 'docs/*.jpg' -o -path 'docs/*.svg' -o -path 'docs/site.*' \) -print0 |
  xargs -0 cp --parents -t "$pages"
NO_MKDOCS_2_WARNING=1 "$tools/bin/mkdocs" --quiet build --strict
echo "docs: build/docs/index.html"
