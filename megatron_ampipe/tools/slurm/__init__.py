"""SLURM job scripts: one template for one node, several nodes and containers. Called by ``ampipe sbatch``."""
