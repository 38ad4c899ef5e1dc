"""The wheel is there for everybody: who asks for it and does not read it takes no memory and keeps nobody out."""

import socket
import ssl
from hashlib import sha256
from pathlib import Path

import pytest

from rankwatch.trust import Trust, pin_of
from rankwatch_service.api.routes.system.wheel import PIECE_BYTES
from rankwatch_service.own_wheel import own_wheel
from tests.support.service.certificates import make_certificate
from tests.support.service.process import LOGIN, Role, children, until

pytestmark = pytest.mark.integration

READERS = 100
MB = 1024 * 1024


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    folder = tmp_path_factory.mktemp("up")
    make_certificate(folder / "cert.pem", folder / "key.pem")
    tls = ("--tls-cert", str(folder / "cert.pem"), "--tls-key", str(folder / "key.pem"))
    role = Role(folder, "up", "--data", str(folder / "data"), "--port", "0", *tls)
    role.start()
    role.url = until("login link", lambda: LOGIN.findall(role.said()))[-1][0]
    yield role
    role.stop()


def ask(up) -> ssl.SSLSocket:
    """Ask for the wheel, over a connection that takes little before it is read."""
    host, port = up.url.removeprefix("https://").split(":")
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.settimeout(30)
    plain.connect((host, int(port)))
    one = Trust(pin_of(up.folder / "cert.pem")).context().wrap_socket(plain, server_hostname=host)
    path = f"/simple/rankwatch/{own_wheel().name}"
    one.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    return one


def body(one: ssl.SSLSocket) -> bytes:
    received = b""
    while data := one.recv(MB):
        received += data
    return received.partition(b"\r\n\r\n")[2]


def resident_mb(up) -> float:
    api = next(pid for name, pid in children(up.process.pid).items() if name == "api")
    pages = int(Path(f"/proc/{api}/statm").read_text().split()[1])
    return pages * 4096 / MB


def test_downloads_that_nobody_reads_hold_no_copy_of_the_wheel(up):
    with ask(up) as honest:
        assert sha256(body(honest)).hexdigest() == own_wheel().sha256
    before_mb = resident_mb(up)
    waiting = [ask(up) for _ in range(READERS)]
    for one in waiting:
        assert one.recv(1), "its download has begun"
    with ask(up) as honest:
        assert sha256(body(honest)).hexdigest() == own_wheel().sha256
    grown_mb = resident_mb(up) - before_mb
    for one in waiting:
        one.close()
    assert grown_mb < READERS * 8 * PIECE_BYTES / MB < READERS * len(own_wheel().content) / MB / 4
