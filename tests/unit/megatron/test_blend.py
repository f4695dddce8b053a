"""The order of a blend whose weights change."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("megatron")
WEIGHTS = (0.7, 0.3)


def test_one_segment_is_megatrons_own_order() -> None:
    from megatron.core.datasets import helpers
    from megatron.core.datasets.utils import normalize

    from pretrainkit.config.blend_schedule import BlendSegment
    from pretrainkit.megatron.blend import scheduled_indices

    for weights in (WEIGHTS, (3.0, 1.0, 1e-3), (1 / 3, 1 / 7, 5.0)):
        expected = np.zeros(500, np.int16), np.zeros(500, np.int64)
        given = normalize(normalize(list(weights)))
        helpers.build_blending_indices(*expected, given, len(weights), 500, False)
        for found, wanted in zip(scheduled_indices([BlendSegment(0, 0, weights)], 500), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
            assert found.dtype == wanted.dtype


def test_each_dataset_goes_on_where_it_is_and_a_change_leaves_what_came_before() -> None:
    from pretrainkit.config.blend_schedule import BlendSegment
    from pretrainkit.megatron.blend import scheduled_indices

    first, second, third = BlendSegment(0, 0, WEIGHTS), BlendSegment(5, 101, (0.0, 1.0)), BlendSegment(9, 160, (1, 1))
    numbers, places = scheduled_indices([first, second, third], 400)
    for part in range(2):
        assert places[numbers == part].tolist() == list(range(int((numbers == part).sum()))), "none left out or twice"
    assert set(numbers[101:160]) == {1} and (numbers[160:] == 0).mean() == pytest.approx(0.5, abs=0.01)
    for segments, end in (([first], 101), ([first, second], 160)):
        np.testing.assert_array_equal(scheduled_indices(segments, 400)[0][:end], numbers[:end])
        np.testing.assert_array_equal(scheduled_indices(segments, 400)[1][:end], places[:end])
    short = scheduled_indices([first, second, third], 50)
    np.testing.assert_array_equal(short[0], numbers[:50])


def test_a_part_without_weight_is_as_one_that_isnt_there() -> None:
    from pretrainkit.config.blend_schedule import BlendSegment
    from pretrainkit.megatron.blend import scheduled_indices

    without, _ = scheduled_indices([BlendSegment(0, 0, WEIGHTS)], 300)
    numbers, places = scheduled_indices(
        [BlendSegment(0, 0, (0.0, *WEIGHTS)), BlendSegment(2, 200, (1.0, 0.0, 0.0))], 300
    )
    np.testing.assert_array_equal(numbers[:200] - 1, without[:200])
    assert set(numbers[200:]) == {0} and places[200] == 0
