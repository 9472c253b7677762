"""What a table with a path writes, in which order, so that any kill is recoverable."""
