"""The service's settings: argument before environment (`RANKWATCH_…`) before file before default.

The file is `rankwatch.toml` in the working directory, else in the user's configuration folder. A key that does not
exist is an error there and as an argument; in the environment `RANKWATCH_…` names are shared with the collectors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from platformdirs import user_config_path, user_data_path
from pydantic import Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

PORT: Final = 8770
"""Where the api listens unless told otherwise."""

CONFIG_NAME: Final = "rankwatch.toml"


def _database_url(values: dict[str, Any]) -> str:
    return f"sqlite:///{Path(values['data_dir']).absolute() / 'rankwatch.db'}"


def _public_url(values: dict[str, Any]) -> str:
    host = values["host"]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"http://{name}:{values['port']}"


class Settings(BaseSettings):
    """What every role of the service needs to know. Immutable; made once, in the command line."""

    model_config = SettingsConfigDict(env_prefix="RANKWATCH_", frozen=True, extra="forbid")

    data_dir: Path = Field(default_factory=lambda: user_data_path("rankwatch"))
    """Everything that `up` keeps: the SQLite database and the ingest token."""
    database_url: str = Field(default_factory=_database_url)
    """SQLAlchemy URL of the state."""
    host: str = "127.0.0.1"
    """Address the api listens on."""
    port: int = Field(default=PORT, ge=0, le=65_535)
    public_url: str = Field(default_factory=_public_url)
    """How people and agents reach the api; links in notifications begin with it. https makes cookies Secure."""
    ingest_config: Path | None = Field(default_factory=lambda: user_config_path("rankwatch") / "ingest.json")
    """Where `up` leaves {url, token} for collectors on this machine; None: nowhere."""
    notify_allow_private: bool = True
    """Webhooks may go to loopback and private addresses. Switch it off where people you do not trust add receivers."""
    log_level: str = "INFO"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the base class's signature
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Argument, environment, file: the first that has a key wins."""
        places = (Path(CONFIG_NAME), user_config_path("rankwatch") / CONFIG_NAME)
        found = next((place for place in places if place.is_file()), None)
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=found)

    @property
    def ingest_token_path(self) -> Path:
        """The file in which `up` keeps the ingest-only token (0600)."""
        return self.data_dir / "ingest-token"
