"""Kernels of speculative decoding: row expansion, verification, drafters."""
