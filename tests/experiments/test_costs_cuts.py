"""Models of which not every layer learns are cut as well as the best cut into whole layers, by products counted by hand."""

import pytest

from experiments.costs import cuts, predictions


@pytest.mark.long
@pytest.mark.parametrize("num_microbatches", [8, 32])
def test_no_step_is_longer_than_a_little_more_than_that_of_the_best_cut_into_whole_layers(num_microbatches):
    result = cuts.run(cuts.Config(microbatches=num_microbatches))
    rows = {row.name: row for row in result.rows}
    assert len(cuts.table(result).splitlines()) == 12
    assert len(rows) == 8
    for row in rows.values():
        assert row.step[0] <= 1.08 * row.step[2], row
        assert row.largest[0] <= 1.1 * row.largest[2], row
    by_flops = [rows[name].largest[1] / rows[name].largest[2] for name in ("first 12 frozen", "layers 1 to 11 frozen")]
    assert by_flops == pytest.approx([11 / 6, 12 / 10]), "FLOPs of the forward do not see it"


@pytest.mark.long
def test_predicted_steps_are_printed_beside_measured_ones():
    result = predictions.run(predictions.Config(models=("mlp",), stages=2, microbatches=4, batch=64, steps=2))
    (row,) = result.rows
    assert row.predicted > 0 < row.measured
    assert 1 < row.said < 2 and 1 < row.speed < 2
    assert predictions.table(result).splitlines()[1].split()[0] == "mlp"
