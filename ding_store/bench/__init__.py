"""``ding-store bench``: figures beside their bound and beside peers, all taken in one run."""
