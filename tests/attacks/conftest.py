from collections.abc import Callable, Iterator

import httpx2
import pytest

from tests.support.service.process import Http, Up, running_up


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with running_up(tmp_path_factory.mktemp("up")) as up:
        yield up


@pytest.fixture(scope="module")
def asking(up: Up) -> Iterator[Callable[..., httpx2.Client]]:
    """Clients of the service, each with the token that it is given."""
    opened = []

    def ask(token: str = "") -> httpx2.Client:
        opened.append(Http(up.url, token))
        return opened[-1].client

    yield ask
    for one in opened:
        one.close()


@pytest.fixture
def admin(up: Up, asking: Callable[..., httpx2.Client]) -> httpx2.Client:
    return asking(up.kept("local-token"))
