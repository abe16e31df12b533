"""Core attention of a chunk: kernels, attention in pieces, ring attention. Depends only on torch."""
