"""Several learners of one model."""
