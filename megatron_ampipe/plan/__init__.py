"""Predicts the time of a block; chooses its chunks and the order of stages. No torch, no Megatron."""
