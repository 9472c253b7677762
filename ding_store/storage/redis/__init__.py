"""A store in a Redis server."""
