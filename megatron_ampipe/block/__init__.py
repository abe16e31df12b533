"""What describes a block: flags, parallel layout, layers of hybrid models, Megatron's arguments.

Imports neither torch nor Megatron."""
