"""Promises that need no torch: files, messages. Others are kept in the files they belong to, by id."""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from graphs import graph_of
from test_plan_file import VALUES, mutate

import lightning_memopt
from lightning_memopt import jsonio
from lightning_memopt.errors import MemOptError, PlanFileError
from lightning_memopt.plan import lower, plan_from_json, plan_to_json
from lightning_memopt.solvers import planner

PACKAGE = Path(next(iter(lightning_memopt.__path__)))


# -- P29: files are data ---------------------------------------------------------------------------------

EVIL = [
    b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94.",
    b"cos\nsystem\n(S'true'\ntR.",
    b"PK\x03\x04archive/data.pkl",
    b'{"__class__": "os.system", "args": ["true"]}',
    b'{"py/reduce": [{"py/type": "os.system"}, {"py/tuple": ["true"]}]}',
    b"!!python/object/apply:os.system ['true']",
    b"__import__('os').system('true')",
    b'{"format": "lightning_memopt.plan", "schema": 1, "plan": "lightning_memopt.plan:Plan", "graph": "os:system"}',
    b'{"a": NaN}',
    b'{"a": 1, "a": 2}',
    b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"a": ' + b"1" * 5000 + b"}",
    b'{"a": 1e999999}',
    b'{"a": "\\ud800"}',
    b"\xff\xfe{\x00}\x00",
    b"",
    b"null",
]


@pytest.mark.parametrize("data", EVIL, ids=lambda data: ascii(bytes(data[:24])))
def test_p29_evil_files_are_refused_and_run_nothing(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (("os", "system"), ("builtins", "eval"), ("builtins", "exec"), ("importlib", "import_module")):
        monkeypatch.setattr(f"{module}.{name}", lambda *_, **__: pytest.fail("something of the file was run"))
    with pytest.raises(PlanFileError):
        plan_from_json(jsonio.parse(data))


def real_plan() -> dict:
    """What a plan file holds, of a step with every kind of op."""
    graph = next(
        g for g in map(graph_of, range(99)) if any(op.mutates for op in g.ops) and any(op.state_nbytes for op in g.ops)
    )
    frontier = planner.solve(graph)
    return plan_to_json(frontier.plan(frontier.smallest_nbytes), graph)


MUTATIONS = 1_500  # 100,000 of another seed were tried once


def test_p29_no_change_of_a_plan_file_raises_anything_else() -> None:
    """Changes of its bytes and of its content, by the ten thousand: a plan that may be obeyed, or PlanFileError."""
    rng, good = random.Random(29), real_plan()
    text = json.dumps(good, separators=(",", ":")).encode()
    plan_from_json(jsonio.parse(text))
    passed = 0
    for i in range(MUTATIONS):
        data = bytearray(text)
        if i % 4 == 0:
            obj = json.loads(text)
            for _ in range(rng.choice((1, 1, 2, 4))):
                mutate(obj, rng)
            data = bytearray(json.dumps(obj, allow_nan=True).encode())
        else:
            for _ in range(rng.choice((1, 1, 2, 8))):
                at, size = rng.randrange(len(data)), rng.choice((0, 1, 1, 2, 40))
                new = rng.choice((bytes([rng.randrange(256)]), json.dumps(rng.choice(VALUES)).encode(), b"", b"-", b"0", b"9"))
                data[at : at + size] = new
        try:
            plan, graph = plan_from_json(jsonio.parse(bytes(data)))
        except PlanFileError as error:
            assert len(str(error)) < 1000
            continue
        passed += 1
        assert lower(graph, plan.lives) is not None
    assert 0 < passed < MUTATIONS // 2


# -- P34: messages ---------------------------------------------------------------------------------------

REMEDY = re.compile(
    r"\b(set|use|give|raise|make|remove|write|leave|add|check|enter|ask|copy|solve|install|fix|measure|mark|observe|keep|change"
    r"|run|do not)\b",
    re.IGNORECASE,
)


def texts(node: ast.expr) -> Iterator[str]:
    """The literal parts of a message, `{}` where a value is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        for part in node.values:
            yield from texts(part)
    elif isinstance(node, ast.FormattedValue):
        yield "{" + ast.unparse(node.value) + "}"
    elif isinstance(node, ast.BinOp):
        yield from texts(node.left)
        yield from texts(node.right)
    elif isinstance(node, ast.IfExp):
        yield from texts(node.body)
    else:
        yield "{" + ast.unparse(node) + "}"


def raised() -> Iterator[tuple[str, str]]:
    """(where, message) of every error of ours that is made in the package."""
    classes = {name for name, value in vars(lightning_memopt.errors).items() if isinstance(value, type)}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in classes and node.args:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", "".join(texts(node.args[0]))


SAID = list(raised())


def test_p34_there_are_messages() -> None:
    assert len(SAID) > 40


@pytest.mark.parametrize(("where", "message"), SAID, ids=[where for where, _ in SAID])
def test_p34_every_message_says_what_and_what_to_do(where: str, message: str) -> None:
    """What was met is named or numbered, and there is a verb in the imperative."""
    assert len(message.split()) >= 5 or message.startswith("{"), message
    assert REMEDY.search(message) or message in PASSED_ON, message


PASSED_ON = {
    "{os.fspath(path)}: {error}",
    "{args.chain}: {error}",
    "{str(error)}",
    "{answer['refused']}",
    "{words_of[first]['error']}",
}
"""Messages that are made elsewhere, where they are checked too."""


def test_p34_the_check_itself_finds() -> None:
    assert not REMEDY.search("the budget is wrong")
    assert issubclass(PlanFileError, MemOptError)
