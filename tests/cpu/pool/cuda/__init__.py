"""The planned pools of CUDA streams: the real sources, over a CUDA runtime that needs no device (fake_cuda.cpp)."""
