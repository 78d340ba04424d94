"""What differs from model to model: configs, weights, layers, families and their state."""
