"""Loops that numba compiles if it is installed."""
