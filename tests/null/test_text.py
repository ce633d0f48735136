"""What is written holds: tables end, files that are named are there."""

from __future__ import annotations

import ast
import itertools
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_memopt

ROOT = Path(__file__).parents[2]
PAGES = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md"))


def sources() -> Iterator[Path]:
    """Every page but the changelog, which names what has gone; and all Python."""
    yield from (page for page in PAGES if page.name != "CHANGELOG.md")
    for folder in ("lightning_memopt", "examples", "tests", "benchmarks"):
        yield from sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_end_where_they_end(page: Path) -> None:
    """A paragraph right below a table becomes a row of it, one right above becomes its head."""
    lines = [re.sub(r"^\|.*", "|", line) for line in re.sub(r"```.*?```", "", page.read_text(), flags=re.S).splitlines()]
    beside = [i for i, (a, b) in enumerate(itertools.pairwise(lines), 1) if a and b and (a == "|") != (b == "|")]
    assert not beside


def test_files_that_the_text_names_are_there() -> None:
    """In the package, the tests, the benchmarks and the docs: by their path from the root, the package or their own folder."""
    named = re.compile(r"(?<![\w/.<])((?:[a-z_0-9]+/)+[a-z_0-9]+\.(?:py|md|cpp|json))\b")
    missing = []
    for path in sources():
        bases = (ROOT, ROOT / "lightning_memopt", ROOT / "tests", path.parent, path.parent.parent)
        for name in named.findall(path.read_text()):
            if not any((base / name).exists() for base in bases):
                missing.append((str(path.relative_to(ROOT)), name))
    assert not missing


def defined(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """The names that a module or a class binds, with the statements that do."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name, statement
        elif isinstance(statement, ast.ImportFrom):
            yield from ((alias.asname or alias.name, statement) for alias in statement.names)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from ((n.id, statement) for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))


def dotted_names() -> set[str]:
    """Modules, what they bind, and what their classes bind, by all dotted names from the package's own down to two parts."""
    names: set[str] = set()
    for path in (ROOT / "lightning_memopt").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        names.add(module)
        for name, statement in defined(ast.parse(path.read_text()).body):
            names.add(f"{module}.{name}")
            if isinstance(statement, ast.ClassDef):
                attributes = (n for n in ast.walk(statement) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
                own = {n.attr for n in attributes if isinstance(n.value, ast.Name) and n.value.id == "self"}
                names |= {f"{module}.{name}.{part}" for part in own | {part for part, _ in defined(statement.body)}}
    return {".".join(parts[i:]) for parts in (name.split(".") for name in names) for i in range(len(parts) - 1)}


@pytest.mark.parametrize("page", ["architecture.md", "formulation.md", "glossary.md"])
def test_dotted_names_that_the_text_names_are_defined(page: str) -> None:
    """`plan.simulate`, `Frontier.within`: a module, a function, a class or an attribute of the package has this name."""
    text = re.sub(r"```.*?```", "", (ROOT / "docs" / page).read_text(), flags=re.S)
    named = set(re.findall(r"`([A-Za-z_]\w*(?:\.\w+)+)(?:\(\))?`", text))
    others = {
        name for name in named if name.startswith(("nn.", "optimizer.", "torch.")) or re.search(r"\.(py|md|cpp|toml)$", name)
    }
    assert named > others and not named - others - dotted_names()


def test_rules_that_comments_cite_are_stated() -> None:
    """R1 to R11 in record/__init__.py, A1 to A8 in runtime/parked.py, T1 to T8 in runtime/tiers/base.py: once, and in order."""
    package = ROOT / "lightning_memopt"
    notes = {"R": "record/__init__.py", "A": "runtime/parked.py", "T": "runtime/tiers/base.py"}
    cited = {letter: set[int]() for letter in notes}
    for path in package.rglob("*.py"):
        for letter, number in re.findall(r"\b([RAT])(\d+)\b", path.read_text()):
            cited[letter].add(int(number))
    for letter, file in notes.items():
        stated = [int(n) for n in re.findall(rf"^{letter}(\d+)\. ", (package / file).read_text(), re.M)]
        assert stated == list(range(1, len(stated) + 1)) and cited[letter] <= set(stated), letter


def test_decisions_are_in_their_index_with_a_status() -> None:
    folder = ROOT / "docs" / "adr"
    index = (folder / "README.md").read_text()
    for page in sorted(folder.glob("0*.md")):
        title, _, status, *_ = page.read_text().splitlines()
        assert status.startswith("**Status.** ") and f"]({page.name}) | {title.partition('. ')[2]} |" in index, page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"`[^`]*`", "", page.read_text()))
    made = "troubleshooting.md" if page.parent.name == "docs" else None  # when the site is built, by docs/troubleshooting.py
    dead = [target for target in targets if "://" not in target and target != made and not (page.parent / target).exists()]
    assert not dead


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"} <= set(re.findall(r"\]\((\w+\.md)\)", index))


def test_the_architecture_lists_every_package() -> None:
    """Each package at any depth, and each module at the top, has a row; no row is of one that is not there."""
    section = (ROOT / "docs" / "architecture.md").read_text().partition("## Packages")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `([\w.]+)` \|", section, re.M)
    top = {module.name for module in pkgutil.iter_modules(lightning_memopt.__path__)}
    root = ROOT / "lightning_memopt"
    packages = {".".join(path.parent.relative_to(root).parts) for path in root.rglob("__init__.py")} - {""}
    assert sorted(listed) == sorted(top | packages)
