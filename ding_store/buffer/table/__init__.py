"""Rows in memory-mapped columns: which row is where, reads, and changes of shape."""
