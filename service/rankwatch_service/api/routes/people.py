"""People who log in with the OIDC provider: what their groups allow them, and when they were last here."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, Final

from fastapi import APIRouter, Depends
from pydantic import Field
from sqlalchemy import Connection, RowMapping, select

from rankwatch_service.access.identities import Identity
from rankwatch_service.access.scopes import Scope
from rankwatch_service.access.tokens import token_state
from rankwatch_service.api.dependencies.context import Ctx
from rankwatch_service.api.http.authorization import Require
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import JobProject
from rankwatch_service.store.models import Token as TokenRow

router = APIRouter(prefix="/people", tags=["access"])

SESSIONS_MAX: Final = 2_000
"""Newest sessions that are read: those of a week of 280 people who log in daily."""

Admin = Annotated[Identity, Depends(Require(Scope.ADMIN, every_job=True))]


class Permission(ApiReply):
    """What a group of a person allows, and in which jobs."""

    scopes: Annotated[list[str], Field(examples=[["operate", "read"]])]
    jobs: Annotated[list[str], Field(examples=[["nlp-*"]])]
    """Patterns of their names; empty: every job."""


class PersonAccess(ApiReply):
    """Somebody who has logged in with the OIDC provider."""

    person: Annotated[str, Field(examples=["https://login.example.com#248289761001"])]
    """Who it is, whatever they are called."""
    name: Annotated[str, Field(examples=["ada@example.com"])]
    permissions: list[Permission]
    """As of their newest login."""
    projects: Annotated[list[str], Field(examples=[["nlp"]])]
    """Projects of the jobs that they own."""
    sessions: int
    """Sessions that are open now."""
    logged_in_unix_ns: int
    """Their newest login."""
    last_used_unix_ns: int
    """When they were last here, to the minute."""


class People(ApiReply):
    """People, those who were here last first."""

    items: list[PersonAccess]
    next_cursor: None = None


@router.get("")
def list_people(context: Ctx, _identity: Admin) -> People:
    """People with a session that is open or ended within the last 7 days, those who were here last first.

    Whoever uses a token is listed with the tokens. Of sessions, the newest 2,000 count.
    """
    of_people = (TokenRow.kind == "session") & (TokenRow.person != "")
    query = select(TokenRow.__table__).where(of_people).order_by(TokenRow.created_unix_ns.desc(), TokenRow.id)
    sessions = defaultdict[str, list[RowMapping]](list)
    with read(context.engine) as connection:
        for row in connection.execute(query.limit(SESSIONS_MAX)).mappings():
            sessions[row["person"]].append(row)
        projects = _projects(connection, {mine[0]["name"] for mine in sessions.values()})
    now = context.clock.unix_ns()
    people = [_shown(mine, projects[mine[0]["name"]], now) for mine in sessions.values()]
    return People(items=sorted(people, key=lambda one: (-one.last_used_unix_ns, one.person)))


def _projects(connection: Connection, owners: set[str]) -> defaultdict[str, list[str]]:
    """By owner, the projects of their jobs."""
    query = select(JobProject.owner, JobProject.project).where(JobProject.owner.in_(owners), JobProject.project != "")
    found = defaultdict[str, list[str]](list)
    for owner, project in connection.execute(query.distinct().order_by(JobProject.owner, JobProject.project)):
        found[owner].append(project)
    return found


def _shown(sessions: list[RowMapping], projects: list[str], now_unix_ns: int) -> PersonAccess:
    newest = sessions[0]
    states = [token_state(one["revoked"], one["expires_unix_ns"], now_unix_ns) for one in sessions]
    return PersonAccess(
        person=newest["person"],
        name=newest["name"],
        permissions=[Permission(**grant) for grant in newest["grants"]],
        projects=projects,
        sessions=states.count("valid"),
        logged_in_unix_ns=newest["created_unix_ns"],
        last_used_unix_ns=max(one["last_used_unix_ns"] or one["created_unix_ns"] for one in sessions),
    )
