"""The verbs of `worklog`. Parsing and printing only; what a verb does is in the module it calls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from worklog.problem import ProblemError
from worklog.record import RecordError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


def main() -> None:
    """Console entry: one sentence and exit 2 for a user's mistake, 130 for an interrupt, no traceback."""
    try:
        app()
    except (ProblemError, RecordError) as error:
        typer.echo(f"worklog: {error}", err=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
