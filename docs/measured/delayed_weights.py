"""Weight gradients apart through Transformer Engine's own Python code of several releases, on a CPU.

Its layers ``Linear``, ``LayerNormLinear`` and ``GroupedLinear`` run as they are; only its kernels are torch's
here, and its checks for a GPU are left out. Of each layer, in two chunks: gradients of inputs and parameters
as the layer computes them, and as ``layers/linear_layers.py`` has it delay them; with and without bias, with
and without ``main_grad``. What kernels have not written yet is NaN.

    python docs/measured/delayed_weights.py CLONE_OF_TRANSFORMER_ENGINE v2.3 v2.9 v2.18
"""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
import tempfile
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from packaging.version import Version
from torch import Tensor

from megatron_ampipe.launch import host

host.install()

from megatron_ampipe.layers.linear_layers import delay_wgrad, linears_of  # noqa: E402
from megatron_ampipe.runtime.segment import (  # noqa: E402
    BlockParameters,
    GradientSums,
    Segment,
    WeightProducts,
)

LEFT_OUT = {
    "module/base.py": (
        ("assert inp.is_cuda, ", "assert True, "),
        ("if not inp.is_cuda:", "if False:"),
    ),
    "constants.py": (("assert {m.name for m in DType} == set(tex.DType.__members__), (", "assert True, ("),),
}
"""By file: checks for a GPU, and for the compiled part."""
NUM_CHUNKS = 2


def generic_gemm(
    a: Tensor, turns_a: bool, b: Tensor, turns_b: bool, out: Tensor | None, *rest: Any, **_: Any
) -> tuple[Tensor, Tensor | None, None, None]:
    """The product of ``b`` and ``a``, each perhaps transposed; into ``out``, or added there."""
    bias, is_backward, accumulates = rest[2], rest[6], rest[9]
    rows, columns = b.reshape(-1, b.shape[-1]), a.reshape(-1, a.shape[-1])
    found = (rows.t() if turns_b else rows) @ (columns.t() if turns_a else columns)
    if not turns_b:
        found = found.view(*b.shape[:-1], -1)
    of_bias = None
    if bias is not None and is_backward:
        of_bias = rows.sum(0)
    elif bias is not None:
        found = found + bias
    if out is not None:
        found = out.add_(found) if accumulates else out.copy_(found)
    return found, of_bias, None, None


def te_general_grouped_gemm(
    a: list[Tensor], turns_a: bool, b: list[Tensor], turns_b: bool, outs: list[Tensor], *rest: Any
) -> list[Tensor]:
    """The same for each expert; with one output, its rows are those of all experts."""
    biases, is_single, is_backward, accumulates = rest[2], rest[4], rest[6], rest[9]
    found = []
    for of_a, of_b, bias in zip(a, b, biases, strict=True):
        product = (of_b.t() if turns_b else of_b) @ (of_a.t() if turns_a else of_a)
        if is_backward and bias.numel():
            bias.copy_(of_b.sum(0))
        found.append(product + bias if bias.numel() and not is_backward else product)
    for out, product in zip(outs, [torch.cat(found)] if is_single else found, strict=True):
        out.add_(product) if accumulates else out.copy_(product)
    return biases


def rmsnorm_fwd(rows: Tensor, weight: Tensor, eps: float, *_: Any) -> tuple[Tensor, None, Tensor]:
    """The norm, and one over the root mean square of each row."""
    inverse = torch.rsqrt(rows.pow(2).mean(-1) + eps)
    return rows * inverse[:, None] * weight, None, inverse


def rmsnorm_bwd(gradient: Tensor, rows: Tensor, inverse: Tensor, weight: Tensor, *_: Any) -> Any:
    """Gradients of rows and weight."""
    with torch.enable_grad():
        given = rows.detach().requires_grad_(), weight.detach().requires_grad_()
        output = torch.nn.functional.rms_norm(given[0], weight.shape, given[1], 1e-5)
    return torch.autograd.grad(output, given, gradient)


class Extension(types.ModuleType):
    """The compiled part: what is not given to it is a mock."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__.setdefault(name, mock.MagicMock(name=name))


def import_layers(folder: Path) -> dict[str, Any]:
    """The classes of the layers, from a folder with the package ``transformer_engine``."""
    root, release = folder / "transformer_engine", Version(torch.__version__).release
    packages = {
        "transformer_engine": {"__version__": "2.0"},
        "transformer_engine.common": {"load_framework_extension": lambda *_: None},
        "transformer_engine.pytorch": {"torch_version": lambda: release},
    }
    for name, given in packages.items():
        sys.modules[name] = package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        vars(package).update(given)
    extension = sys.modules["transformer_engine_torch"] = Extension("transformer_engine_torch")
    for function in (generic_gemm, te_general_grouped_gemm, rmsnorm_fwd, rmsnorm_bwd):
        setattr(extension, function.__name__, function)
    extension.get_num_cublas_streams = lambda: 4  # type: ignore[attr-defined]
    for name in ("onnxscript", "transformer_engine.pytorch.onnx_extensions"):
        sys.modules[name] = mock.MagicMock(__spec__=ModuleSpec(name, None))
    modules = {"Linear": "linear", "LayerNormLinear": "layernorm_linear", "GroupedLinear": "grouped_linear"}
    found = {
        name: getattr(importlib.import_module(f"transformer_engine.pytorch.module.{module}"), name)
        for name, module in modules.items()
    }
    functions = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
    for name in ("layernorm_fwd", "layernorm_bwd", "rmsnorm_fwd", "rmsnorm_bwd"):
        setattr(functions, name, getattr(extension, name))
    return found


def pretend_a_gpu() -> contextlib.ExitStack:
    """What the layers ask torch of a GPU; memory that they allocate there is on the CPU."""
    empty = torch.empty

    def unwritten(*args: Any, **options: Any) -> Tensor:
        if str(options.get("device")).startswith("cuda"):
            options["device"] = "cpu"
        made = empty(*args, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    properties = types.SimpleNamespace(major=9, minor=0, multi_processor_count=100)
    answers = {
        "is_available": True,
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
        "current_device": "cpu",
        "current_stream": mock.MagicMock(),
        "device": contextlib.nullcontext(),
        "is_current_stream_capturing": False,
    }
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(torch, "empty", unwritten))
    for name, answer in answers.items():
        stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer: answer))
    for name in ("range_push", "range_pop", "range"):
        stack.enter_context(mock.patch.object(torch.cuda.nvtx, name, lambda *_: contextlib.nullcontext()))
    return stack


def gradients(layer: Any, rows: Tensor, gradient: Tensor, *counts: Any, apart: bool) -> dict[str, Tensor]:
    """Of inputs and parameters, over chunks that are differentiated from the last to the first."""
    names, parameters = zip(*layer.named_parameters(), strict=True)
    layer.is_first_microbatch = False
    for parameter in parameters:
        parameter.main_grad = torch.zeros_like(parameter)
        parameter.grad_added_to_main_grad = False
    assert linears_of([layer]) == (layer,)
    sums, segments = GradientSums(BlockParameters(parameters, [])), []
    for chunk in range(NUM_CHUNKS):
        products = WeightProducts()

        def run(
            given: Tensor, scale: float = chunk + 1.0, products: WeightProducts = products
        ) -> tuple[Tensor, ...]:
            with delay_wgrad([layer], products) if apart else contextlib.nullcontext():
                return (layer(given * scale, *counts, is_first_microbatch=False),)

        segments.append((Segment(run, [rows]), products if apart else None))
    found: dict[str, Tensor] = {}
    numbers = range(len(parameters))
    for chunk, (segment, waits) in reversed([*enumerate(segments)]):
        (of_rows,) = segment.backward([gradient], parameters=numbers, sums=sums, products=waits)
        assert of_rows is not None and (waits is None or waits.tensors)
        found[f"rows of chunk {chunk}"] = of_rows
    if apart:
        WeightProducts.joined(waits for _, waits in segments if waits is not None).add_to(sums)
    for number, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
        total = sums.take(number)
        assert total is not None, f"{name} has no gradient"
        found[name] = parameter.main_grad if parameter.grad_added_to_main_grad else total
    return found


def compare(folder: Path) -> None:
    """All layers of the release in a folder."""
    # Not while its modules are imported: torch makes constants then.
    classes = import_layers(folder)
    with pretend_a_gpu():
        for name, layer_class in classes.items():
            for bias in (False, True):
                for fused in (False, True):
                    torch.manual_seed(5)
                    options = {"bias": bias, "fuse_wgrad_accumulation": fused, "device": "cpu"}
                    options |= {"normalization": "RMSNorm"} if name == "LayerNormLinear" else {}
                    sizes, counts = ((3, 16, 32), [[5, 3, 4]]) if name == "GroupedLinear" else ((16, 32), [])
                    layer = layer_class(*sizes, params_dtype=torch.float32, **options)
                    given = torch.randn(12, 16), torch.randn(12, 32)
                    expected = gradients(layer, *given, *counts, apart=False)
                    expected = {key: value.clone() for key, value in expected.items()}
                    torch.testing.assert_close(gradients(layer, *given, *counts, apart=True), expected)
                    assert all(value.isfinite().all() and value.any() for value in expected.values())
            print(f"{name}: equal")


def main(clone: str, *releases: str) -> None:
    """Compare each release in a separate process."""
    for release in releases:
        with tempfile.TemporaryDirectory() as folder:
            package = subprocess.run(
                ["git", "-C", clone, "archive", release, "transformer_engine"],
                capture_output=True,
                check=True,
            )
            subprocess.run(["tar", "x", "-C", folder], input=package.stdout, check=True)
            for name, changes in LEFT_OUT.items():
                path = Path(folder, "transformer_engine", "pytorch", name)
                text = path.read_text()
                for before, after in changes:
                    text = text.replace(before, after)
                path.write_text(text)
            print(release, flush=True)
            subprocess.run([sys.executable, __file__, "--release", folder], check=True)


if __name__ == "__main__":
    if sys.argv[1] == "--release":
        compare(Path(sys.argv[2]))
    else:
        main(*sys.argv[1:])
