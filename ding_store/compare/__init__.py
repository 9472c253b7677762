"""``ding-store compare``: the jobs of the published requirements on the stock buffer and on the store, side by side."""
