"""Refuses old names of commands and options. The error message has the new name."""

from __future__ import annotations

from typing import Any, Final

from typer.core import TyperCommand, TyperGroup

COMMANDS: Final = {
    "pools": "pool list",
    "blocks": "pool show",
    "watch": "pool watch",
    "drop-cache": "cache drop",
    "adapters": "adapter",
    "adapter drop": "adapter unload",
}
OPTIONS: Final = {
    f"--{server}{old}": f"--{new}-{server}"
    for server in ("allocator", "worker", "gateway")
    for old, new in (("", "listen"), ("-metrics", "metrics"))
    if (server, old) != ("gateway", "-metrics")
}


class CommandGroup(TyperGroup):
    """A group of commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns the command that the first argument names."""
        old = " ".join([*ctx.command_path.split()[1:], args[0]])
        if old in COMMANDS and args[0] not in self.commands:
            ctx.fail(f"there is no command quire {old}: use quire {COMMANDS[old]}")
        return super().resolve_command(ctx, args)


class Up(TyperCommand):
    """`quire up`. The command's listen options once had the names of the options that say which server to call."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the command line up to the worker's options."""
        for given in args[: args.index("--")] if "--" in args else args:
            name = given.partition("=")[0]
            if name in OPTIONS:
                ctx.fail(f"there is no option {name}: quire up calls it {OPTIONS[name]}")
        return super().parse_args(ctx, args)
