"""Backends of torch.compile other than Inductor that use AOT autograd: `aot_eager`, and users' own by `aot_autograd(...)`.

They have no setting that says how to split a region. So while a watched model runs, the function through which all of them call
AOT autograd is replaced. The replacement passes on another partitioner, and compilers whose code reports when it runs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from torch import fx

from lightning_memopt.record import Seams, telling
from lightning_memopt.torch_private import AOT_BACKENDS, AOT_ENTRY, INDUCTOR, split_in_place

Split = tuple[fx.GraphModule, fx.GraphModule]
Splitter = Callable[..., Split]
Asked = tuple[int, Callable[[Splitter], Splitter]]
"""(thread, function): what the thread compiles is split by `function(partitioner)` instead of `partitioner`."""

_COMPILERS = ("fw_compiler", "bw_compiler", "inference_compiler")


def backends() -> Any:
    """The module through which backends call AOT autograd; None if this process has not used such a backend."""
    return sys.modules.get(AOT_BACKENDS)


def asked_here(seams: Seams[Asked], default: Splitter) -> Splitter:
    """The partitioner to use instead of `default` for what this thread compiles."""
    here = threading.get_ident()
    for thread, asking in tuple(seams.listeners):
        if thread == here:
            default = asking(default)
    return default


def _entry(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    default = options.get("partition_fn", split_in_place)
    partitioner = default
    if getattr(default, "__module__", None) != INDUCTOR:  # Inductor uses its own setting, and reports its code
        partitioner = asked_here(backend_seams, default)
    if partitioner is not default:
        options["partition_fn"] = partitioner
        options.update({name: _telling(options[name]) for name in _COMPILERS if options.get(name) is not None})
    return original(*args, **options)


backend_seams: Seams[Asked] = Seams(lambda: [(backends(), AOT_ENTRY, lambda original: partial(_entry, original))])
"""The replaced function, once such a backend is in use. Sessions in several threads may end in another order than they
began.
"""


def _telling(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler whose code reports when it runs."""

    @wraps(compiler, updated=())
    def compile(module: fx.GraphModule, inputs: Any) -> Any:
        return telling(compiler(module, inputs))

    return compile
