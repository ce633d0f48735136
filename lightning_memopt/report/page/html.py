"""Make one HTML file of sections. It needs no network and no other file.

All text is escaped here. Data for the pictures is JSON in a script element that browsers do not run, with every `<`, `>` and
`&` escaped as in JSON, so that no name of a module can end the element.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from pathlib import Path

from lightning_memopt.report.page.parts import Branch, Cell, Grid, Section

_ASSETS = Path(__file__).parent / "assets"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


@cache
def asset(name: str) -> str:
    """The text of a file of this package."""
    return (_ASSETS / name).read_text(encoding="utf-8")


def embedded(value: object) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character, code in _ESCAPES.items():
        text = text.replace(character, code)
    return text


def document(title: str, sections: Sequence[Section], foot: str) -> str:
    """The page. `foot`: its last line."""
    pictures = [picture for section in sections for picture in section.pictures]
    data = [{"kind": p.kind, "title": p.title, "data": p.data} for p in pictures]
    numbers = iter(range(len(pictures)))
    contents = "".join(f'<li><a href="#{escape(s.key)}">{escape(s.title)}</a></li>' for s in sections)
    body = "".join(_section(section, numbers) for section in sections)
    return "".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title><style>{asset('page.css')}</style></head><body>",
            f'<a class="skip" href="#headline">To the figures</a><header><h1>{escape(title)}</h1>',
            f'<nav aria-label="Sections"><ul>{contents}</ul></nav></header><main>{body}</main>',
            f"<footer><p>{escape(foot)}</p></footer>",
            f'<script type="application/json" id="data">{embedded(data)}</script>\n',
            *(f"<script>{asset(name)}</script>\n" for name in ("d3.min.js", "plot.umd.min.js", "page.js")),
            "</body></html>\n",
        )
    )


def _section(section: Section, numbers: Iterable[int]) -> str:
    key = escape(section.key)
    lead = "".join(f"<p>{escape(text)}</p>" for text in section.lead)
    lead += "".join(f'<p class="alarm">{escape(text)}</p>' for text in section.alarms)
    cards = "".join(
        f"<div><dt>{escape(card.name)}</dt>{_cell(card.cell, 'dd')}<dd>{escape(card.how)}</dd></div>" for card in section.cards
    )
    lead += f'<dl class="cards">{cards}</dl>' if cards else ""
    pictures = "".join(
        f'<figure>{_titled(p.title, section)}<div class="picture" data-picture="{n}" role="img" '
        f'aria-label="{escape(p.label)}"></div><p class="noscript">{escape(p.label)}</p></figure>'
        for p, n in zip(section.pictures, numbers, strict=False)
    )
    legend = "".join(f'<li><i class="{escape(name)}"></i>{escape(text)}</li>' for name, text in section.legend)
    tree = f'<ul class="legend">{legend}</ul>' if legend else ""
    tree += f'<div class="tree">{"".join(map(_branch, section.tree))}</div>' if section.tree else ""
    grids = "".join(map(_grid, section.grids))
    head = f'<h2 id="{key}-title">{escape(section.title)}</h2>'
    return f'<section id="{key}" aria-labelledby="{key}-title">{head}{lead}{pictures}{tree}{grids}</section>'


def _titled(title: str, section: Section) -> str:
    return "" if title == section.title else f"<figcaption>{escape(title)}</figcaption>"


def _branch(branch: Branch) -> str:
    bars = "".join(f'<i class="{escape(name)}" style="width:{100 * share:.2f}%"></i>' for name, share in branch.shares if share)
    bar = f'<span class="bar" aria-hidden="true">{bars}</span>' if bars else ""
    head = f'{bar}<span class="name">{escape(branch.title)}</span> <span class="line">{escape(branch.line)}</span>'
    inner = "".join(map(_branch, branch.branches)) + "".join(map(_grid, branch.grids))
    if not inner:
        return f'<p class="leaf">{head}</p>'
    return f"<details{' open' if branch.opened else ''}><summary>{head}</summary>{inner}</details>"


def _grid(grid: Grid) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in grid.columns)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in grid.rows)
    name = escape(grid.caption)
    table = (
        f'<div class="scroll{" whole" if grid.opened else ""}" tabindex="0" role="region" aria-label="{name}">'
        f'<table id="{escape(grid.key)}">'
        f"<caption>{name}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
    if grid.opened:
        return table
    return f'<details class="table{" printed" if grid.printed else ""}"><summary>Table: {name}</summary>{table}</details>'


def _cell(cell: Cell | str, tag: str = "td") -> str:
    text, value = (cell, None) if isinstance(cell, str) else cell
    return f"<{tag}>{escape(text)}</{tag}>" if value is None else f'<{tag} data-value="{value!r}">{escape(text)}</{tag}>'
