"""The service's settings: argument before environment (`RANKWATCH_…`) before file before default.

The file is `rankwatch.toml` in the working directory, else in the user's configuration folder. An unknown key is an
error in the file and as an argument, but not in the environment, where collectors use `RANKWATCH_…` names too.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from platformdirs import user_config_path, user_data_path
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from rankwatch.kafka.settings import PREFIX, KafkaSettings
from rankwatch.trust import is_loopback
from rankwatch_service.allow_list import EVERY_ADDRESS, AllowList, allow_list
from rankwatch_service.names import NAME_CHARS_MAX, is_address

PORT: Final = 8770
"""Default port of the api."""

SECRET_KEY_CHARS_MIN: Final = 32
"""Characters of the secret key: 128 bits if they are hexadecimal digits. The service creates keys of 64."""

AbsolutePath = Annotated[Path, AfterValidator(Path.absolute)]
"""A relative path is meant from where the command starts, also by the roles that `up` starts."""

Pattern = Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX)]

_MAIL_PORTS: Final = {"smtp": 587, "smtps": 465}

CONFIG_NAME: Final = "rankwatch.toml"


def _database_url(values: dict[str, Any]) -> str:
    return f"sqlite:///{values['data_dir'] / 'rankwatch.db'}"


def _secret_key_file(values: dict[str, Any]) -> Path:
    return Path(values["data_dir"], "secret.key")


def _public_url(values: dict[str, Any]) -> str:
    host = values["host"]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"{'https' if values['tls_cert'] else 'http'}://{name}:{values['port']}"


def is_confidential(url: str) -> bool:
    """Whether what is sent to this URL can be read on this machine and by its holder alone: https, or loopback."""
    parts = urlsplit(url)
    plain_here = parts.scheme == "http" and is_loopback(parts.hostname or "")
    return (parts.scheme == "https" or plain_here) and bool(parts.hostname) and not (parts.query or parts.fragment)


class GroupSettings(BaseModel):
    """What the people of a group may do."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    scopes: frozenset[Literal["read", "operate", "command", "admin"]]
    jobs: tuple[Pattern, ...] = ()
    """Patterns of the names of jobs; none: every job."""

    @model_validator(mode="after")
    def _pages_can_be_read(self) -> GroupSettings:
        if not self.scopes & {"read", "admin"}:
            raise ValueError("scopes need read, without which no page can be opened")
        return self


def local_config(ingest_config: Path) -> Path:
    """The file in which `up` stores {url, token, database_url, data_dir} for the same user's command line (0600)."""
    return ingest_config.with_name("local.json")


def config_file() -> Path | None:
    """The settings file in force; None if there is none.

    Raises:
        PermissionError: others could have written it. Whoever starts the service in a folder of theirs would do what
            they want.
    """
    places = (Path(CONFIG_NAME), user_config_path("rankwatch") / CONFIG_NAME)
    place = next((place for place in places if place.is_file()), None)
    for path in () if place is None else (place.absolute().parent, place.absolute()):
        if why := _others_write(path):
            raise PermissionError(
                f"{place} is not read, as {why}; it and its folder must belong to this user or to root"
            )
    return place


def _others_write(path: Path) -> str:
    """Why others than this user and root may write a file, or replace what is in a folder; "" if they may not.

    Raises:
        OSError: it does not exist or cannot be looked at.
    """
    found, uid = path.stat(), os.getuid()
    if found.st_uid not in (uid, 0):
        return f"{path} belongs to user {found.st_uid}"
    # In a folder such as /tmp nobody replaces what is another's, and nobody writes what Kubernetes mounts to be read,
    # with every right. Many systems give each user a group of its own.
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return ""
    sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    others = stat.S_IWOTH | stat.S_IWGRP * (not _is_group_of(uid, found.st_gid))
    return f"others can write {path}" if found.st_mode & others and not sticky else ""


def _is_group_of(uid: int, gid: int) -> bool:
    try:
        return gid == 0 or grp.getgrgid(gid).gr_name == pwd.getpwuid(uid).pw_name
    except KeyError:
        return False


@dataclass(frozen=True, slots=True)
class MailServer:
    """The mail server, and the account that sends."""

    host: str
    port: int
    is_tls: bool
    """TLS from the first byte; else STARTTLS, which only a server on this machine may lack."""
    username: str
    """Empty: without a login."""
    password: str
    sender: str
    """Address in From."""

    @classmethod
    def of(cls, url: str, username: str, password: str, sender: str) -> MailServer | None:
        """The server from its settings; None: there is none.

        Args:
            url: smtp://HOST:PORT or smtps://HOST:PORT; without a port it is 587 or 465. Empty: no server.
            username: login; empty: none.
            password: of the login.
            sender: address in From.

        Raises:
            ValueError: a setting is malformed, missing or without use.
        """
        if not url:
            if username or password or sender:
                raise ValueError("smtp_username, smtp_password and smtp_from need smtp_url, the mail server")
            return None
        parts = urlsplit(url)
        if parts.scheme not in _MAIL_PORTS or not parts.hostname or parts.path.strip("/") or "@" in parts.netloc:
            raise ValueError("smtp_url must be smtp://HOST:PORT or smtps://HOST:PORT; the login has its own settings")
        if not is_address(sender):
            raise ValueError("smtp_from must be the address that e-mails come from, such as rankwatch@example.com")
        if bool(username) != bool(password):
            raise ValueError("smtp_username and smtp_password belong together: set both or none")
        port = parts.port or _MAIL_PORTS[parts.scheme]
        return cls(parts.hostname, port, parts.scheme == "smtps", username, password, sender)


class ProjectSettings(BaseModel):
    """Settings for the jobs of one project, instead of those of all jobs; None: no other."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    series_raw_hours: int | None = Field(default=None, ge=1)
    series_rollup_days: int | None = Field(default=None, ge=1)


class Settings(BaseSettings):
    """The settings of all roles of the service. Immutable; created once, by the command line."""

    model_config = SettingsConfigDict(env_prefix="RANKWATCH_", frozen=True, extra="forbid")

    data_dir: AbsolutePath = Field(default_factory=lambda: user_data_path("rankwatch"))
    """Folder of everything that `up` stores: the SQLite database, the secret key and the tokens."""
    database_url: str = Field(default_factory=_database_url, repr=False)
    """The database: sqlite:///PATH or postgresql://USER:PASSWORD@HOST:PORT/NAME."""
    secret_key: str | None = Field(default=None, min_length=SECRET_KEY_CHARS_MIN, repr=False)
    """Encrypts the secrets in the database; the same text in all roles. None: it is in `secret_key_file`."""
    secret_key_file: AbsolutePath = Field(default_factory=_secret_key_file)
    """File of the secret key, which only its owner may read; created with a new key for a new database."""
    host: str = "127.0.0.1"
    """Address the api listens on."""
    port: int = Field(default=PORT, ge=0, le=65_535)
    tls_cert: AbsolutePath | None = None
    """PEM file of the api's certificate, with those between it and its authority: the api then speaks https alone."""
    tls_key: AbsolutePath | None = None
    """PEM file of its key, without a passphrase. Both files are read again when they change."""
    insecure: bool = False
    """The api may listen without TLS where other machines reach it."""
    trusted_proxies: str = ""
    """Addresses and networks of reverse proxies, with commas. Their X-Forwarded-For or Forwarded names the client."""
    public_url: str = Field(default_factory=_public_url)
    """URL at which people and agents reach the api, also used in notifications. https makes cookies Secure."""
    ingest_config: AbsolutePath | None = Field(default_factory=lambda: user_config_path("rankwatch") / "ingest.json")
    """File in which `up` stores {url, token} for collectors on this machine, with `local_config` for commands beside
    it; None: neither is written."""
    allowed_hosts: str = ""
    """Further names, with commas, that requests may ask for in Host, such as that of a service in Kubernetes."""
    notify_allow_private: bool = False
    """Webhooks may go to every loopback and private address. `up` switches it on, unless it is set."""
    notify_allow: str = ""
    """Names, addresses and networks, with commas, to which webhooks may go even if they are loopback or private."""
    smtp_url: str = ""
    """Mail server: smtp://HOST:PORT, which must offer STARTTLS unless it is on this machine, or smtps://HOST:PORT."""
    smtp_username: str = ""
    """Login on the mail server; empty: none."""
    smtp_password: str = Field(default="", repr=False)
    smtp_from: str = ""
    """Address that e-mails come from."""
    runbook_url: str = ""
    """URL of your runbooks, with {kind} in it: the link `runbook` of messages about incidents; empty: none."""
    message_links: bool = True
    """Messages have links by which whoever gets them acknowledges or silences, once."""
    alert_job_labels: str = "rankwatch_job,job_name"
    """Labels of an alert, with commas, best first, that name its job."""
    heartbeat_url: str = Field(default="", repr=False)
    """URL that `notify` asks for as long as the chain from telemetry to notifications lives; empty: none."""
    heartbeat_s: int = Field(default=60, ge=5, le=3_600)
    """Seconds between two of these."""
    log_level: str = "INFO"

    oidc_issuer: str = ""
    """URL of the OIDC provider by which people log in, exactly as it names itself; empty: they log in with tokens."""
    oidc_client_id: str = ""
    oidc_client_secret: str = Field(default="", repr=False)
    """Empty: the provider knows this service as a public client."""
    oidc_scopes: str = "openid profile email"
    """What is asked of the provider; some want `groups` besides."""
    oidc_groups_claim: str = Field(default="groups", min_length=1)
    """Claim of the id token that lists the groups of a person."""
    oidc_groups: dict[str, GroupSettings] = {}
    """What the people of each group may do. Whoever is in none of them is refused."""

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

    links: dict[str, str] = {}
    """URLs of your own tools by name, with {job}, {rank} or {host} in them: links on the pages of these."""

    projects: dict[str, ProjectSettings] = {}
    """What is different for the jobs of a project: in the file, `[projects.NAME]`; in the environment, JSON."""

    @model_validator(mode="after")
    def _lists_are_readable(self) -> Settings:
        self.private_targets()
        if allow_list(self.allowed_hosts).networks:
            raise ValueError("allowed_hosts are names: requests that ask for an address are always answered")
        return self

    @model_validator(mode="after")
    def _heartbeat_is_url(self) -> Settings:
        parts = urlsplit(self.heartbeat_url)
        if self.heartbeat_url and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError("heartbeat_url must be a URL with http or https")
        return self

    @model_validator(mode="after")
    def _smtp_is_whole(self) -> Settings:
        self.mail_server()
        return self

    @model_validator(mode="after")
    def _oidc_is_whole(self) -> Settings:
        if not self.oidc_issuer:
            return self
        if not is_confidential(self.oidc_issuer):
            raise ValueError("oidc_issuer must be a URL with https, without query and fragment")
        if not self.oidc_client_id:
            raise ValueError("oidc_issuer needs oidc_client_id, by which the provider knows this service")
        if not self.oidc_groups:
            raise ValueError("oidc_issuer needs oidc_groups: nobody could log in without a group")
        return self

    @model_validator(mode="after")
    def _kafka_can_connect(self) -> Settings:
        self.kafka_settings()
        return self

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Settings:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: set both or none")
        if self.tls_cert and self.public_url.startswith("http:"):
            raise ValueError(f"public_url is {self.public_url}, but with tls_cert the api speaks https alone")
        return self

    @field_validator("database_url")
    @classmethod
    def _database_is_absolute(cls, url: str) -> str:
        scheme, _, path = url.partition(":///")
        return (
            f"{scheme}:///{Path(path).absolute()}"
            if scheme.partition("+")[0] == "sqlite" and path not in ("", ":memory:")
            else url
        )

    @field_validator("kafka_ssl_cafile", "kafka_ssl_certfile", "kafka_ssl_keyfile")
    @classmethod
    def _files_are_absolute(cls, path: str) -> str:
        return path and str(Path(path).absolute())

    @field_validator("runbook_url")
    @classmethod
    def _runbooks_are_by_kind(cls, url: str) -> str:
        if url and not (url.startswith(("https://", "http://")) and "{kind}" in url):
            raise ValueError("runbook_url must be a URL with {kind} in it, such as https://wiki.example.com/{kind}")
        return url

    @field_validator("links")
    @classmethod
    def _links_are_templates(cls, links: dict[str, str]) -> dict[str, str]:
        for name, url in links.items():
            places = set(re.findall(r"{([^}]*)}", url))
            if not url.startswith(("https://", "http://")) or not places or places - {"job", "rank", "host"}:
                raise ValueError(f"{name}: a URL with {{job}}, {{rank}} or {{host}} in it, and no other braces")
        return links

    @field_validator("trusted_proxies")
    @classmethod
    def _proxies_are_addresses(cls, listed: str) -> str:
        if names := allow_list(listed).names:
            raise ValueError(f"{', '.join(sorted(names))}: a proxy is named by its address or network")
        return listed

    @property
    def exposed(self) -> bool:
        """Whether other machines would reach the api without TLS, and nobody asked for that."""
        return not (self.tls_cert or self.insecure or is_loopback(self.host))

    def private_targets(self) -> AllowList:
        """Loopback and private addresses that webhooks may go to.

        Raises:
            ValueError: `notify_allow` is malformed.
        """
        listed = allow_list(self.notify_allow)
        return EVERY_ADDRESS if self.notify_allow_private else listed

    @property
    def alert_job_label_names(self) -> tuple[str, ...]:
        """Labels of an alert that name its job, best first."""
        return tuple(filter(None, map(str.strip, self.alert_job_labels.split(","))))

    def mail_server(self) -> MailServer | None:
        """The mail server of e-mail receivers; None: there is none.

        Raises:
            ValueError: a setting is malformed.
        """
        return MailServer.of(self.smtp_url, self.smtp_username, self.smtp_password, self.smtp_from)

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
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=config_file())

    @property
    def ingest_token_path(self) -> Path:
        """The file in which `up` stores the ingest-only token (0600)."""
        return self.data_dir / "ingest-token"

    @property
    def local_token_path(self) -> Path:
        """The file in which `up` stores the token for commands on this machine (0600)."""
        return self.data_dir / "local-token"


def as_environment(settings: Settings) -> dict[str, str]:
    """The settings as environment variables, for other processes of the service."""
    return {
        f"RANKWATCH_{name.upper()}": value if isinstance(value, str) else json.dumps(value)
        for name, value in settings.model_dump(mode="json").items()
        if value is not None
    }
