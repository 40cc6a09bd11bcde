"""Named cases lower to programs with the recorded digests, so that every change is noticed.

After an intended change, `make lowered` writes the digests again for the JAX that is installed.
The files of tests/results are for the oldest and the newest version.
"""

from __future__ import annotations

import jax
import pytest

from attn_dispatch_tools.verify.cases import CASES
from tests.scripts.sameness import (
    OLDEST_JAX,
    TARGETS,
    digest,
    digests_file,
    lowered_case,
    read_digests,
)
from tests.support.backend import needs_cudnn
from tests.support.extent import sample

# One in sixty takes 20 seconds; every case takes a quarter of an hour.
SAMPLE = sample([x for x in CASES if x.transform != "eager"], 60)


@pytest.fixture(scope="module")
def recorded_digests() -> dict[str, dict[str, str]]:
    if not digests_file().exists():
        assert jax.__version__ != OLDEST_JAX
        pytest.skip(f"no digests are recorded for this JAX: {digests_file().name}")
    return read_digests()


@needs_cudnn
@pytest.mark.parametrize("case", SAMPLE, ids=lambda x: x.name)
def test_case_lowers_to_the_recorded_program(case, recorded_digests):
    found = {target: digest(lowered_case(case, target)["program"]) for target in TARGETS}
    assert found == recorded_digests[case.name]


def test_every_named_case_has_a_digest(recorded_digests):
    assert recorded_digests.keys() == {x.name for x in CASES if x.transform != "eager"}
