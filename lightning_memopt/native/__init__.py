"""A small native allocator that counts every byte of torch's for the CPU: built on first use, cached, never unloaded.

`counter()` gives it once it is in place (`install`), None where it is not: no compiler, another allocator after it. Then
torch's profiler is asked instead (trace/memory.py).
"""

from lightning_memopt.native.counting import Counter, Window, counter, install

__all__ = ["Counter", "Window", "counter", "install"]
