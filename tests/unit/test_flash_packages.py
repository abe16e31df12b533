"""The kernels of flash-attn, flash-attn-3 and flash-attn-4, computed by stand-ins with their interfaces.

Their results on a GPU are compared in tests/gpu by the same functions.
"""

import functools
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch.utils.checkpoint import checkpoint

from megatron_ampipe import compat
from megatron_ampipe.attention.kernels import DROPOUT, FLASH_KERNELS, LATENT, SINKS, WINDOW
from tests import attention_checks, flash_attn_standin, reference_pieces
from tests.attention_checks import DOCUMENTS, DROPPED_DOCUMENTS, LATENT_SIZES, ODD, ONE_DOCUMENT, On, Sizes

ROOT = Path(__file__).resolve().parents[2]
ON_CPU = On("cpu", torch.float64, 1e-9)


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    compat.flash_attention_problem.cache_clear()
    flash_attn_standin.install(monkeypatch)
    yield
    compat.flash_attention_problem.cache_clear()


def with_feature(feature: str) -> list[str]:
    return [kernel for kernel in flash_attn_standin.KERNELS if feature in FLASH_KERNELS[kernel]]


FEATURES: list[tuple[str, Sizes, dict[str, Any]]] = [
    *((kernel, ODD, {}) for kernel in flash_attn_standin.KERNELS),
    *((kernel, ODD, {"documents": DOCUMENTS}) for kernel in flash_attn_standin.KERNELS),
    *(
        (kernel, LATENT_SIZES, options)
        for kernel in with_feature(LATENT)
        for options in ({}, {"documents": ONE_DOCUMENT})
    ),
    *((kernel, ODD, {"window": 9}) for kernel in with_feature(WINDOW)),
    *((kernel, ODD, {"window": 9, "documents": DOCUMENTS}) for kernel in with_feature(WINDOW)),
    *((kernel, ODD, {"sinks": torch.linspace(-1, 2, 8)}) for kernel in with_feature(SINKS)),
    *(
        (kernel, ODD, {"sinks": torch.linspace(-1, 2, 8), "window": 9, "documents": DOCUMENTS})
        for kernel in with_feature(SINKS)
    ),
]


@pytest.mark.parametrize(("kernel", "sizes", "options"), FEATURES)
def test_outputs_and_all_gradients(kernel: str, sizes: Sizes, options: dict[str, Any]) -> None:
    assert attention_checks.compare(kernel, sizes, ON_CPU, **options) == {}
    if options:
        last = "flash_attn_varlen_func" if "documents" in options else "flash_attn_func"
        assert flash_attn_standin.calls == [last]


@pytest.mark.parametrize("kernel", flash_attn_standin.KERNELS)
@pytest.mark.parametrize("causal", [True, False])
def test_pieces_and_sums(kernel: str, causal: bool) -> None:
    """Without a mask as in a ring; a causal mask with more keys than rows is aligned to the bottom right."""
    assert attention_checks.compare_pieces(kernel, ODD, ON_CPU, causal=causal) == {}
    assert attention_checks.compare_sums(kernel, ODD, ON_CPU) == {}
    assert not any("func" in called for called in flash_attn_standin.calls)


@pytest.mark.parametrize("kernel", with_feature(DROPOUT)[-1:])
@pytest.mark.parametrize("options", [{}, {"documents": DROPPED_DOCUMENTS}, {"window": 9}])
def test_the_backward_drops_the_same_weights(kernel: str, options: dict[str, Any]) -> None:
    assert attention_checks.compare_dropout(kernel, ON_CPU, **options) == {}


def test_a_backward_that_draws_other_numbers_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of dropout fails if the random state of the forward is lost."""
    exact = reference_pieces.exact

    def forgetful(*tensors: torch.Tensor, **scoring: Any) -> torch.Tensor:
        return checkpoint(
            functools.partial(exact, **scoring), *tensors, use_reentrant=False, preserve_rng_state=False
        )

    monkeypatch.setattr(reference_pieces, "exact", forgetful)
    wrong = attention_checks.compare_dropout("flash-attn-2", ON_CPU)
    assert wrong.keys() == {"query", "key", "value"}


@pytest.mark.parametrize("kernel", flash_attn_standin.KERNELS)
def test_every_function_and_argument_that_is_used_is_checked(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package without a function, or a function without an argument, is named, and not used."""
    assert compat.flash_attention_problem(kernel) is None
    (package,) = (each for each in compat.FLASH_ATTENTION if each.kernel == kernel)
    module = sys.modules[package.module]
    for name, arguments in package.arguments.items():
        if "." in name:
            continue
        function = getattr(module, name)
        others = [p for p in inspect.signature(function).parameters.values() if p.name != arguments[-1]]

        def older() -> None:
            raise AssertionError

        older.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        for substitute, expected in (
            (older, f"{package.name}: {name} has no argument {arguments[-1]}"),
            (None, f"{package.name} has no function {name}"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(module, name, substitute)
                compat.flash_attention_problem.cache_clear()
                assert compat.flash_attention_problem(kernel) == expected
    if kernel == "flash-attn-3":
        monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace())
        compat.flash_attention_problem.cache_clear()
        assert compat.flash_attention_problem(kernel) == "flash-attn-3 has no function flash_attn_3.fwd"


def test_the_extras_install_what_is_used() -> None:
    requirements = re.findall(r'^ +"(flash-attn[-4]*)": \["(.*)"\],$', (ROOT / "setup.py").read_text(), re.M)
    installable = {
        p.name: f"{p.name}>={p.oldest}" for p in compat.FLASH_ATTENTION if p.name != "flash-attn-3"
    }
    assert dict(requirements) == installable
    for package in compat.FLASH_ATTENTION:
        assert installable.get(package.name, "hopper") in package.remedy


def test_absent_old_and_broken_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for name in ("flash_attn", "flash_attn_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)

    def problem(kernel: str) -> str | None:
        compat.flash_attention_problem.cache_clear()
        return compat.flash_attention_problem(kernel)

    assert {problem(kernel) for kernel in flash_attn_standin.KERNELS} == {"not installed"}
    assert problem("cudnn") is None, "it needs no package"
    # FlashAttention 4 lies in the folder of the other one, which is not there.
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "interface.py").write_text("raise TypeError('no such\\nlayout')")
    assert problem("flash-attn-2") == "not installed"
    assert problem("flash-attn-4") == "flash-attn-4 cannot be imported (TypeError: no such)"
    (tmp_path / "flash_attn_interface.py").write_text("import flash_attn_3._C")
    missing = problem("flash-attn-3")
    assert missing is not None and "ModuleNotFoundError: No module named 'flash_attn_3'" in missing
    (tmp_path / "flash_attn" / "flash_attn_interface.py").write_text("")
    monkeypatch.setattr(compat, "found_version", lambda _: Version("2.6.3"))
    assert problem("flash-attn-2") == "flash-attn 2.6.3 is older than 2.7"
