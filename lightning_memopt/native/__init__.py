"""A small native allocator around torch's CPU allocator that counts every byte: built on first use, cached, never unloaded.

`install` installs it. From then on `counter()` returns it. It returns None if there is no compiler, or if another allocator was
installed later; then torch's profiler measures instead (trace/memory.py). `pool()` is the planned pool, which is part of the
same allocator. `cuda_allocator` has the planned pools of CUDA streams.
"""

from lightning_memopt.native.counting import Counter, Window, counter, counter_of, install
from lightning_memopt.native.cuda_pooling import CUDA_ALIGNMENT, CudaAllocator, StreamPool, cuda_allocator
from lightning_memopt.native.pooling import Counts, Lane, Pool, pool

__all__ = [
    "CUDA_ALIGNMENT",
    "Counter",
    "Counts",
    "CudaAllocator",
    "Lane",
    "Pool",
    "StreamPool",
    "Window",
    "counter",
    "counter_of",
    "cuda_allocator",
    "install",
    "pool",
]
