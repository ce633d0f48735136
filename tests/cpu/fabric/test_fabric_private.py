"""Private names of Fabric that the package uses: each is in one place, and is there in the installed version."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

pytest.importorskip("lightning")

import lightning
from lightning.fabric import Fabric, cli, connector, wrappers
from torch import nn

import lightning_memopt
from lightning_memopt.fabric import fabric_private
from tests.cpu.lightning.test_private_api import own_names, private_names

PACKAGE = Path(lightning_memopt.__file__).parent
OF_WRAPPERS = {"_forward_module", "_original_module"}
OF_STRATEGIES = {"_root_device", "_configure_launcher", "_accelerator", "_checkpoint_io", "_precision"}
OF_PARALLEL_STRATEGIES = {"_set_world_ranks"}
ASSIGNED = {"_num_nodes"}
OF_COMMAND = {"_run"}
CLASSES = {"_FabricModule"}


def test_private_names_of_fabric_are_there() -> None:
    """The message names those that are missing."""
    fabric = Fabric(accelerator="cpu", devices=1)
    wrapper, ddp = fabric.setup(nn.Linear(1, 1)), Fabric(accelerator="cpu", devices=2, strategy="ddp").strategy
    source = inspect.getsource(connector)
    missing = {name for name in OF_WRAPPERS if name not in {*vars(wrapper), *wrapper._modules}}
    missing |= {name for name in OF_STRATEGIES if not hasattr(fabric.strategy, name)}
    missing |= {name for name in OF_PARALLEL_STRATEGIES if not hasattr(ddp, name)}
    missing |= {name for name in OF_COMMAND if cli._CLICK_AVAILABLE and not hasattr(cli, name)}
    missing |= {name for name in CLASSES if not hasattr(wrappers, name)}
    missing |= {name for name in ASSIGNED if f"self.strategy.{name} =" not in source}
    missing |= set() if "self.strategy._configure_launcher()" in source else {"the call of _configure_launcher"}
    missing |= set() if fabric_private.STEP_METHOD in wrappers._LIGHTNING_MODULE_STEP_METHODS else {"step methods"}
    assert not missing, f"Lightning {lightning.__version__} has no {', '.join(sorted(missing))}: see fabric_private.py"


def test_no_other_file_uses_one() -> None:
    place = Path(fabric_private.__file__)
    named = {*OF_WRAPPERS, *OF_STRATEGIES, *OF_PARALLEL_STRATEGIES, *ASSIGNED, *OF_COMMAND, *CLASSES}
    unknown = private_names(place) - named - own_names(place)
    assert not unknown, "each private name of Fabric is in a table above"
    for path in (PACKAGE / "fabric").glob("*.py"):
        assert path == place or not private_names(path) & (named - own_names(path)), path
