"""What a route requires of the identity behind a request."""

from __future__ import annotations

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from rankwatch_service.access.identities import Identity
from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.http.problem import ProblemError


class Require:
    """Dependency of a route: returns the request's identity, which must hold a scope."""

    def __init__(self, scope: Scope, *, every_job: bool = False) -> None:
        """Check nothing yet.

        Args:
            scope: what the identity must hold.
            every_job: whether a token that is restricted to some jobs is refused, since the route serves no single job.
        """
        self.scope = scope
        self.every_job = every_job

    async def __call__(self, request: Request) -> Identity:
        """The identity of a request, with the jobs in which it holds the scope.

        Raises:
            ProblemError: no identity (401), not the scope (403), or not this job (403, or 404 as for an unknown job).
        """
        identity: Identity | None = request.scope.get("identity")
        if identity is None:
            raise ProblemError(401, "a token is required", headers={"WWW-Authenticate": "Bearer"})
        holder = identity.within(self.scope)
        if holder is None:
            raise ProblemError(403, f"a token with scope {self.scope} is required")
        if self.every_job and not holder.jobs.every:
            raise ProblemError(403, f"this token is restricted to {holder.jobs}")
        job = request.path_params.get("job")
        if job is not None and not await run_in_threadpool(holder.may_see, job):
            reader = identity.within(Scope.READ)
            if reader is not None and await run_in_threadpool(reader.may_see, job):
                raise ProblemError(403, f"scope {self.scope} is required in job {job!r}")
            raise ProblemError(404, f"there is no job {job!r}")
        return holder
