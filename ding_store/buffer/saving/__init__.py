"""save_data and load_data: our files, of this format and the first, and DequeBuffer's."""
