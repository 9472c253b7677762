"""``ding-store compare``: the jobs of the published requirements on DI-engine's own buffer and on the store."""
