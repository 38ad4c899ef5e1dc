"""The pages. They contain no data: they read it from the REST API, with the session of the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from rankwatch_service.dashboard.assets import Assets, assets

PAGES: Final = {
    "/incidents": ("incidents", "Incidents"),
    "/incidents/{incident}": ("incident", "Incident"),
    "/jobs": ("jobs", "Jobs"),
    "/jobs/{job:path}": ("job", "Job"),
    "/topology/{job:path}": ("ranks/topology", "Topology"),
    "/ranks/{place:path}": ("ranks/rank", "Rank"),
    "/hosts": ("hosts", "Hosts"),
    "/hosts/{host:path}": ("host", "Host"),
    "/commands": ("commands/commands", "Commands"),
    "/commands/{command}": ("commands/command", "Command"),
    "/policy": ("policy", "Policy"),
    "/rules": ("rules", "Rules"),
    "/notifications": ("service/notifications", "Notifications"),
    "/health": ("service/health", "Health"),
    "/access": ("access", "Access"),
}
"""Path of each page; its module in `static/pages/` and its title."""


Handler = Callable[[Request, Exception], Response]


class LoginPage:
    """The login page, with what a login came to."""

    def __init__(self, assets: Assets, provider: str, begin_url: str) -> None:
        """Read nothing.

        Args:
            assets: of the dashboard.
            provider: name of the OIDC provider; empty: people log in with tokens alone.
            begin_url: where a browser begins to log in with it.
        """
        self._assets = assets
        self._facts = {"provider": provider, "begin": begin_url} if provider else {}

    def response(self, status: int = 200, problem: str = "") -> Response:
        """The page, with a sentence that says what went wrong."""
        facts = {**self._facts, "problem": problem} if problem else self._facts
        body = self._assets.page("login", "Log in", facts)
        return Response(body, status, {"Cache-Control": "no-cache"}, "text/html")


def mount(app: FastAPI, provider: str = "", begin_url: str = "") -> LoginPage:
    """Add the pages and their files to an application. They need no token, unlike the data that they show.

    Args:
        app: to which they are added.
        provider: name of the OIDC provider; empty: people log in with tokens alone.
        begin_url: where a browser begins to log in with it.

    Returns:
        The login page.
    """
    static = assets()
    login = LoginPage(static, provider, begin_url)

    def home(_request: Request) -> Response:
        return RedirectResponse("/incidents", status_code=307)

    def file(request: Request) -> Response:
        return static.file(request.path_params["version"], request.path_params["name"], request.headers)

    app.add_route("/", home, include_in_schema=False)
    app.add_route("/static/{version}/{name:path}", file, include_in_schema=False)
    for path, (module, title) in PAGES.items():
        app.add_route(path, _page(static, module, title), include_in_schema=False)
    app.add_route("/login", lambda _request: login.response(), include_in_schema=False)
    app.add_exception_handler(404, _missing(static, cast("Handler", app.exception_handlers[HTTPException])))
    return login


def _missing(assets: Assets, otherwise: Handler) -> Handler:
    """The response to an address that does not exist: a page for people, and the result of `otherwise` for programs."""
    body = assets.page("missing", "Not found")

    def missing(request: Request, error: Exception) -> Response:
        if request.url.path.startswith("/api/") or "text/html" not in request.headers.get("accept", ""):
            return otherwise(request, error)
        return Response(body, 404, {"Cache-Control": "no-cache"}, "text/html")

    return missing


def _page(assets: Assets, module: str, title: str) -> Callable[[Request], Response]:
    body = assets.page(module, title)

    def page(_request: Request) -> Response:
        return Response(body, media_type="text/html", headers={"Cache-Control": "no-cache"})

    return page
