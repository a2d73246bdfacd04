"""How long a step takes, by what its programs cost: small cases that can be added up by hand."""

import dataclasses

import pytest

from jaxpp.schedule import Kind, make
from jaxpp.tuner.candidate import Candidate, Family
from jaxpp.tuner.costs import FamilyCosts
from jaxpp.tuner.estimate import estimate, nearest
from jaxpp.tuner.predict import alone, parts, predict
from tests.tuner.virtual_machine import Virtual

COSTS = FamilyCosts(
    actions={Kind.F: (1.0, 1.0), Kind.B: (2.0, 2.0)},
    dispatch={Kind.F: (0.0, 0.0), Kind.B: (0.0, 0.0)},
    transfer=(0.5,),
    offload=(0.0, 0.0),
    offload_dispatch=(0.0, 0.0),
    before=10.0,
    after=(3.0, 4.0),
    after_dispatch=0.0,
    capacity=2.0,
)
NAIVE = Candidate(make("naive", 2, 1))


def costs(**changes):
    return dataclasses.replace(COSTS, **changes)


def handing(seconds):
    return dict.fromkeys((Kind.F, Kind.B), (seconds, seconds))


def test_a_step_is_what_comes_before_its_actions_its_transfers_and_what_follows_on_the_slowest_rank():
    # 0F0 1, to stage 1 0.5, 1F0 1, 1B0 2, back 0.5, 0B0 2; then rank 0 has 3 to do. Rank 1 began with its 4 before that, 2.5 ago.
    assert predict(NAIVE, COSTS) == 10 + 1 + 0.5 + 1 + 2 + 0.5 + 2 + 3
    assert predict(NAIVE, costs(after=(3.0, 7.0))) == 10 + 1 + 0.5 + 1 + 2 + 7
    assert parts(NAIVE, COSTS) == (3.0, 3.0, 0.0, 1.0, 0.0, 0.0, 13.0)
    assert alone(NAIVE, COSTS) == 10 + 6 + 7


def test_stages_of_one_rank_send_nothing_to_each_other():
    one = Candidate(make("interleaved", 1, 1, 2))
    assert predict(one, costs(transfer=(100.0,))) == 10 + 6 + 7


def test_one_process_hands_over_all_actions_and_several_their_own():
    slow = costs(dispatch=handing(5.0), after_dispatch=1.0)
    # 0F0 at 15, 1F0 at 20, 1B0 at 25, 0B0 at 30 until 32; the rest is handed over at 31.
    assert predict(NAIVE, slow) == pytest.approx(35.0)
    # Each process: F at 15, B at 20: 0F0 15-16, 1F0 16.5-17.5, 1B0 20-22, 0B0 22.5-24.5.
    assert predict(NAIVE, slow, processes=(0, 1)) == pytest.approx(27.5)
    assert parts(NAIVE, slow).dispatch == pytest.approx(32 - 17)


def test_copies_to_the_host_are_waited_for_and_handed_over_too():
    candidate = Candidate(make("gpipe", 1, 4), "offload")
    plain = costs(actions={Kind.F: (1.0,), Kind.B: (2.0,)}, transfer=(), after=(0.0,), offload=(0.5,), offload_dispatch=(0.0,))
    plain = dataclasses.replace(plain, dispatch=dict.fromkeys((Kind.F, Kind.B), (0.0,)))
    assert predict(candidate, plain) == 10 + 12
    # 0F0 and 0F1 leave; 0F1 comes back beside 0B2 and 0F0 beside 0B1, each 1 later than the action beside it takes.
    slow = dataclasses.replace(plain, offload=(3.0,))
    assert predict(candidate, slow) > 22 and parts(candidate, slow).copies == predict(candidate, slow) - 22
    assert predict(candidate, dataclasses.replace(plain, offload_dispatch=(100.0,))) > 200
    assert predict(Candidate(candidate.schedule), slow) == 22


def test_ranks_that_share_a_core_do_what_follows_at_half_speed():
    # 1B0 ends at 14.5 and 0B0 at 17: rank 1 has 1.5 of its 4 left when rank 0 joins it with 3, so for 3 both go at half speed.
    assert predict(NAIVE, costs(capacity=1.0)) == pytest.approx(17 + 3 + 1.5)


def test_b_takes_i_and_w_where_it_was_not_measured():
    split = costs(actions={Kind.F: (1.0, 1.0), Kind.I: (1.5, 1.5), Kind.W: (0.5, 0.5)})
    split = dataclasses.replace(split, dispatch=dict.fromkeys((Kind.F, Kind.I, Kind.W), (0.0, 0.0)))
    assert predict(NAIVE, split) == predict(NAIVE, COSTS)


def test_the_estimate_of_a_family_scales_with_its_microbatches_and_stages():
    machine = Virtual()
    known = Family(4, 8, "least", "flops", False)
    costs = machine.costs(known)
    for wanted in (
        Family(4, 2, "least", "flops", False),
        Family(8, 16, "least", "flops", True),
        Family(4, 8, "recompute", "flops", True),
    ):
        guess, true = estimate(wanted, known, costs, 4), machine.costs(wanted)
        assert {kind: pytest.approx(times) for kind, times in true.actions.items()} == guess.actions
        assert guess.dispatch == {kind: pytest.approx(times) for kind, times in true.dispatch.items()}
        assert sum(guess.after) == pytest.approx(sum(true.after)) and guess.before == true.before
        assert len(guess.transfer) == wanted.num_stages - 1
    others = [known, Family(4, 16, "least", "flops", False), Family(8, 8, "least", "flops", True)]
    assert nearest(Family(4, 32, "least", "flops", False), others) == others[1]
    assert nearest(Family(4, 8, "least", "flops", True), others) == others[2]
