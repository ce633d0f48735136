"""The form in which a tensor is parked: in a tier, encoded on the device, or encoded in a tier.

A form is written `TIER`, `CODEC` or `CODEC@TIER`. A plan knows two things about a codec: how many bytes the encoded tensor
takes (`Life.parked_nbytes`), and whether decoding gives back the same bits (`EXACT`). The runtime knows the rest.
"""

from __future__ import annotations

TIERS = ("host", "disk")
LOSSY = ("block4", "block6", "block8", "block10", "block12", "block14", "block16", "int8", "int4")
"""Codecs that change gradients. A user must ask for them by name."""
EXACT = frozenset({"", "bools"})
"""Codecs that give back the same bits. A tensor that was decoded by another codec may be read by autograd, but not by a
rebuild.
"""
LOSSLESS = EXACT | {"positive"}
"""Codecs that change no gradient, because plans use them only where backward does not need what they lose."""


def codec_of(form: str) -> str:
    """The codec of a form; "" if the bytes are not encoded."""
    return "" if form in TIERS else form.partition("@")[0]


def tier_of(form: str) -> str:
    """The tier of a form; "" if the bytes stay on the device."""
    return form if form in TIERS else form.partition("@")[2]


def is_form(form: str) -> bool:
    """Whether the text is a well-formed form. The codec need not be a known one."""
    codec, at, tier = form.partition("@")
    return bool(codec) and (tier in TIERS and codec not in TIERS if at else True)
