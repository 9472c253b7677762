"""A private redis-server per run: which program, its supervisor, and how to talk to it."""
