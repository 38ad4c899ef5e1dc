import pytest
from pydantic import ValidationError

from rankwatch_service.settings import PORT, Settings


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """No configuration of whoever runs the tests counts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("DATA_DIR", "DATABASE_URL", "HOST", "PORT", "PUBLIC_URL", "KAFKA"):
        monkeypatch.delenv(f"RANKWATCH_{name}", raising=False)
    return tmp_path


def test_without_configuration_it_is_sqlite_on_loopback(elsewhere):
    settings = Settings(data_dir=elsewhere)
    assert (settings.host, settings.port) == ("127.0.0.1", PORT)
    assert settings.database_url == f"sqlite:///{elsewhere}/rankwatch.db"
    assert settings.public_url == f"http://127.0.0.1:{PORT}"


def test_an_argument_beats_the_environment_beats_the_file_beats_the_default(elsewhere, monkeypatch):
    assert Settings().port == PORT
    (elsewhere / "config" / "rankwatch").mkdir(parents=True)
    (elsewhere / "config" / "rankwatch" / "rankwatch.toml").write_text("port = 1001\n")
    assert Settings().port == 1001
    (elsewhere / "rankwatch.toml").write_text("port = 1002\n")
    assert Settings().port == 1002
    monkeypatch.setenv("RANKWATCH_PORT", "1003")
    assert Settings().port == 1003
    assert Settings(port=1004).port == 1004


def test_a_key_that_does_not_exist_is_an_error(elsewhere):
    with pytest.raises(ValidationError, match="prot"):
        Settings(prot=1)
    (elsewhere / "rankwatch.toml").write_text("prot = 1\n")
    with pytest.raises(ValidationError, match="prot"):
        Settings()


@pytest.mark.parametrize(("host", "url"), [("0.0.0.0", "http://127.0.0.1:9"), ("::1", "http://[::1]:9")])
def test_the_public_url_is_one_that_can_be_opened(host, url):
    assert Settings(host=host, port=9).public_url == url


def test_settings_do_not_change():
    with pytest.raises(ValidationError):
        Settings().port = 1


def test_without_a_broker_telemetry_flows_through_the_database():
    assert Settings().kafka_settings() is None


def test_kafka_is_reached_as_the_settings_say(monkeypatch):
    monkeypatch.setenv("RANKWATCH_KAFKA", "a:1, b:2")
    monkeypatch.setenv("RANKWATCH_KAFKA_PREFIX", "mine")
    monkeypatch.setenv("RANKWATCH_KAFKA_SECURITY_PROTOCOL", "SASL_SSL")
    monkeypatch.setenv("RANKWATCH_KAFKA_SASL_USERNAME", "u")
    monkeypatch.setenv("RANKWATCH_KAFKA_SASL_PASSWORD", "hush")
    kafka = Settings().kafka_settings()
    assert kafka is not None
    assert kafka.brokers == ["a:1", "b:2"]
    assert kafka.telemetry_topic == "mine.telemetry"
    assert kafka.uses_password
    assert "hush" not in repr(Settings()) + repr(kafka)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"kafka": "localhost"}, "HOST:PORT"),
        ({"kafka": "a:1", "kafka_security_protocol": "TLS"}, "SASL_SSL"),
        ({"kafka": "a:1", "kafka_security_protocol": "SASL_SSL"}, "needs a user name"),
        ({"kafka": "a:1", "kafka_compression": "snap"}, "zstd"),
        ({"kafka_prefix": "a b"}, "kafka_prefix"),
    ],
)
def test_kafka_settings_that_could_never_connect_are_refused(wrong, told):
    with pytest.raises(ValidationError, match=told):
        Settings(**wrong)
