from __future__ import annotations

import pytest

from worklog.record import Claim
from worklog.render.terminal import claim_line, microseconds, size


@pytest.mark.parametrize(
    ("us", "text"),
    [(0.5, "0.5 us"), (13.72, "13.7 us"), (999.9, "1000 us"), (1420, "1.42 ms"), (2.1e6, "2.1 s"), (4.2e9, "4200 s")],
)
def test_microseconds(us, text):
    assert microseconds(us) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (50_380, "49.2 KiB"), (5_637_144_576, "5.25 GiB")],
)
def test_size(number, text):
    assert size(number) == text


@pytest.mark.parametrize(
    ("claim", "text"),
    [
        (
            Claim(name="slower than bf16", holds=True, measured=17.05, required=10.0, unit="x"),
            "claim holds: slower than bf16 (17.05 x measured, 10 x required)",
        ),
        (
            Claim(name="faster", holds=None, measured=None, required=1.8, reason="needs a GPU"),
            "claim undecided: faster (1.8 required; needs a GPU)",
        ),
    ],
)
def test_claim_line(claim, text):
    assert claim_line(claim).plain == text
