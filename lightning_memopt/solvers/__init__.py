"""Solvers: a graph and a budget in, a plan out. They run where torch is not installed, and read and write no files.

`planner` is the door for recomputation, `joint` for recomputation, offload and compression together. The rooms behind them:

    chain/      optimal checkpointing of a chain of stages, exact by dynamic programming
    recompute/  what to rebuild in a real step: minimum cuts, Echo, a step cut into a chain, a bound
    offload/    what to park, when its copies begin and end, and the policies of published papers
    joint/      all of them decided together, with a bound
    placement/  addresses: lifetimes and sizes of buffers to offsets in one arena

`frontier` holds the plans and chooses the one for a budget. `rollout` turns "these ops run again at this unpack" into lives;
every room may use it. No room imports `planner`; `offload` and `recompute` do not import each other, and only `joint` imports
both. `lint-imports` checks this.
"""
