"""Runs of rows: groups, where sequences may start, and time-major batches."""
