"""The two names of Lightning, and the public classes of this package for each.

`lightning` and `pytorch_lightning` (with `lightning_fabric`) are the same code under two names. A Trainer of one refuses the
strategies of the other, because their base classes differ. So `strategies`, `callbacks` and `fabric` import no Lightning. Each
public class there derives from a stand-in for its base class, and `made` derives the class that users get from it and from the
base class of one Lightning. A type checker sees the base class of `lightning` instead of the stand-in.
"""

from __future__ import annotations

import abc
import functools
import importlib
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

PACKAGES = {
    "lightning_memopt.lightning": ("lightning.pytorch", "lightning.fabric"),
    "lightning_memopt.pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}
"""Module of this package with the classes for one Lightning -> Lightning's packages for the Trainer and for Fabric."""
_OF_TRAINER = {
    "MemOptBatchScaler": "callbacks.batch_scaler",
    "MemOptCallback": "callbacks.upgrade",
    "MemOptDDPStrategy": "strategies.strategies",
    "MemOptMixin": "strategies.mixin",
    "MemOptModelParallelStrategy": "strategies.strategies",
    "MemOptMonitor": "callbacks.monitor",
    "MemOptStrategy": "strategies.strategies",
}
_OF_FABRIC = {
    "MemOptFabricDDPStrategy": "fabric.strategies",
    "MemOptFabricMixin": "fabric.strategies",
    "MemOptFabricStrategy": "fabric.strategies",
}
"""Public class -> the module that defines it without its base class of Lightning."""
_STRATEGIES = {
    "memopt": ("MemOptStrategy", "Within a memory budget, on one device or with DDP"),
    "memopt_ddp": ("MemOptDDPStrategy", "DDP, each device within a memory budget"),
    "memopt_fsdp2": ("MemOptModelParallelStrategy", "FSDP2, each process within a memory budget"),
}
_FABRIC_STRATEGIES = {
    "memopt": ("MemOptFabricStrategy", "Within a memory budget"),
    "memopt_ddp": ("MemOptFabricDDPStrategy", "Within a memory budget"),
}
"""Name of a strategy -> its class, and its description in Lightning's registry."""

if TYPE_CHECKING:
    from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
    from lightning.fabric.strategies import SingleDeviceStrategy as FabricSingleDeviceStrategy
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
else:

    def _stand_in(module: str, name: str, *bases: type) -> type:
        """A stand-in with the bases of Lightning's class, so that they come after both classes in the order of bases."""
        return type(name, bases, {"_stands_for": (module, name)})

    Callback = _stand_in("callbacks", "Callback")
    DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy = (
        _stand_in("strategies", name, abc.ABC) for name in ("DDPStrategy", "ModelParallelStrategy", "SingleDeviceStrategy")
    )
    FabricDDPStrategy, FabricSingleDeviceStrategy = DDPStrategy, SingleDeviceStrategy


def made(home: str, name: str) -> type[Any]:
    """The public class `name` for one Lightning; `home` is a key of `PACKAGES`, in which pickles find the class."""
    package = PACKAGES[home][name in _OF_FABRIC]
    importlib.import_module(package)  # first, because it registers the strategies; if it is missing, the error names it
    return _made(home, package, name)


@functools.cache
def _made(home: str, package: str, name: str) -> type[Any]:
    module = (_OF_TRAINER | _OF_FABRIC)[name]
    written: type[Any] = getattr(importlib.import_module(f"lightning_memopt.{module}"), name)
    if not hasattr(written, "_stands_for"):
        return written  # a mixin, for both
    base_module, base_name = written._stands_for
    base = getattr(importlib.import_module(f"{package}.{base_module}"), base_name)
    attributes: dict[str, Any] = {"__module__": home, "__doc__": written.__doc__}
    if "parallel" in vars(written):  # the class that it becomes on several devices
        attributes["parallel"] = _made(home, package, written.parallel.__name__)
    return type(name, (written, base), attributes)


def names_for(home: str) -> Callable[[str], type[Any]]:
    """`__getattr__` of the module `home`: a public class is made when it is first used."""

    def get(name: str) -> type[Any]:
        if name not in _OF_TRAINER and name not in _OF_FABRIC:
            raise AttributeError(f"module {home!r} has no attribute {name!r}")
        return made(home, name)

    return get


def base_of(cls: type[Any]) -> type[Any]:
    """The first class of Lightning that a class derives from."""
    return next(base for base in cls.__mro__ if _package_of(base) is not None)


def part(owner: Any, module: str) -> Any:
    """The module `module` of the Lightning package to which a Trainer or a strategy belongs."""
    return importlib.import_module(f"{_package_of(base_of(type(owner)))}.{module}")


def register(package: str, **options: Any) -> None:
    """Make `Trainer(strategy="memopt")`, or `Fabric(...)`, work for one package of a Lightning. A second call does nothing.

    options: options of `MemOptConfig` for Fabric's strategies that are given by name; they replace those of an earlier call.
    """
    (home,) = (home for home, packages in PACKAGES.items() if package in packages)
    strategies = importlib.import_module(f"{package}.strategies")
    of_fabric = package == PACKAGES[home][1]
    registry = strategies.STRATEGY_REGISTRY if of_fabric else strategies.StrategyRegistry
    for name, (cls, description) in (_FABRIC_STRATEGIES if of_fabric else _STRATEGIES).items():
        if options or name not in registry:
            registry.register(name, made(home, cls), description=description, override=True, **options)


def shown(strategy: Any) -> str:
    """The class of the strategy, the Lightning that it is for, and the import for the other one. If a Trainer refuses the
    strategy because it is for the other Lightning, it prints this.
    """
    name = type(strategy).__name__
    package = _package_of(base_of(type(strategy)))
    for (_, own), (home, others) in itertools.permutations(PACKAGES.items(), 2):
        if package in own:
            home = home.removesuffix(".lightning")  # if `lightning` is imported, the package itself has its classes
            return f"{name} for {package} (for {others[own.index(package)]}: from {home} import {name})"
    return name


def _package_of(cls: type[Any]) -> str | None:
    """Lightning's package for the Trainer or for Fabric that has this very class."""
    packages = [package for pair in PACKAGES.values() for package in pair]
    return next((package for package in packages if cls.__module__.startswith(f"{package}.")), None)
