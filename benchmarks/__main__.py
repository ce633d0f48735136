"""What the claims of this project were measured with: `python -m benchmarks` lists it, `python -m benchmarks NAME...` runs it.

python -m benchmarks                      # names, and what each measures
python -m benchmarks chain echo           # one after the other
python -m benchmarks frontier gpt2 --rounds 5      # what is not a benchmark's name goes to the one before it
python -m benchmarks --short              # those that take a minute or less, at small sizes; `make bench`
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu import parts

FOLDER = Path(__file__).parent
OWN_WORDS = {"gpu": parts.names()}
"""Words that a benchmark takes as arguments, though another benchmark may have that name."""
SHORT = (["chain", "--small"], ["echo", "--small"], ["meter"], ["overhead"])
"""Commands that take a minute or less."""


def modules() -> dict[str, str]:
    """Name -> module of every file in a folder here that is run by itself, by name."""
    paths = sorted(FOLDER.glob("*/*.py"), key=lambda path: path.stem)
    run = [path for path in paths if '__name__ == "__main__"' in path.read_text()]
    return {path.stem: f"benchmarks.{path.parent.name}.{path.stem}" for path in run}


def benchmarks() -> dict[str, str]:
    """Name -> the first line of its docstring."""
    lines = {}
    for name, module in modules().items():
        text = FOLDER.parent.joinpath(*module.split(".")).with_suffix(".py").read_text()
        lines[name] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return lines


def commands(words: list[str]) -> list[list[str]]:
    """One list a benchmark: its name and its arguments. Raises ValueError where the first word names none."""
    known, split = modules(), list[list[str]]()
    for word in words:
        if word in known and not (split and word in OWN_WORDS.get(split[-1][0], ())):
            split.append([word])
        elif split:
            split[-1].append(word)
        else:
            raise ValueError(f"there is no benchmark {word!r}; there are {', '.join(known)}")
    return split


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="those that take a minute or less, at small sizes")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="NAME [ARGUMENT...]", help="none: list them")
    args = parser.parse_args(words)
    try:
        chosen = [*(SHORT if args.short else ()), *commands(args.words)]
    except ValueError as error:
        parser.error(str(error))
    if not chosen:
        for name, line in benchmarks().items():
            print(f"{name:16} {line}")
    failed = []
    for name, *arguments in chosen:
        if len(chosen) > 1:  # the output of one may be meant for a file
            print(f"== {' '.join([name, *arguments])}", flush=True)
        if subprocess.run([sys.executable, "-m", modules()[name], *arguments], cwd=FOLDER.parent).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
