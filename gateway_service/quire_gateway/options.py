"""The command line of the gateway."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Sequence
from typing import Final

from quire._serving import request_log, tracing
from quire._serving.command_line import Parser

from quire_gateway.calls.formats import CALL_FORMATS, REASONING_FORMATS
from quire_gateway.calls.recognition import AUTO, NONE, Named
from quire_gateway.stream_head import KEEP_ALIVE_S

LISTEN: Final = "127.0.0.1:8000"
DRAIN_S: Final = 30.0
BODY_BYTES_MAX: Final = 8 << 20
IN_FLIGHT_MAX: Final = 2_048
REQUEST_TIMEOUT_S: Final = 600.0
RESPONSES_BYTES_MAX: Final = 256 << 20
RESPONSES_LIFETIME_S: Final = 3_600.0
_FILES: Final = {
    "worker-ca": (
        "QUIRE_TLS_CA",
        "certificate authorities of workers and allocators; turns TLS on for these connections",
    ),
    "worker-cert": ("QUIRE_TLS_CERT", "certificate that the gateway shows to them"),
    "worker-key": ("QUIRE_TLS_KEY", "private key of that certificate"),
    "tls-cert": ("QUIRE_SERVER_CERT", "certificate of this server, followed by its chain"),
    "tls-key": ("QUIRE_SERVER_KEY", "private key of this server"),
}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line of the gateway."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    options.worker = options.worker or _listed("QUIRE_WORKER")
    options.allocator = options.allocator or _listed("QUIRE_ALLOCATOR") or ["127.0.0.1:7070"]
    for name in ("max_body_bytes", "max_in_flight"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.max_responses_bytes < 0:
        parser.error("--max-responses-bytes must be at least 0")
    if not options.responses_lifetime > 0:
        parser.error("--responses-lifetime must be above 0")
    if not options.request_timeout > 0:
        parser.error("--request-timeout must be above 0")
    if not options.sse_keep_alive >= 0:
        parser.error("--sse-keep-alive must be at least 0")
    if not options.drain_timeout >= 0:
        parser.error("--drain-timeout must be at least 0")
    return options


def make_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(
        prog="quire-gateway", description="Serve OpenAI's endpoints (completions, chat, models) from Quire's workers."
    )
    parser.add_argument("--listen", default=LISTEN, help="host:port; port 0 takes any free port (default: %(default)s)")
    parser.add_argument(
        "--worker",
        action="append",
        metavar="ADDRESS",
        help="address of a worker; may be repeated (default: $QUIRE_WORKER, separated by commas, or the workers that "
        "the allocators know, as they come and go)",
    )
    parser.add_argument(
        "--allocator",
        action="append",
        metavar="ADDRESS",
        help="address of an allocator of these workers, which routes the prompts of a model that several workers "
        "serve; may be repeated (default: $QUIRE_ALLOCATOR, separated by commas, or 127.0.0.1:7070)",
    )
    parser.add_argument(
        "--api-keys",
        metavar="FILE",
        default=os.environ.get("QUIRE_API_KEYS_FILE") or None,
        help="file of API keys, one per line: KEY or KEY NAMESPACE, then optionally name=NAME, requests=N and "
        "tokens=N per minute, concurrent=N, expires=DATE, special_tokens=text or tokens; read again when it "
        "changes (default: $QUIRE_API_KEYS_FILE, or the keys themselves in $QUIRE_API_KEYS)",
    )
    parser.add_argument(
        "--token-file",
        default=os.environ.get("QUIRE_TOKEN_FILE") or None,
        help="file with the bearer token that the gateway sends to workers and allocators, and that /metrics "
        "requires; callers need it, too, if there are no API keys (default: $QUIRE_TOKEN_FILE)",
    )
    tls = parser.add_argument_group("TLS, as PEM files")
    for option, (variable, text) in _FILES.items():
        default = os.environ.get(variable) or None
        tls.add_argument(f"--{option}", metavar="FILE", default=default, help=f"{text} (default: ${variable})")
    tls.add_argument(
        "--plain-http",
        action="store_true",
        help="listen beyond loopback without --tls-cert: for a container's network, or behind a proxy with TLS",
    )
    parser.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="defaults of sampling parameters: from the checkpoint's generation_config.json, or OpenAI's "
        "(default: %(default)s)",
    )
    _add_notations(parser)
    _add_limits(parser)
    request_log.add_argument(parser)
    tracing.add_argument(parser)
    parser.add_argument("--ready-file", help="once serving, write the address and the pid to this file as JSON")
    parser.add_argument(
        "--log-format", choices=["auto", "json", "console"], default="auto", help="auto: console on a terminal"
    )
    parser.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="info",
        help="lowest level that is logged (default: %(default)s)",
    )
    for name in ("in-flight", "body-bytes", "responses-bytes"):
        parser.add_renamed(f"--{name}-max", f"--max-{name}")
    return parser


def _add_notations(parser: argparse.ArgumentParser) -> None:
    notations = parser.add_argument_group("how models write", "one NAME for all models, or MODEL=NAME; may be repeated")
    for options, formats, what in (
        (("--tool-call-format", "--tool-call-parser"), CALL_FORMATS, "calls of tools"),
        (("--reasoning-format", "--reasoning-parser"), REASONING_FORMATS, "their reasoning"),
    ):
        notations.add_argument(
            *options,
            action="append",
            metavar="[MODEL=]NAME",
            type=_naming(formats),
            default=[],
            help=f"format of {what}: {', '.join([AUTO, NONE, *formats])} (default: {AUTO}, the format of the chat "
            "template)",
        )


def _naming(formats: Collection[str]) -> Callable[[str], tuple[str, str]]:
    """Returns a parser for an option that names a format. The parser returns the model (empty for all) and the name."""

    def read(given: str) -> tuple[str, str]:
        model, _, name = given.rpartition("=")
        if name not in (AUTO, NONE, *formats):
            raise argparse.ArgumentTypeError(
                f"{name!r} is not a known format: known are {', '.join([AUTO, NONE, *formats])}"
            )
        return model, name

    return read


def named_notation(options: argparse.Namespace, model: str) -> Named:
    """Returns the formats that the command line names for a model. Of several options, the last one counts."""
    calls: dict[str, str] = dict(options.tool_call_format)
    reasoning: dict[str, str] = dict(options.reasoning_format)
    return Named(calls.get(model) or calls.get("", AUTO), reasoning.get(model) or reasoning.get("", AUTO))


def _add_limits(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--cors-origin",
        action="append",
        metavar="ORIGIN",
        default=[],
        help=(
            "let web pages of this origin call the gateway, such as https://app.example; may be repeated "
            "(default: none)"
        ),
    )
    limits.add_argument(
        "--host",
        action="append",
        metavar="NAME",
        default=[],
        help="Host header that the gateway accepts; may be repeated (default on loopback: addresses, localhost and "
        "names without a dot, against DNS rebinding; elsewhere: any)",
    )
    limits.add_argument(
        "--max-body-bytes",
        type=int,
        default=BODY_BYTES_MAX,
        help="largest body of a request, in bytes (default: %(default)s)",
    )
    limits.add_argument(
        "--max-in-flight",
        type=int,
        default=IN_FLIGHT_MAX,
        help="requests that run at the same time; further ones get 429. If API keys have several "
        "namespaces, each may use at most half of what the others leave (default: %(default)s)",
    )
    limits.add_argument(
        "--max-responses-bytes",
        type=int,
        default=RESPONSES_BYTES_MAX,
        help="bytes of all kept responses; 0 keeps none. If API keys have several namespaces, each may "
        "use at most half of what the others leave (default: %(default)s)",
    )
    limits.add_argument(
        "--responses-lifetime",
        type=float,
        metavar="SECONDS",
        default=RESPONSES_LIFETIME_S,
        help="how long a response is kept (default: %(default)g)",
    )
    limits.add_argument(
        "--request-timeout",
        type=float,
        metavar="SECONDS",
        default=REQUEST_TIMEOUT_S,
        help="time limit of a complete answer (default: %(default)g)",
    )
    limits.add_argument(
        "--sse-keep-alive",
        type=float,
        metavar="SECONDS",
        default=KEEP_ALIVE_S,
        help="send a comment on a stream that is silent this long, so that no proxy ends it; 0 sends none (default: "
        "%(default)g)",
    )
    limits.add_argument(
        "--drain-timeout",
        type=float,
        metavar="SECONDS",
        default=DRAIN_S,
        help="how long running answers may continue after SIGTERM (default: %(default)g)",
    )


def _listed(variable: str) -> list[str]:
    return [address.strip() for address in os.environ.get(variable, "").split(",") if address.strip()]
