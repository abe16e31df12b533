"""Core attention of a chunk: kernels, attention in pieces, and in the steps of a ring. Knows torch alone."""
