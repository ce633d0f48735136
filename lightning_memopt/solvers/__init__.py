"""Solvers: a graph and a budget in, a plan out. They run without torch, and neither read nor write files.

Enter through `planner` for recomputation, or through `joint` for recomputation, offload and compression together. The packages
behind them:

    chain/      optimal checkpointing of a chain of stages, exact by dynamic programming
    recompute/  what to rebuild in a real step: minimum cuts, Echo, a step cut into a chain, a bound
    offload/    what to park, when copies begin and end, and the policies of published papers
    joint/      all of these decided together, with a bound
    ordering/   another order of the ops of a step, with a lower peak
    placement/  addresses: from lifetimes and sizes of buffers to offsets in one arena

`frontier` holds the plans and chooses the one for a budget. `rollout` turns "these ops run again at this unpack" into lives;
every package here may use it. None imports `planner`; `offload` and `recompute` do not import each other, and only `joint`
imports both. `lint-imports` checks this.
"""
