"""`quire certs`: certificates for development and for small deployments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from quire._distribution import how_to_install
from quire.cli import options, output
from quire.errors import UsageError
from quire.protocol.permissions import EVERYTHING_PATTERNS, Patterns, uris_of

EXAMPLES = """Make a certificate authority, and certificates that it signs. Nothing is overwritten without --renew.

Without options it makes three in FOLDER: ca (the authority), server (for this machine and each --host), and client,
which may do everything. With --server or --client it makes that one, and the authority if there is none yet.
Each NAME is two files: NAME.pem, and NAME.key, which only you can read.

With --renew, a certificate is made again if less than a third of its life is left, or if it differs from what the
options ask for; others stay. Run the same command each day to renew certificates in time. If the authority is made
again, ca.pem keeps the previous one until that expires, so that its certificates stay trusted.

A --client may use only what its options name. A trailing * matches any ending; quote it.

Examples:

    quire certs certs --host allocator.internal
    quire certs certs --client worker-1 --pool worker-1 --namespace '*'
    quire certs certs --client acme --namespace acme
    quire certs certs --client prometheus --observe '*'
    quire certs certs --server worker-1 --host 10.0.0.5
    quire certs worker-1 --authority certs --renew --server server --host worker-1 --client client --pool worker-1
"""

USAGE = """
A server that accepts only callers with such a certificate, and a call to it:
  quire allocator --tls-cert {folder}/server.pem --tls-key {folder}/server.key --tls-client-ca {folder}/ca.pem
  quire pool list --tls-ca {folder}/ca.pem --tls-cert {folder}/client.pem --tls-key {folder}/client.key"""


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command(help=EXAMPLES)(certs)


def certs(
    folder: Annotated[Path, typer.Argument(help="Folder for the files; made if missing.", show_default=False)],
    *,
    server: Annotated[str | None, typer.Option(metavar="NAME", help="Make a server's certificate.")] = None,
    host: Annotated[
        list[str] | None, typer.Option(metavar="HOST", help="A name or address of the server, as callers use it.")
    ] = None,
    client: Annotated[str | None, typer.Option(metavar="NAME", help="Make a caller's certificate.")] = None,
    pool: Annotated[list[str] | None, typer.Option(metavar="POOL", help="A pool that the client may own.")] = None,
    observe: Annotated[
        list[str] | None, typer.Option(metavar="POOL", help="A pool that the client may look into.")
    ] = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option(metavar="NAMESPACE", help="A namespace that the client may use; '' is the nameless one."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=36_500, help="How long the certificates are valid.")] = 30,
    authority: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder of the authority, if it is not FOLDER; its ca.pem is copied into FOLDER."
        ),
    ] = None,
    renew: Annotated[
        bool, typer.Option("--renew", help="Replace certificates that expire soon, and keep the others.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Writes the requested certificates. The command checks everything before it writes the first file."""
    try:
        from quire import _certs
    except ModuleNotFoundError as error:
        raise UsageError(f"the package {error.name!r} is missing: {how_to_install('cli')}") from None
    asked = (server is not None, client is not None)
    if client is None and (pool or observe or namespace):
        raise UsageError("--pool, --observe and --namespace are permissions of a client: give --client NAME, too")
    if host and asked == (False, True):
        raise UsageError("--host is a name in a server's certificate: give --server NAME, too")
    _require_pool_names(pool or (), observe or ())
    _certs.host_names(host or ())
    uris = uris_of(Patterns(pool or (), observe or (), namespace or ()))
    if asked == (False, False):
        server, client, uris = "server", "client", uris_of(EVERYTHING_PATTERNS)
    if server is not None and server == client:
        raise UsageError("--server and --client make two certificates; give them different names")

    home = folder if authority is None else authority
    _make_folders(folder, home)
    for name in [name for name in (server, client) if name is not None]:
        (_certs.check_name(name) if renew else _certs.check_new(folder, name))
    made: dict[Path, str] = {}
    signer = _certs.read_authority(home)
    if signer is None or (renew and _certs.ends_soon(signer.cert)):
        signer = _certs.make_authority(home, days=days, replaced=signer)
        made[home / "ca"] = "the authority; keep ca.key to yourself"
    if home != folder:
        _certs.copy_bundle(folder, signer)
    if server is not None and _certs.make_server(folder, signer, server, host or (), days=days, renew=renew):
        made[folder / server] = f"--tls-cert {folder / server}.pem --tls-key {folder / server}.key"
    if client is not None and _certs.make_client(folder, signer, client, uris, days=days, renew=renew):
        made[folder / client] = " ".join(uris) or "no permission at all"
    _tell(made, as_json=as_json)
    if asked == (False, False) and not as_json:
        print(USAGE.format(folder=folder))


def _tell(made: dict[Path, str], *, as_json: bool) -> None:
    if as_json:
        output.print_json([{"cert": f"{each}.pem", "key": f"{each}.key"} for each in made])
        return
    for each, what in made.items():
        print(f"{each}.pem, .key: {what}")


def _make_folders(*folders: Path) -> None:
    for folder in folders:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{folder}: {error.strerror}") from None


def _require_pool_names(*patterns: Sequence[str]) -> None:
    if any("" in each for each in patterns):
        raise UsageError("--pool must not be empty: write --pool NAME, or '*' for every pool")
