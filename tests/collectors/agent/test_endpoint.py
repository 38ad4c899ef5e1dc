import json
from pathlib import Path

import pytest

from rankwatch.agent.endpoint import CONFIGURATION, Endpoint, find_endpoint


def user_file(folder: Path, text: str) -> dict[str, str]:
    path = folder / CONFIGURATION
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return {"XDG_CONFIG_HOME": str(folder)}


def test_nothing_is_configured_and_that_is_no_error(tmp_path: Path) -> None:
    assert find_endpoint(None, None, {"HOME": str(tmp_path)}) is None


def test_an_argument_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("from-file\n")
    environment = user_file(tmp_path, json.dumps({"url": "https://configured/", "token": "configured"}))
    assert find_endpoint(None, None, environment) == Endpoint("https://configured", "configured")
    environment |= {"RANKWATCH_URL": "https://environment:1", "RANKWATCH_TOKEN": "environment"}
    assert find_endpoint(None, None, environment) == Endpoint("https://environment:1", "environment")
    assert find_endpoint("https://argument", None, environment) == Endpoint("https://argument", "environment")
    assert find_endpoint("https://argument", token, environment) == Endpoint("https://argument", "from-file")


def test_without_xdg_the_file_lies_in_the_home_folder(tmp_path: Path) -> None:
    user_file(tmp_path / ".config", '{"url": "https://h:8770", "token": "t"}')
    assert find_endpoint(None, None, {"HOME": str(tmp_path)}) == Endpoint("https://h:8770", "t")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"url": "http://h"}', '{"url": "ftp://h", "token": "t"}', '"x"'])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"ingest\.json"):
        find_endpoint(None, None, user_file(tmp_path, text))


@pytest.mark.parametrize("url", ["h:8770", "http://", "unix:///x", ""])
def test_what_cannot_be_called_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        Endpoint(url, "t")


@pytest.mark.parametrize("token", ["two words", "line\r\nX-Evil: 1", "ü"])
def test_a_token_that_could_not_stand_in_a_header_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match="token must be ASCII"):
        Endpoint("https://h", token)


def test_a_url_without_a_token_is_refused_and_the_reason_said() -> None:
    with pytest.raises(ValueError, match="RANKWATCH_TOKEN"):
        find_endpoint("http://h", None, {})


def test_the_token_is_not_shown_by_repr() -> None:
    assert "secret" not in repr(Endpoint("https://h", "secret"))
