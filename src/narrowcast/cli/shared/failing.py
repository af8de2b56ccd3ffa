"""How a command fails: one line on stderr that begins with "error: ", an exit code, and no traceback.

    0    success
    1    it failed while running (a full disk, too little memory, a lost rank), or `doctor` found a fault
    2    an argument, or a file or folder that it names, is wrong: missing, damaged, taken, not permitted, read-only
    130  Ctrl-C
    141  the reader of the output is gone, as in `narrowcast codecs | head -2`; nothing is printed, as in other programs

Commands raise the library's exceptions, or call `refuse` for faults of their own arguments. `Commands` reports both,
once. Any other exception is a bug in narrowcast, and keeps its traceback. `bench` and `netlab` end with the exit code
of what they run.
"""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from narrowcast.cli.shared.launched import rank
from narrowcast.errors import CollectiveError, MismatchError, NarrowcastError

FAILED, WRONG, STOPPED, UNREAD = 1, 2, 130, 141
_WRONG_FILE = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_WRONG_NUMBERS = (errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTEMPTY)


class Commands(TyperGroup):
    """A group of commands whose errors are one line each."""

    def main(self, *args: Any, **extra: Any) -> Any:
        if not extra.get("standalone_mode", True):
            return super().main(*args, **extra)
        _write_what_fits()
        with _noting_ctrl_c() as stops:
            return self._run(stops, *args, **extra)

    def _run(self, stops: list[int], *args: Any, **extra: Any) -> NoReturn:
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
            sys.stdout.flush()
        except SystemExit as stop:
            # rich and typer each turn a broken pipe into exit code 1.
            sys.exit(UNREAD if isinstance(stop.__context__, BrokenPipeError) else stop.code)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
            sys.exit(UNREAD)
        except (typer.Abort, KeyboardInterrupt):
            code = STOPPED
        except (NarrowcastError, OSError, MemoryError) as error:
            print_error(_message(error))
            sys.exit(_code(error))
        except Exception as error:
            # typer's errors about arguments. Their classes have moved between versions; this method has not.
            if hasattr(error, "format_message"):
                sys.exit(_usage(error))
            if not stops:
                raise
            code = STOPPED
        if code == STOPPED:  # newer versions of typer handle the exception themselves
            print_error("stopped.")
        sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def _noting_ctrl_c() -> Iterator[list[int]]:
    """Note each Ctrl-C, which raises KeyboardInterrupt as ever.

    torch, while it is imported, may swallow that exception and fail of another one, which is then no bug of ours.
    """
    stops: list[int] = []

    def note(number: int, frame: Any) -> None:
        stops.append(number)
        signal.default_int_handler(number, frame)

    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield stops
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield stops
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _write_what_fits() -> None:
    """Print a question mark for what stdout's encoding lacks (as in the C locale), where Python would raise."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")


def refuse(message: str) -> NoReturn:
    """End the command because of its arguments. All ranks have the same arguments, so only rank 0 prints."""
    if rank() == 0:
        print_error(message)
    raise typer.Exit(WRONG)


def print_error(message: str) -> None:
    """Print an error as one line on stderr."""
    from rich.console import Console

    line = re.sub(r"\s*\n\s*", " ", message.strip())
    Console(stderr=True).print(f"error: {line}", style="red", soft_wrap=True, highlight=False, markup=False)


def _code(error: Exception) -> int:
    if isinstance(error, NarrowcastError):
        lost = isinstance(error, CollectiveError) and not isinstance(error, MismatchError)
        return FAILED if lost else WRONG
    wrong = isinstance(error, _WRONG_FILE) or (isinstance(error, OSError) and error.errno in _WRONG_NUMBERS)
    return WRONG if wrong else FAILED


def _message(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "there is not enough memory."
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
        print_error(f"{message.rstrip('.')}{'' if message.endswith('?') else '.'}{hint}")
    return int(error.exit_code)
