from __future__ import annotations

import base64
import collections
import inspect
import io
import os
import pickle
import random
import struct
import subprocess
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from agentrl.engine.request import BadRequestError
from agentrl.engine.unpickler import DTYPES, load_bucket, load_named_tensors
from agentrl.weights.payloads import shared_payload
from tests.integration.flattened import flatten_by_values


def _encoded(value: Any, protocol: int | None = None) -> str:
    return base64.b64encode(pickle.dumps(value, protocol)).decode()


class _Reduced:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("dtype", DTYPES.values())
def test_plain_tensors_arrive_as_they_were(dtype: torch.dtype, protocol: int) -> None:
    a, b = (100 * torch.randn(3, 4)).to(dtype), (100 * torch.randn(6, 2)).to(dtype)
    tensors = {"a": a, "b": b[::2].T, "c": b[1:], "none": a[:0], "one": a[0, 0]}
    read = load_named_tensors(_encoded(list(tensors.items()), protocol))
    assert read.keys() == tensors.keys()
    assert all(read[name].dtype == dtype and read[name].equal(tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (os.system, ("touch {path}",)),
        (subprocess.check_call, (["touch", "{path}"],)),
        (eval, ("open('{path}', 'w')",)),
        (exec, ("open('{path}', 'w')",)),
        (getattr, (os, "system")),
        (open, ("{path}", "w")),
        (torch.load, ("{path}",)),
        (collections.namedtuple, ("A", "b")),
    ],
)
def test_no_payload_runs_anything(function: Any, arguments: tuple[Any, ...], tmp_path: Any) -> None:
    path = str(tmp_path / "touched")
    filled = [a.replace("{path}", path) if isinstance(a, str) else a for a in arguments]
    filled = [[part.replace("{path}", path) for part in a] if isinstance(a, list) else a for a in filled]
    try:
        payload = _encoded([("a", _Reduced(function, *filled))])
    except TypeError:
        payload = base64.b64encode(b"cbuiltins\ngetattr\n.").decode()
    with pytest.raises(BadRequestError, match="only plain tensors are read"):
        load_named_tensors(payload)
    assert not (tmp_path / "touched").exists()


def test_code_hidden_in_a_storage_does_not_run_either(tmp_path: Any) -> None:
    for data in (
        pickle.dumps(_Reduced(os.system, f"touch {tmp_path / 'touched'}"), protocol=2),
        _saved(_Reduced(os.system, f"touch {tmp_path / 'touched'}")),
    ):
        with pytest.raises(BadRequestError, match=r"cannot be read|only plain tensors"):
            load_named_tensors(_encoded([("a", _Reduced(torch.storage._load_from_bytes, data))]))
    assert not (tmp_path / "touched").exists()


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_an_attribute_of_an_allowed_global_is_not_reached() -> None:
    payload = base64.b64encode(b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.__init__\x93.").decode()
    with pytest.raises(BadRequestError, match=r"collections\.OrderedDict\.__init__"):
        load_named_tensors(payload)


def test_a_tensor_that_no_memory_holds_is_refused() -> None:
    storage = torch.zeros(4).untyped_storage()
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
    rebuilt = _Reduced(torch._utils._rebuild_tensor_v2, typed, 0, (2**50,), (1,), False, collections.OrderedDict())
    with pytest.raises(BadRequestError):
        load_named_tensors(_encoded([("a", rebuilt)]))


def test_a_tensor_that_only_names_its_size_takes_no_memory() -> None:
    for function in (torch.Tensor, torch.FloatStorage, torch.UntypedStorage):
        with pytest.raises(BadRequestError, match="only plain tensors"):
            load_named_tensors(_encoded([("a", _Reduced(function, (300_000_000,)))]))


def test_a_storage_that_announces_more_than_it_brings_takes_no_memory() -> None:
    data = bytearray(_stored(torch.zeros(4)))
    data[-24:-16] = struct.pack("<q", 2**40)
    with pytest.raises(BadRequestError, match="of 1099511627776 values comes with 16 bytes"):
        load_named_tensors(_encoded([("a", _Reduced(torch.storage._load_from_bytes, bytes(data)))]))


def test_bytes_that_are_named_again_and_again_are_not_copied_each_time() -> None:
    data = _stored(torch.zeros(1000))
    storages = [_Reduced(torch.storage._load_from_bytes, data) for _ in range(3)]
    with pytest.raises(BadRequestError, match="same bytes"):
        load_named_tensors(_encoded(storages))


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [(0, (128,), (1,)), (0, (128,), (0,)), (1, (1,), (1,)), (0, (-1,), (1,)), (-1, (1,), (1,)), (0, (1.0,), (1,))],
)
@pytest.mark.parametrize("function", ["rebuild_tensor", "_rebuild_tensor_v2"])
def test_a_tensor_has_no_values_that_its_storage_lacks(function: str, offset: int, size: Any, stride: Any) -> None:
    one = _Reduced(torch.storage._load_from_bytes, _stored(torch.ones(1)))
    if function == "rebuild_tensor":
        tensor = _Reduced(reductions.rebuild_tensor, torch.Tensor, one, (offset, size, stride, False))
    else:
        tensor = _Reduced(torch._utils._rebuild_tensor_v2, one, offset, size, stride, False, {})
    with pytest.raises(BadRequestError, match=r"reaches beyond|by integers"):
        load_named_tensors(_encoded([("a", tensor)]))


def test_shared_memory_is_not_read_beyond_its_end() -> None:
    payload = base64.b64decode(shared_payload([("a", torch.ones(3))]))
    longer = payload.replace(b"K\x0ct", b"M\x00\x10t")
    assert len(longer) == len(payload) + 1
    frame = struct.pack("<Q", struct.unpack("<Q", longer[3:11])[0] + 1)
    with pytest.raises(BadRequestError, match=r"maps 4096 bytes of .*, which has 12"):
        load_named_tensors(base64.b64encode(longer[:3] + frame + longer[11:]).decode())


def _set_of(module: str, name: str) -> str:
    """A payload that sets attributes of a global, by the instruction that sets an object's."""
    state = pickle.dumps((None, {"nbytes": None, "__defaults__": (), "_new_shared_filename_cpu": None}), 4)[2:-1]
    return base64.b64encode(b"\x80\x04c%s\n%s\n%sb." % (module.encode(), name.encode(), state)).decode()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.storage", "UntypedStorage"),
        ("torch.storage", "TypedStorage"),
        ("torch.storage", "_load_from_bytes"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch.multiprocessing.reductions", "rebuild_tensor"),
        ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
        ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"),
        ("torch", "Size"),
        ("torch", "float32"),
    ],
)
def test_no_payload_changes_what_the_next_one_is_read_with(module: str, name: str) -> None:
    for load in (load_named_tensors, load_bucket):
        with pytest.raises(BadRequestError):
            load(_set_of(module, name))
    pairs = [("a", torch.ones(2, 3)), ("b", torch.ones(2).bfloat16())]
    assert load_named_tensors(_encoded(pairs))["a"].sum() == 6
    assert load_named_tensors(shared_payload(pairs))["a"].sum() == 6
    assert load_bucket(flatten_by_values(pairs))["b"].sum() == 2


def _stored(tensor: torch.Tensor) -> bytes:
    """A storage as torch writes it inside of a pickle."""
    data: bytes = tensor._typed_storage().__reduce__()[1][0]
    return data


@pytest.mark.parametrize(
    "payload",
    ["", "é", "####", base64.b64encode(b"not a pickle").decode(), _encoded(7), _encoded([1, 2]), _encoded([("a",)])],
)
def test_what_is_no_list_of_pairs_is_refused(payload: str) -> None:
    with pytest.raises(BadRequestError, match="cannot be read"):
        load_named_tensors(payload)


@pytest.mark.parametrize("pairs", [[(1, torch.zeros(1))], [("a", 1.0)], [("a", torch.nn.Module)]])
def test_pairs_of_anything_else_are_refused(pairs: Any) -> None:
    with pytest.raises(BadRequestError):
        load_named_tensors(_encoded(pairs))


CUDA_TENSOR = {
    "tensor_cls": torch.Tensor,
    "tensor_size": torch.Size([2, 3]),
    "tensor_stride": (3, 1),
    "tensor_offset": 0,
    "storage_cls": torch.storage.TypedStorage,
    "dtype": torch.bfloat16,
    "storage_device": 0,
    "storage_handle": b"c" * 66,
    "storage_size_bytes": 12,
    "storage_offset_bytes": 512,
    "requires_grad": False,
    "ref_counter_handle": b"/torch_4711_123456_0",
    "ref_counter_offset": 7,
    "event_handle": b"e" * 64,
    "event_sync_required": True,
}


def _of_cuda(**changes: Any) -> str:
    """A payload as torch's reduction of a CUDA tensor writes it, with some of its arguments changed."""
    assert [*CUDA_TENSOR] == [*inspect.signature(reductions.rebuild_cuda_tensor).parameters]
    return _encoded([("a", _Reduced(reductions.rebuild_cuda_tensor, *(CUDA_TENSOR | changes).values()))])


def test_a_cuda_tensor_gets_to_torch_with_what_its_reduction_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def open_shared(*arguments: Any) -> Any:
        opened.extend(arguments)
        return torch.arange(6.0).bfloat16()._typed_storage()

    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.storage.TypedStorage, "_new_shared_cuda", open_shared)
    read = load_named_tensors(_of_cuda())
    assert read["a"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert opened == [0, b"c" * 66, 12, 512, b"/torch_4711_123456_0", 7, b"e" * 64, True]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ref_counter_handle": b"/someone_elses_memory"}, "no count of torch"),
        ({"ref_counter_handle": b"/torch_1_2_3/../../etc"}, "no count of torch"),
        ({"ref_counter_offset": 10_000}, "no count of torch"),
        ({"ref_counter_offset": -1}, "no count of torch"),
        ({"tensor_size": torch.Size([2, 4])}, "reaches beyond its 6 values"),
        ({"tensor_offset": 1}, "reaches beyond its 6 values"),
        ({"tensor_stride": (-3, 1)}, "reaches beyond its 6 values"),
        ({"ref_counter_handle": None}, "cannot be read"),
    ],
)
def test_a_cuda_tensor_that_counts_or_reaches_where_it_must_not_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        load_named_tensors(_of_cuda(**changes))


def test_a_cuda_tensor_is_refused_in_words_where_there_is_no_cuda() -> None:
    if torch.cuda.is_available():
        return
    with pytest.raises(BadRequestError, match=r"cannot be read: .*CUDA"):
        load_named_tensors(_of_cuda())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_payloads_are_refused_or_read_but_never_crash() -> None:
    good = pickle.dumps([("a", torch.zeros(4, 4)), ("b", torch.zeros(3).bfloat16())])
    chance = random.Random(0)
    refused = 0
    for _ in range(1500):
        data = bytearray(good)
        for _ in range(chance.choice([1, 1, 2, 5])):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            load_named_tensors(base64.b64encode(data).decode())
        except BadRequestError:
            refused += 1
    assert refused > 1000
