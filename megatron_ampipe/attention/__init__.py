"""Core attention of a chunk: kernels, attention in pieces, ring attention. Imports torch, and no Megatron."""
