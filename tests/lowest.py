"""The requirements of an extra of pyproject.toml, each at its lower bound: `python tests/lowest.py EXTRA [PACKAGE]`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, whose pip has the same module
    from pip._vendor import tomli as tomllib

TOGETHER = {"lightning": ("lightning", "pytorch-lightning")}
"""`lightning` alone would bring the newest `pytorch-lightning`."""


def lowest(extra: str, only: str | None = None) -> list[str]:
    """`package==version` of each requirement. `only`: of this package alone."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = []
    for requirement in project["optional-dependencies"][extra]:
        match = re.match(r"([\w-]+)>=([\d.]+)", requirement)
        assert match is not None, f"{requirement} has no lower bound"
        name, bound = match.groups()
        if only in (None, name):
            pins += [f"{package}=={bound}" for package in TOGETHER.get(name, (name,))]
    return pins


if __name__ == "__main__":
    print(*lowest(*sys.argv[1:]))
