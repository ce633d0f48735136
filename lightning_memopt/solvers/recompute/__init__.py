"""What to rebuild in a real step: `mincut` (op by op, exact for a price of a byte), `bound` (no plan within a budget is
faster), `echo` and its `footprint` (Zheng et al., ISCA 2020), `stages` and `stage_chain` (a step cut into a chain for `chain`,
after Beaumont et al., 2019), `local_search` (better plans from given ones, a tensor at a time), and `baselines`, the policies
that frameworks ship.

A new solver that only rebuilds is a module of this package: a graph in, lives out, made by a `Rollout`; `planner` then takes
its plans into the frontier.
"""
