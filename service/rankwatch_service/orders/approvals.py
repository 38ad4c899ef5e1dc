"""Changes that weaken approvals, as commands to all jobs: where the policy has `two_people`, they need one themselves.

They are: to switch `two_people` off, to raise `approval_ranks`, and to make a token that can approve. What the command
line does in the database, on the machine of the service, needs no approval. Receivers are notified of either.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Final

from sqlalchemy import Connection, RowMapping

from rankwatch_service.access.tokens import admit_token
from rankwatch_service.log.base import Entry
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.orders import commands
from rankwatch_service.orders.order import CommandOutcome
from rankwatch_service.policy.actions import MAKE_TOKEN, SET_APPROVALS, CommandRequest
from rankwatch_service.policy.announcement import command_announcement
from rankwatch_service.policy.control_records import encode_control
from rankwatch_service.policy.policy import Policy, policy_record
from rankwatch_service.store import audit_trail
from rankwatch_service.store.settings_rows import read_policy, write_policy

ID_BYTES: Final = 12


def request_change(
    connection: Connection,
    action: str,
    params: Mapping[str, Any],
    links: Mapping[str, str],
    now_unix_ns: int,
    *,
    requested_by: str,
    requester: str = "",
    reason: str = "",
    approval_required: bool = True,
) -> CommandRequest:
    """Store a change that weakens approvals, and announce it, in a `write`.

    Args:
        connection: of the `write`.
        action: `SET_APPROVALS` or `MAKE_TOKEN`.
        params: {"two_people", "approval_ranks"}, or of a token that is not admitted {"token": id} and what it may do.
        links: URLs of pages, by name.
        now_unix_ns: the time.
        requested_by: who, as the audit trail names people.
        requester: the person, as `Identity.person` names people; empty: the command line.
        reason: why, for people.
        approval_required: it waits for a second person; otherwise the caller has carried it out.
    """
    request = CommandRequest(
        id=f"cmd_{secrets.token_hex(ID_BYTES)}",
        job=ALL_JOBS,
        attempt="",
        action=action,
        params=params,
        reason=reason,
        requested_by=requested_by,
        requester=requester,
        requested_unix_ns=now_unix_ns,
        approval_required=approval_required,
    )
    commands.add(connection, request, announcement=command_announcement(request, links))
    if not approval_required:
        commands.set_state(connection, request.id, CommandOutcome("applied"), requested_by, now_unix_ns)
    return request


def carry_out(connection: Connection, command: RowMapping, controls: ControlLog, now_unix_ns: int) -> None:
    """Carry out a change that a second person has approved, in the `write` of the approval."""
    params, actor = command["params"], command["requested_by"]
    outcome = CommandOutcome("applied")
    if command["action"] == MAKE_TOKEN and not admit_token(connection, params["token"]):
        outcome = CommandOutcome("failed", "the token was revoked")
    if command["action"] == SET_APPROVALS:
        wanted = with_approvals(read_policy(connection), params["two_people"], params.get("approval_ranks"))
        set_policy(connection, controls, wanted, actor, "policy.approvals", now_unix_ns)
    commands.set_state(connection, command["id"], outcome, actor, now_unix_ns)


def with_approvals(policy: Policy, two_people: bool, approval_ranks: int | None) -> Policy:
    """The policy with other approvals; `approval_ranks` None: as it is."""
    ranks = policy.limits.approval_ranks if approval_ranks is None else approval_ranks
    return replace(policy, two_people=two_people, limits=replace(policy.limits, approval_ranks=ranks))


def set_policy(
    connection: Connection, controls: ControlLog, wanted: Policy, actor: str, what: str, now_unix_ns: int
) -> None:
    """Replace the policy, in a `write`, with a record for the stream and a line in the audit trail."""
    write_policy(connection, wanted, now_unix_ns)
    controls.append_in(connection, [Entry(ALL_JOBS, encode_control(policy_record(wanted)))])
    audit_trail.append(connection, now_unix_ns, actor, what, "policy", "ok", fields=asdict(wanted))
