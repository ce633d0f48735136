"""Accelerate: `prepare` in explicit calls and under the launcher, in the words of scripts as people write them."""
