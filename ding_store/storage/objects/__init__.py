"""Immutable objects of a run: files that the processes of a host map, spilled to a disk, and fetched by other hosts."""
