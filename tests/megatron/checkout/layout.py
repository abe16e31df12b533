"""Creates folders that look like a Megatron-LM checkout, for each supported version."""

import shutil
from pathlib import Path

from tests.megatrons import megatron_of

SCRIPTS = ("pretrain_gpt.py", "pretrain_hybrid.py")


def lay_out(folder: Path, version: str, *, copy: bool = False) -> Path:
    """Create a checkout in ``folder``.

    Args:
        folder: The folder to create.
        version: Major and minor version, such as ``"0.18"``.
        copy: Copy ``megatron``, so that it can be changed, instead of a link.

    Returns:
        Its training script.
    """
    folder.mkdir()
    if copy:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(megatron_of(version), folder / "megatron", ignore=ignored)
    else:
        (folder / "megatron").symlink_to(megatron_of(version))
    for name in SCRIPTS:
        shutil.copy(Path(__file__).parent / name, folder)
    return folder / SCRIPTS[0]
