"""SLURM job scripts: one template for one node, many nodes and containers. Called by ``ampipe sbatch``."""
