"""Which parameters are updated in backward: decided by what an observed step shows.

The first observed step of an input signature updates nothing early. It is the *lesson*: it notes when each gradient is final,
and its trace shows who reads what afterwards. In the steps that come a parameter is updated early where its gradient was made
in one piece, and where no op between that and the optimizer's step read the parameter or its gradient. So what clips by the
global norm, a GradScaler, a logged gradient, a checkpointed region that runs again with the weight (D5), or tied weights in
nested backwards keep an update where it was. A planned step whose forward leaves its plan, by more than a metric or a log,
updates nothing early.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from lightning_memopt.config import MemOptConfig
from lightning_memopt.errors import UpdatesInBackwardError
from lightning_memopt.graph import Graph
from lightning_memopt.record import is_plain
from lightning_memopt.runtime.early_updates import EarlyUpdates, Reason, of_optimizers, refusal
from lightning_memopt.session.final_gradients import early_in, late
from lightning_memopt.session.observation import Observation
from lightning_memopt.session.peak_meter import in_compiled_code

_UNMARKED = Reason(
    "the loop does not say which backward is the last one before optimizer.step()",
    "Put that backward into `with run.last_backward():`",
)
_ANOMALY = Reason(
    "anomaly detection stops at the first NaN, which must find the model as it was before the step", "Switch it off"
)
_AUTOCAST = Reason("backward runs under autocast, and the update would", "Call backward() outside of autocast")
_CLOSURE = Reason("optimizer.step(closure) runs backward inside of the step", "Call backward() before optimizer.step()")
_ZEROED = Reason(
    "gradients are kept from one step to the next, or set to zero in place", "Use optimizer.zero_grad(set_to_none=True)"
)
_SCHEDULED = Reason(
    "learning rates, or other options of the optimizer, are set between backward and optimizer.step()",
    "Set them before backward(), or after the step",
)
_COMPILED = Reason("the optimizer's step is compiled, and rounds otherwise", "Step without torch.compile")


def wanted(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    config: MemOptConfig,
    reasons: Callable[[], Iterable[Reason]],
    say: Callable[[str], None],
) -> EarlyUpdating | None:
    """Updates in backward where the config wants them and nothing forbids them; `reasons`: what the adapter knows against it.

    Raises UpdatesInBackwardError with "always" and a reason.
    """
    if config.optimizer_in_backward == "never":
        return None
    always = config.optimizer_in_backward == "always"
    for reason in [*reasons(), *of_optimizers(optimizers)]:
        if always:
            raise refusal(reason)
        say(f"MemOpt: parameters are updated after backward, as usual: {reason.what}. {reason.fix}.")
        return None
    return EarlyUpdating(model, optimizers[0], always, say, reasons)


class EarlyUpdating:
    """Updates in backward for one model and its one optimizer. `always`: raise where they are not possible; else `say` so.
    `reasons`: what the adapter has against them, asked again before every step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        always: bool,
        say: Callable[[str], None],
        reasons: Callable[[], Iterable[Reason]] = tuple,
    ) -> None:
        self.model, self.always, self.say, self._reasons = model, always, say, reasons
        self.updates = EarlyUpdates(optimizer)
        self.learnt: set[str] = set()
        self.late: set[str] = set()
        self._names: dict[int, str] = {}
        self._marked = False
        self._said: set[Reason] = set()
        self._gradients: dict[str, TensorWeakRef] = {}
        self._read_names: set[str] = set()

    def adopt(self, graph: Graph) -> None:
        """A plan was given: the step of its graph says what may be updated early."""
        self.learnt |= early_in(graph)

    @contextlib.contextmanager
    def last_backward(self, observation: Observation | None, armed: bool) -> Iterator[None]:
        """Around the last backward before the optimizer's step. Without `observation` or `armed` it is as if it was not there.

        Raises UpdatesInBackwardError where the step after the one before was left out.
        """
        if self.updates.updated:
            count = len(self.updates.updated)
            self.updates.step_ended()
            raise UpdatesInBackwardError(
                f"No optimizer.step() came after run.last_backward(), which had updated {count} parameters already. Mark a "
                "backward only when the step is certain to follow it, or set optimizer_in_backward='never'."
            )
        self._marked = True
        self._names = {id(p): name for name, p in self.model.named_parameters()}
        armed = armed and self._possible()
        if observation is None and not armed:
            yield
            return
        with self.updates.backward(partial(self._final, observation, armed), self._read):
            yield

    def _read(self, p: torch.Tensor) -> None:
        """Somebody reads the gradient of `p` before the step: it has to be there in every step to come."""
        name = self._names.get(id(p))
        if name is not None:
            self.late.add(name)
            self._read_names.add(name)

    def update_begins(self) -> None:
        """The optimizer is about to step. Raises UpdatesInBackwardError where what was updated in backward would have been
        updated with something else by now.
        """
        count = len(self.updates.updated)
        if not count:
            return
        if self.updates.options_changed():
            what, fix = _SCHEDULED
        elif self.updates.given():
            what, fix = "gradients are set between backward and optimizer.step()", "Set none"
        else:
            return
        self.updates.step_ended()
        raise UpdatesInBackwardError(
            f"{count} parameters were updated in backward already, but {what}: this step cannot be put right. {fix}, or set "
            "optimizer_in_backward='never'."
        )

    def learn(self, observation: Observation | None) -> bool:
        """The optimizer is about to step: whether the observed step so far was a lesson.

        Raises UpdatesInBackwardError with "always" where nothing can be updated early: nothing is updated yet.
        """
        if observation is None or not observation.has_backward or self.updates.updated:
            return False
        if not self._marked:
            self._refuse(_UNMARKED)
            return False
        graph, finals = observation.so_far(), observation.finals_seen()
        if not finals:
            return False
        reason = _SCHEDULED if self.updates.options_changed() else _COMPILED if in_compiled_code() else None
        if reason is not None:
            self.late |= {f.name for f in finals}
            observation.finals = []
            self._refuse(reason)
            return False
        names = [f.name for f in finals]
        readers = {f.name: late(graph, f) for f in finals}
        early = {n for n, reader in readers.items() if reader is None and names.count(n) == 1 and n not in self._read_names}
        self.learnt |= early
        self.late |= set(names) - early
        observation.finals = [f for f, n in zip(observation.finals, names, strict=True) if n in self.early]
        if not early:
            reader = next((r for r in readers.values() if r), "Python code" if self._read_names else "a second backward")
            self._refuse(
                Reason(
                    f"{reader} reads gradients or weights between backward and optimizer.step()",
                    "Leave out what does (clipping by the global norm, a GradScaler, logging of gradients, SAM)",
                )
            )
            return False
        if len(early) < len(readers):
            self.say(
                f"MemOpt: {len(early)} of {len(readers)} parameters are updated in backward; the others, or their gradients, "
                f"are read later or made in parts ({', '.join(sorted(set(readers) - early)[:3])}, ...)"
            )
        self._gradients = {
            name: TensorWeakRef(p.grad) for name, p in self.model.named_parameters() if name in early and p.grad is not None
        }
        return True

    def refuse_closure(self) -> None:
        """The optimizer's step has been given a closure. Raises UpdatesInBackwardError with "always"."""
        self._refuse(_CLOSURE)

    @property
    def early(self) -> set[str]:
        """Names of the parameters that are updated in backward."""
        return self.learnt - self.late

    def step_ended(self) -> None:
        self._marked = False
        self.updates.step_ended()

    def _final(
        self, observation: Observation | None, armed: bool, p: torch.Tensor
    ) -> contextlib.AbstractContextManager[None] | None:
        """See `EarlyUpdates.backward`."""
        name = self._names.get(id(p))
        if name is not None and not (is_plain(p) and p.grad is not None and is_plain(p.grad)):
            self.late.add(name)  # who reads a sparse gradient is not seen
            return None
        early = armed and name in self.learnt and name not in self.late
        if name is None or observation is None:
            return contextlib.nullcontext() if early else None
        if early or not armed:
            observation.final(p, name)
        return observation.updating(p) if early else None

    def _possible(self) -> bool:
        """Whether this very step may update early. Nothing of it is updated yet."""
        kinds = {p.device.type for p in self.model.parameters()}
        if torch.is_anomaly_enabled():
            return self._refuse(_ANOMALY)
        reasons = [*self._reasons(), *of_optimizers([self.updates.optimizer])]  # since the run began
        if reasons:
            return self._refuse(reasons[0])
        if any(torch.is_autocast_enabled(kind) for kind in kinds):
            return self._refuse(_AUTOCAST)
        before, self._gradients = self._gradients, {}
        for name, p in self.model.named_parameters() if before else ():
            if name in before and p.grad is not None and before[name]() is p.grad:
                self.late |= self.learnt
                return self._refuse(_ZEROED)
        return True

    def _refuse(self, reason: Reason) -> bool:
        if self.always:
            raise refusal(reason)
        if reason not in self._said:
            self._said.add(reason)
            self.say(f"MemOpt: parameters are updated after backward, as usual: {reason.what}. {reason.fix}.")
        return False
