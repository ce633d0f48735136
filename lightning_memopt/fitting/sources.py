"""What is asked about: a training script, a user's function, or the config of a transformers model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memopt.bench import user_code
from lightning_memopt.device.kinds import kind_of
from lightning_memopt.errors import ConfigError, needing
from lightning_memopt.fitting import scripts
from lightning_memopt.fitting.options import DTYPES, OPTIMIZERS, TASKS, UNSHARDED, Options
from lightning_memopt.fitting.recording import AtSizes, Recorded, record, recorded
from lightning_memopt.fitting.sharding import shard
from lightning_memopt.fitting.values import Values, values_of

if TYPE_CHECKING:
    from lightning_memopt.bench.subject import Training

_LABELS = 2
_IMAGE = 224
SIZES = ("batch", "length")
"""The sizes of a step: samples, and tokens of a sample."""


@dataclass(frozen=True)
class Source:
    """A training to ask about.

    name: what it is called in the answer.
    record: records a step of so many samples, of so many tokens.
    batch: samples of its step; None: the source says, and no other number can be asked about.
    length: tokens of a sample; None: the same.
    unsized: why sizes are None.
    device: type of the device whose operators the step has.
    early: records the same step with parameters updated in backward, as far as it allows it; None: nobody can ask for that.
    tiled: records the same step with its loss head in tiles, and perhaps with early updates: `tiled(batch, length, tiles=...,
        early=...)`; None: nobody can ask for that.
    checkpointed: records the same step with gradient checkpointing; None: nobody asks for that, or can.
    asks: whether the user asks for that. Otherwise, it is recorded if the source itself checkpoints.
    close: lets go of the model, if it was kept to be recorded at other sizes.
    """

    name: str
    record: Callable[[int, int], Recorded]
    batch: int | None = None
    length: int | None = None
    unsized: str = ""
    device: str = "cuda"
    early: Callable[[int, int], Recorded] | None = None
    tiled: Callable[..., Recorded] | None = None
    checkpointed: Callable[[int, int], Recorded] | None = None
    asks: bool = False
    close: Callable[[], None] = lambda: None


def source_of(spec: str | Sequence[str], options: Options, device: tuple[str, int], ranks: int = 1) -> Source:
    """A command that runs a training script, `package.module:function`, the path of a config.json or of its folder, or the
    id of a model of transformers.

    device: name and bytes of the CUDA device that a script finds.
    ranks: number of cards over which the model is sharded.

    Raises ConfigError if it is none of these, or if it does not take the options.
    """
    words, is_script, is_config = _kind(spec)
    if ranks > 1 and not is_config:
        raise ConfigError("a script or a function shards its model itself: ask about several cards with the config of a model")
    if is_script:
        return _of_script(words, options, device)
    if is_config:
        return _of_config(words[0], options, ranks)
    return _of_function(words[0], options)


def import_libraries(spec: str | Sequence[str]) -> None:
    """Import what a source of this kind needs, which would be imported later; nothing if that is not installed."""
    if _kind(spec)[2]:
        with contextlib.suppress(ImportError):
            import transformers

            transformers.PreTrainedModel  # noqa: B018  (its module is imported with it)


def _kind(spec: str | Sequence[str]) -> tuple[list[str], bool, bool]:
    """The words of a source, whether they run a script, and whether they name the config of a model."""
    words = [spec] if isinstance(spec, str) else list(spec)
    is_script = len(words) > 1 or words[0].endswith(".py")
    return words, is_script, not is_script and (Path(words[0]).exists() or ":" not in words[0])


def of_training(
    name: str,
    build: Callable[[int], Training],
    batch: int | None,
    device: str = "cuda",
    values: Values | None = None,
    asks: bool = False,
) -> Source:
    """A training that a function makes for any number of samples. `asks`: see `Source`."""
    cuda, unsized = not kind_of(device).is_host, "the function alone knows it"

    def recording(n: int, _: int, **how: Any) -> Recorded:
        return record(partial(build, n), cuda, values=values, **how)

    return Source(
        name,
        recording,
        batch,
        unsized=unsized,
        device=device,
        early=partial(recording, early=True),
        tiled=recording,
        checkpointed=partial(recording, checkpoints=True),
        asks=asks,
    )


def _of_script(command: list[str], options: Options, device: tuple[str, int]) -> Source:
    scripts.script_of(command)
    taken = tuple(size for size in SIZES if any(f"{{{size}}}" in word for word in command))
    _refuse(options, taken, "The script")
    values = values_of(options.values)

    def recording(batch: int, length: int, checkpoints: bool = False, **how: Any) -> Recorded:
        words = [word.replace("{batch}", str(batch)).replace("{length}", str(length)) for word in command]
        on, limit = device if options.cuda else (), options.time_limit
        return recorded(
            lambda mode: scripts.observed(words, *on, mode=mode, checkpoints=checkpoints, limit_seconds=limit, **how),
            options.cuda,
            values,
            checkpoints=checkpoints,
        )

    hint = "write {batch} and {length} in the command where the script takes them"
    sizes = {size: getattr(options, size) for size in taken}
    return Source(
        " ".join(command),
        recording,
        **sizes,
        unsized=hint,
        device=options.device,
        early=partial(recording, early=True),
        tiled=recording,
        checkpointed=partial(recording, checkpoints=True) if options.gradient_checkpointing else None,
        asks=options.gradient_checkpointing,
    )


def _of_function(spec: str, options: Options) -> Source:
    _refuse(options, (), "The function")
    build = user_code.builder(spec)

    def built(_: int) -> Training:
        with user_code.in_user_code(f"{spec}()"):
            training = build()
        _give_memory(training.model)
        return training

    return of_training(spec, built, None, options.device, values_of(options.values), options.gradient_checkpointing)


def _refuse(options: Options, taken: tuple[str, ...], who: str) -> None:
    """Raise ConfigError for options that have no effect."""
    taken = (*taken, "device", "values", "gradient_checkpointing", *(("time_limit",) if who == "The script" else ()))
    given = [f.name for f in fields(Options) if f.name not in taken and getattr(options, f.name) != f.default]
    if given:
        sizes = " and ".join(f"{{{name}}}" for name in given if name in SIZES and who == "The script")
        hint = f" Or write {sizes} where it takes that number." if sizes else ""
        raise ConfigError(f"{who} itself says {', '.join(given)}: leave the option out.{hint}")


def _of_config(spec: str, options: Options, ranks: int) -> Source:
    with needing("transformers", "The config of a model needs"):
        import transformers
    path = Path(spec)
    folder = path.parent if path.is_file() else path
    with user_code.in_user_code(
        f"reading the config of {spec}", "Give package.module:function, or a folder with a config.json"
    ):
        config = transformers.AutoConfig.from_pretrained(str(folder) if folder.exists() else spec)
    import torch

    from lightning_memopt.bench.subject import Training

    if ranks > 1 and options.optimizer in UNSHARDED:
        raise ConfigError(f"torch's {options.optimizer} cannot update weights that FSDP2 shards: give another --optimizer")
    task = options.task or _task_of(config, spec)
    if task == "image-classification" or task == "sequence-classification":
        config.num_labels = _LABELS
    if hasattr(config, "use_cache"):
        config.use_cache = False

    mixed = options.dtype.startswith("mixed")

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        with user_code.in_user_code(f"making the model of {spec}", "Give another --task"):
            made = getattr(transformers, TASKS[task]).from_config(config, dtype=getattr(torch, DTYPES[options.dtype]))
            model = _adapted(made.train(), options)
        if ranks > 1:
            with user_code.in_user_code(f"sharding the model of {spec}", "Leave --ranks out"):
                shard(model, torch.bfloat16 if mixed else None)
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, getattr(torch.optim, OPTIMIZERS[options.optimizer])(trained, lr=1e-4)

    def training(made: tuple[torch.nn.Module, torch.optim.Optimizer], batch: int, length: int) -> Training:
        model, optimizer = made
        inputs = _inputs(config, task, batch, length, options)

        def step() -> None:
            with user_code.in_user_code(f"a step of {spec}", "Give another --task, --batch or --optimizer"):
                with torch.autocast("cpu", torch.bfloat16, enabled=mixed and ranks == 1):
                    loss = model(**inputs).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        return Training(model, optimizer, step)

    sizes = AtSizes(make, training, options.cuda, ranks, values_of(options.values))
    return Source(
        spec,
        sizes.record,
        options.batch,
        None if task == "image-classification" else options.length,
        device=options.device,
        early=partial(sizes.record, early=True) if ranks == 1 else None,
        tiled=sizes.record if ranks == 1 else None,
        checkpointed=partial(sizes.record, checkpoints=True) if options.gradient_checkpointing else None,
        asks=options.gradient_checkpointing,
        close=sizes.close,
    )


def _task_of(config: Any, spec: str) -> str:
    """The task of the architecture that the config names."""
    endings = {
        "ForCausalLM": "causal-lm",
        "LMHeadModel": "causal-lm",
        "ForMaskedLM": "masked-lm",
        "ForConditionalGeneration": "seq2seq-lm",
        "ForSequenceClassification": "sequence-classification",
        "ForImageClassification": "image-classification",
    }
    for architecture in config.architectures or ():
        for ending, task in endings.items():
            if architecture.endswith(ending):
                return task
    raise ConfigError(f"the config of {spec} names no task; give --task, one of {', '.join(TASKS)}")


def _adapted(model: Any, options: Options) -> Any:
    """The model with adapters, if they are wanted."""
    if options.lora is None:
        return model
    with needing("peft", "Adapters need"):
        import peft
    return peft.get_peft_model(model, peft.LoraConfig(r=options.lora, target_modules="all-linear"))


def _inputs(config: Any, task: str, batch: int, length: int, options: Options) -> dict[str, Any]:
    """A batch of random samples."""
    import torch

    if task == "image-classification":
        side = getattr(config, "image_size", _IMAGE)
        sides = (side, side) if isinstance(side, int) else tuple(side)
        images = torch.empty(batch, getattr(config, "num_channels", 3), *sides, dtype=getattr(torch, DTYPES[options.dtype]))
        return {"pixel_values": images, "labels": torch.zeros(batch, dtype=torch.long)}
    words = torch.randint(0, config.vocab_size, (batch, length))
    if task == "sequence-classification":
        return {"input_ids": words, "labels": torch.zeros(batch, dtype=torch.long)}
    return {"input_ids": words, "labels": words}


def _give_memory(model: Any) -> None:
    """Move parameters and buffers on `meta`, which have no memory, to where they have unfilled memory."""
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        model.to_empty(device="cpu")
        if hasattr(model, "tie_weights"):
            model.tie_weights()
