#!/usr/bin/env bash
# A base install in a fresh environment: torch and the package, none of the optional frameworks. Needs a package index.
# bash tests/base_install.sh FOLDER     (about a minute; the environment stays in FOLDER)
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
folder="$(mkdir -p "$1" && cd "$1" && pwd)"
python3 -m venv "$folder/venv"
cp -r "$root/lightning_memopt" "$root/examples" "$root/pyproject.toml" "$root/setup.py" "$root/README.md" "$root/LICENSE" "$folder"
"$folder/venv/bin/python" -m pip -q install torch==2.13.0
"$folder/venv/bin/python" -m pip -q install "$folder"
cd /
"$folder/venv/bin/memopt" --help > /dev/null
"$folder/venv/bin/python" - <<'CODE'
import importlib.util

import torch

import lightning_memopt

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
for name in ("MemOptStrategy", "MemOptFabricStrategy", "MemOptBatchScaler"):
    try:
        getattr(lightning_memopt, name)
    except lightning_memopt.MissingExtraError as error:
        print(error)
    else:
        raise AssertionError(name)
CODE
