"""Elementwise and norm kernels between the matrix products of a layer."""

from mrv2_kernels.layers.activation import silu_and_mul
from mrv2_kernels.layers.embedding import embed_norm
from mrv2_kernels.layers.norm import rms_norm
from mrv2_kernels.layers.rope import qk_norm_rope, rotary_embedding

__all__ = ["embed_norm", "qk_norm_rope", "rms_norm", "rotary_embedding", "silu_and_mul"]
