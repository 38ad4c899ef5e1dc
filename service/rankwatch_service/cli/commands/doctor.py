"""`rankwatch doctor` checks what the service or a training host needs; `rankwatch health` says whether all works."""

from __future__ import annotations

import contextlib
import email.utils
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer
from rich.text import Text

from rankwatch import children
from rankwatch_service.cli import output
from rankwatch_service.cli.commands.database import data_dir_in_force, database_in_force
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.cli.options import DATA, DATABASE_URL, JSON, KAFKA, TOKEN, URL

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from rankwatch_service.settings import Settings

SILENT_S: Final = 30.0
"""A stream process reports every few seconds; one that has been silent for this long does not work."""


class Role(StrEnum):
    """Roles without a port; the api has `/readyz`."""

    STREAM = "stream"
    NOTIFY = "notify"


def health(
    role: Annotated[
        Role | None,
        typer.Argument(
            help="Only this role, by its last report in the database: stream on this host, or notify on any."
        ),
    ] = None,
    data: DATA = None,
    database_url: DATABASE_URL = None,
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Show whether the service works: stream, notifier, receivers, agents and database; exit with 1 if not."""
    from rankwatch_service.cli.options import connect

    if role is not None:
        silent_s = _role_silent_s(role, data, database_url)
        output.done(f"{role}: reported {silent_s:.0f} s ago", {"role": role, "silent_s": silent_s}, as_json)
        return
    client = connect(url, token)
    found = client.get("/api/v1/health")
    if as_json:
        output.print_json([found])
    else:
        show_health(found, client.url)
    if found["problems"]:
        raise typer.Exit(Status.FINDINGS)


def show_health(found: Mapping[str, Any], url: str) -> None:
    """Print the health of a service, as `/health` gives it: what is wrong first, then each part."""
    now, stream, notifier, database = found["at_unix_ns"], found["stream"], found["notifier"], found["database"]
    waiting = sum(one["lag"] for one in stream["partitions"])
    processes = [_ago(one["reported_unix_ns"], now) for one in stream["processes"]]
    names = [one["name"] for one in found["receivers"] if one["enabled"]]
    agents, silent = found["agents_total"], found["agents_silent"]
    off = [f"{one['detector']} in {one['job']}" for one in found["detectors_off"]]
    room = "" if database["free_bytes"] is None else f", {database['free_bytes'] / 1e9:,.1f} GB are free on its disk"
    output.print_fields(
        [
            ("service", _verdict(found)),
            *(
                row
                for one in found["problems"]
                for row in (
                    (
                        f"{one['severity']}",
                        Text(output.plain(one["text"]).plain, output.SEVERITY_STYLES[one["severity"]]),
                    ),
                    (" ", output.plain(one["advice"])),
                )
            ),
            ("api", output.plain(f"{url}, version {found['version']}")),
            ("stream", output.plain(f"{waiting:,} records wait; {_processes(processes)}")),
            (
                "notifier",
                output.plain(f"{notifier['waiting']:,} messages wait; {_ago(notifier['reported_unix_ns'], now)}"),
            ),
            ("receivers", output.plain(", ".join(names)) if names else Text(NO_RECEIVER, style="yellow")),
            ("agents", output.plain(f"{agents:,} of jobs that train" + (f", {silent:,} are silent" if silent else ""))),
            ("detectors", output.plain(f"off: {', '.join(off)}" if off else "all on")),
            ("database", output.plain(f"{database['kind']}, {database['size_bytes'] / 1e6:,.0f} MB{room}")),
        ]
    )


NO_RECEIVER: Final = "none: nobody is notified of incidents; add one with `rankwatch receivers add`"


def _verdict(found: Mapping[str, Any]) -> Text:
    count = len(found["problems"])
    if count:
        wrong = f"{count} problem{'s' * (count != 1)}, which {'are' if count > 1 else 'is'} {found['state']}"
        return Text(wrong, style=output.SEVERITY_STYLES[found["state"]])
    return Text("all parts work", style="green")


def _processes(reported: Sequence[str]) -> str:
    count = len(reported)
    return f"{count} process{'es' * (count != 1)}, {reported[0]}" if reported else "no process has reported"


def _ago(at_unix_ns: int | None, now_unix_ns: int) -> str:
    if at_unix_ns is None:
        return "it has never reported"
    return f"reported {max(now_unix_ns - at_unix_ns, 0) / 1e9:.0f} s ago"


def _role_silent_s(role: Role, data: str | None, database_url: str | None) -> float:
    """How many seconds ago a role reported last.

    Raises:
        CliError: never, or too long ago, or the database does not tell.
    """
    from rankwatch_service.cli.configuration import configured_settings
    from rankwatch_service.store.engine import open_engine
    from rankwatch_service.store.errors import StoreError

    engine = open_engine(configured_settings(data_dir=data, database_url=database_url).database_url)
    try:
        return _silent_s(engine, role)
    except StoreError as error:
        raise CliError(Status.FINDINGS, f"{role}: {error}") from error
    finally:
        engine.dispose()


def _silent_s(engine: Engine, role: Role) -> float:
    """How many seconds ago a role reported last.

    Raises:
        CliError: never, or too long ago.
    """
    silent_s = _stream_silent_s(engine, socket.gethostname()) if role is Role.STREAM else _notify_silent_s(engine)
    if silent_s is None:
        raise CliError(Status.FINDINGS, f"{role}: has never reported")
    if silent_s > SILENT_S:
        raise CliError(Status.FINDINGS, f"{role}: last reported {silent_s:.0f} s ago")
    return max(silent_s, 0.0)


def _stream_silent_s(engine: Engine, host: str) -> float | None:
    from sqlalchemy import func, select

    from rankwatch_service.clock import SystemClock
    from rankwatch_service.store.engine import read
    from rankwatch_service.store.models import StreamProcess

    newest = select(func.max(StreamProcess.at_unix_ns)).where(
        StreamProcess.owner.startswith(f"{host}:", autoescape=True)
    )
    with read(engine) as connection:
        at_unix_ns = connection.scalar(newest)
    return None if at_unix_ns is None else (SystemClock().unix_ns() - at_unix_ns) / 1e9


def _notify_silent_s(engine: Engine) -> float | None:
    from sqlalchemy import select

    from rankwatch_service.clock import SystemClock
    from rankwatch_service.notify.lease import LEASE_S
    from rankwatch_service.store.engine import read
    from rankwatch_service.store.models import Lease

    with read(engine) as connection:
        expires_unix_ns = connection.scalar(select(Lease.expires_unix_ns).where(Lease.name == "notify"))
    return None if expires_unix_ns is None else (SystemClock().unix_ns() - expires_unix_ns) / 1e9 + LEASE_S


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check; the verdict is ok, note (optional) or finding."""

    name: str
    verdict: str
    detail: str


PROGRAM_ANSWER_WITHIN_S: Final = 30.0
"""A few dozen small files are read in milliseconds, unless the folder is on a file system that does not answer."""


def host_checks(named: str) -> Iterator[CheckResult]:
    """Read the host in a process of its own, which may hang.

    Args:
        named: `RANKWATCH_HOST_ROOT`; empty: /.
    """
    root = children.absolute(named or "/")
    command = children.python_module("rankwatch.agent.host", root)
    try:
        reported = children.run(command, capture_output=True, check=True, timeout=PROGRAM_ANSWER_WITHIN_S).stdout
    except subprocess.TimeoutExpired:
        yield CheckResult("host", "finding", f"{root} does not answer within {PROGRAM_ANSWER_WITHIN_S:.0f} s")
        return
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        yield CheckResult("host", "finding", f"reading {root} failed: {last}")
        return
    found = msgspec.json.decode(reported, type=dict[str, Any])
    if missing := found["missing"]:
        what = f"{root} has no {' and no '.join(missing)}: agents cannot tell what is in it"
        yield CheckResult("host", *(("finding", f"{what} (RANKWATCH_HOST_ROOT)") if named else ("note", what)))
    if "proc" not in missing:
        yield CheckResult("host", "ok", f"{root} tells {', '.join(found['counters'])}, and rates")
    if "sys" not in missing:
        none = f"{root} has no port in use that is hardware; those of containers are not read"
        ports = ", ".join(found["ports"])
        yield CheckResult("network ports", "ok" if ports else "note", ports or none)


ANSWER_WITHIN_S: Final = 60.0
"""A driver that keeps no state between its users initializes each device anew, which takes seconds."""
END_WITHIN_S: Final = 5.0
_CONTAINER: Final = "in a container, start it with NVIDIA's runtime (`--gpus all`)"


def gpu_checks() -> Iterator[CheckResult]:
    """Query the driver in a separate process, since it may hang."""
    command = children.python_module("rankwatch.agent.device_reader", "survey")
    process = children.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        reported, trouble = process.communicate(timeout=ANSWER_WITHIN_S)
        found = msgspec.json.decode(reported, type=dict[str, Any])
    except subprocess.TimeoutExpired:
        process.terminate()  # one that hangs in the driver ends later
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=END_WITHIN_S)
        detail = (
            f"does not answer within {ANSWER_WITHIN_S:.0f} s: look for processes in state D (`ps axo pid,stat,comm`)"
        )
        yield CheckResult("GPU driver", "finding", detail)
        return
    except msgspec.DecodeError:
        last = trouble.decode(errors="replace").strip().rpartition("\n")[2]
        yield CheckResult("GPU driver", "finding", f"asking it failed: {last}")
        return
    yield from _results(found)


def _results(found: Mapping[str, Any]) -> Iterator[CheckResult]:
    if found["trouble"] == "pynvml is not installed":
        yield CheckResult("GPU driver", "finding", f"{found['trouble']}: pip install 'rankwatch[gpu]'")
        return
    if found["trouble"]:
        detail = f"no GPU can be read: {found['trouble']}; {_CONTAINER}; a job on CPUs needs none"
        yield CheckResult("GPU driver", "finding", detail)
        return
    yield CheckResult("GPU driver", "ok", f"version {found['driver'] or 'unknown'}, {len(found['devices'])} devices")
    for device in found["devices"]:
        yield _device(device)
    sources = [
        name
        for name, open_to_us in (("the kernel's log", not found["kernel_log"]), ("NVML", found["events"]))
        if open_to_us
    ]
    if sources:
        missing = f"; not from {found['kernel_log']}" if found["kernel_log"] else ""
        yield CheckResult("GPU errors", "ok", f"are received from {' and '.join(sources)}{missing}")
    else:
        detail = (
            f"are not received: NVML refuses events, {found['kernel_log']}; give the agent CAP_SYSLOG and that file"
        )
        yield CheckResult("GPU errors", "finding", detail)


def _device(device: Mapping[str, Any]) -> CheckResult:
    name = f"GPU {device['index']}"
    if not device["answers"]:
        return CheckResult(
            name, "finding", f"{device['uuid'] or 'a device that cannot be opened'}: the driver has lost it"
        )
    reasons: dict[str, list[str]] = {}
    for what, reason in sorted(device["refused"].items()):
        reasons.setdefault(reason, []).append(what)
    missing = "; ".join(f"{reason}: {', '.join(names)}" for reason, names in reasons.items())
    return CheckResult(
        name, "ok", f"{device['name']}, {device['uuid']}" + (f"; does not tell: {missing}" if missing else "")
    )


DISK_BYTES_MIN: Final = 1_000_000_000
SHARED_MEMORY_BYTES_MIN: Final = 32_000_000
"""16 recorders of 2 MB each."""
CLOCK_SKEW_MAX_S: Final = 5.0

OPTIONAL: Final = (
    ("torch", "gradient norms, fingerprints and rollback"),
    ("pynvml", "GPU counters (`rankwatch doctor --gpu` says which there are)"),
    ("kafka", "the Kafka log"),
    ("psycopg", "PostgreSQL"),
)


def doctor(
    data: DATA = None,
    database_url: DATABASE_URL = None,
    kafka: KAFKA = None,
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Check what this machine's GPUs report instead.")] = False,
) -> None:
    """Check this machine, the database, Kafka, the OIDC provider and the service; exit with 1 if there is a finding."""
    from rankwatch_service.cli.configuration import configured_settings

    configured = configured_settings(data_dir=data, database_url=database_url, kafka=kafka)
    checks = (
        list(gpu_checks())
        if gpu
        else [
            *_machine(configured),
            *host_checks(os.environ.get("RANKWATCH_HOST_ROOT", "")),
            *_database(configured),
            *_kafka(configured),
            *_oidc(configured),
            *_service(url, token),
        ]
    )
    styles = {"ok": "green", "note": "dim", "finding": "bold red"}
    output.show(
        ({"check": check.name, "verdict": check.verdict, "told": check.detail} for check in checks),
        as_json,
        {
            "check": lambda one: output.plain(one["check"]),
            "": lambda one: Text(one["verdict"], style=styles[one["verdict"]]),
            "detail": lambda one: output.plain(one["told"]),
        },
        "",
    )
    if any(check.verdict == "finding" for check in checks):
        raise typer.Exit(Status.FINDINGS)


def _machine(configured: Settings) -> Iterator[CheckResult]:
    yield CheckResult("version", "ok", f"rankwatch {metadata.version('rankwatch')}")
    for module, use in OPTIONAL:
        if find_spec(module):
            yield CheckResult(module, "ok", f"installed, for {use}")
        else:
            yield CheckResult(module, "note", f"not installed; needed only for {use}")
    yield _space("recorder folder", _recorder_folder(os.environ.get("RANKWATCH_DIR")), SHARED_MEMORY_BYTES_MIN)
    yield _space("data folder", data_dir_in_force(configured), DISK_BYTES_MIN)


def _recorder_folder(named: str | None) -> Path:
    shared = Path("/dev/shm")  # noqa: S108 - the default folder of recorders
    return Path(named) if named else shared if shared.is_dir() else Path(os.environ.get("TMPDIR", "/tmp"))  # noqa: S108


def _space(name: str, folder: Path, bytes_min: int) -> CheckResult:
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not os.access(existing, os.W_OK):
        return CheckResult(name, "finding", f"{existing} is not writable")
    free = shutil.disk_usage(existing).free
    if free < bytes_min:
        return CheckResult(
            name, "finding", f"{existing} has {free / 1e6:,.0f} MB free, needs {bytes_min / 1e6:,.0f} MB"
        )
    return CheckResult(name, "ok", f"{folder}, {free / 1e6:,.0f} MB free")


def _database(configured: Settings) -> Iterator[CheckResult]:
    from rankwatch_service.store.engine import address_of, open_engine
    from rankwatch_service.store.errors import StoreError
    from rankwatch_service.store.migrate import check

    try:
        url = database_in_force(configured)
        address = address_of(url)
    except StoreError as error:
        yield CheckResult("database", "finding", str(error))
        return
    shown = address.render_as_string(hide_password=True)
    if address.get_backend_name() == "sqlite" and not Path(address.database or "").exists():
        yield CheckResult("database", "note", f"{shown} does not exist yet; `rankwatch up` creates it")
        return
    try:
        engine = open_engine(url)
        check(engine)
        engine.dispose()
        yield CheckResult("database", "ok", shown)
    except (StoreError, OSError) as error:
        yield CheckResult("database", "finding", f"{shown}: {error}")


def _kafka(configured: Settings) -> Iterator[CheckResult]:
    if not configured.kafka:
        return
    if not find_spec("kafka"):
        yield CheckResult("Kafka", "finding", "the Kafka client is not installed: pip install 'rankwatch[kafka]'")
        return
    from rankwatch.kafka.client import KafkaAwayError
    from rankwatch_service.log.kafka_topics import topic_partitions

    try:
        topics = topic_partitions(configured)
    except KafkaAwayError as error:
        yield CheckResult("Kafka", "finding", str(error))
        return
    yield CheckResult("Kafka", "ok", f"{configured.kafka} accepts connections")
    for topic, partitions in topics.items():
        if partitions:
            yield CheckResult("topic", "ok", f"{topic}, {partitions} partitions")
        else:
            yield CheckResult("topic", "finding", f"there is no topic {topic}; `rankwatch db upgrade` creates it")


def _oidc(configured: Settings) -> Iterator[CheckResult]:
    if not configured.oidc_issuer:
        yield CheckResult("OIDC", "note", "not set: people log in with tokens")
        return
    from rankwatch_service.access.oidc_provider import OidcProvider, ProviderAwayError
    from rankwatch_service.clock import SystemClock

    try:
        OidcProvider(configured, SystemClock()).begin("/")
    except ProviderAwayError as error:
        yield CheckResult("OIDC", "finding", f"{configured.oidc_issuer} cannot be used: {error}")
        return
    yield CheckResult("OIDC", "ok", f"{configured.oidc_issuer} answers")


def _service(url: str | None, token: str | None) -> Iterator[CheckResult]:
    from rankwatch_service.cli.options import connect

    try:
        client = connect(url, token)
    except CliError as error:
        yield CheckResult("service", "finding", str(error))
        return
    try:
        date = client.head_date("/livez")
    except CliError as error:
        yield CheckResult("service", "note", f"{error}; `rankwatch up` starts one")
        return
    yield CheckResult("service", "ok", f"{client.url} answers")
    yield _clock(date)
    yield _request("service ready", "all checks pass", lambda: client.get("/readyz"))
    yield _request("token", "can read", lambda: client.get("/api/v1/jobs", limit=1))


def _request(name: str, success: str, send: Callable[[], object]) -> CheckResult:
    try:
        send()
    except CliError as error:
        return CheckResult(name, "finding", str(error))
    return CheckResult(name, "ok", success)


def _clock(date: str) -> CheckResult:
    from rankwatch_service.clock import SystemClock

    skew_s = SystemClock().unix_ns() / 1e9 - email.utils.parsedate_to_datetime(date).timestamp()
    # The header has a resolution of 1 s, so up to 1 s is not skew.
    if abs(skew_s - 0.5) > CLOCK_SKEW_MAX_S:
        return CheckResult("clock", "finding", f"the clocks of this machine and the service differ by {skew_s:.0f} s")
    return CheckResult("clock", "ok", "agrees with the clock of the service")
