"""Tests that cannot run while coverage traces each line."""

from __future__ import annotations

import sys

import pytest

untraced = pytest.mark.skipif(sys.gettrace() is not None, reason="coverage changes times, adds frames, and has a lock")
