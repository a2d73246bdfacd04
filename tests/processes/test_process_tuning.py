"""``jaxpp.tune`` in several processes: all of them find the same, also with a budget, which is of time."""

import json

from tests.processes.processes import launch


def test_all_processes_choose_the_same_and_train_with_it(tmp_path):
    launch("tests.processes.process_tuning_cases:main", 2, {"folder": str(tmp_path)}, seconds=150)
    one, two = (json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2))
    assert one == two
    assert len(one["rows"]) == 6 and sum(row[3] is not None for row in one["rows"]) == 2
    assert one["best"]["num_stages"] == 4 and one["loss"] > 0
    assert all(len(row[2]) == 4 for row in one["rows"] if row[3] is not None)
