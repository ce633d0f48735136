"""From a graph, a machine and a budget to a plan: the solve, what is said of it, and what is refused before anything runs.

Enter through `solved` (solving.py), `Foresight` (foresight.py), `refuse_sharded` and `refuse_hopeless` (refusals.py).
"""
