"""Which calls count as agreed."""

from jaxpp.engine.agreed import Agreed


def test_the_least_recently_used_shapes_are_forgotten_with_all_their_calls():
    agreed, calls = Agreed(2), {name: lambda: None for name in ("a", "b", "c", "d")}
    agreed.add(("update", None, "16"), calls["a"])
    agreed.add(("update", None, "8"), calls["b"])
    agreed.add(("grads", None, "16"), calls["c"])
    assert agreed.get(("update", None, "16")) is calls["a"]
    agreed.add(("update", None, "4"), calls["d"])
    assert agreed.get(("update", None, "8")) is None
    assert agreed.get(("update", None, "16")) is calls["a"]
    assert agreed.get(("grads", None, "16")) is calls["c"]
    agreed.forget()
    assert agreed.get(("update", None, "4")) is None
