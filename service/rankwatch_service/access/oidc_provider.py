"""The OIDC provider by which people log in: where to send them, and who they are.

OpenID Connect Core 1.0 with the authorization code flow and PKCE. The two requests to the provider are ours; authlib
and joserfc check what it answers.
"""

from __future__ import annotations

import json
import secrets
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from threading import Lock
from typing import Any, Final
from urllib.parse import quote_plus, urlsplit

import httpx2
from authlib.oauth2.rfc6749.parameters import prepare_grant_uri
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from authlib.oidc.core import CodeIDToken
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import JWKRegistry, Key

from rankwatch_service.clock import Clock
from rankwatch_service.settings import Settings, is_confidential

TIMEOUT_S: Final = 5.0
"""How long an answer of the provider may take. A person waits before the login page."""

AWAY_S: Final = 5.0
"""How long a provider that did not answer is not asked again."""

ANSWER_BYTES_MAX: Final = 1_048_576
"""Longest answer of the provider that is read; an id token with a thousand groups has 50 KB."""

FRESH_S: Final = 3_600.0
"""How long the provider's description and its keys are used before they are fetched again."""

UNKNOWN_KEY_S: Final = 10.0
"""Time between two tries to find an unknown key by fetching the keys again: an id token may name any key."""

LEEWAY_S: Final = 60
"""How far the provider's clock may differ from ours."""

ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519")
"""Signatures that only the provider can make: `none` and those with a shared secret are not among them."""

BEGIN_PATH: Final = "/login/oidc"
CALLBACK_PATH: Final = "/login/oidc/callback"
"""The path to which the provider redirects browsers."""

KEY_TYPES: Final = ("RSA", "EC", "OKP")


class ProviderAwayError(Exception):
    """The provider cannot be asked now, or does not describe itself as it must; the message says why."""


class LoginRefusedError(Exception):
    """The provider does not vouch for this person; the message says why, without any of its secrets."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One login attempt. The browser keeps it in an encrypted cookie until the provider redirects it back."""

    state: str
    nonce: str
    verifier: str
    """The PKCE verifier: only the browser that began this login can redeem its code."""
    next: str
    """Path of the page to go to afterwards."""
    began_unix_ns: int


@dataclass(frozen=True, slots=True)
class Person:
    """The person who has logged in, by the provider's claims."""

    subject: str
    """The issuer and what it knows this person by, which never changes."""
    name: str
    """For people: the email address, else a user name."""
    groups: frozenset[str]


@dataclass(slots=True)
class _ProviderAnswer:
    """An answer of the provider, and when it was fetched."""

    content: dict[str, Any]
    at_s: float


class OidcProvider:
    """Talks to the provider of the settings. Thread-safe."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        """Do no I/O yet."""
        self.name = urlsplit(settings.oidc_issuer).netloc
        self.begin_url = f"{settings.public_url.rstrip('/')}{BEGIN_PATH}"
        """The URL at which the browser begins: the provider redirects it to this host, which then needs its cookie."""
        self._redirect_url = f"{settings.public_url.rstrip('/')}{CALLBACK_PATH}"
        self._issuer = settings.oidc_issuer
        self._client_id = settings.oidc_client_id
        self._client_secret = settings.oidc_client_secret
        self._scopes = settings.oidc_scopes
        self._groups_claim = settings.oidc_groups_claim
        self._clock = clock
        self._fetched: dict[str, _ProviderAnswer] = {}
        self._away = (-inf, "")
        self._lock = Lock()

    def begin(self, next_page: str) -> tuple[Attempt, str]:
        """Begin a try: what the browser has to keep, and the URL at which the person logs in.

        Raises:
            ProviderAwayError: it cannot be asked.
        """
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        url = prepare_grant_uri(
            self._endpoint("authorization_endpoint"),
            self._client_id,
            "code",
            self._redirect_url,
            self._scopes,
            state,
            nonce=nonce,
            code_challenge=create_s256_code_challenge(verifier),
            code_challenge_method="S256",
        )
        return Attempt(state, nonce, verifier, next_page, self._clock.unix_ns()), url

    def redeem(self, attempt: Attempt, code: str) -> Person:
        """The person for whom the provider has given out a code.

        Raises:
            ProviderAwayError: it cannot be asked.
            LoginRefusedError: it refuses the code, or its id token is not valid.
        """
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._redirect_url,
            "code_verifier": attempt.verifier,
        }
        posts_secret = "client_secret_post" in self._description().get("token_endpoint_auth_methods_supported", ())
        auth: tuple[str, str] | None = None
        if self._client_secret and not posts_secret:
            auth = quote_plus(self._client_id), quote_plus(self._client_secret)
        else:
            form["client_id"] = self._client_id
            if self._client_secret:
                form["client_secret"] = self._client_secret
        status, answer = self._ask("POST", self._endpoint("token_endpoint"), data=form, auth=auth)
        if status >= 500:
            raise ProviderAwayError(f"its token endpoint answered {status}")
        if status != 200:
            raise LoginRefusedError(f"the provider refused the code: {_text(answer.get('error'))}")
        return self._person(_text(answer.get("id_token")), attempt.nonce)

    def _person(self, id_token: str, nonce: str) -> Person:
        options = {
            "iss": {"essential": True, "value": self._issuer},
            "aud": {"essential": True, "value": self._client_id},
        }
        try:
            token = jwt.decode(id_token, self._key, algorithms=list(ALGORITHMS))
            params = {"nonce": nonce, "client_id": self._client_id}
            claims = CodeIDToken(token.claims, token.header, options, params)
            claims.validate(now=self._clock.unix_ns() // 10**9, leeway=LEEWAY_S)
        except (JoseError, ValueError, TypeError) as error:
            raise LoginRefusedError(f"the id token is not valid: {error}") from error
        subject, groups = claims["sub"], claims.get(self._groups_claim, [])
        if not isinstance(subject, str) or not subject:
            raise LoginRefusedError("the id token is not valid: its subject is not a text")
        listed = [groups] if isinstance(groups, str) else groups if isinstance(groups, list) else []
        email = "" if claims.get("email_verified") is False else _text(claims.get("email"))
        name = email or _text(claims.get("preferred_username")) or subject
        return Person(f"{self._issuer}#{subject}", name, frozenset(one for one in listed if isinstance(one, str)))

    def _key(self, id_token: Any) -> Key:
        """The key that an id token names. One that is not known may be new: the keys are fetched again."""
        header = id_token.headers()
        url = self._endpoint("jwks_uri")
        found = _find(self._get(url, FRESH_S), header)
        if found is None:
            found = _find(self._get(url, UNKNOWN_KEY_S), header)
        if found is None:
            raise LoginRefusedError("the id token is not valid: the provider has no such key")
        return found

    def _endpoint(self, name: str) -> str:
        url = _text(self._description().get(name))
        if not is_confidential(url.partition("?")[0]):
            raise ProviderAwayError(f"its {name} is not a URL with https")
        return url

    def _description(self) -> dict[str, Any]:
        description = self._get(f"{self._issuer.rstrip('/')}/.well-known/openid-configuration", FRESH_S)
        if description.get("issuer") != self._issuer:
            raise ProviderAwayError(f"it names itself {_text(description.get('issuer'))!r}, not {self._issuer!r}")
        return description

    def _get(self, url: str, fresh_s: float) -> dict[str, Any]:
        """The answer at a URL, as it was fetched at most `fresh_s` ago. One thread asks, the others wait for it."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            kept = self._fetched.get(url)
            if kept is not None and now_s - kept.at_s < fresh_s:
                return kept.content
            if now_s < self._away[0]:
                raise ProviderAwayError(self._away[1])
            try:
                content = self._fetch(url)
            except ProviderAwayError as error:
                self._away = self._clock.monotonic_s() + AWAY_S, str(error)
                raise
            self._fetched[url] = _ProviderAnswer(content, self._clock.monotonic_s())
            return content

    def _fetch(self, url: str) -> dict[str, Any]:
        status, content = self._ask("GET", url)
        if status != 200:
            raise ProviderAwayError(f"{url} answered {status}")
        return content

    def _ask(self, method: str, url: str, **how: Any) -> tuple[int, dict[str, Any]]:
        """Status and JSON object of an answer.

        Raises:
            ProviderAwayError: there is none.
        """
        try:
            with (
                httpx2.Client(timeout=TIMEOUT_S, verify=ssl.create_default_context()) as client,
                client.stream(method, url, headers={"Accept": "application/json"}, **how) as answer,
            ):
                body, began_s = b"", self._clock.monotonic_s()
                for part in answer.iter_bytes():
                    body += part
                    if self._clock.monotonic_s() - began_s > TIMEOUT_S:
                        raise ProviderAwayError(f"{url} did not answer within {TIMEOUT_S:g} s")
                    if len(body) > ANSWER_BYTES_MAX:
                        raise ProviderAwayError(f"its answer has more than {ANSWER_BYTES_MAX} bytes")
            content = json.loads(body)
        except (httpx2.HTTPError, OSError) as error:
            raise ProviderAwayError(str(error) or type(error).__name__) from error
        except ValueError as error:
            raise ProviderAwayError(f"{url} did not answer with JSON") from error
        if not isinstance(content, dict):
            raise ProviderAwayError(f"{url} did not answer with a JSON object")
        return answer.status_code, content


def _find(keys: Mapping[str, Any], header: Mapping[str, Any]) -> Key | None:
    """The key that the header of a token names; where it names none, the only one there is."""
    listed = keys.get("keys")
    signing = [
        one
        for one in (listed if isinstance(listed, list) else ())
        if isinstance(one, dict) and one.get("kty") in KEY_TYPES and one.get("use", "sig") == "sig"
    ]
    kid = header.get("kid")
    named = signing if kid is None else [one for one in signing if one.get("kid") == kid]
    return JWKRegistry.import_key(named[0]) if len(named) == 1 else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
