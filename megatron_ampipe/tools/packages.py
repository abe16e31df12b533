"""The packages that only the ``ampipe`` command needs, not a training: the extra ``tools`` of setup.py."""

from __future__ import annotations

from importlib.util import find_spec

from megatron_ampipe.errors import EnvironmentMissing

PACKAGES = ("jinja2", "matplotlib", "scipy", "tqdm")
"""Their modules."""
INSTALL = "pip install 'megatron-ampipe[tools]'"


def require(*modules: str) -> None:
    """Raise :class:`EnvironmentMissing` if one of :data:`PACKAGES` is not installed. Imports nothing."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise EnvironmentMissing(f"{' and '.join(missing)}: not installed. Run: {INSTALL}")
