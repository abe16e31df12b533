"""Messages for a Megatron that is too old, too new, or lacks a part that only AMPipe's entry point needs."""

from pathlib import Path

import pytest

from megatron_ampipe import compat
from megatron_ampipe.errors import EnvironmentMissing
from tests.megatrons import megatron_of


def _pretend(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an import find a fake Megatron of this version."""
    major, minor, patch = version.split(".")
    text = f'MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = "rc1"\n'
    (tmp_path / "package_info.py").write_text(text)
    monkeypatch.setattr(compat, "megatron_folder", lambda: tmp_path)


def test_a_newer_megatron_gives_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend("0.20.0", tmp_path, monkeypatch)
    with pytest.warns(UserWarning) as said:
        compat.require_peers()
    assert len(said) == 1
    message = str(said[0].message)
    assert "Megatron 0.20.0rc1 is newer" in message


def test_an_older_megatron_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend("0.16.2", tmp_path, monkeypatch)
    with pytest.raises(EnvironmentMissing, match=r"megatron-core 0.16.2rc1 is too old: AMPipe needs 0.17"):
        compat.require_peers()


def test_on_an_older_megatron_the_entry_point_suggests_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "megatron_folder", lambda: megatron_of("0.18") / "core")
    with pytest.raises(EnvironmentMissing, match=r"-m megatron_ampipe.launch PATH/pretrain_gpt.py"):
        compat.require_model_from_configuration()
