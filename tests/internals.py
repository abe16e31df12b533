"""What AMPipe takes from Megatron, read from the package's sources, and which versions have it.

``python -m tests.internals`` looks it up in every version that is installed for the tests and in the checkout
that ``AMPIPE_MEGATRON`` names, and what has an underscore in the installed torch; writes ``internals.json``
and ``docs/internals.md``. Versions that are not at hand keep what they have.
``tests/megatron/test_megatron_names.py`` compares.
"""

import ast
import copy
import functools
import hashlib
import importlib
import inspect
import json
import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ampipe import compat
from tests import definitions, foreign
from tests.forked import REPOSITORY, completed
from tests.megatron.launcher import environment
from tests.megatrons import at_hand, folder_of, installed, megatron_of

PACKAGE = REPOSITORY / "megatron_ampipe"
PAGE = REPOSITORY / "docs" / "internals.md"
RECORD = Path(__file__).with_name("internals.json")

_WHOLE = """
    core.models.gpt.moe_module_specs.get_moe_module_spec_for_backend
    core.transformer.moe.moe_utils.get_capacity
    core.transformer.moe.moe_utils.compute_routing_scores_for_aux_loss
    core.transformer.moe.moe_utils.apply_router_token_dropping core.transformer.moe.moe_utils.permute
    core.transformer.moe.moe_utils.sort_chunks_by_idxs
    core.pipeline_parallel.combined_1f1b.combined_1f1b_schedule_for_no_pipelining
    core.pipeline_parallel.combined_1f1b.combined_1f1b_schedule_for_interleaved_pipelining
    core.pipeline_parallel.combined_1f1b.combined_forward_backward_step
    core.parallel_state.initialize_model_parallel core.tensor_parallel.random._get_all_rng_states
    core.tensor_parallel.random._fork_rng core.datasets.utils.compile_helpers
    training.training.setup_model_and_optimizer training.training.get_model training.training.training_log
    training.training.pretrain training.arguments.parse_and_validate_args
    training.argument_utils.hybrid_config_from_args training.checkpointing.read_metadata
    training.checkpointing.get_checkpoint_name
""".split()  # noqa: SIM905
MIRRORED = {
    "core.transformer.transformer_layer.TransformerLayer": "forward _forward_attention _forward_mlp "
    "_forward_post_mlp _apply_self_attn_bda_step _run_input_layernorm _pre_mlp_layernorm_and_residual "
    "_apply_mlp_bda_step",
    "core.transformer.attention.Attention": "forward _apply_output_gate",
    "core.transformer.attention.SelfAttention": "get_query_key_value_tensors",
    "core.transformer.multi_latent_attention.MLASelfAttention": "get_query_key_value_tensors",
    "core.transformer.dot_product_attention.DotProductAttention": "__init__ forward",
    "core.tensor_parallel.layers.ColumnParallelLinear": "forward",
    "core.tensor_parallel.layers.RowParallelLinear": "forward",
    "core.tensor_parallel.layers.LinearWithGradAccumulationAndAsyncCommunication": "backward",
    "core.extensions.transformer_engine.TELinear": "forward",
    "core.distributed.distributed_data_parallel.DistributedDataParallel": "__init__ _make_forward_pre_hook "
    "_finish_param_sync_for_bucket_group enable_forward_pre_hook zero_grad_buffer",
    "core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup": "register_grad_ready "
    "finish_grad_sync finish_param_sync",
    "core.transformer.module.MegatronModule": "set_is_first_microbatch",
    "core.transformer.moe.moe_layer.MoELayer": "forward routed_experts_compute postprocess",
    "core.transformer.moe.token_dispatcher.MoETokenDispatcher": "__init__",
    "core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher": "__init__ preprocess "
    "dispatch_preprocess token_dispatch dispatch_postprocess combine_preprocess token_combine "
    "combine_postprocess",
    "core.transformer.moe.token_dispatcher.MoEAllGatherTokenDispatcher": "token_dispatch token_combine",
    "core.transformer.moe.token_dispatcher.MoEFlexTokenDispatcher": "dispatch_preprocess "
    "dispatch_postprocess",
    "core.transformer.moe.token_dispatcher._DeepepManager": "dispatch _indices_to_multihot",
    "core.transformer.moe.token_dispatcher._HybridEPManager": "dispatch",
    "core.transformer.moe.fused_a2a.HybridEPDispatch": "backward",
    "core.transformer.moe.fused_a2a.HybridEPCombine": "forward backward",
    "core.transformer.moe.router.TopKRouter": "forward routing _apply_expert_bias apply_z_loss "
    "_apply_aux_loss _apply_global_aux_loss _apply_seq_aux_loss",
    "core.transformer.moe.moe_utils.MoEAuxLossAutoScaler": "forward backward",
    "core.transformer.moe.router_replay.RouterReplay": "get_replay_topk record_indices",
    "core.transformer.moe.router_trace.RouterTracer": "register_hooks _record",
    "core.transformer.transformer_block.TransformerBlock": "forward _build_layers",
    "core.models.hybrid.hybrid_block.HybridStack": "__init__ forward",
    "core.ssm.mamba_mixer.MambaMixer": "__init__ _ssm_training",
    "core.transformer.moe.experts.TEGroupedMLP": "forward",
    "core.transformer.moe.experts.SequentialMLP": "forward",
    "core.models.common.model_chunk_schedule_plan.TransformerModelChunkSchedulePlan": "run",
    "core.tensor_parallel.random.CheckpointFunction": "backward",
    "core.datasets.indexed_dataset._IndexReader": "__init__",
    "training.models.gpt.GPTModelBuilder": "build_model",
} | dict.fromkeys(_WHOLE, "")
"""Definitions of which AMPipe repeats a part, or relies on how they do their work; of a class, its methods.

The list that no source says. A change in one of them may mean that the same has to change in AMPipe.
"""

REPLACED = {
    # Called with the arguments of the call, before and after our own work.
    "core.datasets.gpt_dataset.GPTDataset._get_num_tokens_per_epoch": "signature",
    "core.distributed.DistributedDataParallel.__init__": "signature",
    "core.models.gpt.GPTModel.__init__": "signature",
    "core.models.hybrid.hybrid_model.HybridModel.__init__": "signature",
    "training.arguments.parse_args": "signature",
    "training.arguments.validate_args": "signature",
    "training.initialize.parse_args": "signature",
    "training.initialize.validate_args": "signature",
    "training.pretrain": "signature",
    "training.training.initialize_megatron": "signature",
    "training.training.pretrain": "signature",
    "training.training.print_rank_last": "signature",
    "training.training.setup_model_and_optimizer": "signature",
    "training.training.train_step": "signature",
    # Ours relies on when it is called, or does what it does.
    "core.datasets.utils.compile_helpers": "code",
    "core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup.finish_grad_sync": "code",
    "core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup.start_grad_sync": "code",
    "core.models.backends.LocalSpecProvider.core_attention": "code",
    "core.models.gpt.GPTModel.build_schedule_plan": "code",
    "core.transformer.moe.experts.TEGroupedMLP._apply_bias": "code",
    "core.tensor_parallel.mappings._gather_along_first_dim": "code",
    "core.tensor_parallel.mappings._reduce_scatter_along_first_dim": "code",
    "core.tensor_parallel.random._get_cuda_rng_state": "code",
    "core.tensor_parallel.random._set_cuda_rng_state": "code",
    "core.transformer.dot_product_attention.DotProductAttention.forward": "code",
    "core.transformer.moe.moe_utils.apply_router_token_dropping": "code",
    "core.transformer.moe.moe_utils.maybe_move_tensor_to_cpu": "code",
    "core.transformer.moe.router.apply_router_token_dropping": "code",
    "core.transformer.moe.token_dispatcher._DeepepManager._indices_to_multihot": "code",
    "core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": "code",
    "core.transformer.torch_norm.WrappedTorchNorm.__new__": "code",
    "core.utils.tex": "code",
    "training.training.training_log": "code",
    # Values, and classes and functions of packages that a CPU does without.
    "core.models.hybrid.hybrid_block.TENorm": "signature",
    "core.models.hybrid.hybrid_layer_specs.hybrid_stack_spec.submodules": "signature",
    "core.ssm.mamba_mixer.ExtendedRMSNorm": "signature",
    "core.ssm.mamba_mixer.HAVE_MAMBA_SSM": "signature",
    "core.ssm.mamba_mixer.mamba_split_conv1d_scan_combined": "signature",
    "core.tensor_parallel.layers._grad_accum_fusion_available": "signature",
    "core.tensor_parallel.layers.fused_weight_gradient_mlp_cuda": "signature",
    "core.tensor_parallel.random.FP8GlobalStateManager": "signature",
    "core.tensor_parallel.random.activation_recompute_forward": "signature",
    "core.tensor_parallel.random.fp8_autocast": "signature",
    "core.transformer.moe.fused_a2a._buffer": "signature",
    "core.transformer.moe.moe_layer.HAVE_TE": "signature",
    "core.transformer.moe.moe_layer.TELinear": "signature",
}
"""What is compared of each function and value of Megatron that AMPipe replaces at run time.

``code`` is the signature and what it does. :mod:`tests.foreign` finds which ones are replaced.
"""

WHERE_PRESENT = {"training.initialize.parse_args", "training.initialize.validate_args"}
"""Replaced only in versions that have them; the newest one need not."""


@dataclass(slots=True)
class Use:
    """What the package does with one name of Megatron."""

    files: set[str] = field(default_factory=set)
    replaced: bool = False
    """Some code assigns another value to it."""
    keywords: set[str] = field(default_factory=set)
    """Names of the arguments that it is called with."""


@functools.cache
def used() -> dict[str, Use]:
    """Every name that the package imports from Megatron, or takes from a module of it, without ``megatron.``.

    A name of a module is one that the code says: ``moe_utils.permute`` after an import of ``moe_utils``.
    """
    uses: dict[str, Use] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name, use in _uses_in(ast.parse(path.read_text())):
            whole = uses.setdefault(name, Use())
            whole.files.add(path.relative_to(PACKAGE).as_posix())
            whole.replaced |= use.replaced
            whole.keywords |= use.keywords
    # A module that is imported for some name in it is not another use.
    owners = {name.rpartition(".")[0] for name in uses}
    modules = {name for name in owners if _is_module(f"megatron.{name}")}
    return {name: use for name, use in sorted(uses.items()) if name not in modules or use.replaced}


def _uses_in(tree: ast.Module) -> Iterator[tuple[str, Use]]:
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("megatron."):
            bound |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Import):
            imported = [one for one in node.names if one.name.startswith("megatron.")]
            bound |= {one.asname or one.name: one.name for one in imported}
            if any(one.asname is None for one in imported):
                bound["megatron"] = "megatron"

    def dotted(node: ast.AST) -> str | None:
        """The name of Megatron that an expression says; None for others."""
        if isinstance(node, ast.Name):
            return bound.get(node.id)
        owner = dotted(node.value) if isinstance(node, ast.Attribute) else None
        # Of what is not a module, attributes are those of an object.
        return f"{owner}.{node.attr}" if owner is not None and _is_module(owner) else None

    yield from ((name.removeprefix("megatron."), Use()) for name in bound.values() if name != "megatron")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node)) is not None:
            stored = isinstance(node.ctx, ast.Store)
            yield name.removeprefix("megatron."), Use(replaced=stored)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if (name := dotted(node.value)) is not None:
                yield f"{name}.{node.attr}".removeprefix("megatron."), Use(replaced=True)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "replace":
            owner, attribute = (*node.args, None, None)[:2]
            if isinstance(attribute, ast.Constant) and (name := dotted(owner)) is not None:
                yield f"{name}.{attribute.value}".removeprefix("megatron."), Use(replaced=True)
        elif isinstance(node, ast.Call) and (name := dotted(node.func)) is not None:
            keywords = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
            yield name.removeprefix("megatron."), Use(keywords=keywords)


@functools.cache
def _is_module(name: str) -> bool:
    """By the files of the versions at hand, without an import."""
    relative = Path(*name.split(".")[1:])
    folders = [megatron_of(version) for version in at_hand()]
    return any((top / relative).is_dir() or (top / f"{relative}.py").is_file() for top in folders)


def look_up() -> dict[str, Any]:
    """What the imported Megatron has of it, takes and says.

    Returns:
        ``lacks``: the names that are not there; ``refuses``: arguments that are not taken any more;
        ``sources``: of each mirrored definition a hash of its code, without docstrings and comments.
    """
    from megatron_ampipe.launch import host

    if not host.gpu_available():
        host.install()
    found: dict[str, Any] = {"lacks": [], "refuses": [], "sources": {}, "replaced": {}}
    for name in sorted(used().keys() | MIRRORED.keys()):
        try:
            value = _resolve(name)
        except (ImportError, AttributeError):
            found["lacks"].append(name)
            continue
        found["refuses"] += [f"{name}({keyword}=)" for keyword in sorted(_refused(value, name))]
        if name in MIRRORED:
            found["sources"][name] = _hash(name, MIRRORED[name].split())
    folders = [Path(folder) for folder in importlib.import_module("megatron").__path__]
    root = next(folder for folder in folders if (folder / "core").is_dir())
    for name, what in REPLACED.items():
        defined = definitions.definition(root, name)
        if defined is not None:
            found["replaced"][name] = _described_definition(defined.node, with_code=what == "code")
    replaced = {*REPLACED} - {*found["replaced"]}
    private = {name for name in private_names() if not _is_defined(root, name)}
    found["lacks"] = sorted({*found["lacks"], *replaced, *private})
    return found


def private_names() -> list[str]:
    """Names of Megatron with an underscore, without ``megatron.``."""
    names = foreign.scan().names
    return sorted(name.removeprefix("megatron.") for name in names if name.startswith("megatron."))


def _is_defined(root: Path, name: str) -> bool:
    """Whether a name is defined, or assigned to ``self`` in a method of its class."""
    owner, _, attribute = name.rpartition(".")
    defined = definitions.definition(root, name) is not None
    return defined or attribute in definitions.attributes(root, owner)


def _described_definition(node: ast.AST, *, with_code: bool) -> str:
    if not isinstance(node, ast.FunctionDef):
        return "class" if isinstance(node, ast.ClassDef) else "value"
    parameters = copy.deepcopy(node.args)
    for each in ast.walk(parameters):
        if isinstance(each, ast.arg):
            each.annotation = None
    signature = f"({ast.unparse(parameters)})"
    return f"{signature} {_hash_of([node])}" if with_code else signature


def look_up_torch() -> dict[str, str | None]:
    """What the installed torch and Python have of each of their names that has an underscore."""
    own = (name for name in sorted(foreign.scan().names) if name.startswith(("torch.", "argparse.")))
    return {name: described(name) for name in own}


def described(name: str) -> str | None:
    """The signature and a hash of a function's code, or what it is of others; None if it does not exist."""
    try:
        value = _imported(name)
    except (ImportError, AttributeError):
        owner, _, attribute = name.rpartition(".")
        return "attribute" if hasattr(_example(owner), attribute) else None
    schemas = [getattr(value, overload)._schema for overload in getattr(value, "overloads", list)()]
    if schemas:
        return "; ".join(map(str, schemas))
    function = value.__init__ if inspect.isclass(value) else value
    if not inspect.isfunction(function):
        # The signature, if torch's binding of a C++ function says it.
        text = (
            (getattr(value, "__doc__", None) or "") if callable(value) and not inspect.isclass(value) else ""
        )
        said = text.strip().partition("\n")[0]
        return said if "(" in said else f"a {type(value).__name__}"
    signature = inspect.signature(function)
    plain = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    node = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return (
        f"{signature.replace(parameters=plain, return_annotation=signature.empty)} {_hash_of([node.body[0]])}"
    )


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        owner, _, attribute = name.rpartition(".")
        if not owner:
            raise
        return getattr(_imported(owner), attribute)


def _example(owner: str) -> Any:
    """An object whose attributes its class does not have."""
    match owner:
        case "torch.nn.Module":
            return _imported(owner)()
        case "argparse.ArgumentParser":
            return _imported(owner)()
        case "torch._ops.OpOverload":
            return _imported("torch.ops.aten.add.Tensor")
    return None


def lacks_of(package: str) -> list[str]:
    """The names of an optional package that is installed which it lacks."""
    return [
        name for name in sorted(foreign.scan().names) if name.startswith(f"{package}.") and _is_lost(name)
    ]


def _is_lost(name: str) -> bool:
    try:
        _imported(name)
        return False
    except (AttributeError, ImportError):
        owner, _, attribute = name.rpartition(".")
    try:
        value = _imported(owner)
    except (AttributeError, ImportError):
        return True
    # Of a layer: its class assigns it.
    return not (inspect.isclass(value) and f"self.{attribute}" in inspect.getsource(value))


def torch_version() -> str:
    """Major and minor version of the installed one."""
    return ".".join(map(str, (compat.torch_release() or ())[:2]))


def _resolve(name: str) -> Any:
    try:
        return importlib.import_module(f"megatron.{name}")
    except ModuleNotFoundError:
        owner, _, attribute = name.rpartition(".")
        return getattr(_resolve(owner) if owner else importlib.import_module("megatron"), attribute)


def _refused(value: Any, name: str) -> set[str]:
    keywords = used()[name].keywords if name in used() else set()
    if not keywords or not callable(value):
        return set()
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:
        return set()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return set()
    return keywords - {parameter.name for parameter in parameters}


def _hash(name: str, methods: list[str]) -> str:
    """Of a function or class in the file that defines it: the host platform replaces some of them."""
    owner, _, attribute = name.rpartition(".")
    tree = ast.parse(inspect.getsource(importlib.import_module(f"megatron.{owner}")))
    (node,) = [each for each in tree.body if getattr(each, "name", None) == attribute][-1:]
    nodes: list[ast.AST] = [node]
    if methods:
        nodes = [each for each in ast.iter_child_nodes(node) if getattr(each, "name", None) in methods]
    return _hash_of(nodes)


def _hash_of(nodes: list[Any]) -> str:
    text = "\n".join(ast.unparse(_without_docstrings(copy.deepcopy(each))) for each in nodes)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _without_docstrings(node: ast.AST) -> ast.AST:
    for each in ast.walk(node):
        match getattr(each, "body", None):
            case [ast.Expr(value=ast.Constant()), _, *_] as body:
                body.pop(0)
    return node


@functools.cache
def report_of(version: str) -> dict[str, Any]:
    """:func:`look_up` in a separate process, with a version that is at hand."""
    folder = folder_of(version)
    path = [str(REPOSITORY), *([str(folder)] if folder is not None else [])]
    env = environment() | {"PYTHONPATH": os.pathsep.join(path)}
    done = completed(sys.executable, "-m", "tests.internals", "look-up", env=env)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def recorded() -> dict[str, Any]:
    """By version of Megatron, what :func:`look_up` found."""
    found: dict[str, Any] = json.loads(RECORD.read_text())["megatron"]
    return found


def recorded_torch() -> dict[str, dict[str, str | None]]:
    """By version of torch, what :func:`look_up_torch` found."""
    found: dict[str, dict[str, str | None]] = json.loads(RECORD.read_text())["torch"]
    return found


HEAD = """\
# Megatron internals

Every name of Megatron that the package imports, calls in a module, replaces or mirrors, without `megatron.`.
Written by `python -m tests.internals` from the package's sources and from the versions that are installed for
the tests. `tests/megatron/test_megatron_names.py` fails if a version lacks a name or an argument that it had,
or if the code of a mirrored definition changes: it then names the files to read again.

Some versions lack these, or their code differs from that of {installed}. `compat.py` handles that, or only
AMPipe's entry point needs the name.

| name | how | other versions |
|---|---|---|"""


def render() -> Iterator[str]:
    """The page, line by line."""
    yield HEAD.format(installed=installed())
    versions = recorded()
    sources = versions[installed()]["sources"]
    same: dict[str, list[str]] = {}
    for name in sorted(used().keys() | MIRRORED.keys()):
        use = used().get(name, Use())
        how = ", ".join(["replaced"] * use.replaced + ["mirrored"] * (name in MIRRORED))
        lacking = [version for version, of in versions.items() if name in of["lacks"]]
        changed = [
            version
            for version, of in versions.items()
            if of["sources"].get(name, 0) not in (0, sources.get(name))
        ]
        parts = (("not in", lacking), ("differs in", changed))
        notes = [f"{what} {', '.join(which)}" for what, which in parts if which]
        if notes:
            yield f"| `{name}` | {how} | {'; '.join(notes)} |"
        else:
            same.setdefault(how or "only imported or called", []).append(f"`{name}`")
    for how, names in sorted(same.items()):
        yield f"\nIn every version, {how}:\n\n" + ",\n".join(names)
    yield from _render_private()


PRIVATE_HEAD = """
## Attributes with an underscore

Nobody promises to keep these. `tests/foreign.py` finds them in the package's sources. Tests fail if one is
new or missing, or if one of torch has another signature or code than in torch {torch}. All names of
Transformer Engine are listed; those of optional packages are looked up where they are installed.

| name | read again |
|---|---|"""
REPLACED_HEAD = """
## Replaced at run time

Tests compare the signature of each function of Megatron in every version, and its code where AMPipe's
replacement relies on what it does. Values and classes have to exist.

| name | compared | read again |
|---|---|---|"""


def _render_private() -> Iterator[str]:
    found = foreign.scan()
    yield PRIVATE_HEAD.format(torch=", ".join(recorded_torch()))
    for name, files in sorted(found.names.items()):
        yield f"| `{name}` | {_in_words(files)} |"
    yield REPLACED_HEAD
    for name, files in sorted(found.replaced.items()):
        yield f"| `{name}` | {REPLACED.get(name, 'nothing')} | {_in_words(files)} |"


def _in_words(files: set[str]) -> str:
    return ", ".join(f"`{file}`" for file in sorted(files))


def main() -> None:
    """Write the record and the page."""
    found = recorded() | {version: report_of(version) for version in at_hand()}
    of_torch = recorded_torch() | {torch_version(): look_up_torch()}
    record = {"megatron": dict(sorted(found.items())), "torch": of_torch}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text("\n".join(render()) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["look-up"]:
        print(json.dumps(look_up()))
    else:
        main()
