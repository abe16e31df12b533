"""Messages for a Megatron that is too new, or lacks a part that only AMPipe's entry point needs."""

from pathlib import Path

import pytest

from megatron_ampipe import compat
from megatron_ampipe.errors import EnvironmentMissing
from tests.megatrons import megatron_of


def test_a_newer_megatron_gives_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'MAJOR = 0\nMINOR = 20\nPATCH = 0\nPRE_RELEASE = "rc1"\n'
    (tmp_path / "package_info.py").write_text(text)
    monkeypatch.setattr(compat, "megatron_folder", lambda: tmp_path)
    with pytest.warns(UserWarning) as said:
        compat.require_peers()
    assert len(said) == 1
    message = str(said[0].message)
    assert "Megatron 0.20.0rc1 is newer" in message


def test_on_an_older_megatron_the_entry_point_suggests_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "megatron_folder", lambda: megatron_of("0.18") / "core")
    with pytest.raises(EnvironmentMissing, match=r"-m megatron_ampipe.launch PATH/pretrain_gpt.py"):
        compat.require_model_from_configuration()
