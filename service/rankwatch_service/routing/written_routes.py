"""Routes as people write them, in TOML. Everything that is wrong with them is reported here, with its place."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Final, TypeVar

from pydantic import Field, StrictBool, ValidationError

from rankwatch_service.labels.incident_labels import check_label_name
from rankwatch_service.labels.matcher import Matcher, parse_matchers
from rankwatch_service.routing.inhibition import InhibitRule
from rankwatch_service.routing.route import ALL_LABELS, Escalation, Route, Routing
from rankwatch_service.routing.written_times import Duration, PositiveDuration, Written, WrittenTimeInterval

ROUTES_BYTES_MAX: Final = 256 * 1024
"""Largest file of routes; a tree of a thousand routes has a third of it."""

T = TypeVar("T")


class WrittenTimeIntervals(Written):
    """Time intervals under a name; a moment in any of them counts."""

    name: Annotated[str, Field(min_length=1)]
    time_intervals: tuple[WrittenTimeInterval, ...]


class WrittenInhibitRule(Written):
    """See `InhibitRule`."""

    source_matchers: Annotated[tuple[str, ...], Field(min_length=1)]
    target_matchers: Annotated[tuple[str, ...], Field(min_length=1)]
    equal: tuple[str, ...] = ()


class WrittenEscalation(Written):
    """See `Escalation`."""

    after: PositiveDuration
    receiver: Annotated[str, Field(min_length=1)]


class WrittenRoute(Written):
    """See `Route`. What is not written is inherited from the parent, but for matchers, continue and time intervals."""

    receiver: str | None = None
    matchers: tuple[str, ...] = ()
    group_by: tuple[str, ...] | None = None
    continues: Annotated[StrictBool, Field(alias="continue")] = False
    group_wait: Duration | None = None
    group_interval: PositiveDuration | None = None
    repeat_interval: PositiveDuration | None = None
    mute_time_intervals: tuple[str, ...] = ()
    active_time_intervals: tuple[str, ...] = ()
    escalations: tuple[WrittenEscalation, ...] | None = None
    routes: tuple[WrittenRoute, ...] = ()


class WrittenRouting(Written):
    """A whole file."""

    route: WrittenRoute
    inhibit_rules: tuple[WrittenInhibitRule, ...] = ()
    time_intervals: tuple[WrittenTimeIntervals, ...] = ()


def read_routes(text: str) -> Routing:
    """The routes of a TOML document.

    Raises:
        ValueError: it is not TOML, or something in it is wrong; the text names the place, such as
            `route.routes[1].group_wait`.
    """
    if len(text.encode()) > ROUTES_BYTES_MAX:
        raise ValueError(f"the file has more than {ROUTES_BYTES_MAX} bytes")
    document = tomllib.loads(text)
    try:
        written = WrittenRouting.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{_place(first['loc'])}: {str(first['msg']).removeprefix('Value error, ')}") from error
    except RecursionError as error:
        raise ValueError("the routes are nested too deeply") from error
    intervals = {}
    for number, one in enumerate(written.time_intervals):
        if one.name in intervals:
            raise ValueError(f"time_intervals[{number}].name: there is another one called {one.name!r}")
        intervals[one.name] = tuple(
            _at(f"time_intervals[{number}].time_intervals[{position}]", interval.interval)
            for position, interval in enumerate(one.time_intervals)
        )
    rules = tuple(_inhibit_rule(f"inhibit_rules[{number}]", rule) for number, rule in enumerate(written.inhibit_rules))
    return Routing(_Tree(intervals.keys()).root(written.route), rules, intervals)


@dataclass(slots=True)
class _Tree:
    """Makes routes of written ones."""

    intervals: Collection[str]
    keys: set[str] = field(default_factory=set)

    def root(self, written: WrittenRoute) -> Route:
        for name in ("matchers", "continue", "mute_time_intervals", "active_time_intervals"):
            if name in written.model_dump(by_alias=True, exclude_unset=True):
                raise ValueError(f"route: the root takes every incident, always: it has no {name}")
        if written.receiver is None:
            raise ValueError('route.receiver: the root needs one; "" notifies nobody')
        return self.route(written, "route", Route("", ""))

    def route(self, written: WrittenRoute, place: str, parent: Route) -> Route:
        matchers = _matchers(f"{place}.matchers", written.matchers)
        for name in (*written.mute_time_intervals, *written.active_time_intervals):
            if name not in self.intervals:
                raise ValueError(f"{place}: there are no time_intervals called {name!r}")
        if written.group_by is not None:
            _check_labels(f"{place}.group_by", [name for name in written.group_by if name != ALL_LABELS])
        mine = f"{{{','.join(map(str, matchers))}}}"
        escalations = (
            parent.escalations
            if written.escalations is None
            else tuple(Escalation(one.after, one.receiver) for one in written.escalations)
        )
        route = Route(
            key=self.unique(f"{parent.key}/{mine}" if parent.key else mine),
            receiver=_inherited(written.receiver, parent.receiver),
            matchers=matchers,
            group_by=_inherited(written.group_by, parent.group_by),
            continues=written.continues,
            group_wait_s=_inherited(written.group_wait, parent.group_wait_s),
            group_interval_s=_inherited(written.group_interval, parent.group_interval_s),
            repeat_interval_s=_inherited(written.repeat_interval, parent.repeat_interval_s),
            mute_time_intervals=written.mute_time_intervals,
            active_time_intervals=written.active_time_intervals,
            escalations=escalations,
        )
        notified = [route.receiver, *(escalation.receiver for escalation in escalations)]
        if len(set(notified)) < len(notified):
            raise ValueError(f"{place}: an escalation goes to a receiver that the route notifies already")
        children = [self.route(child, f"{place}.routes[{n}]", route) for n, child in enumerate(written.routes)]
        return replace(route, routes=tuple(children))

    def unique(self, key: str) -> str:
        """The key, with a number behind it if an earlier route of the tree has the same matchers."""
        number = 1
        unique = key
        while unique in self.keys:
            number += 1
            unique = f"{key}#{number}"
        self.keys.add(unique)
        return unique


def _inhibit_rule(place: str, written: WrittenInhibitRule) -> InhibitRule:
    _check_labels(f"{place}.equal", written.equal)
    return InhibitRule(
        _matchers(f"{place}.source_matchers", written.source_matchers),
        _matchers(f"{place}.target_matchers", written.target_matchers),
        written.equal,
    )


def _matchers(place: str, texts: Sequence[str]) -> tuple[Matcher, ...]:
    matchers: tuple[Matcher, ...] = ()
    for number, text in enumerate(texts):
        found = _at(f"{place}[{number}]", partial(parse_matchers, text))
        _check_labels(f"{place}[{number}]", [matcher.name for matcher in found])
        matchers += found
    return tuple(matchers)


def _check_labels(place: str, names: Sequence[str]) -> None:
    for name in names:
        _at(place, partial(check_label_name, name))
    if len(set(names)) < len(names) and not place.endswith("]"):
        raise ValueError(f"{place}: a label is listed twice")


def _inherited(written: T | None, from_parent: T) -> T:
    return from_parent if written is None else written


def _at(place: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _place(location: Sequence[int | str]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).removeprefix(".")
