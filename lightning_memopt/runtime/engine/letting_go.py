"""What an observing engine lets go of after its forward, while autograd still holds tensors of the forward."""

from __future__ import annotations

from lightning_memopt.runtime.engine.holding import Claim
from lightning_memopt.runtime.engine.observing import ObservingEngine


def let_go(engine: ObservingEngine) -> None:
    """Drop the values that autograd has released and from which no rebuild of a saved tensor starts. Generated code, which is
    about to run, would free them at their last use.
    """
    with engine.lock:
        versions = engine.tape.versions
        wanted = [version for version in versions.values() if version.holding.handles > 0]
        needed = {version.id for version in wanted}
        while wanted:
            version = wanted.pop()
            reads = (*(version.call.reads if version.call is not None else ()), version.next)
            sources = [versions[id] for id in reads if id is not None and id not in needed]
            needed.update(source.id for source in sources)
            wanted += sources
        for version in versions.values():
            if version.id not in needed and version.holding.claim is Claim.NONE:
                version.holding.drop()


def step_ended(engine: ObservingEngine) -> None:
    """The step is over, or its next forward begins. If autograd still holds tensors of this forward, drop the bytes that it
    does not hold and from which nothing must be rebuilt, now and when it releases more. Otherwise the tape frees all of them.
    """
    with engine.lock:
        versions = list(engine.tape.versions.values())
        if not any([version.holding.handles for version in versions]):
            return
        engine.needed = engine.surplus.needed()
        for version in versions:
            holding = version.holding
            free = holding.claim is Claim.NONE and holding.handles == 0 and version.id not in engine.needed
            if free and holding.value is not None:
                engine.lose(version)
