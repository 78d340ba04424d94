"""Drafters with weights: the passes that follow the target's step on the device."""
