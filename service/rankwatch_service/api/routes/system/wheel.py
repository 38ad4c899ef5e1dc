"""The wheel of this service as an index of packages, from which training images install what matches it.

An index for pip's `--index-url` (PEP 503). It has rankwatch alone, and sends whoever asks for another package to PyPI:
so pip takes each package from one place, and nobody can offer it a newer "rankwatch" elsewhere, as with a second index.
The routes need no token, since they serve public code alone.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from html import escape
from typing import Final

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse

from rankwatch_service.api.http.problem import ProblemError, not_found
from rankwatch_service.own_wheel import DISTRIBUTION, OwnWheel, WheelError, own_wheel

OTHER_PACKAGES: Final = "https://pypi.org/simple"
PIECE_BYTES: Final = 65_536
"""What a client that does not read its download occupies at most, besides the buffers of its connection."""

_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")
_PAGE: Final = """<!DOCTYPE html>
<html><head><meta name="pypi:repository-version" content="1.0"><title>{title}</title></head>
<body>{link}</body></html>
"""

router = APIRouter(tags=["installation"])


@router.get("/simple/", response_class=HTMLResponse)
def packages() -> HTMLResponse:
    """The index of packages, for `pip install --index-url`: rankwatch alone. Needs no token."""
    return HTMLResponse(_PAGE.format(title="packages", link=f'<a href="{DISTRIBUTION}/">{DISTRIBUTION}</a>'))


@router.get("/simple/{package}/", response_class=HTMLResponse, responses={302: {"description": "Another package"}})
def package_files(package: str) -> Response:
    """The wheel of rankwatch with its SHA-256; for another package, where PyPI has it. Needs no token."""
    if not _NAME.fullmatch(package):
        raise not_found("package", package)
    name = re.sub(r"[-_.]+", "-", package).lower()
    if name != DISTRIBUTION:
        return RedirectResponse(f"{OTHER_PACKAGES}/{name}/", 302)
    wheel = _wheel()
    python = escape(wheel.requires_python)
    link = f'<a href="{wheel.name}#sha256={wheel.sha256}" data-requires-python="{python}">{wheel.name}</a>'
    return HTMLResponse(_PAGE.format(title=DISTRIBUTION, link=link))


@router.get(
    f"/simple/{DISTRIBUTION}/{{file}}",
    response_class=Response,
    responses={200: {"content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}}}},
)
def package_file(file: str) -> Response:
    """The wheel of this service's own version. Needs no token."""
    wheel = _wheel()
    if file != wheel.name:
        raise not_found("file", file)
    headers = {"Content-Length": str(len(wheel.content))}
    return StreamingResponse(_pieces(wheel.content), headers=headers, media_type="application/zip")


def _wheel() -> OwnWheel:
    try:
        return own_wheel()
    except WheelError as error:
        raise ProblemError(404, f"this service has no wheel: {error}") from error


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), PIECE_BYTES):
        yield content[start : start + PIECE_BYTES]
