"""Incidents as they change: a list that is kept up to date at a terminal, else a line for each change."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.live import Live
from rich.text import Text

from rankwatch_service.cli import output
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.incidents.lost_time import cost_unit

if TYPE_CHECKING:
    from rankwatch_service.cli.client import CliClient

PATH: Final = "/api/v1/incidents"
RETRY_S: Final = 2.0
"""Pause before a connection that broke is opened again."""

LIST_EVERY_S: Final = 0.5
"""Shortest time between two readings of the list, however many incidents change."""

Wanted = Mapping[str, Sequence[str] | None]


def watch(client: CliClient, wanted: Wanted, columns: output.Columns, limit: int, *, as_json: bool) -> None:
    """Show unresolved incidents and their changes, until Ctrl-C.

    Args:
        client: of the service.
        wanted: jobs, kinds and severities to show; None for all.
        columns: of the list.
        limit: most incidents of the list.
        as_json: a line of JSON for each change, also at a terminal.

    Raises:
        CliError: the service refuses. While it is away, a note says so.
    """
    try:
        if sys.stdout.isatty() and not as_json:
            _keep_list(client, wanted, columns, limit)
        else:
            _print_changes(client, wanted, as_json)
    except KeyboardInterrupt:
        output.note("ended")


def _keep_list(client: CliClient, wanted: Wanted, columns: output.Columns, limit: int) -> None:
    with Live(auto_refresh=False) as live:
        for topic, _ in _changes(client, on_break=lambda why: live.update(Text(why), refresh=True)):
            if topic in ("hello", "reset", "incident"):
                found = client.get(PATH, state="unresolved", limit=limit, **wanted)["items"]
                live.update(Group(_totals(client), _table(found, columns)), refresh=True)
                time.sleep(LIST_EVERY_S)


def _print_changes(client: CliClient, wanted: Wanted, as_json: bool) -> None:
    for topic, change in _changes(client, on_break=output.note):
        if topic != "incident":
            continue
        one = client.get(f"{PATH}/{change['id']}")
        if any(values and one[name] not in values for name, values in wanted.items()):
            continue
        if as_json:
            output.print_json([{"what": change["what"], "at_unix_ns": change["at_unix_ns"], "incident": one}])
        else:
            at = output.moment(change["at_unix_ns"])
            said = output.plain(f"{one['job']}: {one['summary']}")
            print(at, change["what"], change["severity"], output.short_id(one["id"]), said)
        sys.stdout.flush()


def _changes(client: CliClient, on_break: Callable[[str], None]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Topic and data of each change; after a connection that broke those that were missed follow.

    An outage is told once, by its first reason, and so is its end.
    """
    after: int | None = None
    away = False
    while True:
        try:
            for topic, at, data in client.events(after):
                if away:
                    on_break("the service answers again")
                after, away = at, False
                yield topic, data
        except CliError as error:
            if error.status != Status.UNREACHABLE or after is None:
                raise
            if not away:
                on_break(f"{error}; trying again")
            away = True
        time.sleep(RETRY_S)


def _totals(client: CliClient) -> Text:
    totals = client.get(f"{PATH}/totals")
    count = {name: totals["open"][name] + totals["acknowledged"][name] for name in ("critical", "warning", "info")}
    lost = f"{totals['impact_gpu_hours_per_hour']:.3g} {cost_unit(totals['accelerated'])} lost per hour"
    said = " · ".join([*(f"{number} {name}" for name, number in count.items()), lost])
    return Text(said, style="bold")


def _table(found: Sequence[dict[str, Any]], columns: output.Columns) -> Any:
    rows = ([cell(one) for cell in columns.values()] for one in found)
    return output.new_table(columns, rows) if found else Text("no unresolved incidents", style="dim")
