"""How a command fails: one line on stderr that begins with "error: ", an exit code, and no traceback.

    0    done
    1    it failed on the way (a full disk, a rank that is gone), or `doctor` found a fault
    2    it cannot be: an argument, or a file that was named, is wrong
    130  Ctrl-C
    141  nobody reads what it prints, as in `narrowcast codecs | head -2`; it ends without a word, as other programs do

Commands raise what the library raises, or call `refuse` for what only they can know; the group that holds them reports
it here, once. Any other exception is a mistake in narrowcast, and keeps its traceback.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from narrowcast.cli.launched import rank
from narrowcast.errors import CollectiveError, MismatchError, NarrowcastError

FAILED, WRONG, STOPPED, UNREAD = 1, 2, 130, 141
_NAMED_WRONG = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


class Commands(TyperGroup):
    """A group of commands whose errors are one line each."""

    def main(self, *args: Any, **extra: Any) -> Any:
        if not extra.get("standalone_mode", True):
            return super().main(*args, **extra)
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
            sys.stdout.flush()
        except SystemExit as stop:
            # rich and typer answer a broken pipe with 1, each in its own place.
            sys.exit(UNREAD if isinstance(stop.__context__, BrokenPipeError) else stop.code)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is written at exit
            sys.exit(UNREAD)
        except (typer.Abort, KeyboardInterrupt):
            code = STOPPED
        except (NarrowcastError, OSError) as error:
            say(_words(error))
            sys.exit(_code(error))
        except Exception as error:
            # What typer finds wrong with the arguments. Its classes have moved between versions; this has not.
            if not hasattr(error, "format_message"):
                raise
            sys.exit(_usage(error))
        if code == STOPPED:  # newer versions of typer have seen to the exception themselves
            say("stopped.")
        sys.exit(code if isinstance(code, int) else 0)


def refuse(message: str) -> NoReturn:
    """End the command because of its arguments. Every rank has the same ones, so the first speaks for all."""
    if rank() == 0:
        say(message)
    raise typer.Exit(WRONG)


def say(message: str) -> None:
    """Print an error."""
    from rich.console import Console

    line = re.sub(r"\s*\n\s*", " ", message.strip())
    Console(stderr=True).print(f"error: {line}", style="red", soft_wrap=True, highlight=False, markup=False)


def _code(error: Exception) -> int:
    if isinstance(error, NarrowcastError):
        lost = isinstance(error, CollectiveError) and not isinstance(error, MismatchError)
        return FAILED if lost else WRONG
    return WRONG if isinstance(error, _NAMED_WRONG) else FAILED


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, NarrowcastError) and error.strerror:
        return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
    return str(error)


def _usage(error: Any) -> int:
    message = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        if message.strip():
            print(message, file=sys.stderr)
    else:
        context = getattr(error, "ctx", None)
        hint = f" See: {context.command_path} --help" if context else ""
        say(f"{message.rstrip('.')}{'' if message.endswith('?') else '.'}{hint}")
    return int(error.exit_code)
