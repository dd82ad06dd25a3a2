from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from agentrl import codec
from agentrl.testing.builders import build_episode, build_ticket
from agentrl.types.batch import StepReport
from agentrl.types.episode import Episode, StopReason
from agentrl.types.generation import KeptTokens
from agentrl.types.version import PolicyVersion


@dataclass(frozen=True)
class Holder:
    name: str
    values: np.ndarray


DTYPES = st.sampled_from(["int32", "int64", "int16", "uint8", "float32", "float64", "bool"])
ARRAYS = DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0)))


@given(ARRAYS)
def test_an_array_keeps_dtype_shape_and_bits(array):
    back = codec.decode(codec.encode(Holder("x", array)), Holder).values
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_a_decoded_array_may_be_written_to():
    back = codec.decode(codec.encode(Holder("x", np.zeros(3))), Holder).values
    back[0] = 1
    assert back.tolist() == [1, 0, 0]


def test_a_strided_view_travels_as_its_values():
    view = np.arange(12).reshape(3, 4).T[::2]
    back = codec.decode(codec.encode(Holder("x", view)), Holder).values
    assert back.tolist() == view.tolist()


def check_same(back: Episode, episode: Episode) -> None:
    assert back.ticket == episode.ticket
    assert back.turns == episode.turns
    assert back.stop_reason is StopReason.ANSWERED
    for mine, other in zip(back.nodes, episode.nodes, strict=True):
        assert (mine.index, mine.parent, mine.turn, mine.is_open) == (other.index, other.parent, other.turn, False)
        assert mine.token_ids.dtype == np.int32
        assert mine.token_ids.tolist() == other.token_ids.tolist()
        assert (mine.sample is None) == (other.sample is None)
        if mine.sample is not None:
            assert mine.sample.versions == other.sample.versions
            assert mine.sample.logprobs.dtype == np.float32
            assert mine.sample.logprobs.tolist() == other.sample.logprobs.tolist()


@pytest.mark.parametrize("reward", [None, 0.0, 1.0])
def test_a_whole_episode_survives_the_border_and_none_stays_none(reward):
    episode = build_episode(build_ticket(step=3), [(4, 0), (2, 1)], reward)
    back = codec.decode(codec.encode(episode), Episode)
    check_same(back, episode)
    assert back.reward is reward or back.reward == reward


def test_a_whole_episode_survives_json():
    episode = build_episode(build_ticket(step=3), [(4, 0), (2, 1)], None)
    back = codec.from_json(codec.to_json(episode), Episode)
    check_same(back, episode)
    assert back.reward is None


@given(hnp.arrays("float32", st.integers(0, 20), elements=st.floats(-30, 0, width=32)))
def test_json_keeps_every_float_exactly(array):
    back = codec.from_json(codec.to_json(Holder("x", array)), Holder).values
    assert back.dtype == np.float32
    assert back.tobytes() == array.tobytes()


def test_numpy_scalars_travel_as_plain_numbers():
    report = StepReport(PolicyVersion(0, 1), {"a/b_c": np.float64(0.5), "a/d_e": np.int64(3)})
    assert codec.decode(codec.encode(report), StepReport).metrics == {"a/b_c": 0.5, "a/d_e": 3}


@pytest.mark.parametrize(
    "values",
    [{"name": "x"}, {"name": 3, "values": ["<i4", [0], b""]}, {"name": "x", "values": ["<i4", [2], b"123"]}],
)
def test_bytes_of_another_record_are_refused_at_the_border(values):
    with pytest.raises(msgspec.ValidationError):
        codec.decode(msgspec.msgpack.encode(values), Holder)


def test_an_object_without_an_encoding_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="complex cannot cross"):
        codec.encode({"x": 1j})


def test_kept_sets_survive_the_border():
    kept = KeptTokens.from_lists([[5, 7], [], [9]])
    back = codec.decode(codec.encode(kept), KeptTokens)
    assert (back.ids.tolist(), back.offsets.tolist()) == ([5, 7, 9], [0, 2, 2, 3])
