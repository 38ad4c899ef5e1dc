"""The agent's command line:
`python -m rankwatch.agent [--dir DIR] [--job JOB] [--url URL] [--token-file FILE] [--kafka HOST:PORT] [--insecure]`
and `python -m rankwatch.agent drain`.

With a job it is that job's agent on this host: it takes the agent's lock (and ends at once if another has it), and
supervises a worker. Without a job it is a daemon that starts an agent for every job in the directory. `drain` sends
what agents of earlier jobs could not send; the agent of a later job starts that by itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rankwatch import layout
from rankwatch.agent.processes import lower_priority, take_lock, use_all_cores
from rankwatch.children import python_module, run
from rankwatch.folders import directories, others_reach

if TYPE_CHECKING:
    from rankwatch.agent.enrolment import Enrolment
    from rankwatch.agent.sender import Publish

LOG_BYTES_MAX: Final = 256 * 1024
"""Largest size of the log. One rotated copy is kept, so a job's logs take at most twice this."""
DRAINED_MAX: Final = 8
"""Earlier jobs whose messages are sent beside a new one."""
MEMORY_FOLDER: Final = Path("/dev/shm")  # noqa: S108 - compared with, not written to


def main(arguments: list[str], environment: Mapping[str, str]) -> int:
    """Run the agent; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m rankwatch.agent", description="The host agent of rankwatch.")
    parser.add_argument("what", nargs="?", choices=["drain"], help="drain: send what earlier jobs left on this host")
    parser.add_argument("--dir", type=Path, help="directory of the recorder files; else the first that this user has")
    parser.add_argument("--job", help="serve this job only, and end with it; without: serve all jobs, as a daemon")
    parser.add_argument("--url", help="base URL of the service")
    parser.add_argument("--token-file", type=Path, help="file with an ingest token")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="brokers that telemetry goes to; else RANKWATCH_KAFKA")
    parser.add_argument(
        "--insecure", action="store_true", help="allow plain http to other machines; else RANKWATCH_INSECURE"
    )
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.dir is None and options.what is None:
        options.dir = recorders_of(environment)
    options.dir = options.dir and options.dir.absolute()
    options.token_file = options.token_file and options.token_file.absolute()
    if options.kafka:
        environment = {**environment, "RANKWATCH_KAFKA": options.kafka}
    if options.insecure:
        environment = {**environment, "RANKWATCH_INSECURE": "true"}
    if options.what == "drain":
        return _drain(options, environment)
    if options.job is None:
        from rankwatch.agent.supervisor import serve_all  # noqa: PLC0415 - each role loads only what it needs

        return serve_all(options.dir, environment, options.url, options.token_file)
    if options.worker is not None:
        return _work(options, environment)
    return _supervise(options, environment)


def recorders_of(environment: Mapping[str, str]) -> Path:
    """The folder in which the ranks of this user record: the first that exists, else the first."""
    places = directories(environment, os.getuid())
    return Path(next(filter(os.path.isdir, places), places[0]))


def _drain(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Send each spool that is left by an agent, one after the other; return 1 if messages still wait afterwards."""
    from rankwatch.agent.sender import left_spools  # noqa: PLC0415
    from rankwatch.notices import say  # noqa: PLC0415

    folder = spool_base(options.dir or MEMORY_FOLDER, environment)
    for left in left_spools(folder):
        say(f"sending what job {left.job!r} has left")
        command = python_module("rankwatch.agent", "--dir", left.directory, "--job", left.job, *_passed_on(options))
        run(command, environment, check=False)
    waiting = left_spools(folder)
    for left in waiting:
        say(f"messages of job {left.job!r} still wait in {folder}: the service does not accept them")
    return 1 if waiting else 0


def _drain_beside(options: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Start agents that send what earlier jobs of this host left for the same service."""
    from rankwatch.agent.sender import left_spools  # noqa: PLC0415
    from rankwatch.spawn import ensure_agent  # noqa: PLC0415

    token = options.token_file and str(options.token_file)
    service = _service(options, environment)
    left = [one for one in left_spools(spool_base(options.dir, environment)) if one.service in ("", service)]
    for one in left[:DRAINED_MAX]:
        if (one.directory, one.job) != (str(options.dir), options.job):
            ensure_agent(one.directory, one.job, environment, url=options.url, token_file=token)


def _service(options: argparse.Namespace, environment: Mapping[str, str]) -> str:
    """The address of the service, or of the brokers, that telemetry goes to; empty if none can be found."""
    from rankwatch.agent.endpoint import find_endpoint  # noqa: PLC0415

    if environment.get("RANKWATCH_KAFKA"):
        return environment["RANKWATCH_KAFKA"]
    try:
        endpoint = find_endpoint(options.url, options.token_file, environment)
    except (ValueError, OSError):
        return ""  # the sender says why, and tries again
    return endpoint.url if endpoint else ""


def _passed_on(options: argparse.Namespace) -> list[str]:
    """The options that agents and workers which this one starts get too."""
    passed = ["--url", options.url] if options.url else []
    passed += ["--token-file", str(options.token_file)] if options.token_file else []
    passed += ["--kafka", options.kafka] if options.kafka else []
    return [*passed, "--insecure"] if options.insecure else passed


def _supervise(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    from rankwatch.agent.ranks import has_living_rank  # noqa: PLC0415
    from rankwatch.agent.supervisor import supervise  # noqa: PLC0415

    options.dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if why := others_reach(str(options.dir), os.getuid()):
        raise PermissionError(f"{options.dir}: {why}")
    path = Path(layout.agent_lock_path(str(options.dir), options.job))
    lock = take_lock(path)
    if lock is None:
        return 0
    use_all_cores()
    log = os.open(_log_path(options), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.dup2(log, 2)

    def log_line(line: str) -> None:
        os.write(log, f"supervisor {line}\n".encode())

    _drain_beside(options, environment)
    command = python_module("rankwatch.agent", "--dir", str(options.dir), "--job", options.job, *_passed_on(options))
    status = 0
    while lock is not None:
        status = supervise([*command, "--worker"], lock, log_line)
        os.close(lock)
        # A rank that began meanwhile may have found the lock held and rely on us. Looking only now that the lock is
        # free leaves no gap: either it sees the lock free, or we see its recorder.
        again = status == 0 and has_living_rank(options.dir, options.job)
        lock = take_lock(path) if again else None
    return status


def _work(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    import logging.handlers  # noqa: PLC0415
    import signal  # noqa: PLC0415

    from rankwatch.agent.clock import HostClock  # noqa: PLC0415
    from rankwatch.agent.cloud import CloudNotices  # noqa: PLC0415
    from rankwatch.agent.devices import DeviceSampler  # noqa: PLC0415
    from rankwatch.agent.endpoint import Endpoint, find_endpoint  # noqa: PLC0415
    from rankwatch.agent.enrolment import Enrolment  # noqa: PLC0415
    from rankwatch.agent.host import HostSampler  # noqa: PLC0415
    from rankwatch.agent.sender import Sender, Spool, SpoolOrigin, one_by_one  # noqa: PLC0415
    from rankwatch.agent.service_connection import ServiceConnection  # noqa: PLC0415
    from rankwatch.agent.supervisor import STOP_SIGNALS  # noqa: PLC0415
    from rankwatch.agent.uplink import HttpPublisher  # noqa: PLC0415
    from rankwatch.agent.worker import Hardware, Setting, Worker  # noqa: PLC0415
    from rankwatch.log_lines import JsonLines  # noqa: PLC0415

    handler = logging.handlers.RotatingFileHandler(_log_path(options), maxBytes=LOG_BYTES_MAX, backupCount=1)
    handler.setFormatter(JsonLines("agent"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    stopping: list[int] = []
    for each in STOP_SIGNALS:
        signal.signal(each, lambda number, _frame: stopping.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    clock = HostClock()

    def find() -> Endpoint | None:
        return find_endpoint(options.url, options.token_file, environment)

    by_kafka = environment.get("RANKWATCH_KAFKA", "")
    identity_path = Path(layout.agent_identity_path(str(options.dir), options.job))
    enrolment = Enrolment(identity_path, options.job, ServiceConnection(find))
    to_http = one_by_one(HttpPublisher(ServiceConnection(find), enrolment))
    publish = _to_kafka(options.job, environment, enrolment) if by_kafka else to_http

    def open_spool() -> Spool:
        folder = _private(spool_folder(options.dir, options.job, environment))
        return Spool(folder, origin=SpoolOrigin(str(options.dir), options.job, _service(options, environment)))

    sender = Sender(publish, open_spool, clock)
    devices = DeviceSampler(layout.devices_lock_path(str(options.dir), options.job), clock)
    host = HostSampler(Path(environment.get("RANKWATCH_HOST_ROOT") or "/"), clock)
    hardware = Hardware(devices, host, CloudNotices(environment.get("RANKWATCH_CLOUD", ""), clock))
    setting = Setting(options.dir, options.job, clock, find, enrolment, sender, hardware, restarts=options.worker)
    worker = Worker(setting, lambda: bool(stopping))
    # Until the ranks are watched every millisecond counts: how a process ended is only known of one that was watched
    # before, and beside busy ranks a process of low priority can take seconds to start.
    worker.turn()
    lower_priority()
    worker.run()
    return 0


def _to_kafka(job: str, environment: Mapping[str, str], enrolment: Enrolment) -> Publish:
    """Publish to Kafka. With invalid settings everything waits in the spool, and the log says why."""
    from rankwatch.kafka.settings import from_environment  # noqa: PLC0415
    from rankwatch.outcome import Later  # noqa: PLC0415

    try:
        from rankwatch.agent.kafka_publisher import KafkaPublisher  # noqa: PLC0415

        settings = from_environment(environment)
        assert settings is not None
        return KafkaPublisher(settings, job, enrolment)
    except (ValueError, ImportError) as error:
        trouble = Later(str(error))
        return lambda _bodies: [trouble]


def spool_folder(directory: Path, job: str, environment: Mapping[str, str]) -> Path:
    """The folder of a job's spool."""
    return spool_base(directory, environment) / layout.file_stem(f"{job}@{directory}")


def spool_base(directory: Path, environment: Mapping[str, str]) -> Path:
    """The folder of spools: `RANKWATCH_SPOOL`, else beside the recorders, unless those are in memory."""
    if environment.get("RANKWATCH_SPOOL"):
        return Path(environment["RANKWATCH_SPOOL"])
    if directory.is_relative_to(MEMORY_FOLDER):
        return Path(f"/var/tmp/rankwatch-{os.getuid()}")  # noqa: S108 - checked by _private
    return directory / "spool"


def _private(folder: Path) -> Path:
    """Check that the parent folder belongs to this user: anyone can create names in /var/tmp.

    Raises:
        PermissionError: the parent folder belongs to another user, or is a symbolic link.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.parent.is_symlink() or folder.parent.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder.parent} belongs to another user")
    return folder


def _log_path(options: argparse.Namespace) -> Path:
    return Path(options.dir, f"{layout.file_stem(options.job)}.agent.log")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
