"""Files on disk: text read within limits, files written whole or not at all, digests of content."""
