"""The page in a real browser without a screen: nothing on its console, nothing fetched, every picture drawn."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lightning_memopt.cli import main
from tests.cpu.lib.pages import Page, page_at, trained

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-extensions", "--virtual-time-budget=4000"),
]


def opened(address: str, folder: Path, *flags: str) -> tuple[str, str]:
    """(what the browser made of the page, what its console said)."""
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", *flags, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


class Server(BaseHTTPRequestHandler):
    """Serves one page, and writes down what is asked for."""

    def __init__(self, content: bytes, asked: list[str], *args: object) -> None:
        self.content, self.asked = content, asked
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served() -> Iterator[tuple[ThreadingHTTPServer, list[str]]]:
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, b"", asked))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server, asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_run_in_a_browser(tmp_path: Path, served: tuple[ThreadingHTTPServer, list[str]]) -> None:
    """All five kinds of pictures, from a run with a pool; the numbers in the browser are those of the run."""
    run = trained(tmp_path / "run.html", share=0.5, pool="planned")
    plan, status = run.plan, run.status()
    assert plan is not None
    server, asked = served
    server.RequestHandlerClass = partial(Server, (tmp_path / "run.html").read_bytes(), asked)  # type: ignore[assignment]
    dom, console = opened(f"http://127.0.0.1:{server.server_port}/run.html", tmp_path, "--dump-dom")
    assert console == ""
    assert asked == ["/run.html"], "the page is all that was asked for"
    page = Page(dom)
    assert page.figures()["peak with the plan", "measured"] == status.measured_peak_nbytes
    assert page.figures()["peak with the plan", "predicted"] == plan.predicted_peak_nbytes
    kinds = [entry["kind"] for entry in page.data]
    assert kinds == ["stack", "stack", "frontier", "lanes", "rects", "steps"]
    drawn = dom.count('class="picture drawn"')
    assert drawn == len(kinds)
    assert sum(tag == "svg" for tag, _ in page.elements) >= drawn
    assert f"peak {page.rows('peak-after')[-1][3][0]}" in dom, "the peak is marked"
    assert dom.count("<rect") >= len(page.pictures("rects")[0]["rects"])


def test_a_plan_and_a_run_without_one_in_a_browser(tmp_path: Path) -> None:
    run = trained(tmp_path / "run.html", name="</script><b>&")
    run.save_plan(str(tmp_path / "plan.json"))
    assert main(["report", str(tmp_path / "plan.json"), "-o", str(tmp_path / "plan.html"), "--solver-seconds", "1"]) == 0
    trained(tmp_path / "none.html", steps=1, profile_steps=3)
    for name in ("run.html", "plan.html", "none.html"):
        dom, console = opened((tmp_path / name).as_uri(), tmp_path, "--dump-dom", "--window-size=400,900")
        assert console == "", name
        assert dom.count('class="picture drawn"') == len(page_at(tmp_path / name).data), name


def test_an_error_would_be_seen(tmp_path: Path) -> None:
    """The console is heard, and what the page's policy forbids is not fetched."""
    trained(tmp_path / "run.html", steps=3)
    text = (tmp_path / "run.html").read_text()
    broken = text.replace("</body>", "<img src='http://127.0.0.1:9/x.png'><script>undefined.x</script></body>")
    (tmp_path / "broken.html").write_text(broken)
    _, console = opened((tmp_path / "broken.html").as_uri(), tmp_path, "--dump-dom")
    assert "TypeError" in console and "Content Security Policy" in console
