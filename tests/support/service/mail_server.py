"""A real SMTP server on a real socket, for one e-mail at a time, that answers as the test sets."""

import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress


class FakeMailServer:
    """Keeps every e-mail that it accepts; `answers` are replies to commands, by their first word.

    The reply "hang" is none until the client goes.
    """

    def __init__(self, answers: Mapping[str, str], tls: ssl.SSLContext | None, *, starts_with_tls: bool):
        self.mails: list[bytes] = []
        self.commands: list[str] = []
        self._answers = answers
        self._tls = tls
        self._starts_with_tls = starts_with_tls
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with suppress(OSError):
                if self._starts_with_tls:
                    connection = self._tls.wrap_socket(connection, server_side=True)
                self._session(connection)
            connection.close()

    def _session(self, connection: socket.socket) -> None:
        lines = connection.makefile("rb")
        connection.sendall(b"%s\r\n" % self._reply("greeting", "220 ready").encode())
        while line := lines.readline():
            word = line.split()[0].decode().upper()
            self.commands.append(line.decode().strip().lower())
            default = {"EHLO": self._ehlo(), "DATA": "354 go on", "STARTTLS": "220 go on", "QUIT": "221 bye"}.get(
                word, "250 ok"
            )
            reply = self._reply(word, default)
            if reply == "hang":
                lines.read()
                return
            connection.sendall(reply.encode() + b"\r\n")
            if word == "STARTTLS":
                connection = self._tls.wrap_socket(connection, server_side=True)
                lines = connection.makefile("rb")
            if word == "DATA" and reply.startswith("354"):
                mail = b""
                while (line := lines.readline()) != b".\r\n":
                    mail += line
                reply = self._reply("content", "250 taken")
                connection.sendall(reply.encode() + b"\r\n")
                if reply.startswith("250"):
                    self.mails.append(mail)
            if word == "QUIT":
                return

    def _ehlo(self) -> str:
        return "250-here\r\n250-AUTH PLAIN\r\n" + ("250-STARTTLS\r\n" if self._tls else "") + "250 SIZE"

    def _reply(self, word: str, default: str) -> str:
        return self._answers.get(word, default)


@contextmanager
def mail_server(
    answers: Mapping[str, str] = {}, tls: ssl.SSLContext | None = None, *, starts_with_tls: bool = False
) -> Iterator[FakeMailServer]:
    server = FakeMailServer(answers, tls, starts_with_tls=starts_with_tls)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        with suppress(OSError):
            server.socket.shutdown(socket.SHUT_RDWR)
        server.socket.close()
        thread.join(10)
