"""What is scarce in an api process, and whose: connections, event streams, answers, bodies, and what has a rate.

Everything scarce is taken from an account. A token of agents is one, so is a person by whatever tokens and sessions,
and whoever shows no token is the address that the request comes from. No account has a fixed share. While there is
room, one may hold all of it; once there is none, whoever holds less takes from the one that holds most. So an account
always gets its own part, which is the whole divided by those that ask, and the rest only while others do not ask.

A quarter of everything is for people alone, and clients without a token have a quarter at most: neither agents nor
strangers keep a person out who comes to see what is wrong.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from ipaddress import IPv6Address, ip_address
from threading import Lock
from typing import Any, Final, NamedTuple, Protocol

from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.clock import Clock

CONNECTIONS_MAX: Final = 8_192
"""A host has three, a browser tab one or two."""
CONNECTIONS_OF_A_PERSON_MAX: Final = 256
"""A browser opens six at most. Once a person has as many, the oldest that idles makes room."""
STREAMS_MAX: Final = 4_096
"""One for each host, and those of people."""
STREAMS_OF_A_PERSON_MAX: Final = 64
"""People leave tabs open, and each of their streams wakes up at every change."""
UNREAD_MAX: Final = 256
"""Answers that wait for a reader who does not take them, each with `WRITE_BUFFER_BYTES` or one piece in memory."""
BODIES_MAX: Final = 64
"""Requests whose body is longer than `BODY_SMALL_BYTES` and is being received, or waits for its turn: 512 MB of the
largest batches."""
PART: Final = 4
"""One in so many of each is for people alone, and clients without a token have at most as many."""
PREFIX_BITS: Final = 64
"""Leading bits of an IPv6 address that make one account: a network owns all addresses behind them."""


class Whose(StrEnum):
    """Kinds of accounts."""

    PERSON = "person"
    """Tokens with a scope beside ingest and alert, and sessions."""
    AGENT = "agent"
    """Tokens that only send: of agents, and of a Prometheus."""
    ANONYMOUS = "anonymous"
    """Nobody has shown a valid token."""


class Account(NamedTuple):
    """Who uses something."""

    whose: Whose
    name: str
    """The id of a token, the name of a person, or an address."""


SENDING: Final = frozenset((Scope.INGEST, Scope.ALERT))


def account_of(identity: Identity) -> Account:
    """The account of a token; all tokens and sessions of a person are one."""
    if identity.grants or not identity.scopes <= SENDING:
        return Account(Whose.PERSON, identity.person)
    return Account(Whose.AGENT, identity.id)


def account_at(address: str) -> Account:
    """The account of whoever shows no token, by an IPv4 address or the /64 of an IPv6 address."""
    try:
        found = ip_address(address)
    except ValueError:
        return Account(Whose.ANONYMOUS, address)
    if isinstance(found, IPv6Address):
        if found.ipv4_mapped is not None:
            return Account(Whose.ANONYMOUS, str(found.ipv4_mapped))
        network = int(found) >> (128 - PREFIX_BITS) << (128 - PREFIX_BITS)
        return Account(Whose.ANONYMOUS, f"{IPv6Address(network)}/{PREFIX_BITS}")
    return Account(Whose.ANONYMOUS, str(found))


class Held(Protocol):
    """What an account holds one of."""

    @property
    def is_idle(self) -> bool:
        """Whether it waits for its client, not for the service: those of an account are closed first."""
        ...


class Limit(NamedTuple):
    """Something of which accounts hold a number at a time."""

    what: str
    """As metrics name it."""
    most: int
    """Limit for all accounts together."""
    of_a_person: int | None = None
    """Limit for the account of one person; None: its share."""


class Rate(NamedTuple):
    """Something that each account may use up, and has again after a while."""

    what: str
    """As metrics name it."""
    most: float
    """At once, in whatever unit it is counted in."""
    period_s: float
    """Time in which as much comes back, evenly."""


CONNECTIONS: Final = Limit("connections", CONNECTIONS_MAX, CONNECTIONS_OF_A_PERSON_MAX)
STREAMS: Final = Limit("streams", STREAMS_MAX, STREAMS_OF_A_PERSON_MAX)
UNREAD: Final = Limit("unread", UNREAD_MAX)
BODIES: Final = Limit("bodies", BODIES_MAX)
LIMITS: Final = (CONNECTIONS, STREAMS, UNREAD, BODIES)
"""Whoever holds most of it loses one to whoever holds less, as docs/operations.md says of each."""


class Budgets:
    """The accounts of an api process. Thread-safe."""

    def __init__(self, clock: Clock, refused: Callable[[str, Whose], None], limits: Iterable[Limit] = LIMITS) -> None:
        """Do no I/O.

        Args:
            clock: by which what was used up comes back.
            refused: called with what was refused to an account, or taken from it, and whose account it is.
            limits: what accounts hold.
        """
        self._clock = clock
        self._refused = refused
        self._holdings = {limit.what: _Holdings(limit) for limit in limits}
        self._used: defaultdict[str, OrderedDict[Account, tuple[float, float]]] = defaultdict(OrderedDict)
        """What is left, and as of when, by rate and account; in the order of the last use."""
        self._lock = Lock()

    def shrink(self, limit: Limit, most: int) -> None:
        """Lower a limit, since there is less here; call it before the first reservation."""
        self._holdings[limit.what] = _Holdings(limit._replace(most=min(limit.most, most)))

    def reserve(self, limit: Limit, account: Account, item: Held) -> Any:
        """Reserve a place for `item`, any hashable object, or move its place to this account from another one.

        Returns:
            Whose place was needed, and which holds nothing any more: its caller closes it. None if there was room;
            `item` itself if it was refused, since this account holds as much as any other, or as a person may.
        """
        with self._lock:
            gone = self._holdings[limit.what].reserve(account, item)
        if gone is None:
            return None
        self._refused(limit.what, gone[0].whose)
        return gone[1]

    def release(self, limit: Limit, item: Held) -> None:
        """Release it; without effect if nobody holds it."""
        with self._lock:
            self._holdings[limit.what].release(item)

    def spend(self, rate: Rate, account: Account, amount: float = 1.0) -> float:
        """Use up an amount that is at most `rate.most`.

        Returns:
            0.0 if it was left to the account; else nothing was used, and after so many seconds it will be.
        """
        now_s = self._clock.monotonic_s()
        with self._lock:
            used = self._used[rate.what]
            while used and now_s - next(iter(used.values()))[1] >= rate.period_s:
                used.popitem(last=False)  # it has everything again
            left, at_s = used.get(account, (rate.most, now_s))
            left = min(rate.most, left + (now_s - at_s) * rate.most / rate.period_s)
            if left >= amount:
                used[account] = left - amount, now_s
                used.move_to_end(account)
                return 0.0
        self._refused(rate.what, account.whose)
        return (amount - left) * rate.period_s / rate.most

    def held(self, limit: Limit, whose: Whose) -> int:
        """How many all accounts of a kind hold now."""
        with self._lock:
            return self._holdings[limit.what].held[whose]


class _Holdings:
    """What accounts hold of one thing."""

    def __init__(self, limit: Limit) -> None:
        part = limit.most // PART
        self._of_a_person = limit.most if limit.of_a_person is None else limit.of_a_person
        self.held = dict.fromkeys(Whose, 0)
        self._account: dict[Held, Account] = {}
        self._items: dict[Account, dict[Held, None]] = {}
        """Oldest first."""
        self._groups = (
            _Group((Whose.ANONYMOUS,), part),
            _Group((Whose.ANONYMOUS, Whose.AGENT), limit.most - part),
            _Group(tuple(Whose), limit.most),
        )
        """Each within the next."""

    def reserve(self, account: Account, item: Held) -> tuple[Account, Held] | None:
        self.release(item)
        self._account[item] = account
        self._items.setdefault(account, {})[item] = None
        self._count(account, 1)
        full = next(
            (group for group in self._groups if group.count > group.most and account.whose in group.kinds), None
        )
        if account.whose is Whose.PERSON and len(self._items[account]) > self._of_a_person:
            gone = next((held for held in self._items[account] if held is not item and held.is_idle), item)
            return self.release(gone), gone
        if full is None:
            return None
        gone = self._whose_turn(full, account, item)
        return self.release(gone), gone

    def release(self, item: Held) -> Account:
        account = self._account.pop(item, _NOBODY)
        if account is not _NOBODY:
            self._count(account, -1)
            items = self._items[account]
            del items[item]
            if not items:
                del self._items[account]
        return account

    def _count(self, account: Account, more: int) -> None:
        self.held[account.whose] += more
        count = len(self._items[account])
        before = count - 1 if more > 0 else count
        for group in self._groups:
            if account.whose in group.kinds:
                group.move(account, before, before + more)

    def _whose_turn(self, group: _Group, account: Account, item: Held) -> Held:
        """The oldest idle one of whoever holds most. If none is idle: the oldest of them, but nothing is taken for
        somebody who would then hold more than whom it was taken from.
        """
        largest = group.largest()
        for one in largest:
            for held in self._items[one]:
                if held is not item and held.is_idle:
                    return held
        return item if account in largest else next(iter(self._items[next(iter(largest))]))


_NOBODY: Final = Account(Whose.ANONYMOUS, "")


class _Group:
    """Accounts that share a limit, by how many they hold."""

    def __init__(self, kinds: tuple[Whose, ...], most: int) -> None:
        self.kinds = kinds
        self.most = most
        self.count = 0
        self._by_number: defaultdict[int, dict[Account, None]] = defaultdict(dict)
        self._top = 0

    def move(self, account: Account, before: int, now: int) -> None:
        """An account holds another number, which differs by one."""
        self.count += now - before
        if before:
            del self._by_number[before][account]
        if now:
            self._by_number[now][account] = None
        if now > self._top:
            self._top = now
        elif not self._by_number[self._top] and self._top:
            self._top -= 1

    def largest(self) -> Mapping[Account, None]:
        """The accounts that hold most, of which there is one."""
        return self._by_number[self._top]
