from __future__ import annotations

import gc

from agentrl.process.heap import gc_frozen


def test_the_collector_passes_over_what_there_is_until_the_end_of_the_block() -> None:
    there = [object() for _ in range(3)]
    with gc_frozen():
        assert gc.get_freeze_count() > 0
        assert not any(kept is there for kept in gc.get_objects())
        later = [there]
        assert any(kept is later for kept in gc.get_objects())
    assert gc.get_freeze_count() == 0
    assert any(kept is there for kept in gc.get_objects())
