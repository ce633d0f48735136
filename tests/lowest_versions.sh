#!/usr/bin/env bash
# The tests of every front, with the lowest versions of the frameworks that pyproject.toml admits. Needs a package index.
# bash tests/lowest_versions.sh FOLDER     (the environment stays in FOLDER; TORCH sets the version of torch, PYTHON the interpreter)
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
folder="$(mkdir -p "$1" && cd "$1" && pwd)"
python="$folder/venv/bin/python"

lowest() { "$python" "$root/tests/lowest.py" "$@"; }

install() { "$python" -m pip -q install "torch==${TORCH:-2.13.0}" "$@"; }

# Each room in a process of its own. All run; the script fails if one failed.
failed=0
run() {
  local room
  for room in "$@"; do
    echo "== $room"
    (cd "$root" && PYTHONPATH="$root" OMP_NUM_THREADS=1 "$python" -m pytest -q "$room") || failed=1
  done
}

"${PYTHON:-python3}" -m venv "$folder/venv"
install numpy ortools rich pytest hypothesis scikit-learn matplotlib 'jsonargparse[signatures]' setuptools click
# Tests of Accelerate train models of transformers, whose Trainer needs a newer Accelerate than ours does.
# shellcheck disable=SC2046
install $(lowest lightning) $(lowest transformers transformers) $(lowest accelerate) peft
run tests/cpu/lightning tests/cpu/fabric tests/cpu/ranks tests/cpu/sharded tests/cpu/accelerate
# shellcheck disable=SC2046
install $(lowest transformers) peft
run tests/cpu/transformers
exit "$failed"
