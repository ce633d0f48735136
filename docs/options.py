"""Writes docs/options.md from `MemOptConfig`: python docs/options.py"""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path

from lightning_memopt import MemOptConfig
from lightning_memopt.integrations.wire import meanings

PAGE = Path(__file__).with_suffix(".md")
HEAD = """\
# Options

Generated from `MemOptConfig` by `python docs/options.py`; do not edit. `optimize(model, optimizer, ...)` and
`MemOptStrategy(...)` take these as keyword arguments, or all of them in one `config=MemOptConfig(...)`. The
[usage](usage.md) page says what a budget covers, and when it is refused.

| option | default | |
|---|---|---|
"""


def page() -> str:
    said = meanings()
    rows = []
    for field in fields(MemOptConfig):
        assert field.default is not MISSING
        text = said[field.name]
        rows.append(f"| `{field.name}` | `{field.default!r}` | {text[:1].upper()}{text[1:]} |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
