"""What a block is and how a user says it should run. Pure: imports neither torch nor Megatron."""
