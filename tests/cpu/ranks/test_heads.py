"""What ranks decide together of their loss heads."""

from __future__ import annotations

from lightning_memopt.session.ranks.shared_heads import KnownHead, together


def test_what_ranks_know_together() -> None:
    def of(*known: KnownHead, rank: int = 0) -> KnownHead | None:
        return together([k.fields() for k in known], rank, [4, 5])

    a = KnownHead("prove", again=True)
    b = KnownHead("prove", ways=2, needed=True)
    for rank in range(2):
        both = of(a, b, rank=rank)
        assert both is not None and (both.again, both.needed) == (True, True)
    fewer = of(b, KnownHead("prove", ways=1))
    assert fewer is not None and (fewer.again, fewer.ways) == (False, 1)
    assert of(a, KnownHead("look")) is None and of(a) == a
    assert together([a.fields(), {}], 0, [4, 5]) is None
    cannot = of(a, KnownHead("look", why="it cannot"))
    assert cannot is not None and cannot.why == "on rank 5, it cannot"
    costs = of(KnownHead("tiled", costs=((0, 1.0), (0, 2.0))), KnownHead("tiled", costs=((1, 9.0), (0, 4.0))))
    assert costs is not None and costs.best == 1 and costs.costs == ((1, 9.0), (0, 4.0))
