"""TLS, client certificates, basic auth and headers by the exporter-toolkit's web configuration file."""

from __future__ import annotations

import base64
import os
import ssl
import statistics
import time
from pathlib import Path

import bcrypt
import pytest

from kvpressure.errors import InputError
from kvpressure.publish.web import server as server_module
from kvpressure.publish.web import webconfig
from kvpressure.publish.web.auth import WRONG_REMEMBERED, Authenticator
from kvpressure.publish.web.webconfig import WebConfig, parse
from tests.helpers.waiting import until
from tests.publish.certificates import Certificates
from tests.publish.clients import ask, closed_within, connect
from tests.publish.conftest import Published, Start

pytestmark = pytest.mark.live

HASH = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
TLS = "tls_server_config:\n  cert_file: {0}/server.crt\n  key_file: {0}/server.key\n"
MUTUAL = TLS + "  client_ca_file: {0}/ca.crt\n  client_auth_type: RequireAndVerifyClientCert\n"


def write(directory: Path, text: str) -> Path:
    path = directory / "web.yml"
    path.write_text(text)
    return path


def basic(user: str, password: str) -> str:
    return f"Authorization: Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}\r\n"


class TestTls:
    def test_a_scrape_over_tls(self, start: Start, tmp_path: Path, certificates: Certificates) -> None:
        port = start(web=write(tmp_path, TLS.format(certificates.directory)))
        trusting, old = certificates.client_context(), certificates.client_context()
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        for refused in (ssl.create_default_context(), old):
            with pytest.raises(ssl.SSLError):
                ask(port, tls=refused)
        with pytest.raises(OSError):  # noqa: PT011 (plain HTTP gets no answer)
            ask(port)
        assert ask(port, tls=trusting).status == 200

    @pytest.mark.attack("no client certificate, one of another CA or name, an expired one; TLS 1.0 and 1.1", "refused")
    @pytest.mark.parametrize("sans", ["", "prometheus.example", "ops@example.com"])
    def test_client_certificates(self, start: Start, tmp_path: Path, certificates: Certificates, sans: str) -> None:
        named = f"  client_allowed_sans: [{sans}]\n" if sans else ""
        port = start(web=write(tmp_path, MUTUAL.format(certificates.directory) + named))
        assert ask(port, tls=certificates.client_context("client")).status == 200
        with pytest.raises(OSError):  # noqa: PT011 (alert or reset, by timing)
            ask(port, tls=certificates.client_context("stranger" if sans else None))


class TestReload:
    def serial(self, port: int, context: ssl.SSLContext) -> str:
        with connect(port, context) as client:
            assert isinstance(client, ssl.SSLSocket)
            return str(client.getpeercert()["serialNumber"])

    @pytest.mark.fault("web", "certificate replaced", "nothing", "–", "at the next connection")
    def test_a_new_certificate_counts_at_once_and_a_broken_one_changes_nothing(
        self, start: Start, tmp_path: Path
    ) -> None:
        own = Certificates(tmp_path)
        port = start(web=write(tmp_path, "tls_server_config: {cert_file: server.crt, key_file: server.key}\n"))
        context = own.client_context()
        first = self.serial(port, context)
        (tmp_path / "server.crt").write_text("half a rotation")
        assert self.serial(port, context) == first
        own.issue("server", "DNS:localhost")
        second = self.serial(port, context)
        assert second != first
        assert self.serial(port, context) == second

    def test_a_file_that_comes_later_is_noticed(
        self, start: Start, tmp_path: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(webconfig, "RETRY_SECONDS", 0.05)
        port = start(web=write(tmp_path, ""))
        write(tmp_path, "tls_server_config: {cert_file: server.crt, key_file: server.key}\n")
        assert ask(port).status == 200
        for name in ("server.crt", "server.key"):
            (tmp_path / name).write_bytes((certificates.directory / name).read_bytes())
        time.sleep(0.1)
        assert ask(port, tls=certificates.client_context()).status == 200

    def test_users_and_headers_change_without_a_restart(
        self, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        web = write(tmp_path, "")
        port = start(web=web)
        assert ask(port).status == 200
        web.write_text(f"basic_auth_users: {{prometheus: '{HASH}'}}\n")
        assert ask(port).status == 401
        web.write_text("basic_auth_users: {prometheus: plaintext}\n")
        assert ask(port).status == 401
        assert f"{web}:1: basic_auth_users: the password of 'prometheus' is not a bcrypt hash" in caplog.text
        os.unlink(web)  # noqa: PTH108
        assert ask(port).status == 401
        web.write_text(f"basic_auth_users: {{p: '{HASH}'}}\n")
        assert ask(port, headers=basic("p", "secret")).status == 200

    @pytest.mark.attack("a web configuration that is broken, emptied or deleted", "nothing opens")
    @pytest.mark.fault(
        "web",
        "web configuration broken, emptied or deleted",
        "the last good one stays",
        "log",
        "when the file is good again",
    )
    @pytest.mark.parametrize("left", ["", "basic_auth_users:\n"])
    def test_a_file_without_its_users_opens_nothing(
        self, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, left: str
    ) -> None:
        """Written in place, a file is empty for a moment."""
        web = write(tmp_path, f"basic_auth_users: {{prometheus: '{HASH}'}}\n")
        port = start(web=web)
        assert ask(port).status == 401
        web.write_text(left)
        assert ask(port).status == 401
        assert (
            "basic_auth_users was removed from the file, and stays in force until the exporter is restarted"
            in caplog.text
        )

    def test_a_file_without_its_certificate_opens_nothing(
        self, start: Start, tmp_path: Path, certificates: Certificates, caplog: pytest.LogCaptureFixture
    ) -> None:
        web = write(tmp_path, TLS.format(certificates.directory))
        port = start(web=web)
        web.write_text("")
        assert ask(port, tls=certificates.client_context()).status == 200
        assert "tls_server_config was removed" in caplog.text

    @pytest.mark.attack("100 half-finished TLS handshakes", "a bounded number of places")
    @pytest.mark.fault(
        "web", "half-finished TLS handshakes", "nothing", '`web_refused_total{reason="handshake_timeout"}`', "by itself"
    )
    def test_half_handshakes_take_a_bounded_number_of_places(
        self, start: Start, tmp_path: Path, certificates: Certificates, published: Published
    ) -> None:
        web = write(tmp_path, TLS.format(certificates.directory))
        port = start(web=web)
        crowd = [connect(port) for _ in range(100)]
        try:
            assert ask(port, tls=certificates.client_context()).status == 200
            until(lambda: published.refused.get("address", 0) >= 100 - server_module.PEER_TLS_CONNECTIONS)
            until(
                lambda: sum(not closed_within(client, 0.002) for client in crowd) <= server_module.PEER_TLS_CONNECTIONS
            )
        finally:
            for client in crowd:
                client.close()

    def test_a_handshake_that_takes_too_long_is_given_up_and_counted(
        self,
        start: Start,
        tmp_path: Path,
        certificates: Certificates,
        published: Published,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(server_module, "HANDSHAKE_SECONDS", 0.2)
        web = write(tmp_path, TLS.format(certificates.directory))
        port = start(web=web)
        with connect(port) as client:
            client.sendall(b"\x16\x03\x01")
            assert closed_within(client, 3)
        with connect(port) as client:
            client.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert closed_within(client, 3)
        assert published.refused == {"handshake_timeout": 1}, "a client that speaks no TLS is not slow"


class TestBasicAuth:
    def test_every_path_wants_the_right_password(self, start: Start, tmp_path: Path) -> None:
        port = start(web=write(tmp_path, f"basic_auth_users: {{prometheus: '{HASH}'}}\n"))
        for path in ("/metrics", "/", "/api/v1/diagnosis", "/-/healthy", "/-/ready", "/nothing"):
            refused = ask(port, path)
            assert refused.status == 401
            assert refused.headers["www-authenticate"].startswith("Basic ")
        for _ in range(2):  # compared, then remembered
            assert ask(port, headers=basic("prometheus", "secret")).status == 200
            assert ask(port, headers=basic("prometheus", "wrong")).status == 401
            assert ask(port, headers=basic("nobody", "secret")).status == 401

    @pytest.mark.parametrize(
        "header",
        [
            "",
            "Basic",
            "Basic !!!",
            "Basic " + base64.b64encode(b"nocolon").decode(),
            "Bearer abc",
            "Basic " + base64.b64encode(b"\xff:x").decode(),
            "Basic " + base64.b64encode(b"prometheus:" + b"x" * 100).decode(),
            "Basic " + base64.b64encode(b"prometheus:a\x00b").decode(),
        ],
    )
    def test_malformed_logins_are_refused(self, start: Start, tmp_path: Path, header: str) -> None:
        port = start(web=write(tmp_path, f"basic_auth_users: {{prometheus: '{HASH}'}}\n"))
        assert ask(port, headers=f"Authorization: {header}\r\n").status == 401

    def test_a_password_that_was_right_is_instant_again(self) -> None:
        config = WebConfig(users={"prometheus": bcrypt.hashpw(b"secret", bcrypt.gensalt(10))})
        auth, header = Authenticator(), basic("prometheus", "secret")[15:-2]
        assert auth.remembered(config, header) is None
        assert auth.check(config, header)
        began = time.perf_counter()
        assert auth.remembered(config, header) is True
        assert time.perf_counter() - began < 0.005
        changed = WebConfig(users={"prometheus": HASH.encode()})
        assert auth.remembered(changed, header) is None

    def test_an_unknown_user_costs_as_much_as_a_known_one(self) -> None:
        config = WebConfig(users={"prometheus": bcrypt.hashpw(b"secret", bcrypt.gensalt(10))})

        def seconds(user: str) -> float:
            times = []
            for number in range(3):
                auth = Authenticator()
                began = time.perf_counter()
                assert not auth.check(config, basic(user, f"wrong{number}")[15:-2])
                times.append(time.perf_counter() - began)
            return statistics.median(times)

        assert 0.3 < seconds("nobody") / seconds("prometheus") < 3

    def test_guesses_are_remembered_in_a_bounded_number_and_push_no_right_one_out(self) -> None:
        config = WebConfig(users={"prometheus": HASH.encode()})
        auth = Authenticator()
        assert auth.check(config, basic("prometheus", "secret")[15:-2])
        for number in range(WRONG_REMEMBERED + 20):
            auth.check(config, basic("prometheus", str(number))[15:-2])
        assert auth.remembered(config, basic("prometheus", "secret")[15:-2]) is True
        assert auth.remembered(config, basic("prometheus", "0")[15:-2]) is None
        assert auth.remembered(config, basic("prometheus", str(WRONG_REMEMBERED + 19))[15:-2]) is False

    @pytest.mark.attack("a flood of wrong passwords", "the known scraper is served at once")
    def test_a_crowd_of_guesses_delays_no_known_scrape(
        self, start: Start, tmp_path: Path, published: Published
    ) -> None:
        slow = bcrypt.hashpw(b"secret", bcrypt.gensalt(11)).decode()
        port = start(web=write(tmp_path, f"basic_auth_users: {{prometheus: '{slow}'}}\n"))
        assert ask(port, headers=basic("prometheus", "secret")).status == 200
        guessers = [connect(port) for _ in range(40)]
        for number, guesser in enumerate(guessers):
            guesser.sendall(f"GET / HTTP/1.1\r\nHost: x\r\n{basic('prometheus', f'guess{number}')}\r\n".encode())
        began = time.monotonic()
        assert ask(port, headers=basic("prometheus", "secret")).status == 200
        assert time.monotonic() - began < 0.5
        until(lambda: published.refused.get("passwords", 0) >= 40 - server_module.PASSWORDS_WAITING - 10)
        for guesser in guessers:
            guesser.close()

    @pytest.mark.attack(
        "a flood of wrong passwords while the hash is replaced", "the scraper waits for a few comparisons"
    )
    def test_a_new_hash_in_a_crowd_of_guesses_is_learnt(self, start: Start, tmp_path: Path) -> None:
        """Nothing is remembered of the new hash, and the scraper has to be compared among the guessers."""
        web = write(tmp_path, f"basic_auth_users: {{prometheus: '{HASH}'}}\n")
        port = start(web=web)
        assert ask(port, headers=basic("prometheus", "secret")).status == 200
        guessers = [connect(port) for _ in range(40)]
        new = bcrypt.hashpw(b"other", bcrypt.gensalt(8)).decode()
        web.write_text(f"basic_auth_users: {{prometheus: '{new}'}}\n")
        for number, guesser in enumerate(guessers):
            guesser.sendall(f"GET / HTTP/1.1\r\nHost: x\r\n{basic('prometheus', f'guess{number}')}\r\n".encode())
        until(lambda: ask(port, headers=basic("prometheus", "other")).status == 200, 10)
        assert ask(port, headers=basic("prometheus", "secret")).status == 401
        for guesser in guessers:
            guesser.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tls: {}", ":1: unknown key 'tls' in the file; allowed: tls_server_config"),
        ("\n\ntls_server_config:\n  http3: true", ":4: unknown key 'http3' in tls_server_config; allowed: cert_file"),
        ("[1]", ":1: the file is not a mapping"),
        ("a: b: c", ":1: not valid YAML"),
        ("a: &a [*a]", ":1: more than 10000 values"),
        ("{" * 3000, "nested too deep"),
        ("\x00", "not text in UTF-8"),
        ("basic_auth_users: [a]", ":1: basic_auth_users is not a mapping; allowed: name: value"),
        ("basic_auth_users: {a: b}", "the password of 'a' is not a bcrypt hash; allowed: a hash like $2y$10$"),
        ("basic_auth_users: {a: 1, a: 2}", ":1: 'a' given twice; allowed: once"),
        ("tls_server_config: {cert_file: x.crt}", ":1: tls_server_config: cert_file: 'x.crt' is not a file"),
        (f"tls_server_config: {{cert_file: {'x' * 300}}}", "xx... is not a file"),
        (
            "tls_server_config:\n  client_auth_type: NoClientCert",
            ":1: tls_server_config: cert_file: missing; allowed: a PEM file",
        ),
        ("tls_server_config: {cert_file: 5}", "cert_file: 5 is not allowed; allowed: text"),
        (
            "tls_server_config: {cert_file: '{0}/server.crt', key_file: '{0}/client.key'}",
            "certificate and key cannot be used",
        ),
        (
            TLS + "  client_auth_type: RequestClientCert",
            ":4: tls_server_config: client_auth_type: 'RequestClientCert' is not allowed; allowed",
        ),
        (TLS + "  client_auth_type: RequireAndVerifyClientCert", "RequireAndVerifyClientCert needs client_ca_file"),
        (TLS + "  client_ca_file: '{0}/ca.crt'", "client_ca_file: given without client_auth_type"),
        (
            TLS + "  client_ca_file: '{0}/ca.key'\n  client_auth_type: RequireAndVerifyClientCert",
            "client_ca_file: cannot be used",
        ),
        (TLS + "  client_allowed_sans: [a]", "client_allowed_sans: needs client_auth_type RequireAndVerifyClientCert"),
        (MUTUAL + "  client_allowed_sans: a", "client_allowed_sans: 'a' is not allowed; allowed: a list of texts"),
    ],
)
def test_a_wrong_file_is_one_clear_line(tmp_path: Path, certificates: Certificates, text: str, message: str) -> None:
    path = write(tmp_path, text.replace("{0}", str(certificates.directory)))
    with pytest.raises(InputError) as caught:
        parse(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


class TestHealthListener:
    """The kubelet has neither password nor certificate, so that its probes get a listener of their own."""

    def test_it_answers_checks_alone_in_plain_http_whatever_the_configuration_asks_for(
        self, start: Start, published: Published, tmp_path: Path, certificates: Certificates
    ) -> None:
        asked = MUTUAL.format(certificates.directory) + f"basic_auth_users: {{prom: {HASH}}}\n"
        port = start(web=write(tmp_path, asked), health=True)
        assert ask(port, "/-/healthy").status == 200
        assert ask(port, "/-/ready").status == 200
        published.unhealthy = "the tick hangs"
        assert ask(port, "/-/healthy").status == 503
        for other in ("/metrics", "/", "/api/v1/diagnosis", "/-/healthyx"):
            assert ask(port, other).status == 404
