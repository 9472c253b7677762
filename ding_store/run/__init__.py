"""A process's part in a run: its session, the members, the run's owner and its end. Knows no DI-engine."""
