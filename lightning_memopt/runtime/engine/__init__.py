"""The eager engine: it carries out plans and makes no decisions of its own.

How its files depend on each other, from the bottom up:

    holding        what the engine holds of a storage version: the states, and the methods between them
    naming         names of tensors for messages
    handles        the objects that autograd gets instead of saved tensors
    rebuild        runs recorded calls again
    native         connects the C++ engine, where that can be built
    program        a plan, indexed by what the engine meets at run time
    templates, learned    what the engine remembers of earlier forwards under the plan
    cursor, turns, guard  how far a step has come in the plan, and what stays in memory after a deviation
    checks, starts        checksums; writes, after the forward, to memory from which rebuilds start
    parking        parked tensors
    planned_holdings      how long bytes are held under a plan
    rejoining, placing, matching   compare a forward with the plan
    base           the parts that both engines share; observing, planned: the two engines
"""
