"""A script of a Megatron-LM checkout, unedited, with AMPipe's flags; and the steps that every launch wraps.

    torchrun ... -m megatron_ampipe.launch PATH/pretrain_gpt.py <its flags> --ampipe-degree 4

The script runs as ``__main__``, with its own folder first on the path, as when it is launched by hand. Steps
of Megatron are wrapped that all training passes through. At degree 1 they pass on what they are given. The
two lines of ``ampipe patch`` wrap the same steps in a Megatron-LM tree. Nothing there replaces a GPU.
"""

import argparse
import atexit
import functools
import inspect
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_ampipe import compat
from megatron_ampipe.errors import AMPipeError
from megatron_ampipe.launch import flags
from megatron_ampipe.launch.ending import end_with, run_to_end
from megatron_ampipe.launch.session import TrainingSession, names_own_flags

_session: TrainingSession | None = None
"""That of the run that this process makes; of a patched tree once a step is called."""
_models: tuple[type, ...] = ()
"""The wrapped classes of models; none before :func:`wrap_steps`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script of a command line, that of the process when None, and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    script = "".join(words[:1])
    session = TrainingSession(words[1:], script=script)

    def run() -> int:
        if not Path(script).is_file():
            remedy = "Name it before all flags: -m megatron_ampipe.launch PATH/pretrain_gpt.py --help"
            raise session.refused_script("is not a script", remedy)
        return _run_script(Path(script), session)

    return run_to_end(run)


def _run_script(script: Path, session: TrainingSession) -> int:
    # In place of what "python -m" set, as if the script had been named on python's command line.
    sys.path[0] = str(script.resolve().parent)
    sys.argv = [str(script), *session.prepare_platform()]
    wrap_steps(session)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise
    finally:
        session.end()
    if session.args is None:
        rule = "it did not read its arguments with Megatron's parser, so no flag of AMPipe was read"
        raise session.refused_script(rule)
    if session.changes_layers and session.num_models == 0:
        raise session.refused_script(
            "it builds no GPT or hybrid model of Megatron's, so nothing is pipelined"
        )
    return 0


def wrap_steps(session: TrainingSession | None = None) -> None:
    """Have the steps of Megatron call a session, wherever Megatron's own modules hold them by name.

    Before a script imports them. Without ``session``, in a patched tree, one is made when a step is called.
    """
    global _session, _models
    _session = session or _session
    if _models:
        return
    import megatron.training as package
    from megatron.training import arguments, initialize, training

    arguments.parse_args = _around(arguments.parse_args, _parse)
    arguments.validate_args = _around(arguments.validate_args, _validate)
    for name in ("parse_args", "validate_args"):
        if hasattr(initialize, name):
            setattr(initialize, name, getattr(arguments, name))
    training.setup_model_and_optimizer = _around(training.setup_model_and_optimizer, _set_up)
    package.pretrain = training.pretrain = _around(training.pretrain, _train)
    _models = models_of_megatron()
    for model in _models:
        model.__init__ = _around(model.__init__, _construct)  # type: ignore[misc]


def models_of_megatron() -> tuple[type, ...]:
    """Megatron's GPT model, and its hybrid model where this version has one."""
    from megatron.core.models.gpt import GPTModel

    if not compat.has_hybrid_models():
        return (GPTModel,)
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    return (GPTModel, HybridModel)


def _around(function: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any]:
    """What calls ``step`` with the session, the function and its arguments."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        global _session
        if _session is None:
            if flags.is_launched:
                return function(*args, **kwargs)
            _session = TrainingSession(sys.argv[1:], script=sys.argv[0], is_patch=True)
            # Also after a failure.
            atexit.register(_session.end)
        try:
            return step(_session, function, *args, **kwargs)
        except AMPipeError as error:
            if not _session.is_patch:
                raise
            sys.exit(end_with(error))

    return called


def _parse(
    session: TrainingSession,
    parse: Callable[..., Any],
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Megatron's ``parse_args``, with AMPipe's flags."""

    def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = extra_args_provider(parser) if extra_args_provider is not None else parser
        return session.add_arguments(parser)

    parsed = parse(provide, *args, **kwargs)
    if names_own_flags():
        # Refuses a --yaml-cfg, which has replaced them; Megatron does not validate it.
        flags.config_from_args(parsed)
    session.check_early(parsed)
    return parsed


def _validate(
    session: TrainingSession, validate: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any
) -> Any:
    """Megatron's ``validate_args``, then AMPipe's checks, the start-up table, and the run's record."""
    validated = validate(args, *rest, **kwargs)
    session.accept(args)
    return validated


def _construct(
    session: TrainingSession, construct: Callable[..., None], model: Any, *args: Any, **kwargs: Any
) -> None:
    """The constructor of a model, with a pipelined specification, its second argument."""
    if session.script is None:
        # Our own entry pipelines a model's configuration.
        construct(model, *args, **kwargs)
        return
    signature = inspect.signature(construct)
    bound = signature.bind(model, *args, **kwargs)
    name = list(signature.parameters)[2]
    is_stack = not isinstance(model, _models[0])
    bound.arguments[name] = session.pipelined(bound.arguments[name], is_stack=is_stack)
    construct(*bound.args, **bound.kwargs)


def _set_up(session: TrainingSession, set_up: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``setup_model_and_optimizer``, whose models have to be pipelined before the first iteration."""
    from megatron.core.utils import unwrap_model

    made = set_up(*args, **kwargs)
    if not session.changes_layers:
        return made
    kinds = {type(chunk) for chunk in unwrap_model(made[0])}
    if session.num_models == 0 or not all(issubclass(kind, _models) for kind in kinds):
        names = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise session.refused_script(f"it trains a {names}, and only GPT and hybrid models can be pipelined")
    return made


def _train(session: TrainingSession, pretrain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``pretrain`` with a forward step that has this run's hooks."""
    bound = inspect.signature(pretrain).bind(*args, **kwargs)
    bound.arguments["forward_step_func"] = session.hooked(bound.arguments["forward_step_func"])
    return pretrain(*bound.args, **bound.kwargs)
