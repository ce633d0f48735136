"""Which parameters are updated early: an observed step decides.

The first observed step of an input signature updates nothing early. It notes when each gradient is final, and its graph shows
which ops read weights and gradients afterwards. A later step updates a parameter early if its gradient was made in one piece,
and if no op between that point and the optimizer's step read the parameter or its gradient. So a parameter is updated as usual
if gradients are clipped by the global norm, scaled by a GradScaler or logged, if a checkpointed region runs again with the
weight (D5), or if tied weights are used in nested backwards. A planned step whose forward deviates from its plan, by more than
a metric or a log, updates nothing early.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from lightning_memopt.config import MemOptConfig
from lightning_memopt.errors import UpdatesInBackwardError
from lightning_memopt.logs import Once
from lightning_memopt.ranks import wrapper_of
from lightning_memopt.record import is_plain
from lightning_memopt.runtime.early_updates import EarlyUpdates, Reason, of_optimizers, refusal
from lightning_memopt.runtime.reduced import reduced_by
from lightning_memopt.session.measure.peak_meter import in_compiled_code
from lightning_memopt.session.observe.costs import of_early_update
from lightning_memopt.session.observe.final_gradients import late
from lightning_memopt.session.observe.observation import Observation
from lightning_memopt.session.parts import Part
from lightning_memopt.session.ranks.processes import names_of, of_processes
from lightning_memopt.torch_private import gradient_of, local_tensor

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
_BEFORE_FORWARD = Reason(
    "run.last_backward() is entered before the forward",
    "Enter it after the forward, around backward() alone",
)
_SCHEDULED = Reason(
    "learning rates, or other options of the optimizer, are set between backward and optimizer.step()",
    "Set them before backward(), or after the step",
)
_LOADED = Reason("a checkpoint is loaded between backward and optimizer.step()", "Load it before backward(), or after the step")
_EVALUATED = Reason("the model is evaluated before optimizer.step()", "Evaluate after the step")
_STRANGER = Reason("an optimizer that this run was not given steps now", "Open a run with that optimizer")
_CALLED = Reason("the model is called again before optimizer.step()", "Call it after the step")
_TOUCHED = Reason(
    "weights or the optimizer's state are read or written between backward and optimizer.step()",
    "Do that before backward(), or after the step",
)
_GIVEN = Reason("the given plan does not say which parameters are updated early", "Leave plan out")
_OTHER_RANK = Reason("another rank does so", "Set optimizer_in_backward alike on all ranks, and read gradients on none")
_COMPILED = Reason("the optimizer's step is compiled, and rounds otherwise", "Step without torch.compile")


def wanted(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    config: MemOptConfig,
    reasons: Callable[[], Iterable[Reason]],
    say: Callable[[str], None],
) -> EarlyUpdating | None:
    """The early updates of a model; None where the config or something else forbids them. `reasons`: those of the adapter.

    Raises UpdatesInBackwardError with "always" and a reason.
    """
    if config.optimizer_in_backward == "never":
        return None
    always = config.optimizer_in_backward == "always"
    for reason in [*reasons(), *of_optimizers(optimizers), *of_processes(model, always)]:
        if always:
            raise refusal(reason)
        say(f"MemOpt: parameters are updated after backward, as usual: {reason.what}. {reason.fix}.")
        return None
    return EarlyUpdating(model, optimizers[0], always, say, reasons)


class EarlyUpdating(Part):
    """Early updates for one model and its one optimizer.

    always: raise where early updates are not possible; else `say` so.
    reasons: why the front forbids them; called again before every step.
    updates: steps single parameters in backward.
    learnt: names of the parameters that observed steps allow to update early.
    late: names of the parameters that must be updated as usual, whatever `learnt` says.
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
        self._marked = self._before_forward = self._keeps = self._clears = False
        self._in_closure = False  # of the optimizer's step: it reads gradients after a backward that runs inside of it
        self._say_once = Once(say)
        self._gradients: dict[str, TensorWeakRef] = {}
        self._read_names: set[str] = set()
        self._touched_names: set[str] = set()
        # since the last backward. They count if the optimizer's step follows; a loop that gives a step up may do anything
        self._read_now: set[str] = set()
        self._touched_now: set[str] = set()

    def adopt(self, names: Iterable[str]) -> None:
        """A plan was given: it updates the parameters with these names early."""
        self.learnt.update(names)
        if not self.learnt:
            self._refuse(_GIVEN)

    @contextlib.contextmanager
    def last_backward(self, observation: Observation | None, chosen: Collection[str]) -> Iterator[None]:
        """Around the last backward before the optimizer's step: of the parameters that may be updated early, those that are
        `chosen` by name are. Does nothing without `observation` and names.

        Raises UpdatesInBackwardError where no optimizer.step() followed an earlier backward that updated parameters, or where
        this one would add to gradients that it freed.
        """
        if self.updates.updated and not self.updates.over:
            count = len(self.updates.updated)
            self.updates.step_ended()
            raise UpdatesInBackwardError(
                f"No optimizer.step() came after run.last_backward(), which had updated {count} parameters already. Mark a "
                "backward only when the step is certain to follow it, or set optimizer_in_backward='never'."
            )
        self.updates.step_ended()  # of an earlier backward: code may have raised in the step, or have left it out
        self._settle(stepped=False)
        # a loop that clears gradients in another way than by `zero_grad` does so from the first step on, and is not checked
        self._clears = self._clears or (bool(self._gradients) and self.updates.cleared)
        if self._clears and self.updates.freed:
            count = len(self.updates.freed)
            self.updates.freed.clear()
            raise UpdatesInBackwardError(
                f"zero_grad() was not called since the last step, which freed {count} gradients in backward: this backward "
                "would add to them, so this step cannot be put right. Call optimizer.zero_grad() in every step, or set "
                "optimizer_in_backward='never'."
            )
        self._marked, self._before_forward = True, observation is None
        self._names = names_of(self.model)
        armed = bool(chosen) and self._possible()
        if observation is None and not armed:
            yield
            return
        wrapper = wrapper_of(self.model)
        self._keeps = wrapper is not None and wrapper.gradient_as_bucket_view
        reasons = of_processes(self.model, self.always)
        if reasons:  # they came since the run began (`Join`): gradients are not complete where hooks are called
            self._refuse(reasons[0])
            yield
            return
        buckets = None if wrapper is None else reduced_by(wrapper)
        reduced = None if observation is None else observation.reduced
        with self.updates.backward(
            partial(self._final, observation, chosen if armed else ()), self._read, self._touched, buckets, reduced
        ):
            yield
        if observation is not None:
            observation.copied_back()

    def shown(self, observation: Observation | None) -> tuple[set[str] | None, UpdatesInBackwardError | None]:
        """As `learn`, but returns the names of the parameters that can be updated early, and the error, unraised."""
        try:
            return (self.early if self.learn(observation) else None), None
        except UpdatesInBackwardError as error:
            return None, error

    def _read(self, p: torch.Tensor) -> None:
        """Code reads the gradient of `p` before the optimizer's step: later steps must not free it early."""
        name = self._names.get(id(p))
        if name is not None:
            self._read_now.add(name)

    def _touched(self, p: torch.Tensor, writes: bool) -> None:
        """Code reads the weight or the state of `p` before the optimizer's step, or `writes` there: later steps must not update
        it early. Raises UpdatesInBackwardError to who reads what this step has updated.
        """
        if id(p) in self.updates.updated:
            if not writes:
                raise self._too_late(*_TOUCHED)
            self.updates.written = True
        elif (name := self._names.get(id(p))) is not None:
            self._touched_now.add(name)

    def _settle(self, stepped: bool) -> None:
        """What was read and touched since the last backward counts if the optimizer `stepped`."""
        if stepped:
            self._read_names |= self._read_now
            self._touched_names |= self._touched_now
            self.late |= self._read_now | self._touched_now
        self._read_now.clear()
        self._touched_now.clear()

    def update_begins(self, optimizer: torch.optim.Optimizer, own: bool, closure: bool) -> None:
        """See `Part`. Raises UpdatesInBackwardError where options, gradients, weights or state have changed since parameters
        were updated early, because the usual update would use the new ones; and with "always" and a closure.
        """
        self.updates.stop_reading()  # the optimizer reads gradients
        if closure:
            self._in_closure = own
            self._refuse(_CLOSURE)
        if not own:
            return
        if not self.updates.updated and self.updates.touched():  # by no op: it is not known which ones
            self._touched_now.update(self._names.values())
        self._settle(stepped=True)
        if not self.updates.updated:
            return
        if self.updates.options_changed():
            what, fix = _SCHEDULED
        elif self.updates.loaded:
            what, fix = _LOADED
        elif self.updates.given():
            what, fix = "gradients are set between backward and optimizer.step()", "Set none"
        elif self.updates.touched():
            what, fix = _TOUCHED
        else:
            self.updates.over = True
            return
        raise self._too_late(what, fix)

    def evaluates(self, within_step: bool) -> None:
        """The model is called in evaluation. Raises UpdatesInBackwardError where parameters were updated before the step."""
        self._comes(_EVALUATED)

    def stranger_steps(self) -> None:
        """An optimizer that does not belong to the run steps. Raises as `evaluates` does."""
        self._comes(_STRANGER)

    def call_begins(self) -> None:
        """The model is called in training. Raises as `evaluates` does."""
        self._comes(_CALLED)
        self.updates.stop_reading()

    def _comes(self, event: Reason) -> None:
        """Something happens that must not happen between the update of a parameter in backward and the optimizer's step."""
        if self.updates.updated and not self.updates.over:
            raise self._too_late(*event)

    def _too_late(self, what: str, fix: str) -> UpdatesInBackwardError:
        """The error for a step whose early updates turn out to be wrong. The step is given up."""
        count = len(self.updates.updated)
        self.updates.step_ended()
        return UpdatesInBackwardError(
            f"{count} parameters were updated in backward already, but {what}: this step cannot be put right. {fix}, or set "
            "optimizer_in_backward='never'."
        )

    def learn(self, observation: Observation | None) -> bool:
        """The optimizer is about to step. Returns whether the observed step showed parameters that can be updated early.

        Raises UpdatesInBackwardError with "always" where none can; nothing has been updated then.
        """
        if observation is None or not observation.has_backward or self.updates.updated:
            return False
        if not self._marked:
            self._refuse(_UNMARKED)
            return False
        if self._before_forward:
            self._refuse(_BEFORE_FORWARD)
            return False
        graph, finals = observation.so_far(), observation.finals_seen()
        if not finals:
            return False
        reason: Reason | None = None
        if self.updates.options_changed():
            reason = _SCHEDULED
        elif in_compiled_code():
            reason = _COMPILED
        if reason is not None:
            self.late |= {f.name for f in finals}
            observation.finals = []
            self._refuse(reason)
            return False
        names = [f.name for f in finals]
        readers = {f.name: late(graph, f, observation.copies) for f in finals}
        seen = self._read_names | self._touched_names
        early = {n for n, reader in readers.items() if reader is None and names.count(n) == 1 and n not in seen}
        self.learnt |= early
        self.late |= set(names) - early
        observation.finals = [f for f, n in zip(observation.finals, names, strict=True) if n in self.early]
        if not early:
            other_reader = "Python code" if self._read_names else "a second backward"
            reader = next((r for r in readers.values() if r), None)
            if reader is None and self._touched_names and not self._read_names:
                self._refuse(_TOUCHED)
                return False
            self._refuse(
                Reason(
                    f"{reader or other_reader} reads gradients or weights between backward and optimizer.step()",
                    "Leave out the code that reads them (clipping by the global norm, a GradScaler, logging of gradients, SAM)",
                )
            )
            return False
        if len(early) < len(readers):
            self.say(
                f"MemOpt: {len(early)} of {len(readers)} parameters are updated in backward; the others, or their gradients, "
                f"are read later or made in parts ({', '.join(sorted(set(readers) - early)[:3])}, ...)"
            )
        self._gradients = {
            name: TensorWeakRef(gradient)
            for name, p in self.model.named_parameters()
            if name in early and (gradient := gradient_of(p)) is not None
        }
        return True

    def agreed(self, names: frozenset[str] | None) -> bool:
        """All ranks can update the parameters with these names early; None: this rank decides by itself. Returns whether any
        are left. Raises UpdatesInBackwardError with "always" where none is.
        """
        if names is not None:
            self.late |= self.learnt - names
            if not names:
                return self._refuse(_OTHER_RANK)
        return True

    def seconds(self, device: torch.device) -> float:
        """Seconds that each early update costs, by which a plan chooses; 0 if all updates that may be early should be."""
        return 0.0 if self.always else of_early_update(self.updates.optimizer, device)

    @property
    def early(self) -> set[str]:
        """Names of the parameters that are updated early."""
        return self.learnt - self.late

    def step_ended(self, planned: Sequence[object]) -> None:
        self._marked = False
        self._settle(self._in_closure)
        self._in_closure = False
        self.updates.step_ended()

    def close(self) -> None:
        self.updates.given_up()

    def _final(
        self, observation: Observation | None, chosen: Collection[str], p: torch.Tensor
    ) -> contextlib.AbstractContextManager[None] | None:
        """The gradient of `p` is final. Returns the context of its early update; None if it is not updated now."""
        name = self._names.get(id(p))
        if name is not None and (p.grad is None or not all(is_plain(local_tensor(t)) for t in (p, p.grad))):
            self.late.add(name)  # ops that read a sparse gradient are not seen
            return None
        early = name in chosen and name in self.learnt and name not in self.late
        if name is None or observation is None:
            return contextlib.nullcontext() if early else None
        if early or not chosen:
            observation.final(p, name, early, freed=not self._keeps)
        return observation.updating(p) if early else None

    def _possible(self) -> bool:
        """Whether this step may update early. It has not updated anything yet."""
        kinds = {p.device.type for p in self.model.parameters()}
        if torch.is_anomaly_enabled():
            return self._refuse(_ANOMALY)
        # they may have changed since the run began
        reasons = [*self._reasons(), *of_optimizers([self.updates.optimizer]), *of_processes(self.model, self.always)]
        if reasons:
            return self._refuse(reasons[0])
        if any(torch.is_autocast_enabled(kind) for kind in kinds):
            return self._refuse(_AUTOCAST)
        if self.updates.kept:  # from this step on gradients are there again
            return self._refuse(_ZEROED)
        before, self._gradients = self._gradients, {}
        for name, p in self.model.named_parameters() if before else ():
            gradient = gradient_of(p) if name in before else None
            if gradient is not None and before[name]() is gradient:
                self.late |= self.learnt
                return self._refuse(_ZEROED)
        return True

    def _refuse(self, reason: Reason) -> bool:
        if self.always:
            raise refusal(reason)
        self._say_once(f"MemOpt: parameters are updated after backward, as usual: {reason.what}. {reason.fix}.")
        return False
