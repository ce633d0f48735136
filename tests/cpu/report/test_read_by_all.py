"""The page for those who do not see it, do not point at it, or read it on paper."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lightning_memopt.report.page.html import asset
from tests.cpu.lib.pages import Page, page_at, trained
from tests.cpu.report.test_browser import CHROMIUM, opened


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "run.html"
    trained(path, share=0.5, pool="planned")
    return path


@pytest.fixture(scope="module")
def page(path: Path) -> Page:
    return page_at(path)


def sections(page: Page) -> dict[str, list[tuple[str, dict[str, str | None]]]]:
    """Id of a section -> its elements."""
    result: dict[str, list[tuple[str, dict[str, str | None]]]] = {}
    for tag, given in page.elements:
        if tag == "section":
            result[str(given["id"])] = []
        elif result:
            result[list(result)[-1]].append((tag, given))
    return result


def test_every_picture_has_a_table_and_a_sentence(page: Page) -> None:
    pictured = {
        key: elements
        for key, elements in sections(page).items()
        if any("data-picture" in given for _, given in elements) or any(given.get("class") == "tree" for _, given in elements)
    }
    assert set(pictured) == {"memory", "modules", "frontier", "timeline", "arena", "steps"}
    for key, elements in pictured.items():
        assert any(tag == "table" for tag, _ in elements), key
    for _, given in page.elements:
        if "data-picture" in given:
            assert given["role"] == "img" and re.search(r"\d", str(given["aria-label"]))


def test_the_keyboard_reaches_everything_in_the_order_of_the_page(page: Page) -> None:
    """Nothing jumps ahead in the order of tabs; the first stop leads past the links; what folds is the browser's `details`."""
    stops = [(tag, given) for tag, given in page.elements if tag in ("a", "summary") or "tabindex" in given]
    assert stops[0][1].get("class") == "skip"
    assert all(given.get("tabindex", "0") == "0" for _, given in stops)
    assert not any(name.startswith("on") for _, given in page.elements for name in given), "only a pointer reaches it"
    tags = [tag for tag, _ in page.elements]
    assert tags.count("h1") == tags.count("main") == tags.count("nav") == 1
    assert tags.count("details") == tags.count("summary") and tags.count("section") == tags.count("h2")
    assert all(given["scope"] == "col" for tag, given in page.elements if tag == "th")


def luminance(colour: str) -> float:
    """WCAG 2.2, relative luminance."""
    digits = colour.lstrip("#")
    digits = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
    shares = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_text_has_contrast_in_light_in_the_dark_and_on_paper() -> None:
    css = asset("page.css")
    schemes = [dict(re.findall(r"--(\w+): (#\w+)", block)) for block in re.findall(r":root \{([^}]*)\}", css)]
    assert len(schemes) == 3 and contrast("#000", "#fff") == pytest.approx(21)
    for scheme in schemes:
        for text in ("ink", "soft", "mark", "alarm"):
            for ground in ("ground", "panel"):
                assert contrast(scheme[text], scheme[ground]) >= 4.5, (text, ground, scheme)
    named = re.findall(r"(?<![-\w])color: ([^;}]+)", css)
    assert set(named) <= {"var(--ink)", "var(--soft)", "var(--mark)"}, "text has these colours only"


@pytest.mark.skipif(CHROMIUM is None or shutil.which("pdftoppm") is None, reason="needs chromium and poppler-utils")
def test_on_paper(path: Path, tmp_path: Path) -> None:
    """White in the dark, too; nothing runs over the edge of the paper; few pages, none of them empty."""
    pdf = tmp_path / "page.pdf"
    dark = "--blink-settings=preferredColorScheme=0"
    opened(path.as_uri(), tmp_path, "--no-pdf-header-footer", dark, f"--print-to-pdf={pdf}")
    subprocess.run(["pdftoppm", "-r", "30", "-gray", str(pdf), str(tmp_path / "p")], check=True, timeout=60)
    papers = sorted(tmp_path.glob("p-*.pgm"))
    assert 1 < len(papers) <= 10
    for paper in papers:
        width, height, pixels = pgm(paper.read_bytes())
        rows = [pixels[y * width : (y + 1) * width] for y in range(height)]
        assert min(min(row[:6] + row[-6:]) for row in rows) > 250, "something is in the margin"
        written = sum(min(row) < 200 for row in rows) / height
        assert written > 0.05, f"{paper.name} is empty"
        assert sum(pixels) / len(pixels) > 150, "the paper is white"


def pgm(content: bytes) -> tuple[int, int, bytes]:
    """Width, height and grey values of a picture in the format P5."""
    head = re.match(rb"P5\s+(\d+)\s+(\d+)\s+255\s", content)
    assert head is not None
    return int(head[1]), int(head[2]), content[head.end() :]
