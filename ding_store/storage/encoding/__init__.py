"""Arrays as bytes: format, checksum, compression, and parts of what is too large for one entry."""
