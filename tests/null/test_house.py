"""Rules that a tool can check: what no file of the package may do, and what every error must have."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_memopt
from lightning_memopt import errors

PACKAGE = Path(next(iter(lightning_memopt.__path__)))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}

# Each of these runs code that came with the data.
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
FORBIDDEN_BUILTINS = {"eval", "exec", "__import__"}
FORBIDDEN_CALLS = {"torch.load", "np.load", "numpy.load", "yaml.load", "yaml.unsafe_load", "os.system"}


def forbidden(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of every forbidden import or call in `tree`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.Attribute) and any(call.endswith("." + node.attr) for call in FORBIDDEN_CALLS):
            names = [ast.unparse(node)]
        else:
            continue
        for name in names:
            if isinstance(node, ast.Import | ast.ImportFrom):
                bad = name.split(".")[0] in FORBIDDEN_MODULES or name in FORBIDDEN_CALLS
            else:
                bad = name in FORBIDDEN_CALLS | FORBIDDEN_BUILTINS
            if bad:
                yield node.lineno, name


MOST_LINES, MOST_METHODS = 500, 25


def test_no_file_is_longer_than_a_stranger_reads() -> None:
    """Of the package, its tests, benchmarks and examples."""
    root = PACKAGE.parent
    folders = ("lightning_memopt", "tests", "benchmarks", "examples")
    paths = [path for folder in folders for path in (root / folder).rglob("*.py")]
    lines = {str(path.relative_to(root)): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert not {name: n for name, n in lines.items() if n > MOST_LINES}


def test_a_class_of_many_methods_says_why() -> None:
    large = []
    for path, tree in TREES.items():
        for node in (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)):
            methods = sum(isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) for child in node.body)
            if methods > MOST_METHODS and "Many methods: " not in (ast.get_docstring(node) or ""):
                large.append(f"{path.relative_to(PACKAGE)}: {node.name} has {methods} methods")
    assert not large, "say why in the docstring, after 'Many methods: '"


def imports() -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports, wherever in the file."""
    paths = {".".join((PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in TREES}
    modules = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    edges: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.ImportFrom) and node.module:
                known = {f"{node.module}.{alias.name}" for alias in node.names} & modules.keys()
                edges[name] |= known or ({node.module} & modules.keys())
            elif isinstance(node, ast.Import):
                edges[name] |= {alias.name for alias in node.names} & modules.keys()
    return edges


def test_no_module_imports_itself_by_a_circle() -> None:
    """No import cycles, including imports for types and inside functions. The package imports its public names lazily."""
    edges = imports()
    edges["lightning_memopt"] = set()
    while leaves := [name for name, needs in edges.items() if not needs & edges.keys()]:
        for name in leaves:
            del edges[name]
    circle = {name: sorted(needs & edges.keys()) for name, needs in edges.items()}
    assert not circle, "modules on circles, and those that import them"


CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "thread_time"}


def test_clocks_come_from_one_module() -> None:
    """A module that calls `time`'s clock directly would use up a reading of a script that has replaced the clock."""
    reads = set()
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in CLOCKS and ast.unparse(node.value) == "time":
                reads.add(path.name)
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                reads.add(path.name)
    assert reads == {"clocks.py"}


ALLOWED_IMPORTS = {
    "__init__.py",  # a constant
    "_registration.py",  # by a constant, as all that have no other remark
    "after_import.py",  # what the caller waits for: a constant
    "bench/user_code.py",  # by what the user typed
    "cli/__init__.py",  # examples, which lie in two places
    "integrations/asking.py",  # a constant, of a layer above
    "integrations/lightnings.py",  # from tables, and from the package that the user's Trainer is of
    "integrations/accelerate_private.py",  # names of Accelerate that stand there
    "runtime/codecs/block.py",
    "telemetry/nvml.py",
    "torch_private.py",  # names of torch that stand there
}


def test_p29_names_in_files_import_nothing() -> None:
    """Few files import modules by name. Those names are literals or were typed by the user, and never come from a plan."""
    found = set()
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            attribute = node.attr if isinstance(node, ast.Attribute) else ""
            if attribute in ("import_module", "find_spec", "spec_from_file_location"):
                found.add(str(path.relative_to(PACKAGE)))
            assert attribute not in ("run_path", "load_source", "locate", "resolve_name"), path
    assert found == ALLOWED_IMPORTS


def test_p29_nothing_in_the_package_runs_code_from_data() -> None:
    found = {f"{path.relative_to(PACKAGE)}: {what}" for path, tree in TREES.items() for _, what in forbidden(tree)}
    assert found == {
        "fitting/card_types.py: torch.load",  # the script's own call, passed on
        "integrations/launch.py: exec",  # the script that the user's command line names
        "plan/snapshot.py: pickle",  # written, never read: torch's viewer takes no other format
    }
    calls = re.findall(r"pickle\.(\w+)", (PACKAGE / "plan" / "snapshot.py").read_text().partition("from __future__")[2])
    assert calls == ["dumps"]


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import torch, pickle as p",
        "from pickle import loads",
        "from torch import load",
        "torch.load(path)",
        "run = eval",
        "exec(text)",
        "import joblib.numpy_pickle",
    ],
)
def test_the_check_itself_finds(source: str) -> None:
    assert list(forbidden(ast.parse(source)))


@pytest.mark.parametrize("source", ["model.eval()", "json.load(file)", "# eval(x)", "state.load()", "x = 'pickle'"])
def test_the_check_itself_lets_pass(source: str) -> None:
    assert not list(forbidden(ast.parse(source)))


def test_every_error_has_the_base_and_says_its_cause_in_one_line_and_what_to_do() -> None:
    classes = [value for _, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__]
    assert errors.MemOptError in classes and len(classes) > 1
    for value in classes:
        assert issubclass(value, errors.MemOptError)
        cause, _, remedy = (inspect.getdoc(value) or "").partition("\n\nRemedy: ")
        assert cause and "\n" not in cause and remedy, value


def test_every_public_exception_of_the_package_has_the_base() -> None:
    """By name, without importing: a public class that derives from builtin exceptions alone."""
    classes = [value for value in vars(builtins).values() if inspect.isclass(value)]
    builtin = {value.__name__ for value in classes if issubclass(value, BaseException)}
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.name}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name != "MemOptError"
        if node.bases and all(ast.unparse(base) in builtin for base in node.bases)
    ]
    assert found == []


def test_planning_imports_where_there_is_no_torch() -> None:
    """The layer rule sees imports that are written; this one sees what importing the package really runs."""
    modules = [name for name in ("errors", "units", "jsonio", "graph", "plan", "solvers") if _exists(name)]
    code = "import sys\nfor name in ('torch', 'lightning', 'pytorch_lightning', 'transformers'):\n"
    code += "    sys.modules[name] = None\n"
    code += "\n".join(f"import lightning_memopt.{name}" for name in modules)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, timeout=60)
    assert done.returncode == 0, done.stderr


def _exists(name: str) -> bool:
    return (PACKAGE / name / "__init__.py").exists() or (PACKAGE / f"{name}.py").exists()


def test_every_package_is_in_a_layer() -> None:
    """The import contract must list every package: a package that it does not list could import anything."""
    contract = (PACKAGE.parent / "pyproject.toml").read_text().partition('name = "imports point at data"')[2].partition("]]")[0]
    assert "exhaustive = true" in contract
    layers = contract.partition("layers = [")[2].partition("\n]")[0]
    there = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()} - {"__init__"}
    assert set(re.findall(r"\w+", layers)) == there


DEVICES = {"cpu", "cuda", "xpu", "mps", "meta"}


def _is_a_type(side: ast.expr) -> bool:
    if isinstance(side, ast.Constant):
        return side.value in DEVICES
    return isinstance(side, ast.Attribute) and side.attr == "type" and "device" in ast.unparse(side.value)


def _tells_apart(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        return any(map(_is_a_type, (node.left, *node.comparators)))
    if isinstance(node, ast.Attribute):
        return node.attr in {f"is_{device}" for device in DEVICES - {"cpu", "meta"}} or (
            node.attr in DEVICES | {"accelerator"} and ast.unparse(node.value) == "torch"
        )
    return False


def test_devices_are_told_apart_in_one_package() -> None:
    """No other package compares types of devices, or names `torch.cuda`. `is_cpu` and `is_meta` are allowed: both are questions
    of one tensor, and asked for each op.
    """
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if path.parent != PACKAGE / "device" and isinstance(node, ast.expr) and _tells_apart(node)
    ]
    assert not found, "ask lightning_memopt.device"
    tells = (d for path, tree in TREES.items() if path.parent == PACKAGE / "device" for d in ast.walk(tree) if _tells_apart(d))
    assert any(tells), "the rule sees what it forbids"
