from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentrl.inference.adapters import Adapter, AdapterShelf, adapter_name
from agentrl.types.version import PolicyVersion


def _adapter(step: int) -> Adapter:
    version = PolicyVersion(0, step)
    return Adapter(adapter_name(version), version)


def test_a_generation_keeps_its_adapter_and_the_next_takes_the_newest() -> None:
    shelf = AdapterShelf()
    assert shelf.begin() is None
    assert shelf.put(_adapter(1)) is None
    first = shelf.begin()
    assert shelf.put(_adapter(2)) is None, "version 1 is in use"
    assert shelf.begin() == _adapter(2)
    assert first == _adapter(1)
    assert shelf.end(_adapter(1)), "its last generation is over"
    assert not shelf.end(_adapter(2)), "it is the newest"


@given(st.lists(st.sampled_from(["begin", "end", "put"]), max_size=60))
def test_every_adapter_is_unloaded_once_and_never_while_it_is_used_or_newest(actions: list[str]) -> None:
    shelf, step = AdapterShelf(), 0
    in_use: list[Adapter] = []
    unloaded: list[Adapter] = []
    for action in actions:
        gone = None
        if action == "put":
            step += 1
            gone = shelf.put(_adapter(step))
        elif action == "begin" and (adapter := shelf.begin()) is not None:
            assert adapter == _adapter(step)
            in_use.append(adapter)
        elif action == "end" and in_use:
            adapter = in_use.pop(0)
            gone = adapter if shelf.end(adapter) else None
        if gone is not None:
            assert gone not in in_use
            assert gone != shelf.newest
            unloaded.append(gone)
        expected = {_adapter(n) for n in range(1, step)} - set(in_use)
        assert set(unloaded) == expected
        assert len(unloaded) == len(expected)
