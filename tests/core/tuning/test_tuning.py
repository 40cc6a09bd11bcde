"""Tuning, with a clock that says what it is told to: who wins, what is kept, who finds it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from dataclasses import replace
from importlib.metadata import EntryPoint
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch
from attn_dispatch import dot_product_attention, explain, settings, tuning, xla
from attn_dispatch.call.features import FEATURES
from attn_dispatch.core import select
from attn_dispatch.core.tuning import contest, timing, winners
from attn_dispatch.core.tuning.numbers import differing
from attn_dispatch.core.tuning.operands import made_for
from attn_dispatch.devices.extra import GROUP, Extra
from attn_dispatch.devices.implementation import Plan
from attn_dispatch.devices.target import CPU, parse
from attn_dispatch.inspection import spec_of
from tests.support.present import present

Q = jnp.asarray(np.random.default_rng(0).normal(size=(2, 48, 4, 16)), jnp.float32)
SPEC = spec_of(query=Q, key=Q, value=Q, is_causal=True)

TIMES = {
    "toy": 100e-6,
    "toy 1": 90e-6,
    "toy 2": 80e-6,
    "toy 2 2": 70e-6,
    "toy wrong": 1e-6,
    "toy raises": 1e-6,
    "toy absent": 1e-6,
    "xla": 95e-6,
}

LIKE = {"": ("1", "2", "wrong", "raises", "absent"), "2": ("2 2", "1", "wrong"), "2 2": ("2",)}
"""The engines of the stand-in."""


class Toy(ModuleType):
    """What XLA computes, by engines: one gives other numbers, one fails, one there is not."""

    NAME, PLATFORM, FEATURES = "toy", "cpu", FEATURES
    KEEPS_NAN_APART = True

    def __init__(self):
        super().__init__("toy_of_tests")
        self.ran: list[str] = []

    def not_supported_reasons(self, spec, device):
        return ("no such engine",) if spec.options.engine == "absent" else ()

    def plan(self, spec, device):
        return Plan(spec.options.engine or "its own", 0)

    def other_engines(self, spec, device):
        return LIKE.get(spec.options.engine, ())

    def forward(self, spec, device, operands):
        return self._run(spec, xla.forward(spec, device, operands))

    def backward(self, spec, device, operands):
        return self._run(spec, xla.backward(spec, device, operands))

    def _run(self, spec, results):
        self.ran.append(spec.options.engine)
        if spec.options.engine == "raises":
            raise RuntimeError("out of luck\nand more")
        if spec.options.engine == "wrong":
            return tuple(x.at[0, 7].multiply(1.01) for x in results)
        return results


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """A stand-in beside XLA on the CPU, a clock that tells TIMES, and a file to keep winners in."""
    module = Toy()
    monkeypatch.setitem(sys.modules, "toy_of_tests", module)
    extra = Extra.of(EntryPoint("toy", "toy_of_tests", GROUP))
    monkeypatch.setattr(select, "installed", lambda: (extra,))
    monkeypatch.setattr(timing, "seconds_per_call", lambda run, arrays, calls: TIMES[name_of(run)])
    monkeypatch.setenv("ATTN_DISPATCH_WINNERS", str(tmp_path / "kept" / "winners.json"))
    jax.clear_caches()
    yield module
    jax.clear_caches()


def name_of(run) -> str:
    choice = run.__wrapped__.func.__self__
    return f"{choice.NAME} {choice.chain.spec.options.engine}".strip()


def test_the_fastest_that_is_right_is_kept(toy, capsys):
    with tuning():
        winner = present(contest.tune(SPEC, CPU))
    assert winner is not None
    assert (winner.implementation, winner.engine, winner.untuned) == ("toy", "2 2", "toy")
    assert winner.microseconds == {
        "toy 2 2": 70.0, "toy 2": 80.0, "toy 1": 90.0, "xla": 95.0, "toy": 100.0,
    }  # fmt: skip
    said = capsys.readouterr().err
    assert "tuned: forward pass, query float32[2,48,4,16], key float32[2,48,4,16]" in said
    assert "left out: toy wrong: other numbers than toy in out\n" in said
    assert "left out: toy raises: out of luck\n" in said
    assert "absent" not in said
    (kept,) = json.loads(present(winners.winners_file()).read_text())["winners"]
    assert kept["call"] == {
        "pass": "forward", "query": "float32[2,48,4,16]", "key": "float32[2,48,4,16]",
        "value": "float32[2,48,4,16]", "is_causal": True,
    }  # fmt: skip


def test_what_is_kept_runs_and_is_explained(toy):
    def loss(q):
        return (dot_product_attention(q, q, q, is_causal=True) ** 2).sum()

    untuned = jax.jit(jax.grad(loss))(Q)
    assert set(toy.ran) == {""}
    with tuning():
        jax.jit(jax.grad(loss))(Q)
    assert toy.ran[-2:] == ["2 2", "2 2"]  # forward and backward of the program itself
    toy.ran.clear()
    jax.clear_caches()
    tuned = jax.jit(jax.grad(loss))(Q)  # nothing is tuned here, what was kept is found
    assert toy.ran == ["2 2", "2 2"]
    np.testing.assert_allclose(tuned, untuned, rtol=1e-6)
    explanation = explain(Q, Q, Q, is_causal=True)
    assert explanation.chosen_forward == explanation.chosen_backward == "toy"
    assert "runs: 2 2, scratch memory" in str(explanation)
    assert "tuned:     toy 2 2 70.0 µs (toy 2 80.0, toy 1 90.0, xla 95.0, 1 more)" in str(
        explanation
    )
    assert [x.implementation for x in explanation.forward].count("toy") == 1
    scaled = explain(Q, Q, Q, is_causal=True, scale=0.3)
    assert scaled.forward[0].tuned is not None  # a scale changes no time
    assert explain(Q, Q, Q).forward[0].tuned is None  # another call


def test_another_implementation_may_win(toy, monkeypatch):
    monkeypatch.setitem(TIMES, "xla", 60e-6)
    with tuning():
        winner = present(contest.tune(SPEC, CPU))
    assert winner is not None and winner.implementation == "xla"
    assert explain(Q, Q, Q, is_causal=True).chosen_forward == "xla"
    # Whoever names implementations has a contest among the engines of the first that can.
    named = SPEC.by("toy", "xla")
    assert select.winner(named, CPU) is None
    with tuning():
        assert present(contest.tune(named, CPU)).engine == "2 2"
    # Under this policy nothing falls to XLA, not even because it is faster.
    with attn_dispatch.fallback("error"):
        assert explain(Q, Q, Q, is_causal=True).chosen_forward == "toy"


def test_what_is_hardly_faster_does_not_replace_the_untuned_choice(toy, monkeypatch):
    for name in TIMES:
        monkeypatch.setitem(TIMES, name, 99.5e-6)
    with tuning():
        winner = present(contest.tune(SPEC, CPU))
    assert (winner.implementation, winner.engine) == ("toy", "")
    assert explain(Q, Q, Q, is_causal=True).forward[0].tuned == winner


def test_nothing_is_tuned_unasked_or_twice(toy, monkeypatch):
    dot_product_attention(Q, Q, Q)
    assert not present(winners.winners_file()).exists()
    with tuning():
        first = contest.tune(SPEC, CPU)
        toy.ran.clear()
        assert contest.tune(SPEC, CPU) == first and toy.ran == []
    monkeypatch.setenv("ATTN_DISPATCH_TUNING", "5")
    jax.clear_caches()
    dot_product_attention(Q, Q, Q)
    assert "wrong" in toy.ran


def test_no_more_engines_are_tried_when_the_time_is_over(toy, monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr(contest.time, "monotonic", lambda: float(next(now)))
    with tuning(2):
        winner = present(contest.tune(SPEC, CPU))
    assert {"toy", "xla"} <= set(winner.microseconds) < {"toy", "xla", "toy 1", "toy 2"}


@pytest.mark.parametrize("other", ["device", "versions", "call"])
def test_a_winner_of_something_else_is_none(toy, other, monkeypatch):
    with tuning():
        winner = present(contest.tune(SPEC, CPU))
    assert select.winner(SPEC, CPU) == winner
    if other == "device":
        assert select.winner(SPEC, replace(CPU, name="another CPU")) is None
    elif other == "versions":
        monkeypatch.setattr(select, "__version__", "99")
        assert select.winner(SPEC, CPU) is None
    else:
        wide = spec_of(query=Q, key=Q, value=Q, is_causal=True, local_window_size=(3, 0))
        assert select.winner(wide, CPU) is None


def test_a_winner_that_is_not_there_any_more_is_passed_by(toy):
    with tuning():
        winner = present(contest.tune(SPEC, CPU))
    winners.keep(replace(winner, engine="absent"))
    assert select.winner(SPEC, CPU) is None
    assert explain(Q, Q, Q, is_causal=True).chosen_forward == "toy"
    winners.keep(replace(winner, implementation="nobody"))
    assert explain(Q, Q, Q, is_causal=True).chosen_forward == "toy"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"format": 2, "winners": []}', '{"format": 1, "winners": [{}]}', "\x00"],
)
def test_from_a_damaged_file_nothing_is_read_and_nothing_is_lost(toy, caplog, capsys, text):
    file = present(winners.winners_file())
    file.parent.mkdir()
    file.write_text(text)
    with caplog.at_level(logging.WARNING, "attn_dispatch"):
        assert explain(Q, Q, Q, is_causal=True).forward[3].tuned is None
    assert "no winners are read" in caplog.text
    with tuning():
        contest.tune(SPEC, CPU)
    assert "cannot be read as winners, and is left as it is" in capsys.readouterr().err
    assert file.read_text() == text


def test_what_is_kept_is_told_from_what_is_not(toy, tmp_path, monkeypatch):
    file = tmp_path / "checkout.json"
    with tuning():
        winner = present(contest.tune(SPEC, CPU))
    os.replace(present(winners.winners_file()), file)
    file.chmod(0o664)
    link = tmp_path / "link.json"
    link.symlink_to(file)
    monkeypatch.setenv("ATTN_DISPATCH_WINNERS", str(link))
    winners.keep(replace(winner, device="another"))
    assert link.is_symlink() and file.stat().st_mode & 0o777 == 0o664
    assert len(json.loads(file.read_text())["winners"]) == 2
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        monkeypatch.setenv("ATTN_DISPATCH_WINNERS", str(tmp_path / name))
        with pytest.raises(OSError, match="is not a file that winners can be kept in"):
            winners.keep(winner)


def test_an_interrupt_stops_after_the_contestant_whose_turn_it_is(toy, monkeypatch, capsys):
    """As one in the thread that waits; with engines enough for minutes."""
    begun, original = threading.Event(), contest._try
    monkeypatch.setattr(contest, "_try", lambda *x: (begun.set(), original(*x))[1])

    def interrupted(future):
        begun.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr("concurrent.futures.Future.result", interrupted)
    with tuning(), pytest.raises(KeyboardInterrupt):
        contest.tune(SPEC, CPU)
    assert "interrupted" in capsys.readouterr().err and select.winner(SPEC, CPU) is None


def test_times_that_are_no_numbers(toy, caplog):
    with tuning():
        contest.tune(SPEC, CPU)
    file = present(winners.winners_file())
    content = json.loads(file.read_text())
    content["winners"][0]["microseconds"] = {"xla": "fast"}
    file.write_text(json.dumps(content))
    assert str(explain(Q, Q, Q, is_causal=True)) and "expected numbers by names" in caplog.text
    file.write_text("[" * 100_000)
    assert str(explain(Q, Q, Q, is_causal=True))


def test_who_cannot_say_its_engines_is_tuned_without(toy, monkeypatch, capsys):
    def fails(spec, device):
        raise OSError("boom")

    monkeypatch.setattr(select.named("toy")._module, "other_engines", fails, raising=False)  # pyright: ignore[reportAttributeAccessIssue]
    with tuning():
        assert contest.tune(SPEC, CPU) is not None
    assert "toy: other_engines failed: boom" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_costs_a_line(toy, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTN_DISPATCH_WINNERS", str(tmp_path / "file" / "winners.json"))
    with tuning():
        assert present(contest.tune(SPEC, CPU)).engine == "2 2"
    assert "not kept: " in capsys.readouterr().err
    monkeypatch.setenv("ATTN_DISPATCH_WINNERS", "off")
    with tuning(), pytest.raises(RuntimeError, match="what tuning finds would be lost"):
        contest.tune(SPEC, CPU)


def test_many_write_to_one_file(toy):
    with tuning():
        winner = present(contest.tune(SPEC, CPU))
    calls = [replace(winner, call={**winner.call, "window": [i, 0]}) for i in range(40)]
    threads = [threading.Thread(target=winners.keep, args=(x,)) for x in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = json.loads(present(winners.winners_file()).read_text())["winners"]
    assert len(found) == 41
    assert [
        x.name for x in present(winners.winners_file()).parent.iterdir() if "begun" in x.name
    ] == []


def test_what_is_not_tuned(toy):
    key = jax.random.key(0)
    dropout = spec_of(query=Q, key=Q, value=Q, dropout_rate=0.5, dropout_key=key)
    empty = spec_of(query=Q[:, :0], key=Q, value=Q)
    with tuning():
        assert contest.tune(dropout, CPU) is None
        assert contest.tune(empty, CPU) is None


def test_where_it_cannot_be_tuned(toy, monkeypatch):
    with tuning(), pytest.raises(RuntimeError, match="there is no NVIDIA H200"):
        contest.tune(SPEC, replace(parse("sm90"), platform="cpu"))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with tuning(), pytest.raises(RuntimeError, match="in one of several processes"):
        contest.tune(SPEC, CPU)


@pytest.mark.parametrize("seconds", [0, -1, True, "3", None, float("nan"), float("inf")])
def test_seconds(seconds, monkeypatch):
    with pytest.raises(ValueError, match="seconds: expected a positive number of seconds, got"):
        with tuning(seconds):
            pass
    monkeypatch.setenv("ATTN_DISPATCH_TUNING", str(seconds or "nan"))
    with pytest.raises(ValueError, match="ATTN_DISPATCH_TUNING: expected a positive number"):
        if seconds != "3":
            settings.current()
        else:
            raise ValueError("ATTN_DISPATCH_TUNING: expected a positive number")
    for nothing in ("off", "0", ""):
        monkeypatch.setenv("ATTN_DISPATCH_TUNING", nothing)
        assert settings.current().tuning_seconds is None


def test_numbers():
    q = Q.astype(jnp.bfloat16)
    spec = spec_of(query=q, key=q, value=q, return_lse=True)
    rng = np.random.default_rng(1)
    out = jnp.asarray(rng.normal(size=(2, 512, 4, 16)), jnp.bfloat16)
    lse = jnp.asarray(rng.normal(size=(2, 4, 512)), jnp.float32).at[0, 0, 0].set(-jnp.inf)
    noise = 1 + jnp.asarray(rng.normal(size=out.shape) * 2**-8)
    rounded = (out * noise).astype(jnp.bfloat16)
    assert differing(spec, (rounded, lse + 1e-5), (out, lse)) == ()
    assert differing(spec, (out.at[1, 3].multiply(1.1), lse), (out, lse)) == ("out",)
    assert differing(spec, (out.at[1, 3, 1, 2].set(jnp.nan), lse), (out, lse)) == ("out",)
    assert differing(spec, (out, lse.at[0, 0, 1].add(0.01)), (out, lse)) == ("lse",)
    assert differing(spec, (out, lse.at[0, 0, 0].set(0)), (out, lse)) == ("lse",)
    unknown = out.at[0, 0].set(jnp.nan)
    assert differing(spec, (unknown, lse), (unknown, lse)) == ()


@pytest.mark.parametrize("longest", [256, 64, 20])
@pytest.mark.parametrize("count", [1, 5, 16])
def test_sequences_that_are_made_up(count, longest):
    q = jax.ShapeDtypeStruct((256, 4, 16), jnp.bfloat16)
    cu = jax.ShapeDtypeStruct((count + 1,), jnp.int32)
    spec = spec_of(query=q, key=q, value=q, cu_seqlens_q=cu, cu_seqlens_kv=cu,
                   max_seqlen_q=longest, max_seqlen_kv=longest)  # fmt: skip
    made = made_for(spec)
    lengths = np.diff(made["cu_seqlens_q"][0])
    assert (lengths > 0).all() and lengths.max() <= longest
    assert lengths.sum() == min(256, count * longest)
    ids = jax.ShapeDtypeStruct((2, 256), jnp.int32)
    q = jax.ShapeDtypeStruct((2, 256, 4, 16), jnp.bfloat16)
    spec = spec_of(query=q, key=q, value=q, query_segment_ids=ids, max_segments=count)
    made = np.asarray(made_for(spec)["query_segment_ids"])
    assert made.shape == (2, 256) and (np.diff(made) >= 0).all() and made.max() == count


def test_the_command(toy, tmp_path, capsys, monkeypatch):
    from attn_dispatch_tools.cli import main

    calls = tmp_path / "calls.json"
    calls.write_text(
        '[{"query": "float32[2,48,4,16]", "key": "query", "value": "query", "is_causal": true}]'
    )
    main(["tune", str(calls)])
    printed = capsys.readouterr()
    assert printed.err.count("tuned: ") == 2 and "backward pass" in printed.err
    assert present(select.winner(SPEC, CPU)).engine == "2 2"
    main(["tune", "--inference", str(calls)])
    printed = capsys.readouterr()
    assert printed.err == "" and printed.out.count("kept already: toy 2 2 70.0 µs") == 1

    script = tmp_path / "script.py"
    script.write_text(
        "import sys, jax.numpy as jnp, attn_dispatch\n"
        "print('arguments', sys.argv[1:])\n"
        "q = jnp.ones((1, 8, 2, 4))\n"
        "attn_dispatch.dot_product_attention(q, q, q)\n"
        "if __name__ == '__main__': raise ValueError('its own')\n"
    )
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with pytest.raises(ValueError, match="its own"):
        main(["tune", str(script), "a", "--b"])
    printed = capsys.readouterr()
    assert "arguments ['a', '--b']" in printed.out and "query float32[1,8,2,4]" in printed.err


def test_where_nothing_can_be_tuned(tmp_path, capsys, monkeypatch):
    from attn_dispatch_tools.cli import main

    monkeypatch.setenv("ATTN_DISPATCH_WINNERS", str(tmp_path / "winners.json"))
    calls, script = tmp_path / "calls.json", tmp_path / "script.py"
    calls.write_text('[{"query": "float32[2,48,4,16]", "key": "query", "value": "query"}]')
    with pytest.raises(SystemExit, match="error: none of the calls can be tuned on this"):
        main(["tune", str(calls)])
    assert capsys.readouterr().out.count("not tuned: there is nothing to choose from") == 2
    calls.write_text("[]")
    with pytest.raises(SystemExit, match="expected at least one call, got an empty list"):
        main(["tune", str(calls)])
    assert "winners are kept" not in capsys.readouterr().out
    script.write_text("raise SystemExit(0)")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with pytest.raises(SystemExit):
        main(["tune", str(script)])
    assert "nothing was tuned: the script made no calls" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nowhere.py"], "error: nowhere.py: no such file"),
        (["nowhere.json"], "error: nowhere.json: no such file"),
        (["."], "error: .: expected a file, got a folder"),
        (
            ["--seconds", "0", "calls.json"],
            "argument --seconds: expected a positive number of seconds, got '0'",
        ),
        (["calls.JSON", "--inference"], "error: calls.JSON holds calls; unknown: --inference"),
        (["calls", "a"], "error: calls holds calls; unknown: a"),
    ],
)
def test_wrong_commands(toy, arguments, error, tmp_path, monkeypatch, capsys):
    from attn_dispatch_tools.cli import main

    monkeypatch.chdir(tmp_path)
    for name in ("calls", "calls.json", "calls.JSON"):
        (tmp_path / name).write_text("[]")
    with pytest.raises(SystemExit) as raised:
        main(["tune", *arguments])
    assert error in f"{raised.value} {capsys.readouterr().err}"
    monkeypatch.setenv("ATTN_DISPATCH_WINNERS", str(tmp_path))
    with pytest.raises(SystemExit, match="is not a file that winners can be kept in"):
        main(["tune", "calls.json"])


def test_an_interrupted_write_leaves_the_file_alone(toy, tmp_path):
    """A process that is killed while it writes."""
    with tuning():
        winner = present(contest.tune(SPEC, CPU))
    before = present(winners.winners_file()).read_text()
    program = (
        "import os, json\n"
        "from attn_dispatch.core.tuning import winners\n"
        "os.replace = lambda *x: os._exit(9)\n"
        f"found = json.loads(open({str(winners.winners_file())!r}).read())['winners'][0]\n"
        "winners.keep(winners.Winner(**{**found, 'device': 'other'}))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], timeout=120)
    assert ended.returncode == 9
    assert present(winners.winners_file()).read_text() == before
    winners.keep(winner)  # the lock went with the process
