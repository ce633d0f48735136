"""Does it stay exact? Loops as people write them, architectures of `transformers`, random programs, the tests of Lightning and
Accelerate, and recorded cases that no change of the code may change.
"""
