"""Sequences of rows: groups, the possible starts of sequences, and time-major batches."""
