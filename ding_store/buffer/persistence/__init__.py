"""Files of a table with a path: what is written and in which order, so that a restart recovers from any kill."""
