"""The processes of a run: one per role, each running the user's own script."""
