"""The lab: an engine in a notebook, and the exercises of the workshop."""
