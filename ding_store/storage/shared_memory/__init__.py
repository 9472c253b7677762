"""The host plane: payloads of one host in mmap files, and what comes over the wire kept there once for all."""
