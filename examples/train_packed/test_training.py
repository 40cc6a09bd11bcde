"""Whole runs: resumed ones are equal to the last bit, wrong ones are refused; and the command."""

import dataclasses
import json

import jax
import numpy as np
import pytest

for _package in ("flax", "optax", "rich"):
    pytest.importorskip(_package, reason=f"{_package} missing: pip install flax optax rich")

from . import checkpoint  # noqa: E402
from .__main__ import main  # noqa: E402
from .mesh import make_mesh  # noqa: E402
from .sizes import SIZES  # noqa: E402
from .training import Task, train  # noqa: E402

SIZE = dataclasses.replace(
    SIZES["tiny"],
    config=dataclasses.replace(
        SIZES["tiny"].config, width=32, heads=4, kv_heads=2, head_dim=8, ffn_width=48
    ),
    steps=6,
)


def task(**changes):
    return dataclasses.replace(Task(SIZE, make_mesh(1, 1)), **changes)


def test_a_resumed_run_is_the_same_to_the_last_bit(tmp_path):
    whole = train(task(checkpoints=tmp_path / "whole"))
    parts = task(checkpoints=tmp_path / "parts", every=2)
    assert len(train(parts, until=3).losses) == 3
    resumed = train(parts, resume=True)
    assert resumed.losses == whole.losses and len(whole.losses) == SIZE.steps
    assert whole.losses[-1] < whole.losses[0]
    files = [tmp_path / x / "step_00000006.npz" for x in ("whole", "parts")]
    assert files == [checkpoint.latest(x.parent) for x in files]
    with np.load(files[0]) as one, np.load(files[1]) as other:
        assert {*one.files} == {*other.files}
        assert all((one[x] == other[x]).all() for x in one.files)
    assert len([*(tmp_path / "parts").iterdir()]) == checkpoint.KEPT
    # A run that is complete has nothing left to do. A checkpoint of another run is refused.
    assert train(parts, resume=True).losses == whole.losses
    with pytest.raises(ValueError, match="expected a run with seed 1, got 0"):
        train(dataclasses.replace(parts, seed=1), resume=True)
    longer = dataclasses.replace(parts, size=dataclasses.replace(SIZE, steps=9))
    with pytest.raises(ValueError, match=r"expected a run with size steps 9, got 6$"):
        train(longer, resume=True)


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x03\x04 and no more", "npy"])
def test_a_broken_checkpoint_is_named(content, tmp_path):
    path = checkpoint.save(tmp_path, 1, {"a": jax.numpy.arange(3)}, {"losses": [1.0]})
    if content == "npy":
        with path.open("wb") as file:
            np.save(file, np.arange(3))
    else:
        path.write_bytes(content or path.read_bytes()[:300])
    message = r"step_00000001\.npz: expected a checkpoint, got another file"
    with pytest.raises(ValueError, match=message):
        checkpoint.read_facts(path)
    with pytest.raises(ValueError, match=message):
        checkpoint.restore(path, {"a": jax.numpy.arange(3)})


def test_a_missing_checkpoint_is_reported(tmp_path, capsys):
    words = ["--size", "tiny", "--steps", "1", "--out", str(tmp_path), "--resume"]
    main([*words, "--checkpoints", str(tmp_path / "kept")])
    assert "no checkpoint in" in capsys.readouterr().out
    main([*words, "--checkpoints", str(tmp_path / "kept")])
    output = capsys.readouterr().out
    assert "packed: all 1 steps were done before" in output
    assert "no checkpoint in" not in output and "nan" not in output


def test_a_checkpoint_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    state = {"a": jax.numpy.arange(3)}
    checkpoint.save(tmp_path, 1, state, {"losses": [1.0]})

    def broken(file, **arrays):
        file.write(b"half")
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", broken)
        with pytest.raises(OSError, match="full"):
            checkpoint.save(tmp_path, 2, state, {"losses": [1.0, 2.0]})
    path = checkpoint.latest(tmp_path)
    assert path is not None and path.name == "step_00000001.npz"
    np.testing.assert_array_equal(checkpoint.restore(path, state)["a"], [0, 1, 2])
    with pytest.raises(ValueError, match=r"expected \['a'\] int32\(4,\), got int32\(3,\)"):
        checkpoint.restore(path, {"a": jax.numpy.arange(4)})
    with pytest.raises(ValueError, match="these differ"):
        checkpoint.restore(path, {"b": jax.numpy.arange(3)})


def test_the_command_compares(tmp_path, capsys):
    main(["--size", "tiny", "--steps", "3", "--compare", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("train_packed-*.json")
    report = json.loads(path.read_text())
    packed, padded = (report["runs"][x] for x in ("packed", "padded"))
    np.testing.assert_allclose(packed["losses"], padded["losses"], rtol=1e-4)
    assert packed["fill"] > 1.5 * padded["fill"]
    assert report["ratio"] == packed["tokens_per_second"] / padded["tokens_per_second"]
    assert (tmp_path / "train_packed.png").read_bytes()[1:4] == b"PNG"
    assert "packed is" in capsys.readouterr().out


def test_what_the_command_refuses(capsys, tmp_path):
    file = tmp_path / "file"
    file.touch()
    for words, message in (
        (["--steps", "0"], "argument --steps: expected an int above 0, got 0"),
        (["--mesh", "3x"], "argument --mesh: expected two ints above 0 like 4x2, got 3x"),
        (["--checkpoints", str(file / "folder")], "error: --checkpoints: "),
        (["--checkpoints", str(file)], f"error: --checkpoints: {file}: file exists"),
        (["--out", str(file / "folder")], "folder: not a directory"),
        (["--mesh", "9x1"], "expected at most"),
        (["--resume"], "--resume needs --checkpoints"),
        (["--every", "2"], "--every needs --checkpoints"),
        (["--compare", "--checkpoints", "x"], "it takes no --checkpoints"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["--size", "tiny", "--out", str(tmp_path), *words])
        assert message in f"{stop.value} {capsys.readouterr().err}"
