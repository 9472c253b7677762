"""A writer's and a reader's side of exactly-once, the same for every backend."""
