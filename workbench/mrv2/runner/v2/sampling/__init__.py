"""The features of the V2 sampler, one state object each."""
