"""What sizes and durations are called."""

import pytest

from extractor.quantities import bytes_words, duration_words


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 s"),
        (0.42, "0.4 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1m00s"),
        (125, "2m05s"),
        (3599.7, "1h00m"),
        (11_520, "3h12m"),
        (187_200, "2d04h"),
        (-3, "0 s"),
        (float("inf"), "unknown"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds: float, said: str) -> None:
    assert duration_words(seconds) == said


@pytest.mark.parametrize(
    ("num_bytes", "said"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (57_344, "57.3 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (711e9, "711 GB"),
        (1.024e12, "1.02 TB"),
        (-2.5e9, "-2.50 GB"),
        (5e21, "5,000 EB"),
    ],
)
def test_bytes_have_three_digits_and_a_decimal_unit(num_bytes: float, said: str) -> None:
    assert bytes_words(num_bytes) == said
