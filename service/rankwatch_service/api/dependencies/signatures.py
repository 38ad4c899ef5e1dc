"""Whether a message is from the agent that it names; what is not is refused, counted and reported."""

from __future__ import annotations

from fastapi import Request

from rankwatch.signed import Purpose, Signed
from rankwatch_service.access.agents import ForgedError, Origin, UnknownAgentError
from rankwatch_service.access.identities import Identity
from rankwatch_service.api.dependencies.context import Context
from rankwatch_service.api.http.gate import source_of
from rankwatch_service.api.http.problem import ProblemError
from rankwatch_service.policy.control_records import JobProject


def require_job(identity: Identity, job: str) -> None:
    """Refuse an agent whose token is not for this job. May query.

    Raises:
        ProblemError: it is not (403).
    """
    if not identity.may_send(job):
        raise ProblemError(403, f"this token is restricted to {identity.jobs}")


def begin_job(context: Context, request: Request, identity: Identity, job: str) -> None:
    """Give a job that begins by a token the token's project and owner. May write.

    Raises:
        ProblemError: it has begun in another project meanwhile, to which the token is no access (403).
    """
    if identity.project or identity.owner:
        whose = JobProject(job, identity.project, identity.owner)
        context.authenticator.projects.begin(whose, context.controls, identity.actor, source_of(request.scope))
        require_job(identity, job)


def verified(
    context: Context, request: Request, identity: Identity, signed: Signed | None, purpose: Purpose, origin: Origin
) -> str:
    """The id of the agent that sent a message; empty for an unsigned one where no agent has enrolled. May query.

    An agent that is known renews its token.

    Raises:
        ProblemError: the agent should enrol again (409); its token is not for this job, or somebody else sent the
            message (403).
    """
    require_job(identity, origin.job)
    try:
        agent = context.agents.verify(signed, purpose, origin)
    except UnknownAgentError as error:
        detail = f"no such agent is enrolled for job {origin.job!r} on host {origin.host!r}; enrol again"
        raise ProblemError(409, detail) from error
    except ForgedError as error:
        context.counters.forged.labels(error.what).inc()
        context.forgeries.add(origin, error, source_of(request.scope))
        raise ProblemError(403, str(error)) from error
    if agent:
        context.renewals.reported(request.scope["identity"])
    return agent
