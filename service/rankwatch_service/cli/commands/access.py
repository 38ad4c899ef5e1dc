"""`rankwatch login` and `rankwatch token`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankwatch_service.cli import output
from rankwatch_service.cli.commands.database import existing_database, service_in_force, token_pin_in_force
from rankwatch_service.cli.errors import CliError, Status, did_you_mean
from rankwatch_service.cli.options import DATA, DATABASE_URL, INSECURE, JOB, JSON

if TYPE_CHECKING:
    from sqlalchemy import Connection

token = typer.Typer(help="Create, list and revoke access tokens, directly in the database.", no_args_is_help=True)


def login(
    url: Annotated[str, typer.Argument(help="URL of the service, such as http://127.0.0.1:8770.")],
    secret: Annotated[
        str, typer.Option("--token", prompt="Token", hide_input=True, help="Access token; prompted for if not given.")
    ],
    insecure: INSECURE = False,
    as_json: JSON = False,
) -> None:
    """Store the URL and token of a service for other commands, in the user's configuration folder."""
    import os

    from rankwatch.client.connection import user_places
    from rankwatch_service.cli.client import CliClient, service_endpoint, store_endpoint

    endpoint = service_endpoint(url.rstrip("/"), secret.strip(), os.environ, insecure=insecure)
    CliClient(endpoint).get("/api/v1/jobs", limit=1)
    config = user_places(os.environ).login
    store_endpoint(endpoint, config)
    output.done(f"stored in {config}", {"url": endpoint.url, "file": str(config)}, as_json)


@token.command("create")
def create(
    name: Annotated[str, typer.Argument(help="Owner or purpose.")],
    scope: Annotated[list[str], typer.Option(help="ingest, alert, read, operate, command or admin; may be repeated.")],
    job: Annotated[str, typer.Option(help="The only job it may access. Default: every job.")] = "",
    project: Annotated[
        str, typer.Option(help="The only project whose jobs it may access; jobs that begin by it are of this project.")
    ] = "",
    lasting: Annotated[str, typer.Option("--for", help="Lifetime, such as 90s, 30m, 2h or 1d; or never.")] = "90d",
    as_json: JSON = False,
    data: DATA = None,
    database_url: DATABASE_URL = None,
) -> None:
    """Create a token and print it. It cannot be shown again.

    If the api's certificate signs itself, a token for agents ends with the certificate's SHA-256, by which agents know
    the api. Nobody has to approve it, but if the policy has two_people, all receivers are notified of one with scope
    command or admin, as they are of a login link.
    """
    from rankwatch_service.access.grants import Scope
    from rankwatch_service.access.tokens import LOCAL_NAME, can_approve, issue_token, with_pin
    from rankwatch_service.cli.configuration import seconds
    from rankwatch_service.clock import SystemClock
    from rankwatch_service.store.engine import write

    for one in scope:
        if one not in set(Scope):
            known = did_you_mean(one, Scope, f"scopes are {', '.join(Scope)}")
            raise CliError(Status.USAGE, f"there is no scope {one!r}{known}")
    scopes = {Scope(one) for one in scope}
    now = SystemClock().unix_ns()
    _require_names(project)
    if job and project:
        raise CliError(Status.USAGE, "give --job or --project: the agents of one job get both by `rankwatch token job`")
    expires = None if lasting == "never" else now + seconds(lasting) * 1_000_000_000
    pin = token_pin_in_force(data, database_url) if scopes == {Scope.INGEST} else ""
    with existing_database(data, database_url) as engine, write(engine) as connection:
        token_id, text = issue_token(
            connection,
            "command line",
            name,
            scopes,
            now,
            makers=(LOCAL_NAME,),
            job=job,
            expires_unix_ns=expires,
            project=project,
        )
        if can_approve(scopes):
            made = {"name": name, "scopes": sorted(scopes), "job": job, "project": project, "expires": lasting}
            _tell_receivers(connection, made | {"token": token_id}, now)
    _print_secret({"id": token_id, "token": with_pin(text, pin), "expires_unix_ns": expires}, "token", as_json)


@token.command("job")
def job_token(
    job: JOB,
    hosts: Annotated[
        int | None,
        typer.Option(min=1, help="How many agents it admits at a time, usually one for each host. Default: 131072."),
    ] = None,
    project: Annotated[str, typer.Option(help="Project of the job, if it begins by this token.")] = "",
    owner: Annotated[str, typer.Option(help="Owner of the job, if it begins by this token.")] = "",
    lasting: Annotated[str, typer.Option("--for", help="Lifetime, such as 90s, 30m, 2h or 30d.")] = "30d",
    file: Annotated[
        Path | None,
        typer.Option(help="Keep it here instead of printing it; one that is valid for half of --for or more stays."),
    ] = None,
    as_json: JSON = False,
    data: DATA = None,
    database_url: DATABASE_URL = None,
) -> None:
    """Create the token with which the agents of one job enrol, and print it: RANKWATCH_TOKEN on its hosts.

    Without --hosts it admits as many agents as come, so that whoever has it can enrol while the job runs.
    """
    from rankwatch_service.access.grants import Scope
    from rankwatch_service.access.token_files import is_lasting_token_of, write_secret
    from rankwatch_service.access.tokens import LOCAL_NAME, issue_token, with_pin
    from rankwatch_service.cli.configuration import seconds
    from rankwatch_service.clock import SystemClock
    from rankwatch_service.names import is_name
    from rankwatch_service.policy.control_records import JobOwnership
    from rankwatch_service.store.engine import write

    if not is_name(job):
        raise CliError(Status.USAGE, f"{job!r} cannot be the name of a job")
    _require_names(project, owner)
    clock, whose = SystemClock(), JobOwnership(job, project, owner)
    lasts_ns = seconds(lasting) * 1_000_000_000
    pin = token_pin_in_force(data, database_url)
    try:
        with existing_database(data, database_url) as engine:
            if file and is_lasting_token_of(engine, file, clock, whose, pin, lasts_ns // 2):
                output.done(f"{file} contains a valid token of {job}", {"job": job, "file": str(file)}, as_json)
                return
            with write(engine) as connection:
                now = clock.unix_ns()
                token_id, text = issue_token(
                    connection,
                    "command line",
                    f"agents of {job}",
                    {Scope.INGEST},
                    now,
                    makers=(LOCAL_NAME,),
                    job=job,
                    expires_unix_ns=now + lasts_ns,
                    hosts_max=hosts,
                    project=project,
                    owner=owner,
                )
        text = with_pin(text, pin)
        made = {"id": token_id, "job": job, "expires_unix_ns": now + lasts_ns}
        if file is None:
            _print_secret(made | {"token": text}, "token", as_json)
        else:
            write_secret(file, text + "\n")
            output.done(f"{file} contains a new token of {job}", made | {"file": str(file)}, as_json)
        admits = f"{hosts} agents at a time" if hosts else "as many agents as come (--hosts N limits them)"
        expires = output.moment(now + lasts_ns)
        output.note(f"for {admits}, until {expires}, in {service_in_force(data, database_url)}")
    except OSError as error:
        raise CliError(Status.USAGE, f"{file}: {error.strerror}") from error


@token.command("login")
def login_link(as_json: JSON = False, data: DATA = None, database_url: DATABASE_URL = None) -> None:
    """Print a link that logs a browser in, once and within 10 minutes, with scope admin."""
    import os

    from rankwatch.client.connection import user_places
    from rankwatch_service.access.grants import Scope
    from rankwatch_service.access.sessions import issue_login
    from rankwatch_service.access.tokens import LOGIN_NAME
    from rankwatch_service.cli.client import find_endpoint
    from rankwatch_service.clock import SystemClock
    from rankwatch_service.store.engine import write

    url = find_endpoint(None, None, os.environ, user_places(os.environ)).url
    now = SystemClock().unix_ns()
    with existing_database(data, database_url) as engine, write(engine) as connection:
        text = issue_login(connection, "command line", now)
        _tell_receivers(connection, {"name": LOGIN_NAME, "scopes": [Scope.ADMIN]}, now)
    _print_secret({"url": f"{url}/login#{text}"}, "url", as_json)


def _tell_receivers(connection: Connection, made: Mapping[str, Any], now_unix_ns: int) -> None:
    """Notify receivers of a token that can approve, if the policy has `two_people`."""
    from rankwatch_service.orders.approvals import request_change
    from rankwatch_service.policy.actions import MAKE_TOKEN
    from rankwatch_service.store.settings_rows import read_policy

    if read_policy(connection).two_people:
        request_change(
            connection, MAKE_TOKEN, made, {}, now_unix_ns, requested_by="command line", approval_required=False
        )


@token.command("list")
def list_tokens(as_json: JSON = False, data: DATA = None, database_url: DATABASE_URL = None) -> None:
    """List tokens, newest first, without their secrets."""
    from sqlalchemy import select

    from rankwatch_service.access.tokens import OF_AGENTS, token_state
    from rankwatch_service.clock import SystemClock
    from rankwatch_service.store.engine import read
    from rankwatch_service.store.models import Token

    now = SystemClock().unix_ns()
    columns = [column for column in Token.__table__.columns if column.key not in {"secret_sha256", "enrolment_key"}]
    with existing_database(data, database_url) as engine, read(engine) as connection:
        rows = connection.execute(select(*columns).order_by(Token.created_unix_ns.desc())).mappings().all()
    output.show(
        ({**row, "state": token_state(row["revoked"], row["admitted"], row["expires_unix_ns"], now)} for row in rows),
        as_json,
        {
            "id": lambda one: output.identifier(one["id"]),
            "kind": lambda one: output.plain(one["kind"]),
            "name": lambda one: output.plain(one["name"]),
            "scopes": lambda one: output.plain(one["scopes"]),
            "job": lambda one: output.plain(one["job"] or "every job"),
            "hosts": lambda one: output.plain(one["hosts_max"] or ("any" if one["kind"] in OF_AGENTS else "")),
            "project": lambda one: output.plain(one["project"]),
            "expires": lambda one: output.moment(one["expires_unix_ns"], "never"),
            "last used": lambda one: output.moment(one["last_used_unix_ns"], "never"),
            "": lambda one: output.state(one["state"]),
        },
        "no tokens",
    )


@token.command("revoke")
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the token (not its text).")],
    as_json: JSON = False,
    data: DATA = None,
    database_url: DATABASE_URL = None,
) -> None:
    """Revoke a token, and the sessions that it opened."""
    from rankwatch_service.access.tokens import revoke_token
    from rankwatch_service.clock import SystemClock
    from rankwatch_service.store import audit_trail
    from rankwatch_service.store.engine import write

    with existing_database(data, database_url) as engine, write(engine) as connection:
        if not revoke_token(connection, token_id):
            raise CliError(Status.USAGE, f"there is no token {token_id!r}")
        audit_trail.append(connection, SystemClock().unix_ns(), "command line", "token.revoke", token_id, "ok")
    output.done(f"revoked {token_id}", {"token": token_id, "revoked": True}, as_json)


def _print_secret(made: Mapping[str, Any], name: str, as_json: bool) -> None:
    """Print what was made: the secret alone, for `$(…)`, or all of it."""
    if as_json:
        output.print_json([made])
    else:
        print(made[name])


def _require_names(*texts: str) -> None:
    from rankwatch_service.names import is_name

    for text in texts:
        if text and not is_name(text):
            raise CliError(Status.USAGE, f"{text!r} cannot be the name of a project or an owner")
