#!/usr/bin/env bash
# Compares a training step of weft with PyTorch, in a virtual environment of its own, .venv-validation/.
# Arguments go to validation/compare_step.py.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv-validation/bin/python}
if [ ! -x "$python" ]; then
  echo "bench: fetching PyTorch into .venv-validation/ (once)"
  if ! python3 -m venv .venv-validation 2>/dev/null; then
    echo "bench: python3 cannot make a virtual environment. HINT: apt-get install python3-venv, or PYTHON=path of a" \
      "python with the packages of validation/requirements.txt" >&2
    exit 1
  fi
  .venv-validation/bin/pip install --quiet --extra-index-url https://download.pytorch.org/whl/cpu \
    -r validation/requirements.txt
fi
exec "$python" validation/compare_step.py "$@"
