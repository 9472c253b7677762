"""A private redis-server per run: its program, its supervisor, and the calls of its clients."""
