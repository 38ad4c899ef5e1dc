"""A terminal in which the tests run commands in their own process, as the installed script does."""

import sys
from pathlib import Path

import pytest

from rankwatch_service.cli import main


class Terminal:
    """Runs commands without any configuration of the machine that it runs on."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        monkeypatch.setenv("COLUMNS", "200")
        for name in ("RANKWATCH_URL", "RANKWATCH_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        # Jobs of this machine that have nothing to do with the test keep their notices where any command looks.
        monkeypatch.setattr("rankwatch.notices.directories", lambda env, uid: [env.get("RANKWATCH_DIR", str(folder))])

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Exit status, stdout and stderr."""
        self._monkeypatch.setattr(sys, "argv", ["rankwatch", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = self._capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err
