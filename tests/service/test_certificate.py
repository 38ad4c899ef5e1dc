"""The certificate of the api: read again when its files change, and known to agents by its pin."""

import os
import ssl

import pytest
from structlog.testing import capture_logs

from rankwatch.trust import pin_of
from rankwatch_service.certificate import CertificateError, ServedCertificate, token_pin
from tests.support.service.machine import make_certificate


@pytest.fixture
def files(tmp_path):
    made = tmp_path / "certificate.pem", tmp_path / "key.pem"
    make_certificate(*made)
    return made


def shown(served):
    """The pin of the certificate that the next connection is shown."""
    client = ssl.create_default_context()
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server)
    theirs = served.context.wrap_bio(to_server, to_client, server_side=True)
    for side in (ours, theirs, ours):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return ssl.DER_cert_to_PEM_cert(ours.getpeercert(binary_form=True))


def test_a_renewed_certificate_is_shown_from_the_next_look_on(files):
    served = ServedCertificate(*files)
    before = files[0].read_text()
    make_certificate(*files)
    assert shown(served) == before
    with capture_logs() as said:
        served.look()
        served.look()
    assert shown(served) == files[0].read_text() != before
    assert [line["event"] for line in said] == ["certificate_renewed"]


def test_broken_files_are_logged_once_and_the_certificate_stays(files):
    served = ServedCertificate(*files)
    before = files[0].read_text()
    files[0].write_text("half a certif")
    with capture_logs() as said:
        for _ in range(3):
            served.look()
    assert [line["event"] for line in said] == ["certificate_not_renewed"]
    assert str(files[0]) in said[0]["detail"]
    assert shown(served) == before
    make_certificate(*files)
    served.look()
    assert shown(served) == files[0].read_text()


def test_a_renewal_may_take_the_files_away_for_a_moment_and_swap_links(files, tmp_path):
    served = ServedCertificate(*files)
    files[1].rename(tmp_path / "gone")
    served.look()
    (tmp_path / "new").mkdir()
    renewed = tmp_path / "new" / "certificate.pem", tmp_path / "new" / "key.pem"
    make_certificate(*renewed)
    for file, target in zip(files, renewed, strict=True):
        file.unlink(missing_ok=True)
        os.symlink(target, file)
    served.look()
    assert shown(served) == renewed[0].read_text()


def test_files_that_cannot_be_used_are_named(files, tmp_path):
    with pytest.raises(CertificateError, match=r"missing\.pem cannot be read: No such file"):
        ServedCertificate(tmp_path / "missing.pem", files[1])
    other = tmp_path / "other.pem", tmp_path / "other.key"
    make_certificate(*other)
    with pytest.raises(CertificateError, match=r"certificate\.pem and .*other\.key are no certificate with its key"):
        ServedCertificate(files[0], other[1])


def test_tokens_name_a_certificate_that_signs_itself_and_no_other(files, tmp_path):
    assert token_pin(files[0]) == pin_of(files[0])
    authority = make_certificate(tmp_path / "authority.pem", tmp_path / "authority.key")
    make_certificate(*files, signer=authority)
    assert token_pin(files[0]) == ""
    files[0].write_text("nothing")
    with pytest.raises(CertificateError, match="no certificate in PEM form"):
        token_pin(files[0])
