"""What ranks decide together of their loss heads."""

from __future__ import annotations

from lightning_memopt.session.ranks.shared_heads import Known, together


def test_what_ranks_know_together() -> None:
    def of(*known: Known, rank: int = 0) -> Known | None:
        return together([k.fields() for k in known], rank, [4, 5])

    a = Known("prove", head=("head", 10, 4), rows=(8, 4, 2), columns=(5, 2), ops=("mm", "log"))
    b = Known("prove", head=("head", 10, 4), rows=(4, 2), columns=(5,), ops=("log", "mm"), needed=True)
    for rank in range(2):
        both = of(a, b, rank=rank)
        assert both is not None and (both.rows, both.columns, both.needed) == ((4, 2), (5,), True)
    assert of(a, Known("look")) is None and of(a) == a
    assert together([a.fields(), {}], 0, [4, 5]) is None
    cannot = of(a, Known("look", why="it cannot"))
    assert cannot is not None and cannot.why == "on rank 5, it cannot"
    costs = of(Known("tiled", whole=(0, 1.0), tiled=(0, 2.0)), Known("tiled", whole=(1, 9.0), tiled=(0, 4.0)))
    assert costs is not None and costs.pays and (costs.whole, costs.tiled) == ((1, 9.0), (0, 4.0))
