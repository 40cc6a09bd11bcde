"""The report that tests/gpu/memcheck.py writes about its calls."""

from tests.gpu import memcheck


def test_the_report_has_counts_and_the_unclean_calls():
    calls = [
        {"case": "a", "status": "passed", "errors": 0},
        {"case": "b", "status": "passed", "errors": 3},
        {"case": "c", "status": "refused", "errors": None},
        {"case": "d", "status": "unfinished", "errors": None},
    ]
    assert memcheck.kept({"seed": 4, "paged": ["a", "b"], "packed": ["c"]}, calls) == {
        "seed": 4,
        "paged": {"drawn": 2, "clean": 1},
        "packed": {"drawn": 1, "clean": 0},
        "clean": 1,
        "refused": 1,
        "not_clean": 1,
        "sanitizer_crashed_or_hung": 1,
        "unclean": [calls[1], calls[3]],
    }
