"""The points that a better plan is looked for at."""

from __future__ import annotations

from lightning_memopt.solvers.joint.polish import _near


def test_few_points_are_all_tried_and_of_many_the_ends_and_the_neighbours() -> None:
    assert list(_near(range(0, 60, 10), 33)) == [0, 10, 20, 30, 40, 50]
    assert list(_near(range(0, 100, 10), 33)) == [0, 20, 30, 40, 90]
    assert list(_near(range(0, 100, 10), 3)) == [0, 10, 90] and list(_near(range(0, 100, 10), 88)) == [0, 80, 90]
