"""What is kept by shapes: what was used last."""

from jaxpp.runtime.lru import LRU


def test_the_least_recently_used_is_forgotten():
    kept, made = LRU[list](2), []
    assert not kept.put("a", ["a"]) and not kept.put("b", ["b"])
    assert kept.find("a") == ["a"], "the one used last"
    assert kept.put("c", ["c"])
    assert kept.find("b") is None and kept.find("a") and list(kept.values()) == [["c"], ["a"]]
    assert kept.get_or_make("a", list) == ["a"] and kept.get_or_make("d", lambda: made.append(1) or ["d"]) == ["d"]
    assert kept.find("c") is None and made == [1]
