"""``python -m benchmarks``: figures with their bounds and with peers, all measured in one run."""
