"""The service's settings: argument before environment (`RANKWATCH_…`) before file before default.

The file is `rankwatch.toml` in the working directory, else in the user's configuration folder. An unknown key is an
error in the file and as an argument, but not in the environment, where collectors use `RANKWATCH_…` names too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from platformdirs import user_config_path, user_data_path
from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from rankwatch.kafka.settings import PREFIX, KafkaSettings

PORT: Final = 8770
"""Default port of the api."""

CONFIG_NAME: Final = "rankwatch.toml"


def _database_url(values: dict[str, Any]) -> str:
    return f"sqlite:///{Path(values['data_dir']).absolute() / 'rankwatch.db'}"


def _public_url(values: dict[str, Any]) -> str:
    host = values["host"]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"http://{name}:{values['port']}"


def local_config(ingest_config: Path) -> Path:
    """The file in which `up` stores {url, token, database_url} for the same user's command line (0600)."""
    return ingest_config.with_name("local.json")


class Settings(BaseSettings):
    """The settings of all roles of the service. Immutable; created once, by the command line."""

    model_config = SettingsConfigDict(env_prefix="RANKWATCH_", frozen=True, extra="forbid")

    data_dir: Path = Field(default_factory=lambda: user_data_path("rankwatch"))
    """Folder of everything that `up` stores: the SQLite database and the tokens."""
    database_url: str = Field(default_factory=_database_url, repr=False)
    """The database: sqlite:///PATH or postgresql://USER:PASSWORD@HOST:PORT/NAME."""
    host: str = "127.0.0.1"
    """Address the api listens on."""
    port: int = Field(default=PORT, ge=0, le=65_535)
    public_url: str = Field(default_factory=_public_url)
    """URL at which people and agents reach the api, also used in notifications. https makes cookies Secure."""
    ingest_config: Path | None = Field(default_factory=lambda: user_config_path("rankwatch") / "ingest.json")
    """File in which `up` stores {url, token} for collectors on this machine, with `local_config` for commands beside
    it; None: neither is written."""
    notify_allow_private: bool = True
    """Webhooks may go to loopback and private addresses. Switch it off if people you do not trust add receivers."""
    log_level: str = "INFO"

    kafka: str = ""
    """HOST:PORT of one or more brokers, with commas: telemetry flows through Kafka; empty: through the database."""
    kafka_prefix: str = Field(default=PREFIX, pattern=r"^[A-Za-z0-9._-]{1,200}$")
    """Topics are PREFIX.telemetry, PREFIX.dead-letters and PREFIX.incidents; the consumer group is PREFIX.stream."""
    kafka_security_protocol: str = "PLAINTEXT"
    """PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL."""
    kafka_sasl_mechanism: str = "PLAIN"
    """PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512."""
    kafka_sasl_username: str = ""
    kafka_sasl_password: str = Field(default="", repr=False)
    kafka_ssl_cafile: str = ""
    """File of trusted certificates; empty: the system's."""
    kafka_ssl_certfile: str = ""
    kafka_ssl_keyfile: str = ""
    kafka_compression: str = "zstd"
    """Compression of messages that the service sends: zstd, lz4, gzip or none."""
    kafka_partitions: int = Field(default=24, ge=1, le=10_000)
    """Partitions of a new telemetry topic: the largest useful number of stream processes."""
    kafka_replication: int = Field(default=1, ge=1, le=10)
    """Copies of every record, for new topics."""
    kafka_retention_hours: int = Field(default=48, ge=1)
    """How long telemetry stays in Kafka, for new topics: the longest outage of stream without loss."""

    series_raw_hours: int = Field(default=7 * 24, ge=1)
    """How long every step of every rank is kept for charts."""
    series_raw_bytes: int = Field(default=20 * 1024**3, ge=0)
    """Largest size of these: 10 days of 64 ranks x 20 metrics at 10 steps/s and 1.8 bytes a value."""
    series_rollup_days: int = Field(default=365, ge=1)
    """How long roll-ups are kept: lowest, highest and worst value of each rank in 64 steps or more."""
    series_rollup_bytes: int = Field(default=5 * 1024**3, ge=0)
    """Largest size of the roll-ups."""

    @model_validator(mode="after")
    def _kafka_can_connect(self) -> Settings:
        self.kafka_settings()
        return self

    def kafka_settings(self) -> KafkaSettings | None:
        """The settings of Kafka; None if telemetry flows through the database.

        Raises:
            ValueError: a setting is malformed.
        """
        if not self.kafka:
            return None
        return KafkaSettings(
            bootstrap=self.kafka,
            prefix=self.kafka_prefix,
            security_protocol=self.kafka_security_protocol,
            sasl_mechanism=self.kafka_sasl_mechanism,
            sasl_username=self.kafka_sasl_username,
            sasl_password=self.kafka_sasl_password,
            ssl_cafile=self.kafka_ssl_cafile,
            ssl_certfile=self.kafka_ssl_certfile,
            ssl_keyfile=self.kafka_ssl_keyfile,
            compression=self.kafka_compression,
        )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the base class's signature
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Sources in this order: argument, environment, file; the first that has a key is used."""
        places = (Path(CONFIG_NAME), user_config_path("rankwatch") / CONFIG_NAME)
        found = next((place for place in places if place.is_file()), None)
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=found)

    @property
    def ingest_token_path(self) -> Path:
        """The file in which `up` stores the ingest-only token (0600)."""
        return self.data_dir / "ingest-token"

    @property
    def local_token_path(self) -> Path:
        """The file in which `up` stores the token for commands on this machine (0600)."""
        return self.data_dir / "local-token"
