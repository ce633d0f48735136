"""The private names of transformers that the package uses are there (integrations/transformers_private.py)."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from benchmarks.robustness.front_models import built
from lightning_memopt.integrations.transformers_private import FUNCTION, checkpointing_function, is_layer


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_checkpointing_function() -> None:
    model = built("gpt2")
    assert all(checkpointing_function(module) is None for module in model.modules())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = [module for module in model.modules() if is_layer(module)]
    assert layers == list(model.transformer.h)
    for layer in layers:
        function = checkpointing_function(layer)
        assert function is not None and function is vars(layer)[FUNCTION]
        assert function.keywords["use_reentrant"] is False
