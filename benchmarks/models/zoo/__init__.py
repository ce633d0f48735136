"""Tiny configurations of `transformers` architectures, built from scratch with random weights: no downloads."""

from benchmarks.models.zoo import text, media  # isort: skip
from benchmarks.models.zoo.base import ZOO, Architecture

__all__ = ["ZOO", "Architecture", "media", "text"]
