"""The settings of a run and the layers of hybrid models. Imports neither torch nor Megatron."""
