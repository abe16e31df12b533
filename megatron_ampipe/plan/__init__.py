"""Predicts how long a block takes in chunks; chooses the chunks and their order. No torch, no Megatron."""
