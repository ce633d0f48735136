"""Pages that must have what the code has: every public name is in the reference, every option in the page of choices."""

from __future__ import annotations

import re
from pathlib import Path

import lightning_memopt

DOCS = Path(__file__).parents[2] / "docs"


def test_the_reference_has_every_public_name_and_no_other() -> None:
    named = set(re.findall(r"^::: lightning_memopt\.(\w+)$", (DOCS / "api.md").read_text(), re.M))
    assert named == {*lightning_memopt.__all__, "accelerate"} - {"__version__"}


def test_the_page_of_choices_names_options_that_there_are() -> None:
    options = set(re.findall(r"^\| `(\w+)` \|", (DOCS / "options.md").read_text(), re.M))
    chosen = set(re.findall(r"`(\w+)=", (DOCS / "which_option.md").read_text())) - {"mode"}  # of the batch size
    assert chosen <= options
    assert {
        "budget",
        "offload",
        "compress",
        "optimizer_in_backward",
        "pool",
        "objective",
        "plan",
        "solver_seconds",
    } <= chosen | {"plan"}


def test_every_page_is_in_the_navigation_and_in_the_index() -> None:
    navigation, index = (DOCS.parent / "mkdocs.yml").read_text(), (DOCS / "index.md").read_text()
    for page in DOCS.glob("*.md"):
        assert page.name in navigation, page
        assert page.name == "index.md" or page.name in index, page
