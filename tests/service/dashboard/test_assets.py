"""How the files of the pages are served."""

import gzip
import re
from posixpath import normpath

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from rankwatch_service.dashboard import PAGES, mount


@pytest.fixture(scope="module")
def client():
    app = FastAPI()
    mount(app)
    with TestClient(app) as client:
        yield client


def links(client, path):
    return re.findall(r'(?:href|src)="(/static/[^"]+)"', client.get(path).text)


def folder(client):
    """Where the files of this version are."""
    return "/".join(links(client, "/login")[0].split("/")[:3])


def test_the_root_leads_to_the_incidents(client):
    answer = client.get("/", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "/incidents")


@pytest.mark.parametrize(
    "path", ["/login", "/incidents", "/incidents/inc_1", "/jobs", "/jobs/team%2Fjob", "/policy", "/access"]
)
def test_every_page_and_every_file_it_names_is_there(client, path):
    answer = client.get(path)
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["cache-control"] == "no-cache"
    found = links(client, path)
    assert len(found) >= 6
    assert {client.get(link).status_code for link in found} == {200}


def test_a_page_names_every_module_that_it_loads_so_that_they_load_at_once(client):
    base = folder(client)
    for path, (module, _) in PAGES.items():
        todo, seen = [f"pages/{module}.js"], set()
        while todo:
            name = todo.pop()
            seen.add(name)
            room = name.rpartition("/")[0]
            answer = client.get(f"{base}/{name}")
            assert answer.status_code == 200, name
            imported = re.findall(r'(?:from|^import) "(\.[^"]+)";', answer.text, re.MULTILINE)
            todo += {normpath(f"{room}/{one}") for one in imported} - seen
        named = [link.removeprefix(f"{base}/") for link in links(client, path) if link.endswith(".js")]
        assert sorted(set(named)) == sorted(seen | {"common/theme.js"}), path


def test_pages_hold_no_inline_script_or_style(client):
    for path in ("/login", "/jobs"):
        text = client.get(path).text
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:", text)


def test_files_are_kept_for_ever_under_their_version_and_not_under_another(client):
    link = links(client, "/login")[0]
    assert "immutable" in client.get(link).headers["cache-control"]
    version = link.split("/")[2]
    assert client.get(link.replace(version, "0" * 12)).headers["cache-control"] == "no-cache"


def test_files_are_compressed_for_those_who_take_it(client):
    name = f"{folder(client)}/charts/line_chart.js"
    with client.stream("GET", name, headers={"accept-encoding": "gzip"}) as answer:
        raw = b"".join(answer.iter_raw())
    assert answer.headers["content-encoding"] == "gzip"
    plain = client.get(name, headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert gzip.decompress(raw) == plain.content
    assert len(raw) < len(plain.content) / 2


@pytest.mark.parametrize(
    "name",
    [
        "page.html",
        "nope.js",
        "pages",
        "pages/nope.js",
        "..%2F__init__.py",
        "%2e%2e%2fassets.py",
        "pages/../../assets.py",
        "__init__.py",
    ],
)
def test_nothing_else_is_served(client, name):
    base = folder(client)
    assert client.get(f"{base}/{name}").status_code == 404


@pytest.mark.parametrize(
    ("scale", "steps", "property_"),
    [("size", 8, r"font(?:-size)?"), ("space", 10, r"(?:padding|margin|(?:row-|column-)?gap)(?:-\w+)?")],
)
def test_styles_have_no_size_and_no_distance_but_those_of_the_scale(client, scale, steps, property_):
    styles = [client.get(path).text for path in links(client, "/login") if path.endswith(".css")]
    known = {name for style in styles for name in re.findall(rf"(--{scale}-\w+): [\d.]+px;", style)}
    assert len(known) == steps
    for style in styles:
        values = re.findall(rf"[\s;{{]{property_}: ([^;}}]*)[;}}]", re.sub(r"/[\d.]+px", "", style))
        assert [value for value in values if re.search(r"\d(?:px|r?em|pt)\b", value)] == []
        assert set(re.findall(rf"var\((--{scale}-\w+)\)", style)) <= known
