"""The config type 'store': the buffer of DI-engine's config pipeline."""
