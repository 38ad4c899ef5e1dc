"""What a route requires of the identity behind a request."""

from __future__ import annotations

from fastapi import Request

from rankwatch_service.access.identities import Identity
from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.http.problem import ProblemError


class Require:
    """Dependency of a route: returns the request's identity, which must hold a scope."""

    def __init__(self, scope: Scope, *, every_job: bool = False) -> None:
        """Check nothing yet.

        Args:
            scope: what the identity must hold.
            every_job: whether a token that is restricted to one job is refused, since the route serves no single job.
        """
        self.scope = scope
        self.every_job = every_job

    def __call__(self, request: Request) -> Identity:
        """The identity of a request.

        Raises:
            ProblemError: no identity (401), not the scope (403), or not this job (403, or 404 as for an unknown job).
        """
        identity: Identity | None = request.scope.get("identity")
        if identity is None:
            raise ProblemError(401, "a token is required", headers={"WWW-Authenticate": "Bearer"})
        if not identity.holds(self.scope):
            raise ProblemError(403, f"a token with scope {self.scope} is required")
        if self.every_job and identity.job:
            raise ProblemError(403, f"this token is restricted to job {identity.job!r}")
        job = request.path_params.get("job")
        if job is not None and not identity.may_see(job):
            raise ProblemError(404, f"there is no job {job!r}")
        return identity
