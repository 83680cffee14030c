"""What all sinks with a client share: credentials that never show, TLS that verifies, extras that are named."""

from __future__ import annotations

import asyncio
import pickle
import ssl
import subprocess

import pytest

import batchqueue_async as bq
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.secrets import Secret, redacted, resolve
from batchqueue_async.sinks._shared.tls import Tls, context

VALUE = "pass:w0rd' #1"

# --- secrets


def test_a_secret_shows_nowhere():
    secret = Secret(VALUE)
    shown = [repr(secret), str(secret), f"{secret}", f"{secret:>8}", "%s" % secret, repr({"password": secret})]  # noqa: UP031
    assert [text for text in shown if VALUE in text] == []
    assert not hasattr(secret, "__dict__")


def test_a_reference_is_read_when_it_is_used(monkeypatch, tmp_path):
    path = tmp_path / "token"
    secret = Secret(f"file:{path}")
    for value in ("one", "two"):
        path.write_text(f"{value}\n")
        assert secret.reveal() == value
    monkeypatch.setenv("A_TOKEN", VALUE)
    assert resolve("env:A_TOKEN") == resolve(VALUE) == resolve(Secret(Secret(VALUE))) == VALUE
    assert resolve(None) is None


def test_a_reference_to_nothing_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("NO_TOKEN", raising=False)
    with pytest.raises(bq.ConfigError, match="environment variable 'NO_TOKEN'"):
        resolve("env:NO_TOKEN")
    with pytest.raises(bq.ConfigError, match="No such file"):
        resolve(f"file:{tmp_path}/none")


def test_a_pickled_secret_carries_its_reference(monkeypatch):
    secret = pickle.loads(pickle.dumps(Secret("env:LATER")))
    monkeypatch.setenv("LATER", "here")
    assert secret.reveal() == "here"
    assert secret == Secret("env:LATER")
    assert hash(secret) == hash(Secret("env:LATER"))
    assert secret != Secret("env:OTHER")


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("postgresql://app:s3cret@db:5432/app", "postgresql://app:***@db:5432/app"),
        ("amqp://:s3cret@host", "amqp://:***@host"),
        ("redis://user@host/0", "redis://user@host/0"),
        ("http://host:80/a@b", "http://host:80/a@b"),
        ("cannot reach nats://a:s3cret@x, nats://b:s3cret@y", "cannot reach nats://a:***@x, nats://b:***@y"),
        ("postgresql://db/app?user=a&password=s3cret&x=1", "postgresql://db/app?user=a&password=***&x=1"),
        ("host=db PASSWORD = 's3 \\' cret' port=1", "host=db PASSWORD = *** port=1"),
    ],
)
def test_passwords_in_urls_and_settings_are_hidden(text, clean):
    assert redacted(text) == clean


def test_given_secrets_are_hidden_wherever_they_stand():
    assert redacted(f"no {VALUE}, no abc", [Secret(VALUE), None, "abc", ""]) == "no ***, no ***"


# --- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    options = (
        f"-x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=sink.test -addext subjectAltName=DNS:sink.test -keyout {key}"
    )
    subprocess.run(["openssl", "req", *options.split(), "-out", cert], check=True, capture_output=True)
    return cert, key


@pytest.fixture
async def tls_port(certificate):
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(*certificate)
    seen = set()

    def serve(_reader, writer):
        seen.add(writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_context)
    yield server.sockets[0].getsockname()[1]
    server.close()
    for writer in seen:
        writer.transport.abort()


async def connect(port, tls):
    _reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context(tls))
    writer.close()


@pytest.mark.real_time
async def test_an_unknown_certificate_is_refused_unless_told(tls_port, certificate):
    cert, _key = certificate
    with pytest.raises(ssl.SSLCertVerificationError):
        await connect(tls_port, True)
    with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
        await connect(tls_port, Tls(ca=cert))
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        await connect(tls_port, Tls(ca=cert, server_name="other.test"))
    await connect(tls_port, Tls(ca=cert, server_name="sink.test"))
    await connect(tls_port, Tls(verify=False))


def test_files_that_cannot_be_used_are_named(certificate, tmp_path):
    cert, key = certificate
    for tls in (Tls(ca=tmp_path / "none.pem"), Tls(cert=tmp_path / "none.pem"), Tls(ca=key), Tls(cert=cert)):
        with pytest.raises(bq.ConfigError, match="cannot be used"):
            tls.context()
    assert Tls(cert=cert, key=key, key_password="unused").context().verify_mode is ssl.CERT_REQUIRED


def test_options_without_a_meaning_are_refused(tmp_path):
    with pytest.raises(bq.ConfigError, match="without a certificate"):
        Tls(key="key.pem")
    with pytest.raises(bq.ConfigError, match="verify=False"):
        Tls(verify=False, ca="ca.pem")
    with pytest.raises(bq.ConfigError, match="none of True"):
        context("yes")


def test_what_an_option_may_be():
    own = ssl.create_default_context()
    assert context(own) is own
    assert context(None) is context(False) is None
    assert context(True).check_hostname
    assert "s3cret" not in repr(Tls(cert="c", key_password="s3cret"))
    assert pickle.loads(pickle.dumps(Tls(cert="c", key_password="s3cret"))) == Tls(cert="c", key_password="s3cret")


# --- extras


def test_a_missing_extra_names_its_command():
    with pytest.raises(bq.ConfigError, match=r"needs nosuchclient.*pip install 'batchqueue-async\[kafka\]'"):
        require("nosuchclient.errors", "kafka")
    assert require("json", "kafka").loads("1") == 1


def test_a_client_that_misses_something_of_its_own_says_so(tmp_path, monkeypatch):
    (tmp_path / "brokenclient.py").write_text("import nosuchmodule")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nosuchmodule"):
        require("brokenclient", "kafka")
