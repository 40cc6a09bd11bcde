"""The `attn-dispatch tune` command: finds out what runs calls fastest, before they are made."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from attn_dispatch import settings
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import select
from attn_dispatch.core.tuning import contest, winners
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.target import default_device
from attn_dispatch.files import reading
from attn_dispatch.files.user_folders import why_no_cache_path
from attn_dispatch.setting_blocks import tuning
from attn_dispatch.settings import checked_seconds
from attn_dispatch.text import error_text
from attn_dispatch_tools.rates.measure import measure
from attn_dispatch_tools.terminal import style
from attn_dispatch_tools.terminal.help import Commands, add_command, flag, option
from attn_dispatch_tools.written_calls.json_file import FORMAT, calls_in

_DESCRIPTION = """\
Find out on the GPU of this machine what runs attention calls fastest, and keep the winners for the
processes that make these calls later. It tries every implementation that can run a call, and for
cuDNN the engines that it proposes and similar ones. A choice that gives other numbers than the
untuned one is not kept.

FILE is a Python script or a list of calls as JSON. A script runs with the arguments that follow,
and each of its calls is tuned when it is compiled. Calls in JSON are tuned for their forward and
backward passes.

With --rates there is no FILE: drawn calls are timed for two minutes, and the rates that fit them
are kept, by which calls that are not tuned choose their implementation.

"""
_EXAMPLES = (
    "attn-dispatch tune train.py --steps 3",
    "attn-dispatch tune --seconds 60 calls.json",
    "attn-dispatch tune --rates",
)


def add_parser(commands: Commands, help: str) -> None:
    """Add `tune` to the parser of `attn-dispatch`."""
    add_command(
        commands, "tune", main, help=help,
        description=_DESCRIPTION + FORMAT.replace("FILE holds", "As JSON, FILE holds"),
        examples=_EXAMPLES,
        options=(
            option("--seconds", "S",
                "the time for trying engines for one call and direction (default: %(default)g)",
                type=_seconds, default=30.0),
            flag("--inference", "leave out the backward passes of calls in JSON"),
            flag("--rates", "measure the rates of this card, in two minutes"),
            option("file", "FILE", "a script, or calls as JSON", type=Path, nargs="?"),
            option("arguments", "...", "arguments of the script", nargs=argparse.REMAINDER),
        ),
    )  # fmt: skip


def main(args: argparse.Namespace) -> None:
    """Tune the calls of the file. Ends the process with status 1 if none of them can be tuned."""
    if args.rates:
        _measure_rates(args.file)
        return
    try:
        if args.file is None:
            raise ValueError("expected FILE or --rates, got neither")
        if args.file.is_dir():
            raise ValueError(f"{args.file}: expected a file, got a folder")
        args.file.stat()
        kept = _writable_winners()
        calls = _calls(args.file, args.arguments)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error_text(error)}") from error
    print(f"winners are kept in {kept}", flush=True)
    if calls is None:
        _tune_script(args, kept)
        return
    device = default_device()
    with tuning(args.seconds):
        is_tuned = _tune_calls(calls, device, is_inference=args.inference)
    if not is_tuned:
        raise SystemExit(f"error: none of the calls can be tuned on this {device}")
    if lost := winners.not_kept(kept):
        are = "winner is" if lost == 1 else "winners are"
        raise SystemExit(f"error: {lost} {are} not kept in {kept}")


def _measure_rates(file: Path | None) -> None:
    if file is not None:
        raise SystemExit(f"error: --rates takes no FILE, got {file}")
    try:
        print(f"rates are kept in {measure()}")
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error_text(error)}") from error


def _calls(file: Path, arguments: list[str]) -> list[tuple[str, AttentionSpec]] | None:
    """The calls that a file holds; None if it is a script, which can be read."""
    if not _holds_calls(file):
        reading.contents(file, is_kept=True)
        return None
    if arguments:
        raise ValueError(f"{file} holds calls; unknown: {' '.join(arguments)}")
    return calls_in(file)


def _writable_winners() -> Path:
    """The file in which winners are kept."""
    kept = winners.winners_file()
    if kept is None:
        raise SystemExit(f"error: {why_no_cache_path(winners.FILE)}: winners are not kept")
    if reason := winners.not_writable(kept):
        raise SystemExit(f"error: {reason}")
    return kept


def _seconds(text: str) -> float:
    try:
        return checked_seconds(float(text))
    except ValueError:
        expected = f"expected a positive number of seconds, got {text!r}"
        raise argparse.ArgumentTypeError(expected) from None


def _holds_calls(file: Path) -> bool:
    """Whether a file is JSON, not a script, by its name or its first character. A pipe is JSON."""
    if file.suffix.lower() in (".json", ".py"):
        return file.suffix.lower() == ".json"
    if not file.is_file():
        return True
    with open(file, "rb") as opened:
        return opened.read(100).lstrip()[:1] in (b"[", b"{")


def _tune_script(args: argparse.Namespace, kept: Path) -> None:
    # The script may change its working directory, and make calls in other threads.
    os.environ[winners.FILE] = str(kept.absolute())
    os.environ[settings.TUNING] = str(args.seconds)
    before = _version(kept)
    try:
        _run(args.file, args.arguments)
    finally:
        if _version(kept) == before:
            print(
                "nothing was tuned: the script made no calls, or each was tuned before or cannot "
                "be tuned here",
                file=sys.stderr,
            )


def _version(file: Path) -> tuple[int, int]:
    """Numbers that change when the file is replaced."""
    try:
        facts = file.stat()
    except OSError:
        return 0, 0
    return facts.st_ino, facts.st_mtime_ns


def _run(file: Path, arguments: list[str]) -> None:
    """Run the script as `python FILE ARGUMENTS` would."""
    sys.argv = [str(file), *arguments]
    sys.path.insert(0, str(file.resolve().parent))
    runpy.run_path(str(file), run_name="__main__")


def _tune_calls(
    calls: list[tuple[str, AttentionSpec]], device: Device, *, is_inference: bool
) -> bool:
    """Tune each call. Returns whether at least one of them has a winner."""
    has_winner = False
    for written, spec in calls:
        style.show(written, {r".+": style.HEADING})
        training = spec.in_training(spec.options.differentiable)
        wanted: list[AttentionSpec] = [spec] if is_inference else list(training)
        for each in wanted:
            if (kept := select.winner(each, device)) is not None:
                style.show(f"kept already: {kept}", {"^kept already:": style.GOOD})
                has_winner = True
                continue
            try:
                found = contest.tune(each, device)
            except RuntimeError as error:
                raise SystemExit(f"error: {error}") from error
            has_winner |= found is not None
            if found is None:
                why = "not tuned: there is only one choice, or no choice ran"
                style.show(why, {"^not tuned:": style.NOT})
    return has_winner
