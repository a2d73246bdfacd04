"""The means over the replicas that have the same parameters of their own, worked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp.runtime.replica_groups import Mean, ReplicaGroups
from jaxpp.stages.loss.microbatch import scale_dtype

HOME = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), P("data"))
GRADS = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], np.float32)
AVALS = (jax.ShapeDtypeStruct((2,), jnp.float32),)


def groups_of(*names):
    groups = ReplicaGroups()
    groups.set(names)
    return groups


def test_replicas_of_equal_names_are_a_group():
    assert groups_of("a", "b", "a", "c").current == ((0, 2), (1,), (3,))


def test_a_group_has_its_sum_over_its_share_of_the_replicas():
    (found,) = Mean(groups_of("a", "b", "a", "c"), (HOME,), AVALS)(jax.device_put(GRADS, HOME))
    together = (GRADS[0] + GRADS[2]) / 0.5
    np.testing.assert_array_equal(found, [together, GRADS[1] / 0.25, together, GRADS[3] / 0.25])
    assert found.sharding == HOME


def test_a_group_has_its_sum_where_losses_are_added_up():
    (found,) = Mean(groups_of("a", "b", "a", "c"), (HOME,), AVALS, summed=True)(jax.device_put(GRADS, HOME))
    together = GRADS[0] + GRADS[2]
    np.testing.assert_array_equal(found, [together, GRADS[1], together, GRADS[3]])


def test_where_replicas_weigh_differently_it_is_over_the_weight_of_the_group_and_zero_if_that_is_none():
    weights = jax.device_put(np.array([1.0, 0.0, 3.0, 2.0], scale_dtype()), HOME)
    (found,) = Mean(groups_of("a", "b", "a", "c"), (HOME, HOME), AVALS)(jax.device_put(GRADS, HOME), weights)
    together = (GRADS[0] + GRADS[2]) / 4
    np.testing.assert_array_equal(found, [together, [0, 0], together, GRADS[3] / 2])
