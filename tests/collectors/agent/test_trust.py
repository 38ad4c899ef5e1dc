"""Which service an agent speaks to, what it demands of it before it sends anything, and how it signs that."""

import json
import ssl
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from rankwatch import wire
from rankwatch.agent.endpoint import CONFIGURATION, Endpoint, find_endpoint
from rankwatch.agent.service_connection import ServiceConnection, Unconfigured
from rankwatch.signed import HEAD_BYTES, MARK, Purpose, nonce_of, sign, split
from rankwatch.trust import TokenText, Trust, explain_tls_error, is_loopback, pin_of, split_token, trust_of
from tests.support.agent.service import TOKEN, AgentService
from tests.support.service.machine import make_certificate

PIN = sha256(b"a certificate").hexdigest()
BATCH = wire.encode(wire.Batch(1, "gpt", "l.0", "h", "b", 0, 0))


class Certificate:
    """A certificate for 127.0.0.1 that signs itself, and what it shows."""

    def __init__(self, folder: Path, name: str, address: str = "127.0.0.1") -> None:
        self.file, self.keys = folder / f"{name}.pem", folder / f"{name}.key"
        make_certificate(self.file, self.keys, address)
        self.served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.served.load_cert_chain(self.file, self.keys)

    @property
    def pin(self) -> str:
        return pin_of(self.file)


def plain_service(certificate: Certificate) -> AgentService:
    """A service that takes batches as they are, not signed."""
    service = AgentService(certificate.served)
    service.enrols = False
    return service


@pytest.fixture
def ours(tmp_path: Path) -> Certificate:
    return Certificate(tmp_path, "ours")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1"])
def test_this_machine_needs_no_proof(host: str) -> None:
    assert is_loopback(host)
    Trust().check(f"http://[{host}]:8770" if ":" in host else f"http://{host}:8770")


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "", "10.0.0.1", "localhost.example.com", "127.0.0.1.example.com", "[::]", "2130706433"]
)
def test_plain_http_to_any_other_machine_is_refused_unless_somebody_wants_it(host: str) -> None:
    assert not is_loopback(host.strip("[]"))
    if host:
        with pytest.raises(ValueError, match="use https, or RANKWATCH_INSECURE=1"):
            Trust().check(f"http://{host}:8770")
        Trust(insecure=True).check(f"http://{host}:8770")
        Trust().check(f"https://{host}:8770")


def test_the_environment_may_allow_plain_http() -> None:
    for said, allowed in (("1", True), ("true", True), ("True", True), ("False", False), ("", False)):
        assert trust_of("t", {"RANKWATCH_INSECURE": said}).insecure == allowed


def test_a_token_may_end_with_its_enrolment_key_which_is_not_sent(tmp_path: Path) -> None:
    key = bytes(range(16))
    text = f"rankwatch_ingest_1_s.k{key.hex()}"
    assert split_token(text) == TokenText("rankwatch_ingest_1_s", enrolment_key=key)
    found = find_endpoint("http://127.0.0.1:1", None, {"RANKWATCH_TOKEN": text})
    assert found == Endpoint("http://127.0.0.1:1", "rankwatch_ingest_1_s", Trust(enrolment_key=key))
    assert "rankwatch_ingest_1_s" not in repr(found)
    assert key.hex() not in repr(found)
    assert str(key) not in repr(found)


@pytest.mark.parametrize("end", ["", "abc", PIN[:-1], PIN + "0", "g" * 64, "k", "k" + "0" * 31, "K" + "0" * 32])
def test_a_pin_that_was_copied_badly_is_an_error_and_no_part_of_the_token(end: str) -> None:
    with pytest.raises(ValueError, match="not copied as a whole"):
        split_token(f"rankwatch_ingest_1_s.{end}")


def test_a_token_with_a_pin_is_for_https_alone() -> None:
    with pytest.raises(ValueError, match="must be https"):
        Trust(PIN, insecure=True).check("http://127.0.0.1:8770")


def test_a_token_may_end_with_the_pin_of_its_service_which_is_not_sent() -> None:
    assert split_token("rankwatch_ingest_1_a-b_c") == TokenText("rankwatch_ingest_1_a-b_c")
    assert split_token(f"rankwatch_ingest_1_s.{PIN.upper()}") == TokenText("rankwatch_ingest_1_s", PIN)
    environment = {"RANKWATCH_URL": "https://h", "RANKWATCH_TOKEN": f"t.{PIN}", "RANKWATCH_CA_FILE": "ca.pem"}
    assert find_endpoint(None, None, environment) == Endpoint("https://h", "t", Trust(PIN, "ca.pem"))


def test_the_file_of_up_may_name_the_certificate_of_the_service_beside_it(tmp_path: Path, ours: Certificate) -> None:
    environment = user_file(tmp_path, f'{{"url": "https://h", "token": "t", "certificate": "{ours.file}"}}')
    for _ in range(2):
        assert find_endpoint(None, None, environment) == Endpoint("https://h", "t", Trust(ours.pin))
        make_certificate(ours.file, ours.keys)  # it is renewed
    ours.file.unlink()
    assert find_endpoint(None, None, environment) == Endpoint("https://h", "t")
    user_file(tmp_path, '{"url": "http://h", "token": "t", "insecure": true}')
    assert find_endpoint(None, None, environment) == Endpoint("http://h", "t", Trust(insecure=True))


def test_a_service_proves_itself_by_the_pinned_certificate_whatever_name_that_has(tmp_path: Path) -> None:
    elsewhere = Certificate(tmp_path, "elsewhere", "192.0.2.1")
    with plain_service(elsewhere) as service:
        channel = ServiceConnection(lambda: Endpoint(service.url, TOKEN, Trust(elsewhere.pin)))
        assert channel.post("/api/v1/telemetry", BATCH, "application/msgpack").status == 202
        channel.close()
        assert service.tokens == [f"Bearer {TOKEN}"]


@pytest.mark.parametrize("way", ["post", "stream"])
@pytest.mark.parametrize(
    ("trust", "reported"),
    [(Trust(PIN), "another certificate than the token names"), (Trust(), "not trusted .*RANKWATCH_CA_FILE")],
)
def test_who_does_not_prove_itself_gets_nothing(ours: Certificate, trust: Trust, reported: str, way: str) -> None:
    with plain_service(ours) as service:
        channel = ServiceConnection(lambda: Endpoint(service.url, TOKEN, trust))
        ways = {
            "post": lambda: channel.post("/api/v1/telemetry", BATCH, "application/msgpack"),
            "stream": lambda: list(channel.stream("/api/v1/agents/orders")),
        }
        with pytest.raises(Unconfigured, match=reported):
            ways[way]()
        assert service.tokens == []


def test_a_service_at_another_address_than_its_certificate_names_gets_nothing(tmp_path: Path) -> None:
    elsewhere = Certificate(tmp_path, "elsewhere", "192.0.2.1")
    with plain_service(elsewhere) as service:
        channel = ServiceConnection(lambda: Endpoint(service.url, TOKEN, Trust(ca_file=str(elsewhere.file))))
        with pytest.raises(Unconfigured, match=r"not valid for '127.0.0.1'\); use a URL with a name that") as refused:
            channel.post("/api/v1/telemetry", BATCH, "application/msgpack")
        assert "RANKWATCH_CA_FILE" not in str(refused.value)
        assert service.tokens == []


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (9, "check the clock of this machine"),
        (10, "renew the certificate of the service"),
        (18, "set RANKWATCH_CA_FILE to the file of its authority"),
        (20, "set RANKWATCH_CA_FILE to the file of its authority"),
        (62, "use a URL with a name that the certificate has"),
    ],
)
def test_the_hint_fits_the_reason_for_which_a_certificate_is_not_trusted(code: int, hint: str) -> None:
    error = ssl.SSLCertVerificationError("certificate verify failed")
    error.verify_code, error.verify_message = code, "the reason."
    reported = explain_tls_error("https://head:8770", error)
    assert reported.startswith(f"https://head:8770: the certificate is not trusted (the reason); {hint}")
    assert reported.endswith(", or use a token that names the certificate")


def test_a_file_of_authorities_that_cannot_be_used_is_named_to_the_person(tmp_path: Path) -> None:
    for file, content in (("missing", None), ("broken", "no certificate")):
        if content is not None:
            (tmp_path / file).write_text(content)
        environment = {"RANKWATCH_URL": "https://127.0.0.1:1", "RANKWATCH_TOKEN": "t"}
        environment |= {"RANKWATCH_CA_FILE": str(tmp_path / file)}
        line = ServiceConnection(lambda environment=environment: find_endpoint(None, None, environment))
        with pytest.raises(Unconfigured, match=f"RANKWATCH_CA_FILE: {tmp_path / file} cannot be used"):
            line.post("/api/v1/telemetry", BATCH)


def test_a_renewed_file_of_authorities_is_read_again(tmp_path: Path, ours: Certificate) -> None:
    authorities = tmp_path / "authorities.pem"
    make_certificate(authorities, tmp_path / "other.key")
    with plain_service(ours) as service:
        line = ServiceConnection(lambda: Endpoint(service.url, TOKEN, Trust(ca_file=str(authorities))))
        with pytest.raises(Unconfigured):
            line.post("/api/v1/telemetry", BATCH)
        authorities.write_text(ours.file.read_text())
        assert line.post("/api/v1/telemetry", BATCH).status == 202
        line.close()


def user_file(folder: Path, text: str) -> dict[str, str]:
    path = folder / CONFIGURATION
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return {"XDG_CONFIG_HOME": str(folder)}


def test_an_argument_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    assert find_endpoint(None, None, {"HOME": str(tmp_path)}) is None
    user_file(tmp_path / ".config", '{"url": "https://h:8770", "token": "t"}')
    assert find_endpoint(None, None, {"HOME": str(tmp_path)}) == Endpoint("https://h:8770", "t")
    token = tmp_path / "token"
    token.write_text("from-file\n")
    environment = user_file(tmp_path, json.dumps({"url": "https://configured/", "token": "configured"}))
    assert find_endpoint(None, None, environment) == Endpoint("https://configured", "configured")
    environment |= {"RANKWATCH_URL": "https://environment:1", "RANKWATCH_TOKEN": "environment"}
    assert find_endpoint(None, None, environment) == Endpoint("https://environment:1", "environment")
    assert find_endpoint("https://argument", None, environment) == Endpoint("https://argument", "environment")
    assert find_endpoint("https://argument", token, environment) == Endpoint("https://argument", "from-file")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"url": "http://h"}', '{"url": "ftp://h", "token": "t"}', '"x"'])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"ingest\.json"):
        find_endpoint(None, None, user_file(tmp_path, text))


@pytest.mark.parametrize(
    ("url", "token", "why"),
    [
        *((url, "t", "URL") for url in ("h:8770", "http://", "unix:///x", "")),
        *(("https://h", token, "token must be ASCII") for token in ("two words", "line\r\nX-Evil: 1", "ü")),
    ],
)
def test_what_cannot_be_called_and_a_token_that_could_not_stand_in_a_header_are_refused(url, token, why):
    with pytest.raises(ValueError, match=why):
        Endpoint(url, token)
    with pytest.raises(ValueError, match="RANKWATCH_TOKEN"):
        find_endpoint("http://h", None, {})


AGENT, SECRET = "00112233445566aa", bytes(range(32))


def test_a_signed_message_names_its_agent_and_is_by_the_holder_of_its_secret():
    signed = split(sign(Purpose.BATCH, AGENT, SECRET, b"message"))
    assert (signed.agent, signed.message) == (AGENT, b"message")
    assert signed.is_by(SECRET, Purpose.BATCH)
    assert not signed.is_by(bytes(32), Purpose.BATCH)
    assert not signed.is_by(SECRET, Purpose.VIEW), "a batch is no view"


@pytest.mark.parametrize("at", [2, 9, 10, HEAD_BYTES - 1, HEAD_BYTES, -1])
def test_whatever_is_changed_is_no_longer_signed(at):
    body = bytearray(sign(Purpose.VIEW, AGENT, SECRET, b"a message"))
    body[at] ^= 1
    assert not split(bytes(body)).is_by(SECRET, Purpose.VIEW)


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\xc1\x02" + bytes(60), b'{"schema": 1}', msgspec.msgpack.encode({"a": 1})]
)
def test_what_is_not_in_the_signed_form_is_left_to_others(body):
    assert split(body) is None


def test_no_msgpack_message_and_no_json_text_begins_like_a_signed_one():
    large = [0] * 100_000, {str(n): n for n in range(70_000)}
    for value in (None, 1, -1, 2**40, 1.5, "x", b"x" * 300, [1], {"a": 1}, *large):
        assert msgspec.msgpack.encode(value)[0] != MARK


def test_each_message_has_a_nonce_of_its_own():
    first, second = (sign(Purpose.VIEW, AGENT, SECRET, message) for message in (b"1", b"2"))
    assert nonce_of(first) != nonce_of(second)
    assert len(bytes.fromhex(nonce_of(first))) == 16
