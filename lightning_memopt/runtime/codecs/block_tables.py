"""How the bits of a block are shared among its 16 coefficients: tables that encoder and decoder have in common.

A block is 4 x 4 values in `16 * rate` bits: the step (`STEP_BITS`), the mode (`MODE_BITS`), and 16 integers. A *mode* says how
many bits each coefficient has. Each mode is for one shape of spectrum: bits are given one by one to the coefficient that would
need the coarsest step. The encoder chooses the mode under which the step is finest, so that no bit is spent on bit planes that
are zero. Group testing does this in ZFP; a mode has a fixed size, and needs no sequential pass over the bits.

Steps are numbered by the upper bits of a float32 (8 of exponent, 2 of mantissa): step 4 e + m is (1 + m / 4) 2^(e - 127).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

SIDE = 4
VALUES = SIDE * SIDE
STEP_BITS, MODE_BITS = 10, 4
HEADER_BITS = STEP_BITS + MODE_BITS
NOT_FINITE = (1 << STEP_BITS) - 1
"""Written instead of a step's number if a block has a NaN or an infinity. The block then has 2 bits a value (its kind)."""
LEAST_STEP = 4 * 27
"""Number of the smallest step, 2^-100: large enough that results do not depend on whether a device flushes denormals."""
MOST_BITS = 20
"""Maximum number of bits of a coefficient. Its product with the mantissa of a step is then exact in float32."""

# A shape says how many bits fewer than the mean a coefficient needs: for each row down, for each column across, for not being
# the mean, for not being in the first row, for not being in the first column. These were chosen one by one from 200 shapes,
# each to minimise the error on feature maps of a convolutional net and of a transformer, on noise and on random walks.
_SHAPES = (
    (0.0, 0.0, 0.0, 0.0, 0.0),
    (0.0, 0.0, 1.0, 0.0, 0.0),
    (0.4, 0.0, 1.0, 0.0, 0.0),
    (0.0, 0.8, 1.0, 0.0, 0.0),
    (1.2, 0.0, 1.0, 0.0, 0.0),
    (0.8, 0.4, 1.0, 0.0, 0.0),
    (1.2, 1.2, 1.0, 0.0, 0.0),
    (2.0, 1.6, 1.5, 0.0, 0.0),
    (0.0, 0.0, 0.0, 2.5, 0.0),
    (0.0, 0.0, 0.7, 1.5, 0.0),
    (0.0, 0.0, 0.7, 3.5, 0.0),
    (0.8, 0.0, 0.0, 7.0, 0.0),
    (0.0, 0.0, 0.0, 0.0, 1.5),
    (0.0, 0.8, 0.0, 0.0, 1.5),
    (0.0, 0.0, 1.5, 0.0, 2.5),
    (0.0, 0.8, 0.0, 0.0, 2.5),
)
MODES = len(_SHAPES)


@dataclass(frozen=True)
class Tables:
    """Tables of a rate, `[mode][coefficient]`, coefficients row by row.

    bits: the bits of the coefficient.
    at: the position in the block at which these bits begin.
    reach: a coefficient whose magnitude has step number L needs at least step L - reach.
    """

    bits: tuple[tuple[int, ...], ...]
    at: tuple[tuple[int, ...], ...]
    reach: tuple[tuple[int, ...], ...]


def _needed(shape: float, bits: int) -> float:
    """Log2 of the step for a coefficient of this log2 magnitude and these bits. One without bits needs twice its magnitude."""
    return shape - (bits - 1) if bits else shape + 1


def allocate(budget: int, shape: tuple[float, ...]) -> tuple[int, ...]:
    """Share `budget` bits among the coefficients of a spectrum of this shape. A coefficient first gets two bits, because a
    single bit would be a sign without a magnitude.
    """
    bits = [0] * len(shape)
    order = sorted(range(len(shape)), key=lambda i: (i // SIDE + i % SIDE, i))  # by total sequency
    while True:
        fits = [i for i in order if bits[i] < MOST_BITS and (2 if bits[i] == 0 else 1) <= budget]
        if not fits:
            return tuple(bits)
        worst = max(fits, key=lambda i: _needed(shape[i], bits[i]))
        budget -= 2 if bits[worst] == 0 else 1
        bits[worst] += 2 if bits[worst] == 0 else 1


@cache
def tables(rate: int, header: int = HEADER_BITS) -> Tables:
    """The tables for blocks of `rate` bits a value, whose first `header` bits belong to no coefficient."""
    every = []
    for down, across, rest, below, beside in _SHAPES:
        shape = []
        for i in range(VALUES):
            row, column = divmod(i, SIDE)
            shape.append(-(down * row + across * column + rest * (i > 0) + below * (row > 0) + beside * (column > 0)))
        every.append(allocate(VALUES * rate - header, tuple(shape)))
    at = tuple(tuple(header + sum(bits[:i]) for i in range(VALUES)) for bits in every)
    reach = tuple(tuple(4 * (b - 1) - 1 if b else -5 for b in bits) for bits in every)
    return Tables(tuple(every), at, reach)
