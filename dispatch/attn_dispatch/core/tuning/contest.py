"""The contest: the ways to compute a call are timed on the device, and the fastest is kept.

First each implementation runs the call with its default engine. Then the other engines of each are
tried, beginning with the fastest implementation: first those similar to the default, then those
similar to the best so far, until none is faster or the time is over. At the end the best few are
timed in turns.
"""

from __future__ import annotations

import datetime
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import jax

from attn_dispatch import settings
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.console import print_line, waiting
from attn_dispatch.core import select
from attn_dispatch.core.rewrites.rewrite import for_, forward_of
from attn_dispatch.core.tuning import operands, timing, winners
from attn_dispatch.core.tuning.contestants import (
    Contestant,
    Standings,
    first_line,
    with_default_engines,
)
from attn_dispatch.core.tuning.numbers import differing
from attn_dispatch.core.tuning.winners import Winner
from attn_dispatch.devices.device import Device
from attn_dispatch.files.user_folders import why_no_cache_path
from attn_dispatch.typed_jax import compiled

_HOPELESS = 4.0
"""A contestant that takes this many times the best time is not timed any further."""

_FINALISTS = 5
"""At most this many contestants take turns, all within a tenth of the best time."""
_ROUNDS = 8
_SECONDS = 0.02
"""Duration of one measurement, which is at least one call."""

_LEAST_GAIN = 1.01
"""The untuned choice stays unless a contestant is faster by this factor."""

_one_at_a_time = threading.Lock()


def tune(spec: AttentionSpec, device: Device) -> Winner | None:
    """The fastest way to run this call: the kept winner, or else a new one, which is kept.

    None if there is no choice.

    Raises:
      RuntimeError: if the device is not present, winners cannot be kept, or other processes lower
        the same program.
    """
    if _is_not_tuned(spec):
        return None
    with _one_at_a_time:
        if (winner := select.winner(spec, device)) is not None:
            return winner
        contestants = with_default_engines(spec, device)
        if not contestants or (len(contestants) == 1 and not contestants[0].others(device)):
            return None
        _check_surroundings(device)
        # A new thread is outside all transformations, meshes and other contexts of the caller.
        stop = threading.Event()
        with ThreadPoolExecutor(1, "attn_dispatch tuning") as pool:
            surroundings = settings.current()
            result = pool.submit(_run_contest, spec, device, contestants, surroundings, stop)
            try:
                return result.result()
            except KeyboardInterrupt:
                stop.set()  # the contest ends after the current contestant
                raise


class _Interrupted(Exception):
    """The caller has interrupted the contest."""

    def __str__(self) -> str:
        return "interrupted"


def _is_not_tuned(spec: AttentionSpec) -> bool:
    # With dropout both passes must draw the same mask. No kernel runs the other calls.
    return bool(
        spec.meaning.dropout_rate
        or spec.wanted.needs_keep
        or spec.wanted.derivative
        or spec.symbols
        or spec.is_empty
    )


def _check_surroundings(device: Device) -> None:
    if winners.winners_file() is None:
        raise RuntimeError(f"{why_no_cache_path(winners.FILE)}: what tuning finds would be lost")
    if not device.is_present:
        raise RuntimeError(f"tuning runs calls on the device, and there is no {device} here")
    if jax.process_count() > 1:
        raise RuntimeError(
            "if each of several processes tuned, their programs could differ: tune in a process "
            f"that is alone, and let all of them read what it kept ({winners.FILE})"
        )


def _run_contest(
    spec: AttentionSpec,
    device: Device,
    contestants: Sequence[Contestant],
    surroundings: settings.Settings,
    stop: threading.Event,
) -> Winner | None:
    seconds = surroundings.tuning_seconds or 0.0
    start = time.monotonic()
    with (
        settings.restored(surroundings),
        settings.restored(replace(settings.current(), tuning_seconds=None, fallback="silent")),
        jax.default_device(jax.local_devices(backend=device.platform)[0]),
        waiting(f"tuning {_short(spec)}") as say,
    ):
        try:
            arrays = _arrays(spec, device)
            standings, winner = _ranked(
                spec, device, contestants, arrays, start + seconds, say, stop
            )
        except Exception as error:
            # Out of memory, or the untuned choice failed: the call runs without tuning.
            print_line(f"not tuned: {_short(spec)}: {first_line(error)}")
            return None
    tried = len(standings.seconds) + len(standings.left_out)
    print_line(
        f"tuned: {_short(spec)}: {winner}; {tried} tried in {time.monotonic() - start:.1f} s"
    )
    for reason in dict.fromkeys(standings.left_out.values()):
        names = [name for name, of in standings.left_out.items() if of == reason]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        print_line(f"  left out: {names[0]}{more}: {reason}")
    try:
        winners.keep(winner)
    except OSError as error:
        print_line(f"not kept: {error}")
    return winner


def _arrays(spec: AttentionSpec, device: Device) -> dict[str, jax.Array]:
    """The operands, with out and lse as the forward pass makes them."""
    made = operands.made_for(spec)
    if spec.is_backward:
        forward = forward_of(spec)
        compute = compiled(partial(select.choose(forward, device).compute, device))
        computed = compute(for_(forward, made))
        made |= dict(zip(forward.result_names, computed, strict=True))
    return {name: made[name] for name in spec.options.operands}


def _ranked(
    spec: AttentionSpec,
    device: Device,
    contestants: Sequence[Contestant],
    arrays: Mapping[str, jax.Array],
    deadline: float,
    say: Callable[[str], None],
    stop: threading.Event,
) -> tuple[Standings, Winner]:
    untuned, standings = contestants[0], Standings()
    expected = _try(untuned, device, arrays, standings)

    def try_contestant(contestant: Contestant) -> None:
        if stop.is_set():
            raise _Interrupted
        best = standings.best(1)[0]
        say(f"{len(standings.seconds)} timed, best {best.name}; now {contestant.name}")
        try:
            got = _try(contestant, device, arrays, standings)
            if wrong := differing(spec, got, expected):
                raise ValueError(f"other numbers than {untuned.name} in {', '.join(wrong)}")
        except Exception as error:
            standings.seconds.pop(contestant, None)
            standings.left_out[contestant.name] = first_line(error)

    for contestant in contestants[1:]:
        try_contestant(contestant)
    for contestant in list(standings.best(len(contestants))):
        _try_engines(spec, device, contestant, standings, try_contestant, deadline)
    if stop.is_set():
        raise _Interrupted
    order = _final(untuned, standings)
    return standings, _winner(spec, device, untuned, standings, order)


def _try_engines(
    spec: AttentionSpec,
    device: Device,
    start: Contestant,
    standings: Standings,
    try_contestant: Callable[[Contestant], None],
    deadline: float,
) -> None:
    """Try engines similar to a contestant's, then to the best one's, until none is better."""
    if standings.seconds[start] > _HOPELESS * standings.seconds[standings.best(1)[0]]:
        return
    centre, seen = start, {start.engine}
    while True:
        for engine in itertools.filterfalse(seen.__contains__, centre.others(device)):
            if time.monotonic() > deadline:
                return
            seen.add(engine)
            choice = select.by_engine(spec, device, start.choice.NAME, engine)
            if choice is not None:  # the library has that engine
                try_contestant(Contestant(choice, engine))
        own = (
            x for x in standings.best(len(standings.seconds)) if x.choice.NAME == start.choice.NAME
        )
        if (best := next(own)) == centre:
            return
        centre = best


def _try(
    contestant: Contestant,
    device: Device,
    arrays: Mapping[str, jax.Array],
    standings: Standings,
) -> Sequence[jax.Array]:
    """Compile the contestant, run it once, and time it; returns its results."""
    program = compiled(partial(contestant.choice.compute, device))
    results = program(arrays)
    jax.block_until_ready(results)
    seconds = timing.seconds_per_call(program, (arrays,), 1)
    if not standings.seconds or seconds < _HOPELESS * min(standings.seconds.values()):
        calls = max(1, int(_SECONDS / seconds / 2))
        measured = [timing.seconds_per_call(program, (arrays,), calls) for _ in range(3)]
        seconds = statistics.median(measured)
    standings.seconds[contestant] = seconds
    standings.programs[contestant] = (program, (arrays,))
    return results


def _final(untuned: Contestant, standings: Standings) -> list[Contestant]:
    """The winner, then the others, after the best few and the untuned choice are timed in turns."""
    fast = standings.best(_FINALISTS)
    fast = [x for x in fast if standings.seconds[x] < 1.1 * standings.seconds[fast[0]]]
    few = list(dict.fromkeys([*fast, untuned]))
    timed = {x: partial(timing.seconds_per_call, *standings.programs[x]) for x in few}
    if len(few) > 1:
        by_name = {x.name: run for x, run in timed.items()}
        times = timing.turns(by_name, _ROUNDS, _SECONDS)
        standings.seconds |= {x: statistics.median(times[x.name]) for x in few}
    few.sort(key=standings.seconds.__getitem__)
    # Among equally fast ones, prefer the untuned choice, then a default engine.
    level = [x for x in few if standings.seconds[x] < _LEAST_GAIN * standings.seconds[few[0]]]
    kept = min(level, key=lambda x: (x != untuned, x.engine != "", standings.seconds[x]))
    return list(dict.fromkeys([kept, *standings.best(len(standings.seconds))]))


def _winner(
    spec: AttentionSpec,
    device: Device,
    untuned: Contestant,
    standings: Standings,
    order: Sequence[Contestant],
) -> Winner:
    return Winner(
        call=winners.described(spec),
        device=device.name,
        versions=select.versions(device),
        implementation=order[0].choice.NAME,
        engine=order[0].engine,
        date=datetime.date.today().isoformat(),
        untuned=untuned.name,
        microseconds={x.name: round(standings.seconds[x] * 1e6, 2) for x in order},
    )


def _short(spec: AttentionSpec) -> str:
    """A short description of the call."""
    described = winners.described(spec)
    hidden = {"pass", "gradients", *spec.options.operands} - {"query", "key"}
    facts = (f"{name} {value}" for name, value in described.items() if name not in hidden)
    return f"{described['pass']} pass, {', '.join(facts)}"
