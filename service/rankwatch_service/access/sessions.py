"""Sessions of browsers: one that a token is exchanged for, and one of a person whom the OIDC provider vouches for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Connection, select

from rankwatch_service.access.grants import GroupGrant, Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.access.job_filter import JobFilter
from rankwatch_service.access.oidc_provider import Person
from rankwatch_service.access.tokens import LOGIN_NAME, TokenKind, create_token
from rankwatch_service.names import NAME_CHARS_MAX
from rankwatch_service.settings import GroupSettings
from rankwatch_service.store import audit_trail
from rankwatch_service.store.models import Token

SESSION_S: Final = 12 * 3_600
"""How long a session lasts: one shift."""

LOGIN_S: Final = 600
"""How long a login link is valid. It may remain in the history of a terminal or a browser."""


class SenderTokenError(Exception):
    """A token that can only send telemetry or alerts belongs to a program, which has no browser."""


class LoginUsedError(Exception):
    """A login token opens one session, and this one already has."""


def issue_login(connection: Connection, actor: str, now_unix_ns: int) -> str:
    """Create the token of a login link, and record it in the audit trail.

    Args:
        connection: of a write transaction.
        actor: who asked for it, as the audit trail names people.
        now_unix_ns: the time.

    Returns:
        Its text, which opens one session with scope admin within `LOGIN_S`, and nothing else.
    """
    expires = now_unix_ns + LOGIN_S * 10**9
    token_id, text = create_token(
        connection, TokenKind.LOGIN, LOGIN_NAME, [Scope.ADMIN], now_unix_ns, expires_unix_ns=expires
    )
    audit_trail.append(
        connection, now_unix_ns, actor, "token.make", token_id, "ok", fields={"kind": str(TokenKind.LOGIN)}
    )
    return text


def open_session(connection: Connection, identity: Identity, now_unix_ns: int, source: str) -> tuple[str, int]:
    """Open a session for the holder of a token, and record it in the audit trail.

    Args:
        connection: of a write transaction.
        identity: the token's. A session ends no later than its token, except that a login token may expire before.
        now_unix_ns: the time.
        source: the browser's address, for the audit trail.

    Returns:
        The session token's text, and when it expires, in Unix nanoseconds.

    Raises:
        LoginUsedError: a login token that has opened a session before.
        SenderTokenError: a token that may do nothing but send.
    """
    if identity.scopes <= {Scope.INGEST, Scope.ALERT}:
        raise SenderTokenError
    expires_unix_ns = now_unix_ns + SESSION_S * 10**9
    if identity.kind != TokenKind.LOGIN and identity.expires_unix_ns is not None:
        expires_unix_ns = min(expires_unix_ns, identity.expires_unix_ns)
    opened = select(Token.id).where(Token.parent == identity.id).limit(1)
    if identity.kind == TokenKind.LOGIN and connection.execute(opened).one_or_none() is not None:
        raise LoginUsedError
    _, text = create_token(
        connection,
        TokenKind.SESSION,
        identity.name,
        [Scope(scope) for scope in identity.scopes],
        now_unix_ns,
        job=identity.jobs.only,
        project=identity.jobs.project,
        expires_unix_ns=expires_unix_ns,
        parent=identity.id,
        makers=identity.makers,
    )
    audit_trail.append(connection, now_unix_ns, identity.actor, "session.open", identity.id, "ok", source=source)
    return text, expires_unix_ns


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
