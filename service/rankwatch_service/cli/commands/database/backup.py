"""`rankwatch backup` and `rankwatch restore`: everything that the service stores, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankwatch_service.cli import output
from rankwatch_service.cli.configuration import configured_settings
from rankwatch_service.cli.database import data_dir_in_force, existing_database
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.cli.options import DATA, DATABASE_URL

if TYPE_CHECKING:
    from rankwatch_service.settings import Settings


def backup(
    file: Annotated[Path, typer.Argument(help="File to write; it must not exist.")],
    data: DATA = None,
    database_url: DATABASE_URL = None,
) -> None:
    """Back up database, tokens and secret key into one file, while the service runs. The file holds secrets."""
    from rankwatch_service.backup.backup_file import BackupError
    from rankwatch_service.backup.create import back_up
    from rankwatch_service.clock import SystemClock

    with existing_database(data, database_url) as engine:
        try:
            manifest = back_up(_settings_in_force(data, database_url), engine, file, SystemClock())
        except BackupError as error:
            raise CliError(Status.FINDINGS, str(error)) from error
    output.note(f"{file} has {', '.join(manifest.checksums)}; it holds secrets, so keep it as safe as the service")


def restore(
    file: Annotated[Path, typer.Argument(help="File that `rankwatch backup` wrote.")],
    data: DATA = None,
    database_url: DATABASE_URL = None,
) -> None:
    """Restore a backup into an empty data folder, or a PostgreSQL database without tables. Nothing is overwritten."""
    from rankwatch_service.backup.backup_file import BackupError
    from rankwatch_service.backup.restore import restore as restored
    from rankwatch_service.clock import SystemClock
    from rankwatch_service.settings import CONFIG_NAME

    configured = configured_settings(data_dir=data, database_url=database_url)
    try:
        manifest = restored(configured, file, SystemClock())
    except BackupError as error:
        raise CliError(Status.FINDINGS, str(error)) from error
    output.note(f"restored {', '.join(manifest.checksums)} to {configured.data_dir}")
    if CONFIG_NAME in manifest.checksums:
        output.note(f"the settings of the backup are not in force: they are in {configured.data_dir / CONFIG_NAME}")


def _settings_in_force(data: str | None, database_url: str | None) -> Settings:
    """The settings, with the data folder that goes with the database (`database_in_force`)."""
    configured = configured_settings(data_dir=data, database_url=database_url)
    folder = data_dir_in_force(configured)
    # Anew, since other settings follow from the data folder.
    return configured if folder == configured.data_dir else configured_settings(data_dir=folder)
