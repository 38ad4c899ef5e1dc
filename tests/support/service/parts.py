"""The parts of rankwatch beside the api, as far as the store knows them: what each has last reported."""

from collections import Counter

from rankwatch_service.notify.lease import LEASE_NS
from rankwatch_service.store.models import Lease
from rankwatch_service.stream.process import PartitionReport, Reporter
from tests.support.store.rows import add

S = 10**9


def stream_reports(api, tick_s: int = 0) -> None:
    """Stream owns partition 0, and its newest tick was `tick_s` ago."""
    tick = api.clock.unix_ns() - tick_s * S
    Reporter(api.engine, api.clock, "host:1").report([PartitionReport(0, 3, 7, 7, tick, 0)], Counter())


def notifier_reports(api, ago_s: int = 0) -> None:
    """The notifier took its lease `ago_s` ago."""
    until = api.clock.unix_ns() + LEASE_NS - ago_s * S
    add(api.engine, Lease, name="notify", holder="host 1", epoch=1, expires_unix_ns=until)
