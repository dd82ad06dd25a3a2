"""What proves that an engine serves what was published."""

from __future__ import annotations

from agentrl.inference.checksum import dtype_of_key
from agentrl.types.batch import Receipt, WeightsManifest
from agentrl.types.errors import EngineError


class ReceiptError(EngineError):
    """An engine serves something else than what was published."""


class ReceiptBook:
    """Compares receipts with the manifest, with those of like engines, and with the engine's last one.

    Checksums are compared by tensor name where both sides have the name. An engine that fuses or shards
    its tensors shares no names with the trainer; its receipt must then equal those of engines with the
    same names for the same version, and must differ from its own receipt for other weights. Only engines
    that passed the canary are a measure for others: else one with wrong weights that was first would
    have all the right ones set aside.
    """

    def __init__(self) -> None:
        self._by_layout: dict[frozenset[str], Receipt] = {}
        self._by_engine: dict[str, tuple[Receipt, dict[str, str]]] = {}

    def check(self, receipt: Receipt, manifest: WeightsManifest) -> None:
        """Compare a receipt with all that is known.

        Raises:
            ReceiptError: another version, or other content than the manifest's or a like engine's, or
                content that did not change although the weights did.
        """
        check_receipt(receipt, manifest)
        if not receipt.checksums:
            return
        like = self._by_layout.get(frozenset(receipt.checksums))
        if like is not None and like.version == receipt.version:
            _compare(receipt.checksums, like.checksums, f"engine {like.engine}'s")
        last = self._by_engine.get(receipt.engine)
        if last is not None and _is_unchanged(receipt, *last, manifest):
            raise ReceiptError(f"still serves the weights of version {last[0].version}, called {receipt.version}")

    def enter(self, receipt: Receipt, manifest: WeightsManifest) -> None:
        """Let the receipt of an engine that has passed the canary be a measure for others.

        Raises:
            ReceiptError: a like engine's has come in between, and differs.
        """
        if receipt.checksums:
            self.check(receipt, manifest)
            self._by_layout[frozenset(receipt.checksums)] = receipt
            self._by_engine[receipt.engine] = (receipt, manifest.checksums)


def check_receipt(receipt: Receipt, manifest: WeightsManifest) -> None:
    """Compare what an engine serves with what was staged. Raises ReceiptError."""
    if receipt.version != manifest.version:
        raise ReceiptError(f"serves version {receipt.version} instead of {manifest.version}")
    _compare(receipt.checksums, manifest.checksums, "the published ones")


def _compare(served: dict[str, str], wanted: dict[str, str], whose: str) -> None:
    common = served.keys() & wanted.keys()
    wrong = sorted(name for name in common if served[name] != wanted[name])
    if wrong:
        raise ReceiptError(f"{len(wrong)} of {len(common)} tensors differ from {whose}, such as {wrong[0]}")


def _is_unchanged(receipt: Receipt, last: Receipt, published: dict[str, str], manifest: WeightsManifest) -> bool:
    """Whether the served content is that of other weights; unknown contents say nothing.

    A small step may change float32 weights and none of them in the engine's narrower dtype.
    """
    dtype = dtype_of_key(next(iter(receipt.checksums)))
    before, now = (
        {name: digest for name, digest in sums.items() if dtype_of_key(name) == dtype}
        for sums in (published, manifest.checksums)
    )
    return bool(before) and bool(now) and before != now and receipt.checksums == last.checksums
