import pytest
from pydantic import ValidationError

from rankwatch_service.settings import PORT, Settings, as_environment


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """No configuration of whoever runs the tests counts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("DATA_DIR", "DATABASE_URL", "HOST", "PORT", "PUBLIC_URL", "KAFKA", "INSECURE"):
        monkeypatch.delenv(f"RANKWATCH_{name}", raising=False)
    return tmp_path


def test_without_configuration_it_is_sqlite_on_loopback(elsewhere):
    settings = Settings(data_dir=elsewhere)
    assert (settings.host, settings.port) == ("127.0.0.1", PORT)
    assert settings.database_url == f"sqlite:///{elsewhere}/rankwatch.db"
    assert settings.public_url == f"http://127.0.0.1:{PORT}"


def test_links_into_own_tools_are_templates(elsewhere, monkeypatch):
    monkeypatch.setenv("RANKWATCH_LINKS", '{"Grafana": "https://g.example/d?job={job}"}')
    assert Settings().links == {"Grafana": "https://g.example/d?job={job}"}
    for wrong in ("https://g.example/", "javascript:{job}", "https://g.example/{jobs}"):
        with pytest.raises(ValidationError, match="a URL with"):
            Settings(links={"x": wrong})


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


def test_relative_paths_are_meant_from_here_by_the_roles_that_are_started_too(elsewhere, monkeypatch):
    given = {
        "data_dir": "data",
        "database_url": "sqlite:///data/other.db",
        "tls_cert": "c.pem",
        "tls_key": "k.pem",
        "ingest_config": "ingest.json",
        "kafka_ssl_cafile": "ca.pem",
    }
    reported = as_environment(Settings(**given))
    monkeypatch.chdir("/")
    for name, path in given.items():
        scheme, _, rest = path.rpartition(":///")
        assert reported[f"RANKWATCH_{name.upper()}"] == f"{scheme and 'sqlite:///'}{elsewhere / rest}"
    assert reported["RANKWATCH_SECRET_KEY_FILE"] == str(elsewhere / "data" / "secret.key")
    assert reported["RANKWATCH_KAFKA_SSL_KEYFILE"] == ""
    assert Settings(database_url="postgresql://h/d").database_url == "postgresql://h/d"


def test_a_key_that_does_not_exist_is_an_error(elsewhere):
    with pytest.raises(ValidationError, match="prot"):
        Settings(prot=1)
    (elsewhere / "rankwatch.toml").write_text("prot = 1\n")
    with pytest.raises(ValidationError, match="prot"):
        Settings()


@pytest.mark.parametrize(("host", "url"), [("0.0.0.0", "http://127.0.0.1:9"), ("::1", "http://[::1]:9")])
def test_the_public_url_is_one_that_can_be_opened(host, url):
    assert Settings(host=host, port=9).public_url == url


def test_with_a_certificate_the_public_url_is_https(tmp_path):
    files = {"tls_cert": tmp_path / "c.pem", "tls_key": tmp_path / "k.pem"}
    assert Settings(host="0.0.0.0", port=9, **files).public_url == "https://127.0.0.1:9"
    with pytest.raises(ValidationError, match="https alone"):
        Settings(public_url="http://h", **files)
    for name, file in files.items():
        with pytest.raises(ValidationError, match="set both or none"):
            Settings(**{name: file})


@pytest.mark.parametrize(
    ("hosts", "exposed"), [(("127.0.0.1", "localhost", "::1"), False), (("0.0.0.0", "::", "", "h"), True)]
)
def test_the_api_is_exposed_where_others_reach_it_without_tls(tmp_path, hosts, exposed):
    for host in hosts:
        assert Settings(host=host).exposed == exposed
        assert not Settings(host=host, insecure=True).exposed
        assert not Settings(host=host, tls_cert=tmp_path / "c.pem", tls_key=tmp_path / "k.pem").exposed


def test_trusted_proxies_are_addresses_and_networks():
    assert Settings(trusted_proxies="10.0.0.0/8, 2001:db8::1").trusted_proxies
    with pytest.raises(ValidationError, match=r"proxy\.example"):
        Settings(trusted_proxies="10.0.0.1,proxy.example")


def test_settings_do_not_change():
    with pytest.raises(ValidationError):
        Settings().port = 1


OIDC = {"oidc_issuer": "https://sso.example.com", "oidc_client_id": "rankwatch"}
GROUPS = {"ml": {"scopes": ["read"], "jobs": ["llm-*"]}}


def test_groups_are_a_table_of_the_file_and_json_in_the_environment(elsewhere, monkeypatch):
    (elsewhere / "rankwatch.toml").write_text(
        'oidc_issuer = "https://sso.example.com"\noidc_client_id = "rankwatch"\noidc_client_secret = "hush"\n'
        '[oidc_groups."ml/llm"]\nscopes = ["read", "command"]\njobs = ["llm-*"]\n'
        '[oidc_groups.ops]\nscopes = ["admin"]\n'
    )
    settings = Settings()
    assert "hush" not in repr(settings)
    assert settings.oidc_groups["ml/llm"].jobs == ("llm-*",)
    assert settings.oidc_groups["ops"].scopes == {"admin"}
    for name, value in as_environment(settings).items():
        monkeypatch.setenv(name, value)
    (elsewhere / "rankwatch.toml").unlink()
    assert Settings() == settings


@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        ({"oidc_issuer": "http://sso.example.com"}, "https"),
        ({"oidc_issuer": "sso.example.com"}, "https"),
        ({"oidc_issuer": "https://sso.example.com?x=1"}, "https"),
        ({"oidc_client_id": ""}, "oidc_client_id"),
        ({"oidc_groups": {}}, "oidc_groups"),
        ({"oidc_groups": {"ml": {"scopes": ["command"]}}}, "read"),
        ({"oidc_groups": {"ml": {"scopes": ["ingest", "read"]}}}, "ingest|admin"),
        ({"oidc_groups": {"ml": {"scopes": ["read"], "job": "x"}}}, "job"),
        ({"oidc_groups": {"ml": {"scopes": ["read"], "jobs": [""]}}}, "jobs"),
    ],
)
def test_a_provider_by_which_nobody_could_log_in_is_refused(wrong, reported):
    assert Settings(**OIDC, oidc_groups=GROUPS).oidc_issuer
    assert Settings(**(OIDC | {"oidc_issuer": "http://127.0.0.1:8080/realms/x"}), oidc_groups=GROUPS)
    with pytest.raises(ValidationError, match=reported):
        Settings(**({**OIDC, "oidc_groups": GROUPS} | wrong))


def test_without_a_broker_telemetry_flows_through_the_database():
    assert Settings().kafka_settings() is None


def test_kafka_is_reached_as_the_settings_say(monkeypatch):
    named = {"": "a:1, b:2", "_PREFIX": "mine", "_SECURITY_PROTOCOL": "SASL_SSL"}
    for name, value in (named | {"_SASL_USERNAME": "u", "_SASL_PASSWORD": "hush"}).items():
        monkeypatch.setenv(f"RANKWATCH_KAFKA{name}", value)
    kafka = Settings().kafka_settings()
    assert kafka.brokers == ["a:1", "b:2"]
    assert kafka.telemetry_topic == "mine.telemetry"
    assert kafka.uses_password
    assert "hush" not in repr(Settings()) + repr(kafka)


@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        ({"kafka": "localhost"}, "HOST:PORT"),
        ({"kafka": "a:1", "kafka_security_protocol": "TLS"}, "SASL_SSL"),
        ({"kafka": "a:1", "kafka_security_protocol": "SASL_SSL"}, "needs a user name"),
        ({"kafka": "a:1", "kafka_compression": "snap"}, "zstd"),
        ({"kafka_prefix": "a b"}, "kafka_prefix"),
    ],
)
def test_kafka_settings_that_could_never_connect_are_refused(wrong, reported):
    with pytest.raises(ValidationError, match=reported):
        Settings(**wrong)
