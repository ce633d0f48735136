"""The page that docs/troubleshooting.py makes from the code misses no error, no warning and no reason."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from lightning_memopt import errors

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def modules() -> tuple[ModuleType, ModuleType]:
    """docs/troubleshooting.py and docs/messages.py, which it reads the code with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        return importlib.import_module("troubleshooting"), importlib.import_module("messages")


@pytest.fixture(scope="module")
def text(modules: tuple[ModuleType, ModuleType]) -> str:
    return str(modules[0].page())


def test_every_error_class_is_there_with_its_cause_and_remedy(text: str) -> None:
    classes = [value for _, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__]
    for value in classes:
        cause, _, remedy = (inspect.getdoc(value) or "").partition("\n\nRemedy: ")
        section = text.partition(f"### {value.__name__}\n")[2].partition("\n### ")[0]
        assert cause in section and " ".join(remedy.split()) in section, value


def test_every_warning_and_line_is_there_and_every_entry_is_said(modules: tuple[ModuleType, ModuleType], text: str) -> None:
    page, messages = modules
    said = [line for line in messages.lines() if page.told(line)]
    assert len(said) > 50
    assert all(page.shown(line) in text for line in said)
    assert {page.key_of(line) for line in said} == set(page.SAID), "an entry for what is no longer said"


def test_the_words_of_lines_that_the_page_shows_otherwise_are_in_the_code(modules: tuple[ModuleType, ModuleType]) -> None:
    page, messages = modules
    assert set(page.LOOKS) <= set(page.SAID)
    nodes = [node for tree in messages.TREES.values() for node in ast.walk(tree)]
    texts = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    for look in (look for looks in page.LOOKS.values() for look in looks):
        for words in (part.strip(" .") for part in re.split("…|[;,] ", look.removeprefix("MemOpt:"))):
            assert "NAME OF" in words or any(words in text for text in texts), words


def test_every_reason_is_there(modules: tuple[ModuleType, ModuleType], text: str) -> None:
    page, messages = modules
    assert len(messages.reasons()) > 40
    assert all(f"| {page.cell(r.what)} | {r.fix}. |" in text for r in messages.reasons())


@pytest.mark.parametrize(
    "source, texts",
    [
        ("def f():\n    say('a')\n    self._say(f'b {x} c')", {"a", "b … c"}),
        ("TEXT = 'long'\ndef f():\n    warnings.warn(TEXT + ' end', stacklevel=2)", {"long end"}),
        ("def f(y):\n    why = 'p' if y else 'q'\n    say(why)", {"p", "q"}),
        ("def f(y):\n    say(y)\n    print('not said')", {"…"}),
        ("def f(y):\n    print('MemOpt: p' if y else y)\n    rank_zero_warn('q')", {"MemOpt: p", "q"}),
    ],
)
def test_the_reader_of_code_sees(
    modules: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch, source: str, texts: set[str]
) -> None:
    monkeypatch.setattr(modules[1], "TREES", {"new.py": ast.parse(source)})
    assert {line.text for line in modules[1].lines()} == texts


def test_a_new_warning_without_a_remedy_fails(modules: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    page, messages = modules
    monkeypatch.setitem(messages.TREES, "new.py", ast.parse("warnings.warn('MemOpt: the moon is full.')"))
    with pytest.raises(KeyError, match=r"new\.py says 'MemOpt: the moon is full\.'"):
        page.page()
