"""The tunings of detectors. They are always replaced as a whole, under the next version."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt
from sqlalchemy import Connection, RowMapping, delete, insert, select

from rankwatch_detectors.tuning import SETTINGS, Profile
from rankwatch_service import tuning as stored
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.api.dependencies import Context, Ctx, Precondition, PreconditionDep, Require
from rankwatch_service.api.http.paging import Page, Wanted, fetch_page
from rankwatch_service.api.http.problem import ProblemError
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.log.base import Entry
from rankwatch_service.names import ALL_JOBS, NAME_CHARS_MAX
from rankwatch_service.policy.control_records import encode_control
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import TuningVersion
from rankwatch_service.tuning import TUNINGS_MAX, TuningSet, read_tuning

router = APIRouter(prefix="/tuning", tags=["tuning"])

VERSIONS_MAX: Final = 1_000
"""Versions kept, the newest ones; the audit trail has all of them."""

Reader = Annotated[Identity, Depends(Require(Scope.READ, every_job=True))]
Admin = Annotated[Identity, Depends(Require(Scope.ADMIN, every_job=True))]


class Tuning(BaseModel):
    """What holds in the jobs of one pattern, in which `*` stands for any text and `?` for one character."""

    model_config = ConfigDict(extra="forbid")
    jobs: Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX)] = "*"
    profile: Profile = Profile.STANDARD
    settings: dict[str, StrictInt | StrictFloat] = {}
    """Settings of their own, by name; the profile gives all others."""

    def checked(self) -> stored.Tuning:
        """The tuning.

        Raises:
            ProblemError: a setting does not exist or is out of its range; the text says what is allowed.
        """
        try:
            return read_tuning(self.model_dump(mode="python"))
        except ValueError as error:
            raise ProblemError(422, str(error)) from error


class NewTunings(BaseModel):
    """All tunings. The first whose pattern matches a job decides; where none does, every setting has its default."""

    model_config = ConfigDict(extra="forbid")
    tunings: Annotated[list[Tuning], Field(max_length=TUNINGS_MAX)]
    version: Annotated[int | None, Field(strict=True, ge=0)] = None
    """The version that this shall replace; 409 if another one is in force. Null: whichever is."""


class VersionOfTunings(ApiReply):
    """The tunings under their version, and who set them when. Nobody has set version 0, in which there are none."""

    version: int
    tunings: list[Tuning]
    actor: str
    at_unix_ns: int


class SettingInfo(ApiReply):
    """A setting that a tuning may have."""

    name: str
    unit: str
    low: float
    high: float
    profiles: dict[Profile, float]
    meaning: str
    previewable: bool
    """Whether `POST /api/v1/tuning/preview` shows what another value changes."""


class SettingsInfo(ApiReply):
    """All settings that a tuning may have."""

    items: list[SettingInfo]


NOBODY: Final = VersionOfTunings(version=0, tunings=[], actor="", at_unix_ns=0)


@router.get("")
def show_tunings(context: Ctx, precondition: PreconditionDep, _identity: Reader) -> VersionOfTunings:
    """The tunings in force."""
    with read(context.engine) as connection:
        return precondition.show(_newest(connection))


@router.put("")
def set_tunings(body: NewTunings, context: Ctx, precondition: PreconditionDep, identity: Admin) -> VersionOfTunings:
    """Replace the tunings; with `If-Match`, only if they are still those that were read. They hold for running jobs
    too, whose detectors keep what they have learned.
    """
    tunings = [one.checked() for one in body.tunings]
    return _replace(context, precondition, identity, tunings, "tuning.set", body.version)


@router.delete("")
def reset_tunings(context: Ctx, precondition: PreconditionDep, identity: Admin) -> VersionOfTunings:
    """Remove all tunings: every setting has its default again. The answer is the new version."""
    return _replace(context, precondition, identity, [], "tuning.reset", None)


@router.get("/settings")
def list_settings(_identity: Reader) -> SettingsInfo:
    """The settings that a tuning may have, with their ranges and their values in the profiles."""
    return SettingsInfo(
        items=[
            SettingInfo(
                name=one.name,
                unit=one.unit,
                low=one.low,
                high=one.high,
                profiles={profile: one.of(profile) for profile in Profile},
                meaning=one.meaning,
                previewable=one.previewable,
            )
            for one in SETTINGS.values()
        ]
    )


@router.get("/versions")
def list_versions(context: Ctx, window: Wanted, _identity: Reader) -> Page[VersionOfTunings]:
    """Earlier and present tunings, newest first."""
    query = select(TuningVersion.__table__)
    order = (TuningVersion.version,)
    with read(context.engine) as connection:
        return fetch_page(connection, query, order, window, context.cursors, "tuning versions", _shown)


def tunings_in_force(connection: Connection) -> TuningSet:
    """The newest version."""
    newest = _newest(connection)
    return TuningSet(newest.version, tuple(one.checked() for one in newest.tunings))


def _newest(connection: Connection) -> VersionOfTunings:
    query = select(TuningVersion.__table__).order_by(TuningVersion.version.desc()).limit(1)
    row = connection.execute(query).mappings().one_or_none()
    return NOBODY if row is None else _shown(row)


def _shown(row: RowMapping | dict[str, Any]) -> VersionOfTunings:
    return VersionOfTunings.model_validate(dict(row))


def _replace(
    context: Context,
    precondition: Precondition,
    identity: Identity,
    tunings: Iterable[stored.Tuning],
    action: str,
    expected: int | None,
) -> VersionOfTunings:
    wanted = tuple(tunings)
    now = context.clock.unix_ns()
    with write(context.engine) as connection:
        before = _newest(connection)
        precondition.check(before)
        if expected is not None and expected != before.version:
            raise ProblemError(409, f"version {before.version} is in force, not {expected}; read it and change that")
        document = msgspec.to_builtins(list(wanted))
        if document == [one.model_dump(mode="json") for one in before.tunings]:
            return precondition.show(before)
        version = before.version + 1
        row = {"version": version, "tunings": document, "actor": identity.actor, "at_unix_ns": now}
        connection.execute(insert(TuningVersion).values(**row))
        connection.execute(delete(TuningVersion).where(TuningVersion.version <= version - VERSIONS_MAX))
        record = encode_control(TuningSet(version, wanted))
        context.controls.append_in(connection, [Entry(ALL_JOBS, record)])
        fields = {"version": version, "tunings": document}
        audit_trail.append(connection, now, identity.actor, action, "tuning", "ok", fields=fields)
    return precondition.show(_shown(row))
