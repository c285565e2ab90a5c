"""A broker with every way to be let in, each on a port of its own, and who hands out tokens for one of them."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs

import pytest
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from joserfc import jwt
from joserfc.jwk import RSAKey

from tests.fix_tls import Authority
from tests.jvm_classes import ArchivedKafka
from tidemark.app.stack.home import Home
from tidemark.app.stack.processes import LOOPBACK, free_port
from tidemark.app.stack.up import BROKER
from tidemark.sources.kafka import KafkaConnection, OAuth

USER = "tide"
PASSWORD = 'a"b\\c d'
_AUTH = "org.apache.kafka.common.security"


class Issuer:
    """Gives tokens to the client `tide` with the secret `known`, and everybody the key to check them by."""

    def __init__(self, directory: Path) -> None:
        self._key = RSAKey.generate_key(2048, {"kid": "one", "use": "sig", "alg": "RS256"})
        self.keys_file = directory / "jwks.json"
        self.keys_file.write_text(json.dumps({"keys": [self._key.as_dict(private=False)]}))
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                issuer.answer(self)

            def log_message(self, *_: object) -> None:
                """Nobody wants to know."""

        self.server = ThreadingHTTPServer((LOOPBACK, 0), Handler)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server.server_port}/token"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        form = parse_qs(request.rfile.read(int(request.headers["Content-Length"])).decode())
        known = request.headers["Authorization"] == "Basic dGlkZTprbm93bg=="  # tide:known
        body = self._token(form.get("scope", [""])[0]) if known else {"error": "invalid_client"}
        content = json.dumps(body).encode()
        request.send_response(200 if known else 401)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)

    def _token(self, scope: str) -> dict[str, object]:
        now = int(time.time())
        claims = {"sub": USER, "iat": now, "exp": now + 3600, "scope": scope, "iss": "tests"}
        token = jwt.encode({"alg": "RS256", "kid": "one"}, claims, self._key)
        return {"access_token": token, "token_type": "Bearer", "expires_in": 3600, "scope": scope}


class GuardedKafka(ArchivedKafka):
    """Listens in clear for the tests' own administration, and three times behind a lock."""

    def __init__(
        self, home: Home, *, java: str, jars: Path, options: Sequence[str], authority: Authority, issuer: Issuer
    ) -> None:
        super().__init__(home, free_port(), java=java, jars=jars, options=options)
        self.name = "guarded-kafka"  # type: ignore[misc]
        self._properties = home.data(self.name) / "server.properties"
        self._authority = authority
        self._issuer = issuer
        self._server = authority.issue(LOOPBACK)
        self._client = authority.issue("tide.example")
        self._ports = {name: free_port() for name in ("SCRAM", "MUTUAL", "TOKENS")}

    @property
    def scram(self) -> KafkaConnection:
        return KafkaConnection(
            f"{LOOPBACK}:{self._ports['SCRAM']}", "SASL_SSL", "SCRAM-SHA-512", USER, PASSWORD, self._ca_file
        )

    @property
    def mutual(self) -> KafkaConnection:
        return KafkaConnection(
            f"{LOOPBACK}:{self._ports['MUTUAL']}",
            "SSL",
            ca_file=self._ca_file,
            certificate_file=str(self._client.certificate),
            key_file=str(self._client.key),
        )

    @property
    def tokens(self) -> KafkaConnection:
        oauth = OAuth(self._issuer.url, "tide", "known", "facts")
        return KafkaConnection(f"{LOOPBACK}:{self._ports['TOKENS']}", "SASL_PLAINTEXT", "OAUTHBEARER", oauth=oauth)

    def set_password(self, password: str) -> None:
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers})
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        wanted = UserScramCredentialUpsertion(USER, info, password.encode())
        for done in admin.alter_user_scram_credentials([wanted]).values():
            done.result(60)

    @property
    def _ca_file(self) -> str:
        return str(self._authority.ca_file)

    def _jvm(self) -> list[str]:
        java, *rest = super()._jvm()
        keys = self._issuer.keys_file
        allowed = {"urls": keys.as_uri(), "files": str(keys)}
        return [
            java,
            *(f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.{kind}={it}" for kind, it in allowed.items()),
            *rest,
        ]

    def _settings(self, logs: Path) -> dict[str, str | int]:
        plain = super()._settings(logs)
        guarded = [f"{name}://{LOOPBACK}:{port}" for name, port in self._ports.items()]
        bearer = "listener.name.tokens.oauthbearer.sasl"
        return plain | {
            "listeners": ",".join([str(plain["listeners"]), *guarded]),
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SCRAM:SASL_SSL,MUTUAL:SSL,"
            "TOKENS:SASL_PLAINTEXT",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self._server.both),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": self._ca_file,
            "listener.name.mutual.ssl.client.auth": "required",
            "listener.name.scram.sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "listener.name.scram.scram-sha-512.sasl.jaas.config": f"{_AUTH}.scram.ScramLoginModule required;",
            "listener.name.tokens.sasl.enabled.mechanisms": "OAUTHBEARER",
            f"{bearer}.jaas.config": f"{_AUTH}.oauthbearer.OAuthBearerLoginModule required;",
            f"{bearer}.server.callback.handler.class": f"{_AUTH}.oauthbearer.OAuthBearerValidatorCallbackHandler",
            "listener.name.tokens.sasl.oauthbearer.jwks.endpoint.url": self._issuer.keys_file.as_uri(),
            "listener.name.tokens.sasl.oauthbearer.expected.issuer": "tests",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "allow.everyone.if.no.acl.found": "true",
            "super.users": "User:ANONYMOUS",
        }


@contextmanager
def _serving(server: ThreadingHTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def guarded_kafka(
    home: Home,
    java: str,
    jars: Path,
    archived: list[str],
    authority: Authority,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[GuardedKafka]:
    issuer = Issuer(tmp_path_factory.mktemp("issuer"))
    broker = GuardedKafka(home, java=java, jars=jars / BROKER, options=archived, authority=authority, issuer=issuer)
    with _serving(issuer.server):
        broker.start()
        try:
            broker.set_password(PASSWORD)
            yield broker
        finally:
            broker.kill()  # as that of all tests


def with_wrong_secret(connection: KafkaConnection, stranger: Authority) -> KafkaConnection:
    """The same connection, but for what proves who we are."""
    if connection.oauth is not None:
        return replace(connection, oauth=replace(connection.oauth, client_secret="wrong"))
    if connection.password is not None:
        return replace(connection, password="wrong")
    pem = stranger.issue("tide.example")
    return replace(connection, certificate_file=str(pem.certificate), key_file=str(pem.key))
