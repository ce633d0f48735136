"""`memopt bench`: a training step under every method that saves memory, measured side by side in one run.

Input: a function that returns (model, optimizer, step), or a model of the zoo. Output: bench.json, bench.md, bench.svg and
bench.png. Each row is one method within one budget: its peak by the native counter, extra FLOPs, paired ratios of step time,
and whether loss, gradients and buffers are those of the unmodified step, bit by bit. The row of a method that fails or refuses
has the reason. `command` is the entry.
"""
