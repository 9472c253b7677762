"""Figures of a run: their names and units, the run's history, plots, the exporter, and hints for slow runs."""
