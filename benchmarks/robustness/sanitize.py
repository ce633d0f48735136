"""The tests of the native code under the address and undefined-behaviour sanitizers.

    python -m benchmarks sanitize [TESTS ...]        # by default tests/cpu/native

The native code is built anew by a compiler that adds the sanitizers, in a cache of its own. What they find ends the process
that runs the tests. Python's own leaks are not looked at. The exit code is pytest's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.lib.paths import ROOT
from lightning_memopt.cxx import compiler_path

_FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-sanitize=vptr -fno-omit-frame-pointer -g"
"""Without `vptr`: torch's classes are built without the type information that it needs."""
_LIBRARIES = "libasan.so", "libubsan.so", "libstdc++.so"


def main() -> int:
    compiler = compiler_path()
    located = (subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip() for name in _LIBRARIES)
    with tempfile.TemporaryDirectory() as folder:
        wrapper = Path(folder, "c++")
        wrapper.write_text(f'#!/bin/sh\nexec {compiler} {_FLAGS} "$@"\n')
        wrapper.chmod(0o700)
        environment = os.environ | {
            "CXX": str(wrapper),
            "XDG_CACHE_HOME": folder,
            "LD_PRELOAD": " ".join(located),
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }
        tests = sys.argv[1:] or ["tests/cpu/native"]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
