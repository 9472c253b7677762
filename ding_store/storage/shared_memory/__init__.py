"""The shared-memory transport: payloads in memory-mapped files of one host, and downloads that its processes share."""
