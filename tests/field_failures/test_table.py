"""Every failure seen in the field has a test whose name says so, and mutants that the test kills.

`data/field_failures.json` is the table: room -> slug -> the failure, in the words it was reported.
"""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TABLE = json.loads((TESTS / "data" / "field_failures.json").read_text())
SLUGS = {slug: room for room, failures in TABLE.items() for slug in failures}


@pytest.fixture(scope="module")
def mutants():
    """tests/mutants/table.py."""
    path = TESTS / "mutants" / "table.py"
    spec = importlib.util.spec_from_file_location("mutants_table", path)
    # dataclasses look their module up
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_slugs_differ_and_none_begins_another():
    assert len(SLUGS) == sum(len(failures) for failures in TABLE.values())
    assert not [(a, b) for a in SLUGS for b in SLUGS if a != b and b.startswith(a)]


@pytest.mark.parametrize("slug", SLUGS)
def test_every_line_has_a_test_in_its_room(slug, mutants):
    found = mutants.tests_of(slug)
    assert found, f"no test_{slug}"
    assert {test.split("::")[0] for test in found} == {
        f"tests/field_failures/test_{SLUGS[slug]}.py"
    }


def test_every_test_belongs_to_a_line(mutants):
    names = [n for n, i in mutants.tests_by_name().items() if "test_table.py" not in i]
    stray = [n for n in names if not any(n.startswith(f"test_{slug}") for slug in SLUGS)]
    assert stray == []


def test_every_line_has_a_mutant(mutants):
    assert set(SLUGS) - {s for m in mutants.MUTANTS for s in m.slugs.split()} == set()


def test_mutants_can_be_planted(mutants):
    """A line that changed takes its mutants along: see their old text in tests/mutants/table.py."""
    stale = [m.stale(TESTS.parent) for m in mutants.MUTANTS]
    assert [s for s in stale if s] == []


def test_mutants_name_tests_that_exist(mutants):
    assert {s for m in mutants.MUTANTS for s in m.slugs.split() if not mutants.tests_of(s)} == set()
    for test in sorted({test for m in mutants.MUTANTS for test in m.tests.split()}):
        file, _, name = test.partition("::")
        assert f"def {name}" in (TESTS / file).read_text(), test
