"""The command line `accelerate-memopt`: `launch` and `config` of `accelerate`, with the options of memopt.

    accelerate-memopt config --config_file train.yaml
    accelerate-memopt launch --config_file train.yaml --memopt_budget 8GiB train.py --epochs 3

`launch` takes every flag of `accelerate launch`, and `--memopt_budget` and so on. Options are also read from the section
`memopt_config` of the configuration file; flags override them. Without any option it is the same as `accelerate launch`.

Exit codes: those of `accelerate`; 2 for an option that is not accepted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_memopt.errors import ConfigError, MemOptError
from lightning_memopt.integrations import accelerate_private as private
from lightning_memopt.integrations import wire

SECTION = "memopt_config"
FLAG = "memopt_"
_FIRST = ("budget", "offload", "compress", "optimizer_in_backward")
"""Options that `config` asks for before it asks whether to ask for the others."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. `arguments`: by default those of the process."""
    try:
        import accelerate.commands.utils as commands
    except ImportError:
        sys.exit("accelerate-memopt needs Accelerate: pip install 'lightning-memopt[accelerate]'")
    usage = "accelerate-memopt <command> [<args>]"
    parser = commands.CustomArgumentParser("accelerate-memopt", usage=usage, allow_abbrev=False)
    subparsers = parser.add_subparsers(help="commands")
    launch = private.named("accelerate.commands.launch:launch_command_parser")(subparsers=subparsers)
    wire.add_flags(launch.add_argument_group("MemOpt Arguments", "A memory budget for the training."), FLAG)
    launch.set_defaults(run=_launch)
    config = subparsers.add_parser("config", description="Ask the questions of `accelerate config`, and those of memopt.")
    config.add_argument("--config_file", default=None, help=f"Where to write the answers. Default: {default_file()}.")
    config.set_defaults(run=_config)
    given = parser.parse_args(arguments)
    if not hasattr(given, "run"):
        parser.print_help()
        sys.exit(1)
    try:
        given.run(given)
    except MemOptError as error:
        print(f"accelerate-memopt: {error}", file=sys.stderr)
        sys.exit(2)


def default_file() -> str:
    """The file that `config` writes and `launch` reads by default. Stock `accelerate launch` refuses a file with the section of
    memopt, and so has another one.
    """
    return os.path.join(private.named("accelerate.commands.config.config_args:cache_dir"), "memopt_config.yaml")


def read_file(path: str) -> dict[str, Any]:
    """The content of a configuration file of Accelerate. Raises ConfigError if it is not a table."""
    import yaml

    with open(path, encoding="utf-8") as file:
        content = json.load(file) if path.endswith(".json") else yaml.safe_load(file)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} has no keys. Give a configuration file as `accelerate-memopt config` writes it.")
    return content


def write_file(path: str, content: dict[str, Any]) -> None:
    """Write a configuration file of Accelerate."""
    import yaml

    with open(path, "w", encoding="utf-8") as file:
        if path.endswith(".json"):
            json.dump(content, file, indent=2, sort_keys=True)
        else:
            yaml.safe_dump(content, file)


def section_of(path: str, content: dict[str, Any]) -> dict[str, str] | None:
    """The options in the section of a configuration file, which is taken out of `content`; None without such a section.

    Raises ConfigError for a section that is not a table, and for a wrong name in it.
    """
    if SECTION not in content:
        return None
    section = content.pop(SECTION)
    if section is not None and not isinstance(section, dict):
        raise ConfigError(f"{SECTION} in {path} is {section!r}; write options below it, such as `budget: 8GiB`.")
    wire.check_names(map(str, section or {}), f"{SECTION} in {path}")
    return {name: str(value) for name, value in (section or {}).items() if value is not None}


def _launch(given: argparse.Namespace) -> None:
    flags = wire.given_flags(given, FLAG)
    texts = wire.in_environment(os.environ)
    default = private.named("accelerate.commands.config.config_args:default_config_file")
    path, content = given.config_file, {}
    if path is None and not given.cpu:
        path = next(filter(os.path.isfile, (default_file(), default)), None)
    with tempfile.TemporaryDirectory() as folder:
        if path is not None and os.path.isfile(path):
            content = read_file(path)
            section = section_of(path, content)
            if section is not None:
                texts = (texts or {}) | section
                given.config_file = os.path.join(folder, Path(path).name)  # Accelerate refuses a file with our section
                write_file(given.config_file, content)
        if flags:
            texts = (texts or {}) | flags
        if texts is not None:
            wire.options_of(texts)  # raises for bad values
            _refuse(given, content)
            os.environ |= wire.for_environment(texts)
            given.training_script_args = [
                *(["-m"] if given.module else []),
                given.training_script,
                *given.training_script_args,
            ]
            given.training_script, given.module = "lightning_memopt.launch", True
        private.named("accelerate.commands.launch:launch_command")(given)


def _refuse(given: argparse.Namespace, content: dict[str, Any]) -> None:
    """Raise ConfigError for launchers that do not run the script by Python on this machine."""
    kind = content.get("compute_environment", "LOCAL_MACHINE")
    for refused, why in (
        (given.no_python, "--no_python: the script would not be run by Python"),
        (kind != "LOCAL_MACHINE", f"compute_environment: {kind}: the script would run on another machine"),
        (given.tpu or content.get("distributed_type") in ("XLA", "TPU"), "TPUs: the ops of a step of XLA cannot be observed"),
    ):
        if refused:
            raise ConfigError(f"memopt cannot launch with {why}. Use `accelerate launch` without a budget.")


def _config(given: argparse.Namespace) -> None:
    path = given.config_file or default_file()
    config = private.named("accelerate.commands.config.config:get_user_input")()
    texts = ask(input)
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    (config.to_json_file if path.endswith(".json") else config.to_yaml_file)(path)
    if texts is not None:
        write_file(path, read_file(path) | {SECTION: wire.options_of(texts)})
    print(f"accelerate-memopt: the configuration is in {path}")


def ask(answer: Callable[[str], str]) -> dict[str, str] | None:
    """Ask for options; None if no budget is wanted. `answer`: asks one question, as `input` does."""
    if not _yes(answer, "Do you want to train within a memory budget (memopt)? [yes/NO]: "):
        return None
    texts: dict[str, str] = {}
    others = False
    for name in sorted(wire.DEFAULTS, key=lambda name: name not in _FIRST):
        if name not in _FIRST and not others:
            others = _yes(answer, "Do you want to set other options of memopt? [yes/NO]: ")
            if not others:
                break
        _ask_option(answer, name, texts)
    return texts


def _ask_option(answer: Callable[[str], str], name: str, texts: dict[str, str]) -> None:
    print(f"{name}: {wire.meanings()[name]}")
    while text := answer(f"{name} [{wire.DEFAULTS[name]}]: ").strip():
        try:
            wire.options_of(texts | {name: text})
        except MemOptError as error:
            print(error)
        else:
            texts[name] = text
            return


def _yes(answer: Callable[[str], str], question: str) -> bool:
    while True:
        try:
            return wire.truth("the answer", answer(question).strip() or "no")
        except ConfigError as error:
            print(error)


if __name__ == "__main__":
    main()
