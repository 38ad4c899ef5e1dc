"""An OIDC provider on a real port, with real keys, that can be told to lie."""

import base64
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from joserfc import jwt
from joserfc.jwk import RSAKey

from tests.support.service.process import serving

CLIENT_ID = "rankwatch"
CLIENT_SECRET = "client secret: + / %"


@cache
def usual_key() -> RSAKey:
    """Made once for all tests of a process: a key takes 0.1 s."""
    return new_key("first")


def new_key(kid: str) -> RSAKey:
    made = rsa.generate_private_key(65537, 2048)
    pem = made.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return RSAKey.import_key(pem, {"kid": kid, "use": "sig"})


def segment(content: Any) -> str:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


@dataclass
class Provider:
    """What it says; a test changes it. Whoever comes to the login page is logged in as `claims` say."""

    issuer: str = ""
    key: RSAKey = field(default_factory=usual_key)
    published: list[RSAKey] = field(default_factory=list)
    """Keys at the JWKS address; empty: the one that signs."""
    claims: dict[str, Any] = field(default_factory=dict)
    """Added to the usual claims, or put in their place; None removes one."""
    algorithm: str = "RS256"
    """RS256; or what no client may accept: none, HS256 (with the public key as the secret)."""
    away: bool = False
    fetched: list[str] = field(default_factory=list)
    """Paths that were asked for."""
    codes: dict[str, dict[str, str]] = field(default_factory=dict)
    """What each code that was not redeemed yet stands for."""

    def settings(self, **more: Any) -> dict[str, Any]:
        """Settings of a service whose people log in here."""
        return {
            "oidc_issuer": self.issuer,
            "oidc_client_id": CLIENT_ID,
            "oidc_client_secret": CLIENT_SECRET,
            "oidc_groups": {
                "platform": {"scopes": ["admin"]},
                "vision": {"scopes": ["read", "operate", "command"], "jobs": ["vision-*"]},
                "watchers": {"scopes": ["read"], "jobs": ["llm-*"]},
            },
        } | more

    def keys(self) -> dict[str, Any]:
        return {"keys": [key.as_dict(private=False) for key in self.published or [self.key]]}

    def id_token(self, nonce: str) -> str:
        now = int(time.time())
        usual = {
            "iss": self.issuer,
            "sub": "248289761001",
            "aud": CLIENT_ID,
            "iat": now,
            "exp": now + 300,
            "nonce": nonce,
            "email": "ada@example.com",
            "groups": ["platform"],
        }
        claims = {name: value for name, value in (usual | self.claims).items() if value is not None}
        header = {"alg": self.algorithm, "kid": self.key.kid, "typ": "JWT"}
        if self.algorithm == "RS256":
            return jwt.encode(header, claims, self.key)
        signed = f"{segment(header)}.{segment(claims)}"
        if self.algorithm == "none":
            return f"{signed}."
        return f"{signed}.{segment(hmac.digest(self.key.as_pem(private=False), signed.encode(), hashlib.sha256))}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    provider: Provider

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        self.provider.fetched.append(asked.path)
        if self.provider.away:
            self.answer(503, {})
        elif asked.path == "/.well-known/openid-configuration":
            issuer = self.provider.issuer
            self.answer(
                200,
                {
                    "issuer": issuer,
                    "authorization_endpoint": f"{issuer}/authorize",
                    "token_endpoint": f"{issuer}/token",
                    "jwks_uri": f"{issuer}/keys",
                },
            )
        elif asked.path == "/keys":
            self.answer(200, self.provider.keys())
        elif asked.path == "/authorize":
            self.log_in({name: values[0] for name, values in parse_qs(asked.query).items()})
        else:
            self.answer(404, {})

    def log_in(self, query: dict[str, str]) -> None:
        """Nobody has to type a password here: send the browser back at once."""
        assert query["response_type"] == "code"
        assert query["client_id"] == CLIENT_ID
        assert query["code_challenge_method"] == "S256"
        assert "openid" in query["scope"].split()
        code = secrets.token_urlsafe(16)
        self.provider.codes[code] = query
        self.send_response(302)
        self.send_header("Location", f"{query['redirect_uri']}?{urlencode({'code': code, 'state': query['state']})}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        form = {name: values[0] for name, values in parse_qs(self.body()).items()}
        self.provider.fetched.append(self.path)
        if self.provider.away:
            self.answer(503, {})
            return
        challenge = segment(hashlib.sha256(form["code_verifier"].encode()).digest())
        asked = self.provider.codes.pop(form["code"], None)
        if (
            asked is None
            or form["grant_type"] != "authorization_code"
            or form["redirect_uri"] != asked["redirect_uri"]
            or challenge != asked["code_challenge"]
            or not self.is_client()
        ):
            self.answer(400, {"error": "invalid_grant"})
            return
        token = self.provider.id_token(asked["nonce"])
        self.answer(200, {"access_token": "a", "token_type": "Bearer", "id_token": token})

    def is_client(self) -> bool:
        """By HTTP Basic, with id and secret in the form of a query, as RFC 6749 (2.3.1) wants them."""
        given = base64.b64decode(self.headers["Authorization"].removeprefix("Basic ")).decode()
        parts = [parse_qs(f"x={one}")["x"][0] for one in given.split(":")]
        return parts == [CLIENT_ID, CLIENT_SECRET]

    def body(self) -> str:
        return self.rfile.read(int(self.headers["Content-Length"])).decode()

    def answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: Any) -> None:
        pass


@contextmanager
def oidc_provider() -> Iterator[Provider]:
    """A provider that vouches for ada@example.com, of the group `platform`."""
    provider = Provider()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"provider": provider}))
    provider.issuer = f"http://127.0.0.1:{server.server_port}"
    with serving(server):
        yield provider
