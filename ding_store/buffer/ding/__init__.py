"""DI-engine's view of the replay: list sampling, index and storage views, equivalents of its buffer middleware."""
