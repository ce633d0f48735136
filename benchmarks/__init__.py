"""What the claims of this project were measured with; `python -m benchmarks` lists the commands and runs them.

    recompute/   commands: the solvers of recomputation, and their plans executed
    offload/     commands: offload and compression, exact and lossy
    papers/      commands: what published papers report, repeated
    batch/       commands: which batch fits, and how fast it trains
    cost/        commands: what recording and counting cost
    gpu/         the command for a GPU
    robustness/  commands: does every loop, model and random program stay exact?
    models/      every model that a command trains
    lib/         what commands share
    results/     what they wrote

A command is a module of one of these folders with `if __name__ == "__main__"`; its name is that of the module.
"""
