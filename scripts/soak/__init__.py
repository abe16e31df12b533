"""The soak test; see ``scripts/soak.sh``."""
