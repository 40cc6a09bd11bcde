"""A correct fused kernel in NumPy, which the judge must accept.

It rounds where FlashAttention's kernels do: probabilities before they are divided by their sum,
delta from an output in 16 bits, gradients of scores before they are multiplied. Matrix products
have random errors of the size that a matrix unit has.

As a script it prints the drawn cases that the judge wrongly rejects:

usage: python -m tests.support.fused_in_numpy [--seed N] [--draws N] [--jobs N]
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import zlib
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from attn_dispatch.call.options import AttentionOptions
from attn_dispatch_tools.verify import draws, judge
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.naive import _FLOAT32_NOISE, _Forward, _sum_like, naive
from attn_dispatch_tools.verify.reference import Operands, mark_invalid, poison_padding, reference


class Fused:
    """One call: its forward results, then its gradients."""

    def __init__(
        self, options: AttentionOptions, operands: Operands, keep: np.ndarray | None, seed: int
    ) -> None:
        self.random = np.random.RandomState(seed)
        self.call = call = _Forward(options, poison_padding(options, operands, 0.0), keep)
        sizes = (call.q**2) @ (call.k**2).swapaxes(2, 3)
        self.score_noise = _FLOAT32_NOISE * abs(options.meaning.scale) * np.sqrt(sizes)
        lse = np.where(call.attends, call.lse, 0)
        # The largest score, or lse - 30 where a sink leaves next to no weight to the scores.
        top = np.where(call.attends, np.maximum(call.row_max, lse - 30), 0)
        exponentials = self.disturbed(call.p) * np.exp(lse - top)[..., None]
        kept = np.broadcast_to(call.kept, exponentials.shape)
        self.out = (call.rounded(exponentials * kept) @ call.v) * np.exp(top - lse)[..., None]
        self.out = self.out.astype(call.dtype)

    def disturbed(self, p: np.ndarray) -> np.ndarray:
        """Probabilities whose scores were added up in another order."""
        noise = self.score_noise * self.random.standard_normal(p.shape)
        return (p * np.exp(noise)).astype(self.call.wide)

    def results(self) -> Operands:
        results = {"out": self.out.swapaxes(1, 2).copy(), "lse": self.call.lse.copy()}
        if self.call.options.wanted.needs_max:
            results["row_max"] = self.call.row_max.copy()
        mark_invalid(self.call.options, self.call.operands, results)
        return results

    def gradients(self) -> Operands:
        call, scale = self.call, self.call.wide.type(self.call.options.meaning.scale)
        out_grad = call.heads_first("out_grad")
        p = self.disturbed(call.p)
        noise = np.sqrt((out_grad**2) @ (call.v**2).swapaxes(2, 3)) * _FLOAT32_NOISE
        p_grad = (call.p_grad + noise * self.random.standard_normal(p.shape)) * call.kept
        delta = (self.out.astype(call.wide) * out_grad).sum(axis=3).astype(np.float32)
        row_grad = np.asarray(call.operands.get("lse_grad", np.zeros_like(delta)), call.wide)
        row_grad = row_grad - delta
        score_grad = p * (p_grad + row_grad[..., None])
        narrow = call.rounded(score_grad * call.slope)
        found = {
            "query": (scale * (narrow @ call.k)).swapaxes(1, 2),
            "key": call.sum_groups(scale * (narrow.swapaxes(2, 3) @ call.q)),
            "value": call.sum_groups(call.rounded(p * call.kept).swapaxes(2, 3) @ out_grad),
            "bias": call.rounded(score_grad),
            "sinks": np.where(call.attends, call.p_sink * row_grad, 0).sum(axis=2),
        }
        found |= call.per_read_array(call.rounded(score_grad), np.positive)
        return {
            name: _sum_like(x, call.operands[name].shape).astype(call.operands[name].dtype)
            for name, x in found.items()
            if name in call.operands
        }


def failures(case: Case) -> list[str]:
    """The judge's findings against the fused kernel, each of which is an error of the judge."""
    options, operands = case.forward_options(), case.operands()
    seed = zlib.crc32(case.name.encode())
    keep = None
    if case.dropout:
        drawn = np.random.RandomState(seed).random_sample((case.b, case.n, case.t, case.s))
        keep = drawn >= case.dropout
    given = operands | case.cotangents()
    with np.errstate(over="ignore", invalid="ignore"):
        fused = Fused(options, given, keep, seed)
        got = fused.results()
        if case.gradients:
            gradients = fused.gradients()
            got |= {x: gradients[x] for x in case.gradients if x in gradients}
    if case.gradients:
        forward = {x: y for x, y in given.items() if x != "out_grad"}
        exact = reference(options, forward, keep)["out"]
        given = judge.with_rounded_delta(got["out"], exact, given)
    expected, plain = reference(options, given, keep), naive(options, given, keep)
    try:
        allowed = judge.allowances(options, expected, plain, got, is_fused=bool(case.gradients))
    except ArithmeticError as error:
        return [str(error)]
    allowed = judge.loosened(allowed, expected, plain, got)
    errors = {name: judge.error(x, expected[name]) for name, x in got.items()}
    return [
        f"{name}: error {x:.3g}, allowed {allowed[name]:.3g}"
        for name, x in errors.items()
        if not x <= allowed[name]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Does the judge accept a correct kernel?")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    cases = draws.examples(args.draws, args.seed)
    with ProcessPoolExecutor(args.jobs) as pool:
        for case, wrong in zip(cases, pool.map(failures, cases, chunksize=8), strict=True):
            if wrong:
                print(case.to_json(), wrong, flush=True)


if __name__ == "__main__":
    main()
