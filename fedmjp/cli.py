"""What every command line of the project does alike: options from a dataclass, mistakes in one line, exit codes.

Imports no torch: a command imports what computes after its options are read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import tyro
from rich.console import Console

from attacks.registry import UsageError
from fedmjp import __version__
from fedmjp.errors import ClientFailure, Incomplete

T = TypeVar("T")

# What is wrong with a disk or a folder, and not with this program.
SURROUNDINGS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO),
        *(errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EMFILE, errno.ENFILE, errno.ESTALE),
    }
)
EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
SETTING = re.compile(r"[\w.]+=")  # begins another setting of "NAME:option=value,option=value"


def parse(
    options: type[T],
    program: str,
    description: str | None,
    arguments: Sequence[str] | None = None,
    default: T | None = None,
) -> T:
    """The options on the command line; exits with code 2 and one line where they cannot be read.

    --help and --version are answered here, with code 0.

    Args:
        options: a dataclass; its fields are the options, their docstrings the help.
        program: how the command is typed, for the help.
        arguments: instead of those of the process.
        default: an instance whose values are the options' defaults, instead of those of the class.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "--version" in arguments:
        print(f"fedmjp {__version__}")
        sys.exit(0)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            try:
                return tyro.cli(
                    tyro.conf.configure(tyro.conf.OmitArgPrefixes)(options),
                    prog=program,
                    description=f"{description or ''} --version prints the version.".strip(),
                    args=arguments,
                    **({} if default is None else {"default": default}),
                )
            finally:
                sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except SystemExit as stop:
        if stop.code:  # the parser draws a box around several lines
            words = re.sub(r"[^\S ]|[\u2500-\u257f]", " ", complaint.getvalue())
            print("error: " + re.sub(r" +", " ", words).strip(), file=sys.stderr)
        raise


def split_commas(options: T) -> T:
    """The options with every "a,b" in a tuple of words taken for "a b"; "a:option=1,option=2,b" is "a:..." and "b"."""
    words = {
        field.name: tuple(word for entry in value for word in _split(entry) if word)
        for field in dataclasses.fields(options)
        if isinstance(value := getattr(options, field.name), tuple) and all(isinstance(v, str) for v in value)
    }
    return dataclasses.replace(options, **words)


def _split(entry: str) -> list[str]:
    """The words between commas; the settings of a word stay with it."""
    words: list[str] = []
    for word in entry.split(","):
        if words and ":" in words[-1] and SETTING.match(word):
            words[-1] += f",{word}"
        else:
            words.append(word)
    return words


def guarded(work: Callable[[], None], resume: Callable[[], str]) -> int:
    """Run `work` and turn what stops it into one line and an exit code.

    Args:
        resume: where the finished rows are and how to go on, for an interrupt or a failed client.

    Returns:
        0, 1 for a failed client, missing results, or a disk that is full or cannot be written to, 2 for a mistake of
        usage, 130 for an interrupt.
    """
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    try:
        work()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:
        if error.errno not in SURROUNDINGS:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror}; once that is mended: {resume()}", file=sys.stderr)
        return EXIT_FAILURE
    except ClientFailure as error:
        print(f"error: {error}\n{resume()}", file=sys.stderr)
        return EXIT_FAILURE
    except Incomplete as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        print(f"\ninterrupted; {resume()}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def terminal() -> Console:
    """The terminal; a file or a pipe is given room for the table. Brackets in names and paths are no markup."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files that are not UTF-8
    return Console(markup=False) if sys.stdout.isatty() else Console(width=130, markup=False)
