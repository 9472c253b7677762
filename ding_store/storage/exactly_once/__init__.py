"""Exactly-once delivery for every backend: the writer sends lost entries again, and the reader skips duplicates."""
