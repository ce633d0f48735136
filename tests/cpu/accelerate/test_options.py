"""Options as flags, as a section of a YAML file and in the environment: what is accepted, what beats what, what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("accelerate")

from lightning_memopt import MemOptConfig
from lightning_memopt.errors import ConfigError, MemOptError
from lightning_memopt.integrations import accelerate_cli as cli
from lightning_memopt.integrations import accelerate_private as private
from lightning_memopt.integrations import wire
from lightning_memopt.runtime.codecs import NAMES
from tests.cpu.lib.launched import ROOT

PLAIN = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "num_processes": 1, "use_cpu": True}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Calls `accelerate-memopt launch`, and gives what Accelerate's launcher gets of it, with the environment."""
    for name in [n for n in os.environ if n.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    before = dict(os.environ)
    found: list[Any] = []

    def launch_command(given: Any) -> None:
        config = yaml.safe_load(Path(given.config_file).read_text()) if given.config_file else None
        found.append((given, config, {k: v for k, v in os.environ.items() if k.startswith("ACCELERATE_") and "MEMOPT" in k}))

    plain = private.named

    def named(name: str) -> Any:
        if name.endswith(":cache_dir"):
            return str(tmp_path / "cache")
        if name.endswith(":default_config_file"):
            return str(tmp_path / "default.yaml")
        return launch_command if name.endswith(":launch_command") else plain(name)

    monkeypatch.setattr(private, "named", named)

    def call(*arguments: str) -> Any:
        cli.main(["launch", *arguments])
        os.environ.clear()
        os.environ.update(before)
        return found.pop()

    yield call
    os.environ.clear()
    os.environ.update(before)


def file(folder: Path, section: Any = None) -> str:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(PLAIN if section is None else PLAIN | {"memopt_config": section}))
    return str(path)


def test_there_is_a_flag_for_every_option(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["accelerate-memopt", "launch", "--help"])  # Accelerate's help looks there
    with pytest.raises(SystemExit) as ended:
        cli.main(["launch", "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and "--num_processes" in said
    assert all(f"--memopt_{field.name}" in said for field in fields(MemOptConfig)) and list(wire.meanings()) == list(
        wire.DEFAULTS
    )


def test_nothing_asked_for_is_the_stock_launcher(launched: Any, tmp_path: Path) -> None:
    for path in ([], ["--config_file", file(tmp_path)]):
        given, _, environment = launched("--cpu", *path, "train.py", "--lr", "3")
        assert (given.training_script, given.training_script_args, given.module) == ("train.py", ["--lr", "3"], None)
        assert environment == {}


def test_flags_beat_the_file_and_the_file_beats_the_environment(
    launched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file(tmp_path, {"budget": "4GiB", "offload": "disk", "verify": False, "plan": None})
    given, config, environment = launched("--config_file", path, "--memopt-budget", "2GiB", "-m", "package.train", "--lr", "3")
    assert given.training_script == "lightning_memopt.launch" and given.module
    assert given.training_script_args == ["-m", "package.train", "--lr", "3"]
    assert config == PLAIN
    options = {"BUDGET": "2GiB", "OFFLOAD": "disk", "VERIFY": "False"}
    assert environment == {"ACCELERATE_USE_MEMOPT": "1"} | {f"ACCELERATE_MEMOPT_{k}": v for k, v in options.items()}
    assert wire.options_of(wire.in_environment(environment) or {}) == {"budget": "2GiB", "offload": "disk", "verify": False}
    monkeypatch.setenv("ACCELERATE_USE_MEMOPT", "true")
    monkeypatch.setenv("ACCELERATE_MEMOPT_BUDGET", "1GiB")
    monkeypatch.setenv("ACCELERATE_MEMOPT_HEADROOM", "5")
    *_, environment = launched("--config_file", path, "train.py")
    assert environment["ACCELERATE_MEMOPT_BUDGET"] == "4GiB" and environment["ACCELERATE_MEMOPT_HEADROOM"] == "5"


@pytest.mark.parametrize("section", [{}, None])
def test_a_section_without_options_means_the_defaults(launched: Any, tmp_path: Path, section: Any) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(PLAIN | {"memopt_config": section}))
    given, _, environment = launched("--config_file", str(path), "train.py")
    assert given.training_script == "lightning_memopt.launch" and environment == {"ACCELERATE_USE_MEMOPT": "1"}


@pytest.mark.parametrize(
    ("flags", "section", "said"),
    [
        (["--memopt_budget", "4G"], None, "G is ambiguous"),
        (["--memopt_offload", "disc"], None, "offload is 'disc'"),
        (["--memopt_profile_steps", "two"], None, "profile_steps is 'two'; give a whole number"),
        (["--memopt_recompute", "maybe"], None, "recompute is 'maybe'; use 'true' or 'false'"),
        ([], {"budgt": "4GiB"}, "Did you mean 'budget'?"),
        ([], {"offloading": "disk"}, "Did you mean 'offload'?"),
        ([], {"budget": ["4GiB"]}, "budget"),
        ([], "4GiB", "write options below it"),
        (["--memopt_budget", "4GiB", "--no_python"], None, "--no_python"),
        (["--memopt_budget", "4GiB", "--tpu"], None, "TPUs"),
    ],
)
def test_refused_before_anything_runs(
    launched: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], section: Any, said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        launched("--config_file", file(tmp_path, section), *flags, "train.py")
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_config_asks_and_launch_reads(launched: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The answers go into a section of the default file; a bad answer is asked for again; Enter keeps the default."""
    from accelerate.commands.config.config_args import ClusterConfig

    asked = ClusterConfig("LOCAL_MACHINE", "NO", "no", True, False, num_processes=1)
    named = private.named
    monkeypatch.setattr(private, "named", lambda name: (lambda: asked) if name.endswith("get_user_input") else named(name))
    answers = iter(["perhaps", "yes", "9G", "9GiB", "disk", "", "", "yes", "", "", "", "", "", "2", *[""] * 20])
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    cli.main(["config"])
    written = yaml.safe_load(Path(cli.default_file()).read_text())
    assert written["memopt_config"] == {"budget": "9GiB", "offload": "disk", "profile_steps": 2}
    _, config, environment = launched("train.py")
    assert environment["ACCELERATE_MEMOPT_PROFILE_STEPS"] == "2" and "memopt_config" not in config
    answers = iter(["no"])
    path = str(tmp_path / "plain.json")
    cli.main(["config", "--config_file", path])
    assert "memopt_config" not in json.loads(Path(path).read_text())


def test_names_and_values_in_the_environment_are_checked() -> None:
    assert wire.in_environment({}) is None and wire.in_environment({"ACCELERATE_MEMOPT_BUDGT": "1"}) is None
    with pytest.raises(ConfigError, match="Did you mean 'budget'"):
        wire.in_environment({"ACCELERATE_USE_MEMOPT": "1", "ACCELERATE_MEMOPT_BUDGT": "1"})
    with pytest.raises(MemOptError, match="ACCELERATE_USE_MEMOPT is 'perhaps'"):
        wire.in_environment({"ACCELERATE_USE_MEMOPT": "perhaps"})


def test_lossy_codecs_are_those_that_there_are() -> None:
    """Options are checked without importing torch, and so without the codecs themselves."""
    from lightning_memopt.plan.forms import LOSSY

    assert tuple(name for name in NAMES if name.startswith(("block", "int"))) == LOSSY


def test_without_accelerate_a_line_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['accelerate'] = None\nfrom lightning_memopt.integrations.accelerate_cli import main; main([])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 1 and done.stderr == (
        "accelerate-memopt needs Accelerate: pip install 'lightning-memopt[accelerate]'\n"
    )
