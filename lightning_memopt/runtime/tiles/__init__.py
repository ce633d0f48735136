"""Loss heads in tiles: logits, and what a loss makes of them, are computed tile by tile, and never whole.

    hollow.py    tensors without bytes, and the recipe by which the bytes can be made
    recipes.py   the ops whose results can be computed for some rows, or for some columns
    exits.py     the ops that read tiles and make something small: a loss, a gradient
    mode.py      the dispatch mode that runs a step in tiles, or proves that tiles give the same bits

A *row* is what belongs to one token: all its classes. A *column* is one class of all tokens.
"""

from lightning_memopt.runtime.tiles.mode import Proof, Sizes, TileMode

__all__ = ["Proof", "Sizes", "TileMode"]
