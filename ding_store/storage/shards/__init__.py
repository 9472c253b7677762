"""Several servers for one run: each stream, value and counter has one of them."""
