"""Tiny configurations of `transformers` architectures, built from scratch with random weights: no downloads."""

from benchmarks.zoo import text, media  # isort: skip
from benchmarks.zoo.base import ZOO, Architecture

__all__ = ["ZOO", "Architecture", "media", "text"]
