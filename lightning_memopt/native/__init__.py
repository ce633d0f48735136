"""A small native allocator around torch's CPU allocator that counts every byte: built on first use, cached, never unloaded.

`install` puts it in place. `counter()` returns it then, and None if it is not in place: there is no compiler, or another
allocator was installed later. torch's profiler measures instead in that case (trace/memory.py). `pool()` is the planned pool,
which is a part of the same allocator. `cuda_allocator` has the planned pools of CUDA streams.
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
