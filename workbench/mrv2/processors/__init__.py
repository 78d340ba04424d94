"""Logits processors that come with the package, as examples of how to write one."""

from __future__ import annotations

from mrv2.processors.frequency_cap import FrequencyCap
from mrv2.processors.green_list import GreenList

__all__ = ["FrequencyCap", "GreenList"]
