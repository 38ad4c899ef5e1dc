"""What a backup has besides the database, and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rankwatch_service.settings import CONFIG_NAME, Settings, config_file

SECRET_KEY: Final = "secret.key"  # noqa: S105 - the name of a file
"""Where `secret_key_file` is by default, which is the only place that a restore writes to."""


def kept_files(settings: Settings) -> Mapping[str, Path]:
    """The tokens' files, the secret key and the settings file, by their names in a backup. They need not exist."""
    files = {path.name: path for path in (settings.ingest_token_path, settings.local_token_path)}
    files[SECRET_KEY] = settings.secret_key_file
    if (config := config_file()) is not None:
        files[CONFIG_NAME] = config
    return files
