"""The parts of `python -m benchmarks gpu`, in the order of risk: what each proves, and how long it takes. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PYTEST = ("-m", "pytest", "-q", "-p", "benchmarks.gpu.verdicts", "-p", "no:cacheprovider")
MEASURE = ("-c", "from benchmarks.gpu.measure import main; main()")
AWAY = ("GPT-2 medium", "ResNet-152")
"""Models whose maps are away: without dropout's masks there would be little for codecs."""


@dataclass(frozen=True)
class Part:
    """Tests or a benchmark, in a process of their own.

    words: what Python is called with; `--lines FILE --part NAME` is added.
    seconds: how long it takes, about. It is not begun where less is left.
    needs: packages without which it is left out.
    repeated: whether it is run in each call, whatever it gave before.
    """

    name: str
    proves: str
    words: tuple[str, ...]
    seconds: float
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    repeated: bool = False

    @property
    def limit_seconds(self) -> float:
        """When it is stopped."""
        return 2 * self.seconds + 30


def _tests(
    name: str, proves: str, seconds: float, file: str, test: str = "", needs: tuple[str, ...] = (), **environment: str
) -> Part:
    words = (*PYTEST, f"tests/gpu/test_{file}_cuda.py" + f"::{test}" * bool(test))
    return Part(name, proves, words, seconds, ("pytest", "ortools", *needs), environment)


def _measured(command: str, model: str, seconds: float, proves: str, small: bool) -> Part:
    """`seconds` are the model's; building it, and the last row, take some more."""
    name = f"{command}-{model.lower().replace(' ', '-')}"
    words = (*MEASURE, command, model, "--seconds", f"{seconds:.0f}", *(["--small"] if small else []))
    return Part(name, proves, words, seconds + 30, ("ortools",))


def parts(small: bool = False) -> list[Part]:
    """All of them. `small`: benchmarks take tiny models, for a device that is slow."""
    models = ("GPT-2", "Llama", "ResNet", "LSTM NMT") if small else (*AWAY, "GPT-2 large", "Llama 1B", "LSTM NMT")
    away = ("GPT-2", "ResNet") if small else AWAY
    build = ("-c", "from benchmarks.gpu.machine import build; build()")
    return [
        Part("build", "the native engine and the planned pool compile for this torch", build, 60, repeated=True),
        _tests("python", "a loop has the plain one's bits, by the engine in Python", 30, "loop", MEMOPT_NATIVE="0"),
        _tests("native", "the same by the engine in C++", 30, "loop"),
        _tests("exact", "random ops, attention, streams, budgets of loops", 75, "exact"),
        _tests("tiers", "copies to the host and to a disk are ordered; rates of the links", 40, "tiers"),
        _tests("convolutions", "bits while cuDNN chooses algorithms by time, and while not", 30, "convolutions"),
        _tests("allocator", "the model of the allocator, on recorded traces", 120, "allocator", needs=("transformers",)),
        _tests("reserved", "budgets of reserved bytes are kept, as predicted", 150, "frontier", needs=("transformers",)),
        _tests("codecs", "codecs keep their promises; lossless ones change no bit", 60, "codecs"),
        Part("codecs-speed", "GB/s of codecs beside the link's", (*MEASURE, "codecs", *(["--small"] if small else [])), 30),
        _tests("early-updates", "updates in backward have the bits of those after it", 90, "in_backward"),
        _tests("pool", "the planned pool: bits, addresses, torch's statistics", 60, "pool"),
        _tests("batch-size", "the batch that is found fits, and is nearly the largest", 60, "batch_size"),
        _tests("energy", "joules by the device's counter", 30, "energy", needs=("pynvml",)),
        *(_measured("replay", model, 75, "recomputation beside checkpointing: bytes, time, bits", small) for model in models),
        _tests("away", "steps with everything offloaded have the plain one's bits", 30, "away"),
        *(_measured("offload", model, 90, "offload beside save_on_cpu: bytes, time, overlap", small) for model in away),
        *(_measured("compress", model, 75, "codecs beside checkpointing: bytes, time, bits", small) for model in away),
        *(_measured("batch", model, 75, "samples and joules at the batch that plans allow", small) for model in away),
        _tests("sweeps-modules", "bits of torch's own table of modules", 120, "sweeps", "test_no_module_differs"),
        _tests("sweeps-operators", "bits of torch's own table of operators", 240, "sweeps", "test_no_operator_differs"),
        _tests("sweeps-planned", "the same in planned steps", 240, "sweeps", "test_no_operator_differs_in_planned_steps"),
    ]


def chosen(words: list[str], small: bool = False) -> list[Part]:
    """Those that are named, or whose names begin so (`replay`); by default all. Raises ValueError where a word names none."""
    found = parts(small)
    for word in words:
        if not any(_names(word, part) for part in found):
            raise ValueError(f"there is no part {word!r}; there are {', '.join(part.name for part in found)}")
    return [part for part in found if not words or any(_names(word, part) for word in words)]


def names() -> frozenset[str]:
    """Every word that `chosen` takes."""
    found = {part.name for small in (False, True) for part in parts(small)}
    return frozenset(found | {name.partition("-")[0] for name in found})


def _names(word: str, part: Part) -> bool:
    return part.name == word or part.name.startswith(f"{word}-")
