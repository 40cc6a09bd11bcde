"""The `attn-dispatch plan` command: makes plans before they are needed, without a GPU."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.console import waiting
from attn_dispatch.core.explanation import plan_text
from attn_dispatch.core.verdict import verdicts_on
from attn_dispatch.cudnn import plan_store
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.target import default_device, parse
from attn_dispatch.files.user_folders import why_no_cache_path
from attn_dispatch.text import error_text
from attn_dispatch_tools.terminal import style
from attn_dispatch_tools.terminal.help import VERBOSE, Commands, add_command, flag, option
from attn_dispatch_tools.terminal.text import width, wrapped
from attn_dispatch_tools.written_calls.json_file import FORMAT, calls_in

_DESCRIPTION = """\
Plan attention calls, for example on a login node or while an image is built, and keep the plans in
a folder where the processes that make these calls find them. No GPU is needed. Each call is planned
as it is. For training, a forward and a backward pass are planned as well, with every gradient that
the call has; lse counts as not differentiated. If several devices share a call, write down the part
of one device.

Plans are used by processes with the same versions of cuDNN, attn_dispatch and the CUDA driver, on
exactly the kind of GPU that the target names. Other processes plan again.

"""
_EXAMPLES = (
    "attn-dispatch plan calls.json",
    "attn-dispatch plan --target h200 --inference calls.json",
)


def add_parser(commands: Commands, help: str) -> None:
    """Add `plan` to the parser of `attn-dispatch`."""
    add_command(
        commands, "plan", main, help=help, description=_DESCRIPTION + FORMAT, examples=_EXAMPLES,
        options=(
            option("file", "FILE", "the calls, as JSON", type=Path),
            option("--target", "DEVICE",
                "the GPU to plan for, by a name like h200 or sm90 (default: the one here)"),
            flag("--inference", "leave out the plans that training needs"),
            VERBOSE,
        ),
    )  # fmt: skip


def main(args: argparse.Namespace) -> None:
    """Plan the calls of the file. Ends the process with status 1 if a call is refused, or a plan
    cannot be kept."""
    folder = plan_store.plans_folder()
    try:
        device = default_device() if args.target is None else parse(args.target)
        calls = calls_in(args.file)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error_text(error)}") from error
    if device.platform != "cuda":
        raise SystemExit(
            f"error: only cuDNN plans ahead, and this is {device}; name a --target like h200"
        )
    if folder is None:
        raise SystemExit(f"error: {why_no_cache_path(plan_store.FOLDER)}: plans are not kept")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="begun-"):
            pass
    except OSError as error:
        raise SystemExit(f"error: plans cannot be kept in {folder}: {error_text(error)}") from error
    print(f"plans for {device} are kept in {folder}")
    is_refused = False
    for written, spec in calls:
        style.show(written, {r".+": style.HEADING})
        wanted = {"as it is": spec}
        if not args.inference:
            training = spec.in_training(spec.options.differentiable)
            wanted |= dict(zip(("training, forward", "training, backward"), training, strict=True))
        for name, each in wanted.items():
            start = time.perf_counter()
            with waiting(f"planning {name}"):
                answer, is_planned = _planned(each, device, codes=args.verbose)
            is_refused |= not is_planned
            style.show(_line(name, time.perf_counter() - start, answer), _MARKS)
    if reasons := plan_store.write_failures(folder):
        raise SystemExit(f"error: not all plans are kept: {'; '.join(reasons)}")
    if is_refused:
        raise SystemExit(1)


def _line(name: str, seconds: float, answer: str) -> str:
    """The line for one planned call. On a narrow terminal the answer is on the lines below."""
    label = f"  {name:19s}{1e3 * seconds:6.0f} ms  "
    is_wide = width() > 2 * len(label)
    lines = wrapped(label, answer) if is_wide else [label.rstrip(), *wrapped("    ", answer)]
    return "\n".join(lines)


_MARKS = {
    r"^ +(?:as it is|training, \w+)": style.QUIET,
    r"(?m)(?: ms  |^    )(\w+:)": style.GOOD,
    r"(?m)(?: ms  |^    )(refused:)": style.NOT,
}


def _planned(spec: AttentionSpec, device: Device, *, codes: bool) -> tuple[str, bool]:
    """What was planned, or the reasons why nothing was; and whether something was."""
    names = spec.meaning.implementation or ("cudnn",)
    verdicts = verdicts_on(spec.by(*names), device)
    for verdict in verdicts:
        if verdict.plan is not None:
            return f"{verdict.implementation}: {plan_text(verdict, codes=codes)}", True
    reasons = (x.with_remedy for verdict in verdicts for x in verdict.reasons)
    return "refused: " + "; ".join(reasons), False
