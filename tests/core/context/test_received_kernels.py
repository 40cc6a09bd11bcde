"""Kernels of NVIDIA and AMD GPUs receive a device's part of a call that is spread over eight.

The programs are partitioned by XLA's compiler for CPUs, without a GPU. What its compilers for GPUs
do later is not seen here: fusions, layouts and the schedule of collectives. Nor do kernels run, so
that flash is asked for what its library would receive if it were installed.
"""

from __future__ import annotations

from typing import Any

import pytest

from attn_dispatch.cudnn import library as cudnn_library
from tests.core.context.received_kernels import CASES, DECODING, LIBRARIES
from tests.support.backend import needs_cudnn
from tests.support.module_report import report_of

NAMES = [pytest.param(x, marks=needs_cudnn if x == "cudnn" else ()) for x in LIBRARIES]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    able = [x for x in LIBRARIES if x != "cudnn" or cudnn_library.find().is_usable]
    folder = tmp_path_factory.mktemp("partitioned")
    return report_of("tests.core.context.received_kernels", str(folder), *able)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_kernels_receive_the_rows_keys_and_heads_of_a_device(report, case: str, name: str):
    expected = CASES[case]
    passes = {"forward": expected.kernels, "backward": expected.kernels}
    assert report[name][case] == passes | {"exchanged": sorted(expected.exchanged)}


@pytest.mark.parametrize("name", NAMES)
def test_decoding_kernels_receive_the_keys_of_a_device(report, name: str):
    found = report[name]["decoding"]
    assert found == {"forward": DECODING[name], "exchanged": ["all-reduce"]}
