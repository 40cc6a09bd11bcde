"""The table of calls in which another peer is faster than ours."""

from attn_dispatch_tools.bench import behind
from attn_dispatch_tools.bench.grids import GRIDS
from attn_dispatch_tools.bench.report import CellResults, Report

_FIRST, _SECOND, _THIRD, *_ = GRIDS["dense"]
_BOTH = {"forward": "flash", "backward": "flash"}


def _results(**microseconds: float) -> dict[str, dict[str, object]]:
    return {
        name.replace("__", ": "): {"wall_us": {"median": us}} for name, us in microseconds.items()
    }


def _lines(*cells: CellResults) -> list[str]:
    return [x for x in behind.lines(Report({}, {}, [*cells])) if ":" in x and x.startswith("| d")]


def test_calls_with_a_faster_peer_are_listed_with_our_second_time():
    found = CellResults(
        _FIRST,
        {
            "forward": _results(ours=100, ours__flash=98, ours__cudnn=120, dew=97, torch=96),
            "forward_backward": _results(ours=200, ours__flash=190, dew=199),
        },
        {"ours": _BOTH},
    )
    assert _lines(found) == [f"| dense: {_FIRST.name}, forward | torch | 0.960 | 0.980 |"]


def test_another_implementation_of_ours_counts_as_a_peer():
    found = CellResults(
        _SECOND,
        {
            "forward": _results(ours=100, ours__flash=97, ours__cudnn=120),
            "forward_backward": _results(ours=100, ours__flash=90, ours__cudnn=95),
        },
        {"ours": {"forward": "flash", "backward": "xla"}},
    )
    name = f"dense: {_SECOND.name}, forward and backward"
    assert _lines(found) == [f"| {name} | ours: flash | 0.900 | - |"]


def test_nothing_is_listed_where_ours_or_all_others_are_missing():
    alone = CellResults(_FIRST, {"forward": _results(ours=100)}, {"ours": _BOTH})
    absent = CellResults(_SECOND, {"forward": _results(dew=100, torch=90)})
    refused = CellResults(_THIRD, {"forward": _results(ours=100) | {"dew": {"reason": "refused"}}})
    with_mask = CellResults(GRIDS["masks"][0], {"forward": _results(ours=100, other=10)})
    assert behind.lines(Report({}, {}, [alone, absent, refused, with_mask])) == []
