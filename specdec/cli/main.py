"""The `specdec` command and its subcommands."""

from __future__ import annotations

import io
import sys
from importlib import import_module

import typer

from specdec import services
from specdec.cli import bench, demo, distill, generate, health, keys, models, up

app = typer.Typer(
    name="specdec",
    help="Speculative decoding as a service: a draft model proposes, a target model verifies.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help and errors, as the services have them; they fit a narrow window and a pipe.
    rich_markup_mode=None,
)
app.command("demo")(demo.demo)
app.command("up")(up.up)
app.command("generate")(generate.generate)
app.command("bench")(bench.bench)
app.command("distill")(distill.distill)
app.command("health")(health.health)
app.add_typer(models.app, name="models")
app.add_typer(keys.app, name="keys")

# The services read their own command lines, so that flags, environment and file are one thing.
_PACKAGES = {
    services.DRAFT: "draft_service",
    services.VERIFIER: "verifier_service",
    services.GATEWAY: "gateway",
}
_PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def _add_service(service: services.Service, package: str) -> None:
    def run(context: typer.Context) -> None:
        import_module(f"{package}.__main__").main(context.args)

    help_text = f"Run the {service.name} service. `specdec {service.name} --help` lists its flags."
    app.command(service.name, help=help_text, context_settings=_PASS_ON)(run)


for _service, _package in _PACKAGES.items():
    _add_service(_service, _package)


def main() -> None:
    """The entry point."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Text that the terminal's encoding does not have is better escaped than an error.
        sys.stdout.reconfigure(errors="backslashreplace")
    app()
