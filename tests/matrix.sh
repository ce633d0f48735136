#!/usr/bin/env bash
# A smoke subset of the tests with the lowest and the newest frameworks that pyproject.toml admits, on each torch that is named.
# bash tests/matrix.sh FOLDER [TORCH...]     (default: 2.13.0; a torch whose only build is for CUDA is several GB)
# Environments stay in FOLDER, one a cell; FOLDER/matrix.md is a table of versions and outcomes. CELLS sets "lowest", "newest" or both,
# and PYTHON the interpreter.
set -euo pipefail
if [ $# -eq 0 ] || [ "${*: -1}" = --help ]; then
  echo "usage: bash tests/matrix.sh FOLDER [TORCH...]"
  exit 0
fi
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
folder="$(mkdir -p "$1" && cd "$1" && pwd)"
shift
torches=("${@:-2.13.0}")
base=(numpy ortools rich pytest hypothesis scikit-learn matplotlib 'jsonargparse[signatures]' setuptools click)
# Names of frameworks that the package uses, and one training in each front.
smoke=(
  tests/null/test_imports.py tests/null/test_plan.py
  tests/cpu/loops/test_optimize.py
  tests/cpu/lightning/test_private_api.py tests/cpu/lightning/test_two_names.py
  tests/cpu/fabric/test_fabric_private.py tests/cpu/fabric/test_fabric.py
  tests/cpu/accelerate/test_private_names.py tests/cpu/accelerate/test_prepare.py
  tests/cpu/transformers/test_private_api.py tests/cpu/transformers/test_callback.py
)
table="$folder/matrix.md"
printf '| cell | versions | outcome |\n|---|---|---|\n' > "$table"

failed=0
for torch in "${torches[@]}"; do
  for cell in ${CELLS:-lowest newest}; do
    venv="$folder/torch-$torch-$cell"
    python="$venv/bin/python"
    "${PYTHON:-python3}" -m venv "$venv"
    frameworks=(lightning pytorch-lightning accelerate transformers)
    if [ "$cell" = lowest ]; then # transformers' Trainer needs a newer Accelerate than this package does
      read -ra frameworks <<< "$("$python" "$root/tests/lowest.py" lightning) $("$python" "$root/tests/lowest.py" transformers)"
    fi
    "$python" -m pip -q install "torch==$torch" "${base[@]}" "${frameworks[@]}" peft
    versions="$("$python" -c 'import platform
from importlib.metadata import version
names = "torch", "lightning", "accelerate", "transformers", "peft"
print(", ".join(["Python " + platform.python_version(), *(f"{name} {version(name)}" for name in names)]))')"
    outcome="$(cd "$root" && PYTHONPATH="$root" OMP_NUM_THREADS=1 "$python" -m pytest -q "${smoke[@]}" 2>&1 | tee "$folder/torch-$torch-$cell.log" \
      | grep -E '(passed|failed|error).* in [0-9]' | tail -1)" || failed=1 # Triton's binding says more after the summary
    echo "$cell: $versions: $outcome"
    echo "| torch $torch, $cell | $versions | ${outcome//|/ } |" >> "$table"
  done
done
exit "$failed"
