"""What a launch says before training."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ampipe.launch import startup


def test_a_folder_without_a_checkpoint_is_said_before_the_first_iteration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = SimpleNamespace(load=str(tmp_path), pretrained_checkpoint=None, ckpt_step=None)
    ((name, note, _),) = startup.without_checkpoint(args)
    assert (name, note) == ("warning", f"--load {tmp_path} holds no checkpoint: the run starts from scratch")
    lines = startup.LastLines([note])
    lines.before_step([])
    lines.before_step([])
    assert capsys.readouterr().out == f"AMPipe: {note}\n"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert startup.without_checkpoint(args) == []
    assert startup.without_checkpoint(SimpleNamespace(**vars(args) | {"load": None})) == []
