"""The index of packages: rankwatch itself, everything else from PyPI, and nothing besides."""

from hashlib import sha256

import pytest

from rankwatch_service import own_wheel as module
from rankwatch_service.own_wheel import own_wheel


def test_the_wheel_has_the_hash_that_its_page_names(api):
    page = api.get("/simple/rankwatch/", token="").text
    answer = api.get(f"/simple/rankwatch/{own_wheel().name}", token="", headers={"Accept-Encoding": "gzip"})
    assert f'href="{own_wheel().name}#sha256={sha256(answer.content).hexdigest()}"' in page
    assert 'data-requires-python="&gt;=3.11"' in page
    assert answer.headers["Content-Length"] == str(len(answer.content))
    assert "Content-Encoding" not in answer.headers, "compressing it for everybody who asks would take a core"
    assert 'href="rankwatch/"' in api.get("/simple/", token="").text


@pytest.mark.parametrize(("asked", "named"), [("msgspec", "msgspec"), ("Kafka_Python", "kafka-python")])
def test_another_package_is_where_pypi_has_it(api, asked, named):
    answer = api.get(f"/simple/{asked}/", token="", follow_redirects=False)
    assert (answer.status_code, answer.headers["Location"]) == (302, f"https://pypi.org/simple/{named}/")


@pytest.mark.parametrize("path", ["..%2f..", "a%0d%0ab", "%2f%2fevil.example", "-", "a" * 101])
def test_what_is_no_name_of_a_package_leads_nowhere(api, path):
    answer = api.get(f"/simple/{path}/", token="", follow_redirects=False)
    assert (answer.status_code, answer.headers.get("Location")) == (404, None)


@pytest.mark.parametrize("name", ["rankwatch-0.0.1-py3-none-any.whl", "..%2fsecret.key", "METADATA"])
def test_no_other_file_is_served(api, name):
    assert api.get(f"/simple/rankwatch/{name}", token="").status_code == 404


def test_an_installation_that_cannot_be_packed_says_why(api, monkeypatch):
    own_wheel.cache_clear()
    monkeypatch.setattr(module, "WHEEL_BYTES_MAX", 1000)
    answer = api.get("/simple/rankwatch/", token="")
    assert (answer.status_code, "more than 1000" in answer.json()["detail"]) == (404, True)
