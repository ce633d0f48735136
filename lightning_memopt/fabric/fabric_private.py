"""Every private name of Lightning Fabric that this package uses. No other file uses such a name.

Lightning may rename or remove these names in any release: `tests/cpu/fabric/test_fabric_private.py` lists the missing ones.
All of them are in Lightning 2.5.0 and 2.6.6.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from lightning_memopt.integrations.lightnings import FabricSingleDeviceStrategy, base_of, part

FORWARD_MODULE = "_forward_module"
"""`_FabricModule._forward_module`: the module that a call of Fabric's wrapper calls."""
STEP_METHOD = "training_step"
"""The method of a LightningModule that loops call on Fabric's wrapper instead of calling the module."""

Around = Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]]


def wrapper_class(strategy: Any) -> type[Any]:
    """`lightning.fabric.wrappers._FabricModule` of the Lightning to which a strategy belongs."""
    wrapper: type[Any] = part(strategy, "wrappers")._FabricModule
    return wrapper


@contextlib.contextmanager
def told_of_wrappers(wrappers: type[Any], told: Callable[[nn.Module, nn.Module], None]) -> Iterator[None]:
    """Within, call `told(wrapper, module)` when Fabric wraps a module, at the end of `setup`. `wrappers`: the wrapper class.

    After the strategy has set a module up, Fabric compiles it again, and does not tell the strategy of the compiled module or
    the wrapper. Torch has a public hook that is called when a module becomes an attribute of another one.
    """

    def registered(owner: nn.Module, name: str, module: nn.Module | None) -> None:
        if name == FORWARD_MODULE and isinstance(owner, wrappers) and module is not None:
            told(owner, module)

    handle = register_module_module_registration_hook(registered)
    try:
        yield
    finally:
        handle.remove()


class _StepMethod:
    """An attribute of Fabric's wrapper class with the name of a step method. It has no `__set__`, so a wrapper's own attribute
    takes precedence.

    around: the listeners.
    """

    def __init__(self) -> None:
        self.around: list[Around] = []

    def __get__(self, wrapper: nn.Module | None, owner: type) -> Any:
        if wrapper is None:
            raise AttributeError(STEP_METHOD)
        method: Any = wrapper.__getattr__(STEP_METHOD)
        # around another module (DDP) Fabric's wrapper runs the method through a call of that module
        direct = wrapper._forward_module is wrapper._original_module
        for around in self.around if direct else ():
            method = around(wrapper, method)
        return method


@contextlib.contextmanager
def around_step_methods(wrappers: type[Any], around: Around) -> Iterator[None]:
    """Within, a loop that takes `training_step` of one of Fabric's wrappers gets `around(wrapper, method)`.

    wrappers: their class.

    If no other module is between wrapper and model, Fabric runs the method without calling the model. No attribute is set on
    the wrapper or on the model, so copies of them are not affected.
    """
    step_method: _StepMethod = vars(wrappers).get(STEP_METHOD) or _StepMethod()
    setattr(wrappers, STEP_METHOD, step_method)
    step_method.around.append(around)
    try:
        yield
    finally:
        step_method.around.remove(around)
        if not step_method.around:
            delattr(wrappers, STEP_METHOD)


def run_module(arguments: list[str], module: str, strategy: str) -> None:
    """`fabric run` with these arguments, which runs a Python module in each process: `python -m module SCRIPT ...`.

    `strategy`: the default strategy. Raises SystemExit for arguments that Fabric does not accept.

    Fabric's command reads its choice of strategies when its module is imported, and passes script and arguments to torchrun.
    """
    import click
    from lightning.fabric import cli

    try:
        given = cli._run.make_context("fabric run", list(arguments)).params
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from None
    given["strategy"] = given["strategy"] or strategy
    script, script_arguments = given.pop("script"), given.pop("script_args")
    cli.main(Namespace(**given, script="-m"), [module, script, *script_arguments])


class BecomesDDP:
    """The part of a strategy for one device that turns it into a DDP strategy if there are several devices.

    Lightning's own class would train on one of several devices without a warning. The connectors of Fabric and of the Trainer
    assign `parallel_devices`, `cluster_environment` and the number of nodes to strategies that have these attributes, and then
    call `_configure_launcher`. There the object changes its class, because Fabric, or the Trainer, already has the object, and
    looks at its class only later.

    parallel: the class for several devices. A user's own subclass must set its own.
    num_nodes: the number of nodes.
    """

    parallel: type[Any]
    num_nodes: int
    _arguments: tuple[str, ...]
    """Arguments of the base class of `parallel` that are already attributes, with a leading underscore."""
    _kept: tuple[str, ...]
    """Attributes that stay as they are."""

    def _start_on_one_device(self, device: str | torch.device | None, parallel_kwargs: dict[str, Any]) -> None:
        """Make the attributes to which a connector assigns. `parallel_kwargs`: further arguments of Lightning's DDP
        strategy.
        """
        self._device_given = device is not None
        self._parallel_kwargs = parallel_kwargs
        self.parallel_devices: list[torch.device] | None = None
        self.cluster_environment: Any = None

    def _configure_launcher(self) -> None:
        devices = self.parallel_devices or []
        if len(devices) > 1 or self.num_nodes > 1:
            self._become_parallel()
            self._configure_launcher()
            return
        if devices and not self._device_given:
            self._root_device = devices[0]
        super()._configure_launcher()  # type: ignore[misc]

    def _become_parallel(self) -> None:
        if self._device_given or "parallel" not in vars(type(self)):
            why = f"device={str(self._root_device)!r} was given" if self._device_given else "it is a class of your own"
            raise part(self, "utilities.exceptions").MisconfigurationException(
                f"{type(self).__name__} trains on one device, because {why}; it got {len(self.parallel_devices or [])} devices "
                f"and {self.num_nodes} nodes. Use {self.parallel.__name__}, or devices=1."
            )
        before, ddp, kept = dict(vars(self)), base_of(self.parallel), self._kept
        arguments = {name: before[f"_{name}"] for name in self._arguments}
        arguments |= {name: before[name] for name in ("parallel_devices", "cluster_environment")}
        vars(self).clear()
        self.__class__ = self.parallel
        ddp.__init__(self, **arguments, **before["_parallel_kwargs"])
        for name in kept:
            setattr(self, name, before[name])


class OneOrSeveralDevices(BecomesDDP, FabricSingleDeviceStrategy):
    """A `SingleDeviceStrategy` that takes its device from Fabric, and becomes a DDP strategy if Fabric has several devices."""

    _arguments = ("accelerator", "checkpoint_io", "precision")
    _kept = ("_num_nodes", "memopt_config")

    def __init__(self, device: str | torch.device | None = None, **kwargs: Any) -> None:
        super().__init__(device="cpu" if device is None else device, **kwargs)
        self._start_on_one_device(device, {})
        self._num_nodes = 1

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        return self._num_nodes

    def _become_parallel(self) -> None:
        super()._become_parallel()
        self._set_world_ranks()  # type: ignore[attr-defined]
