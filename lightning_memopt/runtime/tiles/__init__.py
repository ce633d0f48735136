"""Loss heads in tiles: logits, and what a loss makes of them, are computed tile by tile, and never whole.

    hollow.py    tensors without bytes, and the recipe by which the bytes can be made
    recipes.py   what recipes are: views of their results, tiles of rows and of columns
    kinds.py     the kinds of ops that have recipes, and how each makes a tile
    rules.py     which op is of which kind
    exits.py     the ops that read tiles and make something small: a loss, a metric, a gradient
    proof.py     which sizes of tiles give the bits of whole ops
    mode.py      the dispatch mode that runs a step in tiles, or proves them

A *row* is what belongs to one token: all its classes. A *column* is one class of all tokens.
"""

from lightning_memopt.runtime.tiles.mode import TileMode
from lightning_memopt.runtime.tiles.proof import HELD, Proof, Sizes

__all__ = ["HELD", "Proof", "Sizes", "TileMode"]
