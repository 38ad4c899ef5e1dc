"""The pages. They contain no data: they read it from the REST API, with the session of the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from rankwatch_service.dashboard.assets import Assets

PAGES: Final = {
    "/login": ("login", "Log in"),
    "/incidents": ("incidents", "Incidents"),
    "/incidents/{incident}": ("incident", "Incident"),
    "/jobs": ("jobs", "Jobs"),
    "/jobs/{job:path}": ("job", "Job"),
}
"""Path of each page; its module in `static/pages/` and its title."""


def mount(app: FastAPI) -> None:
    """Add the pages and their files to an application. They need no token, unlike the data that they show."""
    assets = Assets()

    def home(_request: Request) -> Response:
        return RedirectResponse("/incidents", status_code=307)

    def file(request: Request) -> Response:
        return assets.file(request.path_params["version"], request.path_params["name"], request.headers)

    app.add_route("/", home, include_in_schema=False)
    app.add_route("/static/{version}/{name:path}", file, include_in_schema=False)
    for path, (module, title) in PAGES.items():
        app.add_route(path, _page(assets, module, title), include_in_schema=False)


def _page(assets: Assets, module: str, title: str) -> Callable[[Request], Response]:
    body = assets.page(module, title)

    def page(_request: Request) -> Response:
        return Response(body, media_type="text/html", headers={"Cache-Control": "no-cache"})

    return page
