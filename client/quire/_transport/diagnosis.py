"""Diagnoses an address where no server answered. The diagnosis is one sentence: the fault, and its remedy.

gRPC itself only reports, in its internal terms, that it has no connection. A plain connection tells more: nothing
listens, the machine is silent, or the listener speaks another protocol. The probe requests a page over HTTP/1.1. A gRPC
server answers with an HTTP/2 frame, a TLS server with an alert or not at all, and any other HTTP server with HTTP.
"""

from __future__ import annotations

import socket
from typing import Final

from quire._transport.address import is_local, is_unix, split
from quire.errors import UsageError

ANY_SERVER: Final = "server"  # name used when the kind of server is not known
PROBE_S: Final = 0.5  # time to connect, and also to receive the first bytes
_REQUEST: Final = b"GET / HTTP/1.1\r\nHost: quire\r\nConnection: close\r\n\r\n"
_ANSWER_BYTES: Final = 9  # size of an HTTP/2 frame header
_SETTINGS: Final = 4  # type of an HTTP/2 server's first frame
_ALERT: Final = b"\x15\x03"  # first bytes of a TLS alert, the answer to a request without TLS


def what_is_at(address: str, server: str, *, is_encrypted: bool) -> str:
    """Returns the sentence. Takes a second at most.

    Args:
        address: the client's address.
        server: the expected kind of server, such as "allocator".
        is_encrypted: whether the client uses TLS.
    """
    try:
        connection = _connected(address)
    except socket.gaierror as error:
        return f"the name of its host cannot be looked up ({error.strerror})"
    except (ConnectionRefusedError, FileNotFoundError):
        start = "start it with `quire up`" if is_local(address) else "start it there, or give another address"
        return f"no {server} is running there; {start}"
    except OSError:
        return "its machine does not answer; check the address and the firewalls in between"
    except UsageError:  # Only gRPC can resolve this form of address.
        return f"is the {server} running there?"
    with connection:
        return _what_answers(connection, server, is_encrypted)


def _connected(address: str) -> socket.socket:
    """Connects without gRPC.

    Raises:
        OSError: the connection fails.
        UsageError: only gRPC knows this form of address.
    """
    if not is_unix(address):
        return socket.create_connection(split(address), PROBE_S)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(PROBE_S)
    try:
        connection.connect(address.removeprefix("unix:").removeprefix("//"))
    except OSError:
        connection.close()
        raise
    return connection


def _what_answers(connection: socket.socket, server: str, is_encrypted: bool) -> str:
    """Returns the sentence about the listener that accepted the connection."""
    answer = _asked(connection)
    if answer is None:
        return "a process accepts connections there but does not answer; it may hang"
    if answer.startswith(b"HTTP/"):
        other = f"the server there speaks HTTP and is not {_with_article(server)} (gRPC); give another address"
        as_http = "the server there speaks HTTP, not gRPC: write http:// before the address"
        return as_http if server == ANY_SERVER else other
    is_plain_grpc = len(answer) == _ANSWER_BYTES and answer[3] == _SETTINGS
    if is_encrypted:
        if is_plain_grpc:
            return "the server there does not use TLS; call it without TLS, or start it with a certificate"
        return "the server there ended the connection; does one side not trust the other's certificate?"
    if is_plain_grpc:
        return f"the server there ended the connection; is it {_with_article(server)}?"
    asks_for_tls = answer.startswith(_ALERT)
    why = "it requires TLS" if asks_for_tls else "it is being stopped, or requires TLS"
    return f"the server there ended the connection: {why}; for TLS, name the authorities to trust in QUIRE_TLS_CA"


def _asked(connection: socket.socket) -> bytes | None:
    """Returns an answer's first bytes: empty if the connection ends first, None if nothing arrives in time."""
    connection.settimeout(PROBE_S)
    try:
        connection.sendall(_REQUEST)
        return connection.recv(_ANSWER_BYTES)
    except TimeoutError:
        return None
    except OSError:  # The connection was reset.
        return b""


def _with_article(server: str) -> str:
    return f"{'an' if server[0] in 'aeiou' else 'a'} {server}"
