"""Pages of reports, read as a reader without a browser does: tables by their ids, and the data of the pictures."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_memopt import optimize
from lightning_memopt.integrations.plain import Run
from tests.cpu.lib.loops import budget_at


class Page(HTMLParser):
    """A parsed page.

    tables: id -> rows of (text, exact number or None); the first row is the head.
    data: of the pictures, in their order.
    text: all text that is shown.
    """

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.tables: dict[str, list[list[tuple[str, float | None]]]] = {}
        self.text = ""
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._table: list[list[tuple[str, float | None]]] | None = None
        self._cell: list[Any] | None = None
        self._inside = ""
        self._json = ""
        self.feed(source)
        self.data: list[dict[str, Any]] = json.loads(self._json)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.elements.append((tag, given))
        if tag == "table":
            assert given["id"] not in self.tables, "an id is there twice"
            self._table = self.tables[str(given["id"])] = []
        elif tag == "tr" and self._table is not None:
            self._table.append([])
        elif tag in ("td", "th"):
            value = given.get("data-value")
            self._cell = ["", None if value is None else float(value)]
        elif tag in ("script", "style"):
            self._inside = str(given.get("id", tag))

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self._table is not None and self._cell is not None:
            self._table[-1].append((self._cell[0], self._cell[1]))
            self._cell = None
        elif tag == "table":
            self._table = None
        elif tag in ("script", "style"):
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "data":
            self._json += data
        elif not self._inside:
            self.text += data
            if self._cell is not None:
                self._cell[0] += data

    def figures(self) -> dict[tuple[str, str], float | None]:
        """(figure, how it is known) -> exact number, of the table of all figures."""
        return {(name[0], how[0]): value[1] for name, value, how in self.tables["figures"][1:]}

    def rows(self, table: str) -> list[list[tuple[str, float | None]]]:
        return self.tables[table][1:]

    def pictures(self, kind: str) -> list[dict[str, Any]]:
        return [entry["data"] for entry in self.data if entry["kind"] == kind]


def page_at(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


class Blocks(nn.Module):
    """Six blocks with GELUs; `name`: of the module that holds them."""

    def __init__(self, name: str = "blocks", width: int = 64) -> None:
        super().__init__()
        self.add_module(
            name,
            nn.Sequential(
                *(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(6))
            ),
        )
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(self.name)(x)


def trained(path: Path | None, steps: int = 8, name: str = "blocks", share: float | None = None, **options: Any) -> Run:
    """A run of `steps` steps that writes its report to `path`; its budget is `"min"` unless the options say otherwise.

    share: the budget holds this share of what the unmodified step has on top of what is resident (`budget_at`).
    """
    if share is not None:
        options["budget"] = budget_at(trained(None, 4, name), share)
    torch.manual_seed(0)
    model = Blocks(name)
    optimizer = torch.optim.Adam(model.parameters())
    given = {"budget": "min", "verbose": False, "profile_steps": 2, "solver_seconds": 1.0} | options
    with optimize(model, optimizer, report=path, **given) as run:
        for _ in range(steps):
            model(torch.randn(128, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return run


def scripts(source: str) -> list[str]:
    """The content of each script element, as a browser ends it: at the first `</script`."""
    return re.findall(r"<script[^>]*>(.*?)</script", source, re.S | re.I)
