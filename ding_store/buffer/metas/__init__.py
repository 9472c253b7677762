"""Metas of rows, as JSON in files, and the groups of rows that they make."""
