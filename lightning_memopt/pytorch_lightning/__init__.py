"""The strategies and callbacks for `import pytorch_lightning` and `import lightning_fabric`.

`pytorch_lightning` and `lightning_fabric` have the source text of `lightning.pytorch` and `lightning.fabric` with the names of
the packages changed. A Trainer of the one accepts no strategy of the other, because their base classes differ. So this package
is made in the way theirs is: the modules of `lightning_memopt.strategies`, `callbacks` and `fabric` are loaded once more below
this package, with these names changed in their import statements. Nothing is executed that is not in those files.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_ROOT = Path(__file__).parents[1]
_LOADED_AGAIN = ("strategies", "callbacks", "fabric")
_CHANGED = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"} | {
    f"lightning_memopt.{name}": f"{__name__}.{name}" for name in _LOADED_AGAIN
}
"""Name of a package in the sources -> its name here."""
_PUBLIC = {
    "MemOptBatchScaler": "callbacks",
    "MemOptCallback": "callbacks",
    "MemOptDDPStrategy": "strategies",
    "MemOptFabricDDPStrategy": "fabric",
    "MemOptFabricMixin": "fabric",
    "MemOptFabricStrategy": "fabric",
    "MemOptMixin": "strategies",
    "MemOptModelParallelStrategy": "strategies",
    "MemOptMonitor": "callbacks",
    "MemOptStrategy": "strategies",
}


def _changed(name: str) -> str:
    for before, after in _CHANGED.items():
        if name == before or name.startswith(f"{before}."):
            return after + name.removeprefix(before)
    return name


class _Renamed(ast.NodeTransformer):
    """Changes the names of packages in import statements; lines stay where they are in the file."""

    def visit_Import(self, node: ast.Import) -> ast.Import:
        for alias in node.names:
            alias.name = _changed(alias.name)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        if node.module is not None:
            node.module = _changed(node.module)
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """The code of the changed source. Its bytecode is not cached: the cache of the file has that of the source as it is."""
        return self.source_to_code(_Renamed().visit(ast.parse(self.get_data(self.path), self.path)), self.path)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds `lightning_memopt.pytorch_lightning.X.Y` in the source file of `lightning_memopt.X.Y`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        parts = name.removeprefix(f"{__name__}.").split(".")
        if not name.startswith(f"{__name__}.") or parts[0] not in _LOADED_AGAIN:
            return None
        package = _ROOT.joinpath(*parts, "__init__.py")
        file = package if package.exists() else _ROOT.joinpath(*parts).with_suffix(".py")
        if not file.exists():
            return None
        return importlib.util.spec_from_file_location(name, file, loader=_Loader(name, str(file)))


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


sys.meta_path.insert(0, _Finder())  # before the usual one, which would find the source as it is
