"""Counts the drawn calls that each vendor's implementation refuses, by their reasons.

usage: python -m tests.scripts.refusals [--draws N] [--seed N]
                                                 [--targets sm90,gfx942:aiter0.1.20]
                                                 [--as-they-are] [--mods] [--names]
                                                 [--out FOLDER]

No GPU is needed: cuDNN plans every call here. As in `attn-dispatch verify`, a call counts as
refused if its forward pass does not run on the vendor's kernels. A backward pass alone is counted
separately if the wanted gradients do not run there. The reasons are those left after the rewrites.
On AMD, the kernels of the calls that run are counted too, as ASM's or CK's.
Calls with a score_mod or a mask_mod are skipped, and not counted by --draws, unless --mods is
given. --out writes each target's counts as JSON, as in tests/results.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from attn_dispatch import setting_blocks
from attn_dispatch.call.options import as_partners, backward_options
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import select
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.target import parse
from attn_dispatch.reason import rules_of
from attn_dispatch_tools.reports.environment import environment, file_name
from attn_dispatch_tools.verify import draws
from attn_dispatch_tools.verify.case import Case, spec_of

TARGETS = (
    "sm90", "sm80", "sm120", "gfx942", "gfx950", "gfx942:aiter0.1.20", "gfx950:aiter0.1.20",
)  # fmt: skip


@dataclass
class Count:
    """The drawn calls that one target refuses."""

    calls: int = 0
    refused: list[Case] = field(default_factory=list)
    forward: int = 0
    """The number of calls whose forward pass does not run on the target's kernels."""
    backward: int = 0
    """The number of calls whose forward pass alone runs on the target's kernels."""
    later: int = 0
    """The number of calls that decide at run time, by the values of a float32 bias."""
    families: Counter[str] = field(default_factory=Counter)
    """AMD: by direction and "asm" or "ck", the number of calls that run on such a kernel."""
    rules: Counter[str] = field(default_factory=Counter)
    """By rule, the number of calls that break it."""
    alone: Counter[str] = field(default_factory=Counter)
    """By rule, the number of calls that break no other."""
    sentences: dict[str, str] = field(default_factory=dict)
    """By rule, the sentence of the first call that breaks it."""

    def lines(self) -> Iterator[str]:
        """A summary, then each rule with the calls that break it, and those that break no other."""
        forward, backward = (100 * x / max(self.calls, 1) for x in (self.forward, self.backward))
        yield (
            f"of {self.calls}: refused {self.forward} ({forward:.1f} %), "
            f"the backward pass alone {self.backward} ({backward:.1f} %); "
            f"decided when they run: {self.later}"
        )
        if self.families:
            yield "  " + ", ".join(f"{x}: {self.families[x]}" for x in sorted(self.families))
        for rule, count in self.rules.most_common():
            yield f"  {count:4} ({self.alone[rule]:3} alone)  {self.sentences[rule]}"

    def to_json(self) -> dict[str, object]:
        """The counts as JSON values."""
        return {
            "calls": self.calls,
            "refused": self.forward,
            "backward_pass_alone_refused": self.backward,
            "decided_when_they_run": self.later,
            **({"families": dict(sorted(self.families.items()))} if self.families else {}),
            "reasons": [
                {
                    "rule": rule,
                    "reason": self.sentences[rule],
                    "calls": count,
                    "alone": self.alone[rule],
                }
                for rule, count in self.rules.most_common()
            ],
        }


def drawn(seed: int, count: int, *, mods: bool) -> list[Case]:
    """The first `count` calls of a seed, without calls that have mods unless `mods` is true."""
    cases = draws.examples(2 * count, seed)  # a quarter of them have mods
    return [x for x in cases if mods or not (x.score_mod or x.mask_mod)][:count]


def directions_of(case: Case) -> list[AttentionSpec]:
    """The forward call of a case and, where gradients are wanted, the backward call."""
    operands = case.avals()
    # As in verify/calls.py and primitive.py, lse is a residual if gradients are wanted.
    needs_lse = bool(case.gradients) or case.lse_grad or case.needs_max
    forward = case.forward_options(needs_lse=needs_lse)
    if not case.gradients:
        return [spec_of(forward, operands)]
    backward = backward_options(forward, case.gradients, has_lse_grad=case.lse_grad)
    forward, backward = as_partners(forward, backward)
    spec = spec_of(forward, operands)
    return [spec, spec.backward(backward)]


def count(cases: list[Case], device: Device) -> Count:
    """Count the calls that the device's implementation refuses."""
    vendors = (x for x in select.IMPLEMENTATIONS if not x.IS_EXTRA)
    (implementation,) = (x for x in vendors if x.PLATFORM == device.platform)
    result = Count()
    for case in cases:
        checked = [
            select.reasons_and_chain(implementation, spec, device) for spec in directions_of(case)
        ]
        against = [bool(reasons) for reasons, _ in checked]
        reasons = [reason for _, chain in checked for reason in chain.reasons]
        rules = rules_of(reasons)
        if device.platform == "rocm":
            for direction, (why, chain) in zip(("forward", "backward"), checked, strict=False):
                if not why:
                    family = implementation.plan(chain.spec, device).engine.split()[0]
                    result.families[f"{direction} {family}"] += 1
        result.calls += 1
        result.forward += against[0]
        result.backward += against[-1] and not against[0]
        result.later += checked[0][1].may_fall_back and not against[0]
        result.rules.update(rules)
        for reason in reasons:
            result.sentences.setdefault(reason.rule, reason.text)
        if any(against):
            result.refused.append(case)
        if len(rules) == 1:
            result.alone.update(rules)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the drawn calls that are refused.")
    parser.add_argument("--seed", type=int, default=20261122)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--as-they-are", action="store_true", help="without core/rewrites")
    parser.add_argument("--mods", action="store_true", help="calls with mods as well")
    parser.add_argument("--names", action="store_true", help="the calls that are refused as well")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to keep the counts")
    args = parser.parse_args()
    cases = drawn(args.seed, args.draws, mods=args.mods)
    for target in args.targets.split(","):
        with setting_blocks.rewrites(not args.as_they_are):
            found = count(cases, parse(target))
        print(f"{target}:", *found.lines(), sep="\n", flush=True)
        if args.out:
            facts = environment() | {"device": target}
            report = {"environment": facts, "seed": args.seed, **found.to_json()}
            args.out.mkdir(parents=True, exist_ok=True)
            path = args.out / f"{file_name('refusals', facts)}.json"
            path.write_text(json.dumps(report, indent=1) + "\n")
        if args.names:
            print(*(f"    {case.to_json()}" for case in found.refused), sep="\n")


if __name__ == "__main__":
    main()
