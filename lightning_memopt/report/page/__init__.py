"""The page of a report: one HTML file, drawn in the browser by Observable Plot, which the file contains.

    parts      sections, pictures, tables, trees as data
    headline   the most important figures; batch size, throughput, energy
    memory     memory over the step, by purpose
    modules    the plan on the tree of modules
    budget     budget against time
    timeline   compute, copies and waits over time
    addresses  the arena of a planned pool
    steps      predicted against measured, step by step
    html       sections as one file: the only module that makes HTML, and escapes text
    assets     page.css, page.js; d3 and Observable Plot with their licences

Input: a `RunRecord`. Source of the design: ADR 18.
"""

from __future__ import annotations

import os
from pathlib import Path

from lightning_memopt.files import replace_file
from lightning_memopt.report.page import addresses, budget, headline, memory, modules, steps, timeline
from lightning_memopt.report.page.html import document
from lightning_memopt.report.page.parts import Section
from lightning_memopt.report.record import RunRecord

_SECTIONS = (
    headline.section,
    memory.section,
    modules.section,
    budget.section,
    timeline.section,
    addresses.section,
    steps.section,
    headline.rates,
)


def render(record: RunRecord) -> str:
    """The page as text."""
    what = "Plan" if record.phase == "file" else "Run"
    title = f"MemOpt: {record.model}" if record.model else f"MemOpt: {what.lower()}"
    foot = f"{what} report by lightning_memopt. 1 MiB is 1024 KiB, and 1 KiB is 1024 bytes."
    sections = [section(record) for section in _SECTIONS]
    shown = [section for section in sections if not section.absent]
    reasons = tuple(f"{section.title}: {' '.join(section.lead)}" for section in sections if section.absent)
    if reasons:
        shown.append(Section("absent", "Not in this report", reasons))
    return document(title, shown, foot)


def write_page(path: str | os.PathLike[str], record: RunRecord) -> None:
    """Write the page, whole or not at all. Raises OSError."""
    replace_file(Path(path), render(record).encode("utf-8", errors="replace"))
