#!/usr/bin/env bash
# A base install in a fresh environment: the wheel and torch, no optional framework and no compiler. Needs a package index.
# bash tests/base_install.sh FOLDER     (two minutes; the environment and the distributions stay in FOLDER; TORCH sets torch)
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
folder="$(mkdir -p "$1" && cd "$1" && pwd)"

# Both distributions are built in an environment of their own, from a copy: a build leaves folders behind.
python3 -m venv "$folder/build"
"$folder/build/bin/python" -m pip -q install build
rm -rf "$folder/source" "$folder/dist"
mkdir "$folder/source"
(cd "$root" && git ls-files -co --exclude-standard -z | xargs -0 cp --parents -t "$folder/source")
(cd "$folder/source" && "$folder/build/bin/python" -m build --outdir "$folder/dist" . > "$folder/build.log" 2>&1) || {
  tail -20 "$folder/build.log" >&2
  exit 1
}
"$folder/build/bin/python" "$folder/source/tests/distributions.py" "$folder/dist"

python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip -q install "torch==${TORCH:-2.13.0}"
# No compiler is found while it is installed and used.
cd "$folder"
export PATH="$folder/venv/bin" CXX=none CC=none MEMOPT_CACHE="$folder/no_cache" HOME="$folder" XDG_CACHE_HOME="$folder/cache"
python -m pip -q install "$folder"/dist/*.whl
memopt --help > "$folder/help.txt"
python - <<'CODE'
import importlib.util
import sys

import lightning_memopt

assert "torch" not in sys.modules, "importing the package imports torch"
import torch

frameworks = [name for name in ("lightning", "pytorch_lightning", "accelerate", "transformers") if importlib.util.find_spec(name)]
assert not frameworks, f"not a base install: {frameworks}"
blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(8)]
model = torch.nn.Sequential(*blocks)
optimizer = torch.optim.Adam(model.parameters())
with lightning_memopt.optimize(model, optimizer, budget="min") as run:
    for _ in range(5):
        model(torch.randn(256, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print(run.report())
assert run.plan.predicted_peak_nbytes < run.plan.unmodified_peak_nbytes
run.save_plan("plan.json")
for name in ("MemOptStrategy", "MemOptFabricStrategy", "MemOptBatchScaler", "MemOptTrainerCallback"):
    try:
        getattr(lightning_memopt, name)
    except lightning_memopt.MissingExtraError as error:
        print(error)
    else:
        raise AssertionError(name)
CODE
memopt explain plan.json > "$folder/explain.txt"
# Commands that need more say so in one line, and end with an error.
says_what_to_install() {
  local said
  said="$("$@" 2>&1)" && { echo "$* ended well, without what it needs"; exit 1; }
  case "$said" in
    *"pip install"*) echo "$said" ;;
    *) echo "no word of what to install: $said"; exit 1 ;;
  esac
}
says_what_to_install memopt demo --quick --folder demo
says_what_to_install accelerate-memopt config
echo "the base install is complete"
