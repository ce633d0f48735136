"""Every model that a benchmark trains or plans. Those of the demo are in examples/.

registry       the fifteen models of most commands, by name; those of convolutional and recurrent (Echo's four) among them
full_size      Echo's four models at the source's sizes
gpu            models of the size that people train on one GPU
zoo/           tiny architectures of `transformers`
papers/        networks of papers as graphs, without torch
"""
