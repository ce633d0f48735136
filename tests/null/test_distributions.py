"""What is installed: the check of a wheel sees what is missing and what is too much, and the metadata agree."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

import pytest

import lightning_memopt

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests import distributions  # noqa: E402

PACKAGED = "lightning_memopt/examples"
"""Where a wheel has the folder of examples."""
METADATA = "Metadata-Version: 2.4\nName: x\nSummary: s\nLicense-Expression: Apache-2.0\nAuthor: a\nRequires-Dist: torch>=2.11\n"
COMMANDS = "[console_scripts]\nmemopt = a:b\naccelerate-memopt = a:c\n"


def wheel(folder: Path, names: set[str], metadata: str = METADATA) -> Path:
    path = folder / "x-0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
        archive.writestr("x-0.dist-info/METADATA", metadata)
        archive.writestr("x-0.dist-info/entry_points.txt", COMMANDS)
    return path


def test_a_complete_wheel_has_no_fault(tmp_path: Path) -> None:
    files = distributions.expected()
    assert {"lightning_memopt/py.typed", "lightning_memopt/native/pool.cpp", PACKAGED + "/demo.py"} <= files
    assert distributions.faults_of_wheel(wheel(tmp_path, files)) == []


@pytest.mark.parametrize(
    "kind", ["py.typed", "native/engine/all.cpp", "hooks.h", "pcie3-11gb.json", "assets/page.js", "examples/demo.py"]
)
def test_a_file_that_is_left_out_is_named(tmp_path: Path, kind: str) -> None:
    files = {name for name in distributions.expected() if not name.endswith(kind)}
    (fault,) = distributions.faults_of_wheel(wheel(tmp_path, files))
    assert kind in fault and "missing" in fault


def test_what_does_not_belong_is_named(tmp_path: Path) -> None:
    files = distributions.expected() | {"tests/null/test_cli.py", "benchmarks/__init__.py"}
    faults = distributions.faults_of_wheel(wheel(tmp_path, files))
    assert len(faults) == 2 and all("does not belong" in fault for fault in faults)
    needs = wheel(tmp_path, distributions.expected(), METADATA + "Requires-Dist: lightning>=2.5\n")
    assert distributions.faults_of_wheel(needs) == ["a base install would need Lightning"]


def test_version_and_citation_agree() -> None:
    project, citation = (ROOT / "pyproject.toml").read_text(), (ROOT / "CITATION.cff").read_text()
    versions = re.findall(r'^version = "(.*)"$', project, re.M), re.findall(r"^version: (.*)$", citation, re.M)
    assert versions == ([lightning_memopt.__version__], [lightning_memopt.__version__])
    references = citation.partition("references:")[2]
    assert references.count("\n  - type: ") == 5 and references.count("    notes: ") == 5
    for path in re.findall(r"(lightning_memopt/[\w/.]+)", references):
        assert (ROOT / path.rstrip(".")).exists(), path
