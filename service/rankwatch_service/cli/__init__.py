"""The command line. Data goes to stdout, everything else to stderr.

Exit status: 0 success, 1 findings (or a command was not applied), 2 wrong usage, 3 the service or the database is
unreachable, 4 access denied.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its status."""
    _on_a_training_host(*sys.argv[1:])
    from rankwatch_service.cli.errors import CliError, Status, advice, usage_error
    from rankwatch_service.store.errors import SchemaError, StoreAddressError, StoreError

    try:
        import typer

        from rankwatch_service.cli.app import app

        try:
            sys.exit(app(standalone_mode=False))
        except typer.TyperException as error:
            if type(error).__name__ != "NoArgsIsHelpError":  # then the help has been printed
                _say(usage_error(error))
            sys.exit(Status.USAGE)
        except typer.Abort:
            _say("given up")
            sys.exit(Status.USAGE)
        except OSError as error:
            _say(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error))
            sys.exit(Status.USAGE)
    except CliError as error:
        _say(str(error))
        sys.exit(error.status)
    except ModuleNotFoundError as error:
        hint = advice(error)
        if hint is None:
            raise
        print(f"rankwatch: {hint}", file=sys.stderr)
        sys.exit(Status.USAGE)
    except StoreError as error:
        _say(f"the database: {error}")
        statuses = {StoreAddressError: Status.USAGE, SchemaError: Status.FINDINGS}
        sys.exit(statuses.get(type(error), Status.UNREACHABLE))


def _say(message: str) -> None:
    from rankwatch_service.text_log import say

    say(message)


def _on_a_training_host(command: str = "", *arguments: str) -> None:
    """Start the commands that need nothing but the collectors, since typer may not be installed.

    Where it is, it prints their help, in the style of all others.
    """
    import os
    from importlib.util import find_spec

    own = arguments[:1] if command == "run" else arguments  # what follows is the training command's
    if {"-h", "--help"} & {*own} and find_spec("typer"):
        return

    if command == "run":
        from rankwatch.run.command import main as run

        sys.exit(run(arguments, os.environ))
    if command == "follow":
        from rankwatch.follow.command import main as follow

        sys.exit(follow(arguments, os.environ))
