"""Samplers, limits of use and age, the rate limiter and prefetching: which rows to sample, and when."""
