"""DI-engine's view of the replay: views, equivalents of its buffer middleware, and the config type 'store'."""
