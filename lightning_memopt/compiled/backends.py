"""The function through which all backends of torch.compile call AOT autograd: Inductor, `aot_eager`, and users' own by
`aot_autograd(...)`.

It is wrapped during a run. While something is compiled in a forward of a watched model, settings of Inductor are others
(partitioner.py, kernels.py), and again while its backward is compiled, which torch does when that first runs. Other backends
have no setting that says how to split a region. They are given another partitioner instead, and compilers whose code reports
when it runs.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import fx

from lightning_memopt.record import Listening, Seams, listening_to, telling
from lightning_memopt.torch_private import AOT_BACKENDS, AOT_ENTRY, INDUCTOR, aot_backends, split_in_place

Split = tuple[fx.GraphModule, fx.GraphModule]
Splitter = Callable[..., Split]
Asked = tuple[int, Callable[[Splitter], Splitter]]
"""(thread, function): what the thread compiles is split by `function(partitioner)` instead of `partitioner`."""


class Compiling(NamedTuple):
    """What is different while a thread compiles.

    asked: how its regions are split.
    meanwhile: `meanwhile(by_inductor)` gives what listens while it does. `by_inductor`: the backend is Inductor.
    in_backward: gives what listens while Inductor compiles a backward that is not `PLANNED`. That may be later, and in another
        thread.
    """

    asked: Asked
    meanwhile: Callable[[bool], list[Listening]]
    in_backward: Callable[[], list[Listening]]


PLANNED = "lightning_memopt planned"
"""In the `meta` of a backward that has a plan's order, which is to stay."""
_OF_BACKWARD = "bw_compiler"
_COMPILERS = ("fw_compiler", _OF_BACKWARD, "inference_compiler")


def backends() -> Any:
    """The module through which backends call AOT autograd; None if this process has not used such a backend."""
    return sys.modules.get(AOT_BACKENDS)


def asked_here(asked: Iterable[Asked], default: Splitter) -> Splitter:
    """The partitioner to use instead of `default` for what this thread compiles."""
    here = threading.get_ident()
    for thread, asking in asked:
        if thread == here:
            default = asking(default)
    return default


def _entry(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    here = threading.get_ident()
    compiling = [one for one in tuple(entry_seams.listeners) if one.asked[0] == here]
    if not compiling:
        return original(*args, **options)
    partitioner = options.get("partition_fn", split_in_place)
    by_inductor = getattr(partitioner, "__module__", None) == INDUCTOR
    if not by_inductor:  # Inductor uses its own setting, and reports its code
        options["partition_fn"] = asked_here((one.asked for one in compiling), partitioner)
        options.update({name: _telling(options[name]) for name in _COMPILERS if options.get(name) is not None})
    elif options.get(_OF_BACKWARD) is not None:
        options[_OF_BACKWARD] = _heard(options[_OF_BACKWARD], [one.in_backward for one in compiling])
    with _listening_once(listening for one in compiling for listening in one.meanwhile(by_inductor)):
        return original(*args, **options)


entry_seams: Seams[Compiling] = Seams(
    lambda: [(aot_backends(), AOT_ENTRY, lambda original: partial(_entry, original))], stays=True
)
"""The wrapped function. Sessions in several threads may end in another order than they began."""


def _listening_once(all: Iterable[Listening]) -> contextlib.AbstractContextManager[None]:
    """Within, each of these listens that does not already: a backend may compile one graph while it compiles another."""
    return listening_to([(seams, listener) for seams, listener in all if listener not in seams.listeners])


def _heard(compiler: Callable[..., Any], in_backward: list[Callable[[], list[Listening]]]) -> Callable[..., Any]:
    """A compiler of backwards while which these listen. torch calls it when the backward first runs, where sizes are known."""

    def compile(module: fx.GraphModule, inputs: Any) -> Any:
        heard = [] if PLANNED in module.meta else [listening for listens in in_backward for listening in listens()]
        with _listening_once(heard):
            return compiler(module, inputs)

    return torch.compiler.disable(compile)


def _telling(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler whose code reports when it runs."""

    @wraps(compiler, updated=())
    def compile(module: fx.GraphModule, inputs: Any) -> Any:
        return telling(compiler(module, inputs))

    return compile
