"""Imports the class that a flag names as ``package.module:Class``. Used for routers and wires."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from megatron_ampipe.errors import BadInput


def import_class(flag: str, name: str, *, path: str, fits: Callable[[type], bool], kind: str) -> object:
    """What a class path names. Imports its module.

    Args:
        flag: Whose value it is.
        name: The value as the user wrote it.
        path: ``package.module:Class``.
        fits: Whether a class could be meant, for the message.
        kind: What such classes are called.

    Raises:
        BadInput: there is no such module or class.
    """
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        remedy = f"Install {missing!r}, which the module imports."
        if module_name == missing or module_name.startswith(f"{missing}."):
            remedy = "Check the name, and that its folder is in PYTHONPATH on every rank."
        raise BadInput(flag, name, rule=f"no module named {missing!r}", remedy=remedy) from error
    except Exception as error:
        raise BadInput(
            flag,
            name,
            rule=f"importing {module_name} fails: {type(error).__name__}: {error}".rstrip("."),
            remedy=f"Try python -c 'import {module_name}'.",
        ) from error
    found: object = getattr(module, class_name, None)
    if found is None:
        classes = sorted(
            key for key, value in vars(module).items() if isinstance(value, type) and fits(value)
        )
        remedy = f"{kind} in it: {', '.join(classes)}." if classes else "Check the name of the class."
        raise BadInput(flag, name, rule=f"{module_name} has no class {class_name!r}", remedy=remedy)
    return found
