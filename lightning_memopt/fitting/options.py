"""How the model of a config is trained, as the command line and `fit` take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_memopt.device.kinds import kind_of
from lightning_memopt.errors import ConfigError
from lightning_memopt.fitting.patience import LIMIT_SECONDS

if TYPE_CHECKING:
    from lightning_memopt.fitting.values import Values

TASKS = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
}
"""Task -> the class of transformers that makes its model."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "mixed-bf16": "float32"}
"""Name of a precision -> the type of the weights. Under "mixed-bf16" the forward runs in bfloat16 by autocast."""
OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "adafactor": "Adafactor"}
"""Name -> the class in `torch.optim`."""
UNSHARDED = ("adafactor",)
"""Those whose operators torch does not have for weights that are sharded."""
DEVICES = ("cuda", "cpu")
"""Types of devices whose operators a step may have."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a model is trained.

    task: of TASKS; None: that of the architecture in the config.
    batch: samples of a step.
    length: tokens of a sample.
    dtype: of DTYPES.
    optimizer: of OPTIMIZERS.
    lora: rank of the adapters; None: all weights are trained.
    device: of DEVICES: whose operators the step has. Also for functions and scripts.
    values: a function that is asked for values that steer the step (`fitting.values`), or its name, `package.module:function`.
        Also for functions and scripts.
    gradient_checkpointing: whether the step is asked about with gradient checkpointing, too. Also for functions and scripts.
    time_limit: how many seconds a script may run until its fourth update, each time that it runs.
    """

    task: str | None = None
    batch: int = 1
    length: int = 1024
    dtype: str = "bf16"
    optimizer: str = "adamw"
    lora: int | None = None
    device: str = "cuda"
    values: str | Values | None = None
    gradient_checkpointing: bool = False
    time_limit: float = LIMIT_SECONDS

    def __post_init__(self) -> None:
        for name, value, known in (
            ("task", self.task, (None, *TASKS)),
            ("dtype", self.dtype, tuple(DTYPES)),
            ("optimizer", self.optimizer, tuple(OPTIMIZERS)),
            ("device", self.device, DEVICES),
        ):
            if value not in known:
                raise ConfigError(f"{name} is {value!r}; give one of {', '.join(map(str, filter(None, known)))}")
        if self.time_limit <= 0:
            raise ConfigError(f"time_limit is {self.time_limit}; give more than 0 seconds")
        for name, number in (("batch", self.batch), ("length", self.length), ("lora", 1 if self.lora is None else self.lora)):
            if number < 1:
                raise ConfigError(f"{name} is {number}; give 1 or more")

    @property
    def cuda(self) -> bool:
        """Whether the step has CUDA's operators."""
        return not kind_of(self.device).is_host
