"""Training of draft heads: the model's own dialogues, a one-layer head that predicts ahead, its figures."""
