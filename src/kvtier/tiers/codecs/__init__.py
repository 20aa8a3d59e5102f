"""Stored forms of blocks: codecs, which make them smaller, and encryption."""

from __future__ import annotations

from kvtier.tiers.codecs.codec import Codec
from kvtier.tiers.codecs.frame import BlockCoder, CodecCounts
from kvtier.tiers.codecs.opening import check_coding, make_coder

__all__ = ["BlockCoder", "Codec", "CodecCounts", "check_coding", "make_coder"]
