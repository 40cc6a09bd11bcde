"""docs/proof.md tells of every report that is committed."""

import reports_table


def test_the_page_is_of_the_reports_that_are_here():
    text = reports_table.PAGE.read_text()
    assert reports_table.page(text) == text, "run python tests/reports_table.py"
    assert all(
        x.with_suffix(".md").name in text for x in reports_table.RESULTS.glob("verify-*.json")
    )
