"""Structured output: what a request's text may be, as masks over the vocabulary."""
