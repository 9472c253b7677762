"""Files of ``save_data`` and ``load_data``: the present format, the first format, and DequeBuffer's files."""
