"""Backends of torch.compile other than Inductor that use AOT autograd: `aot_eager`, and users' own by `aot_autograd(...)`.

They have no setting that asks how to split a region. So the function by which all of them reach AOT autograd is replaced while
a watched model runs: it passes on another partitioner, and compilers whose code tells when it runs.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from typing import Any

from torch import fx

from lightning_memopt.record import Seams, telling
from lightning_memopt.torch_private import AOT_BACKENDS, AOT_ENTRY, INDUCTOR, split_in_place

Split = tuple[fx.GraphModule, fx.GraphModule]
Splitter = Callable[..., Split]
Asking = Callable[[Splitter], Splitter]
"""`asking(partitioner)` is the partitioner to use instead of the backend's."""

_COMPILERS = ("fw_compiler", "bw_compiler", "inference_compiler")


def backends() -> Any:
    """The module by which backends reach AOT autograd; None where no such backend was used in this process."""
    return sys.modules.get(AOT_BACKENDS)


@contextlib.contextmanager
def asking_backends(asking: Asking) -> Iterator[None]:
    """Within, `asking` is asked for the partitioner of what this thread compiles."""
    with _seams().listening((threading.get_ident(), asking)) if backends() is not None else contextlib.nullcontext():
        yield


@cache
def _seams() -> Seams[tuple[int, Asking]]:
    """Listeners: (thread, asking). Sessions of several threads may leave in another order than they came in."""
    return Seams((backends(), AOT_ENTRY, lambda original: partial(_entry, original)))


def _entry(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    here = threading.get_ident()
    for asking in (asking for thread, asking in tuple(_seams().listeners) if thread == here):
        partitioner = options.get("partition_fn", split_in_place)
        if getattr(partitioner, "__module__", None) != INDUCTOR:  # Inductor asks by its setting, and tells of its code
            options["partition_fn"] = asking(partitioner)
            options.update({name: _telling(options[name]) for name in _COMPILERS if options.get(name) is not None})
    return original(*args, **options)


def _telling(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler whose code tells when it runs."""

    @wraps(compiler, updated=())
    def compile(module: fx.GraphModule, inputs: Any) -> Any:
        return telling(compiler(module, inputs))

    return compile
