"""What a wheel and a source distribution have: `python tests/distributions.py DIST` checks those in a folder.

The wheel has the package with its C++ sources, profiles and examples, and nothing else; each file of the package is in it. The
source distribution has what the tests need. Needs the standard library only.
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = (".py", ".cpp", ".h", ".json", ".js", ".css", ".LICENSE", "py.typed")
"""Files of the package that are installed end so."""


def expected() -> set[str]:
    """The files of the package, as a wheel names them."""
    package = {p.relative_to(ROOT) for p in (ROOT / "lightning_memopt").rglob("*") if p.is_file() and p.name.endswith(KINDS)}
    examples = {Path("lightning_memopt") / p.relative_to(ROOT) for p in (ROOT / "examples").glob("*.py")}
    return {path.as_posix() for path in package | examples if "__pycache__" not in path.parts}


def faults_of_wheel(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
        own = {name for name in names if ".dist-info/" not in name}
        metadata = Parser().parsestr(wheel.read(next(name for name in names if name.endswith("/METADATA"))).decode())
        entry_points = wheel.read(next(name for name in names if name.endswith("/entry_points.txt"))).decode()
    faults = [f"{name} is missing in the wheel" for name in sorted(expected() - own)]
    faults += [f"{name} does not belong into the wheel" for name in sorted(own - expected())]
    faults += [f"the metadata has no {field}" for field in ("Summary", "License-Expression", "Author") if not metadata[field]]
    if "-none-any" not in path.name:
        faults.append(f"{path.name} is bound to a platform: nothing may be compiled before it is used")
    if any(
        "lightning" in requirement and "extra ==" not in requirement for requirement in metadata.get_all("Requires-Dist", [])
    ):
        faults.append("a base install would need Lightning")
    faults += [f"there is no command {name}" for name in ("memopt", "accelerate-memopt") if f"{name} = " not in entry_points]
    return faults


def faults_of_source(path: Path) -> list[str]:
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"CITATION.cff", "CHANGELOG.md", "LICENSE", "constraints.txt", "tests/null/test_house.py", "docs/index.md"}
    needed |= {name.replace("lightning_memopt/examples", "examples") for name in expected()}
    return [f"{name} is missing in the source distribution" for name in sorted(needed - names)] + [
        f"{name} does not belong into the source distribution" for name in sorted(names) if "__pycache__" in name
    ]


def main(folder: str) -> int:
    wheels, sources = sorted(Path(folder).glob("*.whl")), sorted(Path(folder).glob("*.tar.gz"))
    faults = [f for wheel in wheels for f in faults_of_wheel(wheel)] + [
        f for source in sources for f in faults_of_source(source)
    ]
    if not wheels or not sources:
        faults.append(f"{folder} has no wheel, or no source distribution")
    print("\n".join(faults) or f"{wheels[0].name} and {sources[0].name} are complete")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
