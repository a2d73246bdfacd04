"""Models of which not every layer learns are cut as well as the best cut into whole layers, by products counted by hand."""

import pytest

from experiments.costs import cuts


@pytest.mark.long
@pytest.mark.parametrize("num_microbatches", [8, 32])
def test_no_step_is_longer_than_a_little_more_than_that_of_the_best_cut_into_whole_layers(num_microbatches):
    rows = {row.name: row for row in cuts.run(num_microbatches)}
    assert len(rows) == 8
    for row in rows.values():
        assert row.step[0] <= 1.08 * row.step[2], row
        assert row.largest[0] <= 1.1 * row.largest[2], row
    by_flops = [rows[name].largest[1] / rows[name].largest[2] for name in ("first 12 frozen", "layers 1 to 11 frozen")]
    assert by_flops == pytest.approx([11 / 6, 12 / 10]), "FLOPs of the forward do not see it"
