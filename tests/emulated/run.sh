#!/usr/bin/env bash
# Trains and tests on an emulated CUDA device (README.md). FOLDER keeps an environment with torch for CUDA, and the device's libraries.
set -euo pipefail
if [ $# -ne 1 ] || [ "${*: -1}" = --help ]; then
  echo "usage: bash tests/emulated/run.sh FOLDER"
  exit 0
fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder="$(mkdir -p "$1" && cd "$1" && pwd)"
python="$folder/venv/bin/python"
if [ "$folder/installed" -ot constraints.txt ]; then
  "${PYTHON:-$(command -v python3.11 || command -v python3)}" -m venv "$folder/venv"
  # torch's own requirements, NVIDIA's libraries among them, are not asked for: the pinned ones are enough
  grep -v '^torch==' constraints.txt > "$folder/constraints.txt"
  "$python" -m pip install --no-deps -r "$folder/constraints.txt" torch==2.14.1
  "$python" -m pip install --no-deps -e .
  touch "$folder/installed"
fi
"$python" -m tests.emulated.build "$folder/lib"
export LD_LIBRARY_PATH="$folder/lib" OMP_NUM_THREADS=1 MEMOPT_CACHE=0
failed=0
"$python" -m tests.emulated.reserved || failed=1
PYTORCH_ALLOC_CONF=expandable_segments:True "$python" -m tests.emulated.reserved mlp unet vit --budgets 0.5 || failed=1
"$python" -m tests.emulated.real_size vit-h || failed=1
for mode in bits bytes; do
  EMULATED_MODE=$mode EMULATED_RACES=$([ $mode = bits ] && echo 1 || echo 0) \
    "$python" -m pytest -p tests.emulated.plugin tests/emulated tests/gpu || failed=1
done
exit $failed
