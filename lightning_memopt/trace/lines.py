"""The line of user code that is running, for messages.

Frames are inspected in observed steps only, where an op costs much more than the few frames up to its caller. Planned steps use
the lines of the observed step.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from types import FrameType

import torch

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NOT_USER_CODE = (os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, _PACKAGE + os.sep, "<")
"""How the file names of torch, of this package, and of code without a file begin."""


@cache
def _is_of_user(file: str) -> bool:
    return not file.startswith(_NOT_USER_CODE)


def user_line() -> str:
    """`file:line in function` of the innermost frame outside of torch and this package; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if _is_of_user(code.co_filename):
            return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""
