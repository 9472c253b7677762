"""A store in the memory of one process, and the reference for every other server."""
