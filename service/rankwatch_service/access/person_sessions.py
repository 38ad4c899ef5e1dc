"""Sessions of people whom the OIDC provider vouches for: their groups say what they may do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Connection

from rankwatch_service.access.grants import GroupGrant
from rankwatch_service.access.job_filter import JobFilter
from rankwatch_service.access.oidc_provider import Person
from rankwatch_service.access.scopes import Scope
from rankwatch_service.access.sessions import SESSION_S
from rankwatch_service.access.tokens import TokenKind, create_token
from rankwatch_service.names import NAME_CHARS_MAX
from rankwatch_service.settings import GroupSettings
from rankwatch_service.store import audit_trail

LISTED_MAX: Final = 50
"""Groups of a person that a row of the audit trail lists."""


class NoGroupError(Exception):
    """The person is in none of the groups that may use this service."""


def grants_of(person: Person, groups: Mapping[str, GroupSettings]) -> list[GroupGrant]:
    """What a person may do, by group; those that allow the same in other jobs are one grant.

    Raises:
        NoGroupError: the person is in none of the groups.
    """
    found: dict[frozenset[str], JobFilter] = {}
    for name in sorted(person.groups & groups.keys()):
        group = groups[name]
        scopes, jobs = frozenset[str](group.scopes), JobFilter(group.jobs)
        found[scopes] = JobFilter.any_of([found[scopes], jobs]) if scopes in found else jobs
    if not found:
        raise NoGroupError
    return [GroupGrant(scopes, jobs) for scopes, jobs in found.items()]


def open_session_of(
    connection: Connection, person: Person, grants: list[GroupGrant], now_unix_ns: int, source: str
) -> str:
    """Open a session of `SESSION_S` for a person, and record it in the audit trail.

    Args:
        connection: of a write transaction.
        person: whom the provider vouches for.
        grants: what the person may do.
        now_unix_ns: the time.
        source: the browser's address, for the audit trail.

    Returns:
        The session token's text.
    """
    name = shown_name(person)
    session_id, text = create_token(
        connection,
        TokenKind.SESSION,
        name,
        {Scope(scope) for grant in grants for scope in grant.scopes},
        now_unix_ns,
        expires_unix_ns=now_unix_ns + SESSION_S * 10**9,
        person=person.subject,
        grants=grants,
    )
    fields = {"grants": [grant.stored() for grant in grants], **_groups(person)}
    actor = f"{name} ({session_id})"
    audit_trail.append(
        connection, now_unix_ns, actor, "session.open", person.subject, "ok", source=source, fields=fields
    )
    return text


def record_refusal(connection: Connection, person: Person, now_unix_ns: int, source: str) -> None:
    """Record in the audit trail that a person is in no group that may use this service."""
    target, fields = person.subject, _groups(person)
    audit_trail.append(
        connection, now_unix_ns, shown_name(person), "session.refuse", target, "no group", source=source, fields=fields
    )


def shown_name(person: Person) -> str:
    """A person's name without control codes, and not longer than that of a token."""
    return "".join(sign for sign in person.name if sign.isprintable())[:NAME_CHARS_MAX].strip() or "somebody"


def _groups(person: Person) -> dict[str, Any]:
    return {"groups": sorted(person.groups)[:LISTED_MAX], "number_of_groups": len(person.groups)}
