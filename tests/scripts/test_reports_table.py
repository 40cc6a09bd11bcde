"""docs/proof.md and docs/proof list every report in tests/gpu/results, all in short form."""

import re

from tests.scripts import keep_reports, reports_table
from tests.support.present import present


def test_every_report_is_in_its_short_form():
    assert not [*keep_reports.RESULTS.glob("verify-*.md")], "the JSON files have the same contents"
    for report in reports_table.reports():
        message = f"{report.name}: run python -m tests.scripts.keep_reports tests/gpu/results"
        assert keep_reports.is_kept(report.facts), message


def test_the_pages_are_up_to_date_with_the_reports():
    pages = dict(reports_table.pages(reports_table.PAGE.read_text()))
    for path, text in pages.items():
        assert path.read_text() == text, "run python -m tests.scripts.reports_table"
    assert {x for x in pages if x != reports_table.PAGE} == {*reports_table.FOLDER.glob("*.md")}


def test_every_report_is_listed_and_every_link_has_a_file():
    listed = set()
    for page in (reports_table.PAGE, *reports_table.FOLDER.glob("*.md")):
        for where in re.findall(r"\]\((\.\./[^)#\s]+)", page.read_text()):
            assert (page.parent / where).exists(), f"{page.name}: {where}"
            listed.add(where.rpartition("/")[2])
    reports = reports_table.reports()
    assert len(reports) > 50 and {x.name for x in reports} <= listed


def test_the_totals_are_sums_of_the_reports():
    rows = [x.split(" | ") for x in reports_table.totals(reports_table.reports()).splitlines()[2:]]
    reports = reports_table.reports()
    assert sum(int(x[4]) for x in rows) == len(reports)
    for status, column in (("passed", 7), ("refused", 8)):
        assert sum(int(x[column]) for x in rows) == sum(x.facts["counts"][status] for x in reports)
    bad = [int(present(re.match(r"\d+", x[9]))[0]) for x in rows]
    assert sum(bad) == sum(len(x.facts["outcomes"]) for x in reports) > 10
