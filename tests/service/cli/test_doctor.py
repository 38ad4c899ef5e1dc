"""What `rankwatch doctor` says of the data folder and of the OIDC provider; the rest is in `test_commands.py`."""

import json

import pytest
from typer.testing import CliRunner

from rankwatch_service.cli.app import app
from tests.support.service.oidc_provider import oidc_provider
from tests.support.store.database import new_database


@pytest.fixture
def up(tmp_path, monkeypatch):
    """The data folder of a service that `rankwatch up` has started."""
    data = tmp_path / "elsewhere"
    data.mkdir()
    new_database(data).dispose()
    monkeypatch.setenv("RANKWATCH_INGEST_CONFIG", str(tmp_path / "ingest.json"))
    places = {"database_url": f"sqlite:///{data}/rankwatch.db", "data_dir": str(data)}
    (tmp_path / "local.json").write_text(json.dumps({"url": "http://127.0.0.1:9", "token": "t", **places}))
    return data


def checks():
    lines = CliRunner().invoke(app, ["doctor", "--json"]).stdout.splitlines()
    return {one["check"]: (one["verdict"], one["told"]) for one in map(json.loads, lines)}


def test_the_data_folder_is_that_of_the_database_that_is_checked(up):
    found = checks()
    assert found["data folder"][1].startswith(f"{up}, ")
    assert found["database"] == ("ok", f"sqlite:///{up}/rankwatch.db")
    assert found["OIDC"] == ("note", "not set: people log in with tokens")


def test_the_oidc_provider_is_asked_whether_it_answers(up, monkeypatch):
    with oidc_provider() as provider:
        for name, value in provider.settings().items():
            monkeypatch.setenv(f"RANKWATCH_{name.upper()}", value if isinstance(value, str) else json.dumps(value))
        assert checks()["OIDC"] == ("ok", f"{provider.issuer} answers")
        provider.away = True
        verdict, told = checks()["OIDC"]
        assert (verdict, "answered 503" in told) == ("finding", True)
