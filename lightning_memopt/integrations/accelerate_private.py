"""Every name of Accelerate that is private, or that is replaced. No other file uses such a name.

Accelerate may rename or remove these names in any release: `missing()` lists the missing ones, and
tests/cpu/accelerate/test_private_names.py says which. All of them are in Accelerate 1.0.1 and 1.15.0.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from lightning_memopt.errors import InfeasibleError

NAMES = (
    "accelerate.accelerator:Accelerator.prepare",  # which model and optimizer are trained
    "accelerate.accelerator:Accelerator.prepare_model",  # the model, as it is called
    "accelerate.accelerator:Accelerator.prepare_optimizer",  # the optimizer that is stepped
    "accelerate.accelerator:Accelerator.backward",  # which backward is the last one before an update
    "accelerate.accelerator:Accelerator.free_memory",  # the models are about to be let go of
    "accelerate.accelerator:Accelerator.end_training",  # the training is over
    "accelerate.utils.memory:should_reduce_batch_size",  # which errors make `find_executable_batch_size` try fewer samples
    "accelerate.state:GradientState._shared_state",  # where the data ends, which a trial of a batch size must not move
    "accelerate.commands.launch:launch_command_parser",  # the flags of `accelerate launch`
    "accelerate.commands.launch:launch_command",  # what it does with them
    "accelerate.commands.config.config:get_user_input",  # the questions of `accelerate config`
    "accelerate.commands.config.config_args:default_config_file",  # the file that it writes
    "accelerate.commands.config.config_args:cache_dir",  # the folder of that file
)
Replacement = Callable[..., Any]
"""Called instead of a method: `(name of the method, the method, the Accelerator, *args, **kwargs)`."""


def named(name: str) -> Any:
    """The object with this name, `module:attributes`. Raises ImportError or AttributeError if there is none."""
    module, _, attributes = name.partition(":")
    return functools.reduce(getattr, attributes.split("."), importlib.import_module(module))


def missing() -> list[str]:
    """The names of `NAMES` that the installed Accelerate does not have."""

    def absent(name: str) -> bool:
        try:
            named(name)
        except (ImportError, AttributeError):
            return True
        return False

    return list(filter(absent, NAMES))


def shards(accelerator: Any) -> bool:
    """Whether an Accelerator shards models by FSDP2. Accelerate 1.0 has only FSDP1."""
    return bool(getattr(accelerator, "is_fsdp2", False))


def replace(methods: Mapping[str, Replacement], ours: Callable[[InfeasibleError], bool]) -> None:
    """Replace methods of the class `Accelerator`. May be repeated.

    Also makes `find_executable_batch_size` try fewer samples after an InfeasibleError, as after running out of memory, if
    `ours` says that the error comes from an Accelerator's run.
    """
    cls = named("accelerate.accelerator:Accelerator")
    for name, replacement in methods.items():
        _replace(cls, name, functools.partial(replacement, name))
    _replace(
        importlib.import_module("accelerate.utils.memory"),
        "should_reduce_batch_size",
        functools.partial(_lacks_memory, ours),
    )


def _lacks_memory(ours: Callable[[InfeasibleError], bool], plain: Callable[[Exception], bool], exception: Exception) -> bool:
    return (isinstance(exception, InfeasibleError) and ours(exception)) or plain(exception)


def _replace(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    plain = vars(owner)[name]
    if hasattr(plain, "memopt_replaces"):
        return

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(plain, *args, **kwargs)

    call.memopt_replaces = plain  # type: ignore[attr-defined]
    setattr(owner, name, call)


def attributes_of(value: Any) -> Any:
    """The attribute dict of an Accelerator; any other object unchanged."""
    return vars(value) if isinstance(value, named("accelerate.accelerator:Accelerator")) else value


def gradient_state() -> dict[str, Any]:
    """The dict with the position in the data that all Accelerators of a process share."""
    state: dict[str, Any] = named("accelerate.state:GradientState._shared_state")
    return state
