"""The registry of parameters and the page that is written from it are complete and true."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.conformance.capabilities import (
    CAPABILITIES,
    PAGE,
    Capability,
    Law,
    existing_tests,
    fields_of,
    page,
    request_fields,
    where_tested,
)

EACH = pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda each: each.field)


def test_the_registry_lists_every_field_of_a_request_and_no_other() -> None:
    listed = Counter(capability.field for capability in CAPABILITIES)
    assert listed == Counter(request_fields())


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.conformance.capabilities"


@EACH
def test_a_parameter_is_exercised_by_tests_that_exist(capability: Capability) -> None:
    tests = where_tested(capability)
    assert tests
    assert set(tests) <= existing_tests()


@EACH
def test_an_example_sets_its_parameter(capability: Capability) -> None:
    for example in capability.examples:
        assert capability.field in fields_of(example.change)


@EACH
def test_equal_in_law_is_claimed_where_it_is_sampled(capability: Capability) -> None:
    sampled = any(test.startswith("test_law.py") for test in where_tested(capability))
    off = capability.field == "speculation.enabled"
    assert sampled or off or capability.law is not Law.SAMPLED
