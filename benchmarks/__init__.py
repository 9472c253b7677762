"""``python -m benchmarks``: figures beside their bound and beside peers, all taken in one run."""
