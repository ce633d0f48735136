"""The form in which a tensor is parked: in a tier, encoded on the device, or encoded in a tier.

A form is written `TIER`, `CODEC` or `CODEC@TIER`. A plan knows of a codec how many bytes it leaves (`Life.parked_nbytes`) and
whether it gives back the same bits (`EXACT`); the runtime knows the rest.
"""

from __future__ import annotations

TIERS = ("host", "disk")
LOSSY = ("block4", "block6", "block8", "block10", "block12", "block14", "block16", "int8", "int4")
"""Codecs that a user may ask for by name, and that change gradients."""
EXACT = frozenset({"", "bools"})
"""Codecs that give back the same bits. Tensors from other codecs may be read by autograd, not by a rebuild."""
LOSSLESS = EXACT | {"positive"}
"""Codecs that change no gradient, where a plan has them for what readers cannot tell apart."""


def codec_of(form: str) -> str:
    """The codec of a form, "" where the bytes are as they were."""
    return "" if form in TIERS else form.partition("@")[0]


def tier_of(form: str) -> str:
    """The tier of a form, "" where it stays on the device."""
    return form if form in TIERS else form.partition("@")[2]


def is_form(form: str) -> bool:
    """Whether the text is well formed; a codec may be unknown here."""
    codec, at, tier = form.partition("@")
    return bool(codec) and (tier in TIERS and codec not in TIERS if at else True)
