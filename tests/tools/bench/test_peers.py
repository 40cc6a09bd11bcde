"""The peers of the benchmark: equal results, and the reasons why a peer is absent."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from attn_dispatch.devices.target import parse
from attn_dispatch.flash import library as flash_library
from attn_dispatch_tools.bench import measure, run
from attn_dispatch_tools.bench.arrays import BATCH, PADDED, ROW, ROWS, CellArrays
from attn_dispatch_tools.bench.grids import GRIDS
from attn_dispatch_tools.bench.peers import all_peers, dew_flash_attn, named, torch_sdpa
from attn_dispatch_tools.bench.peers.jax_nn import JaxNn
from attn_dispatch_tools.bench.peers.ours import PEERS as OURS
from attn_dispatch_tools.bench.peers.peer import JaxPeer, PeerCall
from tests.support.bench_cells import DOCUMENTS, QUICK, TINY, WINDOW, bench, ours


class Raising(JaxPeer):
    """A package without a kernel for the call."""

    name = "raising"

    def absent(self) -> str:
        return ""

    def call(self, cell, arrays):
        raise ValueError(f"no kernel for head dim {cell.head_dim}\nand more")


class Doubled(JaxPeer):
    """A package whose results are wrong."""

    name = "doubled"

    def absent(self) -> str:
        return ""

    def call(self, cell, arrays):
        return PeerCall(lambda q, k, v: 2 * jax.nn.dot_product_attention(q, k, v, is_causal=True))


# Peers


def test_all_layouts_hold_the_same_numbers():
    arrays = CellArrays(DOCUMENTS)
    rows, row, padded = (arrays.inputs(x) for x in (ROWS, ROW, PADDED))
    assert [x.shape for x in rows[:2]] == [(12, 2, 8), (12, 1, 8)]
    assert row[0].shape == (1, 12, 2, 8) and padded[1].shape == (3, 8, 1, 8)
    for layout, given in ((ROW, row), (PADDED, padded)):
        for x, y in zip(arrays.without_padding(given, layout), rows, strict=True):
            assert (x == y).all()
    assert padded[0][1, 0].any() and not padded[0][1, 1:].any()
    assert CellArrays(WINDOW).inputs(BATCH)[3].shape == (2, 16, 2, 8)


def test_each_call_of_a_program_takes_the_result_of_the_one_before():
    cell = replace(TINY, calls=3)
    assert cell.forward_flops == 3 * TINY.forward_flops
    arrays = CellArrays(cell)
    q, k, v, _ = arrays.inputs(BATCH)
    results = ours().program(cell, "forward", arrays).results()
    assert results is not None
    (found,) = results
    for _ in range(3):
        q = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    assert jnp.abs(found - q.reshape(found.shape)).max() < 0.03
    with pytest.raises(NotImplementedError, match="single calls"):
        torch_sdpa.peers(None)[0].program(cell, "forward", arrays)


@pytest.mark.parametrize("cell", [TINY, WINDOW, DOCUMENTS], ids=lambda x: x.grid)
@pytest.mark.parametrize("direction", ["forward", "backward", "forward_backward"])
def test_peers_compute_the_same_results(cell, direction):
    without_gpu = {"ours"} | {
        f"ours: {x}" for x in ("finite padding", "known lengths", "segment ids", "padded")
    }
    peers = [*(x for x in OURS if x.name in without_gpu), JaxNn("xla")]
    found = measure.measure(cell, direction, peers, CellArrays(cell), QUICK)
    wanted = {"ours", "jax.nn: xla"}
    if cell.lengths:
        wanted |= without_gpu
    assert found.keys() == wanted
    for row in found.values():
        assert row["difference"] <= 0.03
        wall = row["wall_us"]
        assert 0 < wall["min"] <= wall["quartiles"][0] <= wall["median"] <= wall["quartiles"][1]
        flops = cell.flops(direction)
        assert row["tflops"] == pytest.approx(flops / wall["median"] / 1e6)
        assert row["memory_bytes"] > 0
        assert row["device_us"] is None and row["device_reason"] == "the profile has no GPU"
        steps = row["first_call_ms"]
        assert steps["total"] == pytest.approx(sum(steps[x] for x in steps if x != "total"))


def test_a_peer_that_raises_or_differs_gets_a_reason():
    peers = [ours(), Raising(), Doubled()]
    found = measure.measure(TINY, "forward", peers, CellArrays(TINY), QUICK)
    assert found["raising"] == {"reason": "ValueError: no kernel for head dim 8"}
    assert "its results differ by 1 of the largest" in found["doubled"]["reason"]
    assert "tflops" in found["ours"] and "tflops" not in found["doubled"]


def test_a_peer_that_fails_between_turns_gets_a_reason():
    class Failing:
        def __init__(self):
            self.facts, self.remaining = {}, 3

        def seconds(self, calls):
            self.remaining -= 1
            if not self.remaining:
                raise MemoryError("no more")
            return 1e-3

        def results(self):
            return None

    class Late(Raising):
        name = "late"

        def program(self, cell, direction, arrays):  # pyright: ignore[reportIncompatibleMethodOverride]
            return Failing()

    found = measure.measure(TINY, "forward", [ours(), Late()], CellArrays(TINY), QUICK)
    assert found["late"] == {"reason": "MemoryError: no more"}
    assert found["ours"]["rounds"] == 1


def test_absent_peers_are_listed_with_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    here, facts = run.present(all_peers())
    assert {"ours", "jax.nn: xla"} <= {x.name for x in here}
    assert facts["peers"].keys() == {x.name for x in all_peers()}
    assert facts["absent"]["jax.nn: cudnn"] == "cuDNN runs on NVIDIA GPUs, and this is cpu"
    assert facts["absent"]["ours: cudnn"].startswith("cuDNN runs on NVIDIA GPUs")
    assert facts["absent"].keys() == facts["peers"].keys() - {x.name for x in here}
    assert all(facts["absent"].values())


def test_a_package_that_cannot_be_imported_is_absent(monkeypatch, tmp_path):
    (tmp_path / "tokamax.py").write_text("raise OSError('libx.so: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tokamax,) = named(["tokamax"], all_peers())
    assert tokamax.absent() == "cannot be imported: OSError: libx.so: cannot open"


class Recorded(SimpleNamespace):
    """Stands in for a package: its functions add their names and options to `seen`."""

    def __getattr__(self, name):
        return lambda *arrays, **options: self.seen.append((name, len(arrays), options))


@pytest.mark.parametrize("cell", [TINY, WINDOW, DOCUMENTS], ids=lambda x: x.grid)
def test_packages_get_the_arguments_of_their_own_functions(monkeypatch, cell):
    cell, arrays = replace(cell, head_dim=128, head_dim_v=128), range(3)
    seen: list[tuple[str, int, dict]] = []
    monkeypatch.setattr(JaxPeer, "package", lambda self: Recorded(seen=seen))
    monkeypatch.setattr(dew_flash_attn, "why_absent", lambda *_: "")
    called = ["dew-flash-attn", "fa4-jax", "flash_attn3_jax", "tokamax"]
    for peer in named(called, all_peers()):
        call = peer.call(cell, CellArrays(cell))  # pyright: ignore[reportAttributeAccessIssue]
        call.function(*arrays, *(0 for _ in call.further_arrays))
    plain = {"is_causal": True, "window_size": (-1, -1)}
    causal, backend = {"is_causal": True, "implementation": "mosaic"}, {"backend": "cute"}
    if cell.window:
        near = {"window_size": (4, 0)}
        assert seen == [
            ("flash_mha", 3, {"is_causal": False} | near),
            ("flash_attn", 3, {"causal": False} | backend | near),
            ("flash_mha", 3, {"is_causal": False} | near),
            ("dot_product_attention", 3, causal | {"local_window_size": (4, 0)}),
        ]
    elif cell.lengths:
        longest = {"max_seqlen_q": 8, "max_seqlen_k": 8}
        lengths = dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), 0)
        assert seen == [
            ("flash_mha_varlen", 5, plain),
            ("flash_attn_varlen", 5, {"causal": True} | backend),
            ("flash_mha_varlen", 5, plain | longest),
            ("dot_product_attention", 3, causal | lengths),
        ]
    else:
        assert seen == [
            ("flash_mha", 3, plain),
            ("flash_attn", 3, {"causal": True} | backend),
            ("flash_mha", 3, plain),
            ("dot_product_attention", 3, causal),
        ]


def test_torch_is_measured_in_another_process(tmp_path):
    """A script stands in for the process that has torch."""
    for text, reason in (
        ("#!/bin/sh\n", "its process has ended"),
        ('#!/bin/sh\necho \'{"reason": "torch sees no CUDA device"}\'\nread x\n', "torch sees no"),
    ):
        script = tmp_path / "python"
        script.write_text(text)
        script.chmod(0o755)
        peer, *_ = torch_sdpa.peers(str(script))
        assert peer.absent().startswith(reason)
        peer.close()
    script.write_text(
        "#!/bin/sh\n"
        'echo \'{"version": "torch 9"}\'\n'
        'read x; echo \'{"memory_bytes": 5, "first_call_ms": {"total": 1}}\'\n'
        "read x; echo '{\"seconds\": 0.25}'\n"
        'read x; echo \'{"reason": "RuntimeError: no profiler"}\'\n'
    )
    peer, *_ = torch_sdpa.peers(str(script))
    assert (peer.absent(), peer.version()) == ("", "torch 9")
    program = peer.program(TINY, "forward", CellArrays(TINY))
    assert program.facts["memory_bytes"] == 5 and program.seconds(3) == 0.25
    assert program.device_seconds(3) == (None, "RuntimeError: no profiler")
    with pytest.raises(RuntimeError, match="its process has ended"):
        program.seconds(3)
    with pytest.raises(NotImplementedError, match="no packed sequences"):
        peer.program(DOCUMENTS, "forward", CellArrays(DOCUMENTS))


def test_a_process_that_answers_no_json_makes_the_peer_absent(capsys, tmp_path):
    """/bin/cat stands in for the process and prints the worker's source text."""
    words = ["--grid", "small", "--cells", "*full b1 128", "--peer", "torch*", "--out", tmp_path]
    status, out, _ = bench(capsys, *map(str, words), "--torch-python", "/bin/cat")
    assert status == 1 and "absent: torch: cudnn: its process answered b" in out


def test_a_difference_is_a_share_of_the_largest_number():
    x = jnp.asarray([[[1.0, -8.0]]])
    assert measure._difference([x, x + 0.5], [x, x]) == pytest.approx(0.5 / 8)
    assert not measure._difference([x * jnp.nan], [x]) <= measure.MAX_DIFFERENCE


@pytest.mark.parametrize("is_there", [False, True])
def test_dew_flash_attn_that_cannot_be_imported_has_kernels(monkeypatch, is_there: bool):
    """dew-flash-attn's kernels are called directly, unless it is not installed at all."""
    monkeypatch.setattr(dew_flash_attn, "why_absent", lambda *_: "why")
    monkeypatch.setattr(dew_flash_attn, "is_installed", lambda module: is_there)
    monkeypatch.setattr(flash_library, "version", lambda: "0.3.6")
    monkeypatch.setattr(flash_library, "loading_failure", lambda generation: "")
    monkeypatch.setattr(dew_flash_attn, "default_device", lambda: parse("sm90"))
    assert dew_flash_attn.DewFlashAttn().absent() == ("" if is_there else "why")


@pytest.mark.parametrize("name", ["d128 causal b2 8k", "16 documents, even b1 16k"])
def test_the_kernels_of_dew_flash_attn_have_gradients_of_the_right_shapes(name, monkeypatch):
    """Both passes of dense and packed calls are traced only, which needs no library."""
    monkeypatch.setattr(flash_library, "register", lambda generation: None)
    (cell,) = (x for grid in GRIDS.values() for x in grid if x.name == name)
    monkeypatch.setattr(dew_flash_attn, "why_absent", lambda *_: "why")
    call = dew_flash_attn.DewFlashAttn().call(cell, CellArrays(cell))
    rows = (cell.seq_len,) if cell.lengths else (cell.batch, cell.seq_len)
    heads = (cell.num_heads, cell.num_kv_heads, cell.num_kv_heads)
    given = [jax.ShapeDtypeStruct((*rows, n, cell.head_dim), jnp.bfloat16) for n in heads]

    def gradients(*qkv):
        return jax.grad(lambda *x: call.function(*x, *call.further_arrays).sum(), (0, 1, 2))(*qkv)

    assert [x.shape for x in jax.eval_shape(gradients, *given)] == [x.shape for x in given]
