"""What an episode holds against what its engines delivered: tokens, versions and branches.

Nothing here is shared with what is judged: a reply is put together of deliveries by the prompts that these were asked
with, and the graph of an episode is read node by node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from agentrl.types.episode import Episode, Node
from agentrl.types.generation import Generation, GenerationRequest
from tests.storms.token_verdict import count_common


@dataclass(frozen=True)
class Delivery:
    """What one request was answered with: `versions` has a label for each token, `finish` is SGLang's word."""

    rid: str
    seed: int
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[str]
    finish: str

    @classmethod
    def of(cls, request: GenerationRequest, generation: Generation) -> Delivery:
        """What an engine in this process gave."""
        versions = [str(span.version) for span in generation.versions for _ in range(span.start, span.end)]
        return cls(
            request.rid,
            request.seed,
            request.prompt_ids.tolist(),
            generation.token_ids.tolist(),
            generation.logprobs.tolist(),
            versions,
            str(generation.finish),
        )


@dataclass(eq=False)
class Reply:
    """A whole reply as it was delivered, in one part or, after aborts, in several."""

    seed: int
    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    is_over: bool = False

    @property
    def prompt(self) -> bytes:
        return _key(self.prompt_ids)

    @property
    def whole(self) -> bytes:
        """The prompt and what was drawn behind it."""
        return _key(self.prompt_ids) + _key(self.token_ids)

    def add(self, part: Delivery) -> None:
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs
        self.versions += part.versions
        self.is_over = part.finish != "abort"


@dataclass
class Faults:
    """What was found: numbers of tokens, and for branches of replies that hang elsewhere and leaves that should not be.

    `notes` says of each what it is.
    """

    tokens_lost: int = 0
    tokens_twice: int = 0
    versions_wrong: int = 0
    logprobs_wrong: int = 0
    branches_wrong: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def tokens_wrong(self) -> int:
        return self.tokens_lost + self.tokens_twice + self.versions_wrong + self.logprobs_wrong

    def add(self, other: Faults) -> None:
        for name in ("tokens_lost", "tokens_twice", "versions_wrong", "logprobs_wrong", "branches_wrong"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.notes += other.notes


def check_episode(episode: Episode, deliveries: Iterable[Delivery]) -> Faults:
    """What is wrong with an episode, by all that was delivered for it, in the order in which it came."""
    faults, replies = Faults(), join(deliveries)
    graph = Graph(episode.nodes)
    pairs, nodes_left, replies_left = graph.paired(replies)
    for node, reply in pairs:
        _check_columns(node, reply, faults)
    for node in nodes_left:
        match = next((reply for reply in replies_left if reply.prompt == graph.before(node)), None)
        kept, given = node.token_ids.tolist(), match.token_ids if match else []
        common = count_common(given, kept)
        faults.tokens_twice += len(kept) - common
        if match is not None:
            faults.tokens_lost += len(given) - common
            replies_left.remove(match)
        faults.notes.append(f"{episode.episode_id}: node {node.index} has {len(kept)} tokens, {len(given)} were given")
    for reply in (reply for reply in replies_left if reply.token_ids):
        faults.tokens_lost += len(reply.token_ids)
        faults.notes.append(f"{episode.episode_id}: a reply of {len(reply.token_ids)} tokens has no node")
    _check_branches(graph, replies, faults)
    return faults


def join(deliveries: Iterable[Delivery]) -> list[Reply]:
    """The replies that the deliveries make: one that was aborted goes on with its seed and behind what it had."""
    replies: list[Reply] = []
    open_ones: dict[tuple[int, bytes], Reply] = {}
    for part in deliveries:
        reply = open_ones.pop((part.seed, _key(part.prompt_ids)), None)
        if reply is None:
            reply = Reply(part.seed, list(part.prompt_ids))
            replies.append(reply)
        reply.add(part)
        if not reply.is_over:
            open_ones[part.seed, reply.whole] = reply
    return replies


class Graph:
    """The nodes of an episode, each with the tokens on its path."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self._until: dict[int, bytes] = {}
        for node in nodes:
            self._until[node.index] = self.before(node) + _key(node.token_ids)
        parents = {node.parent for node in nodes}
        self.leaves = Counter(self._until[node.index] for node in nodes if node.index not in parents)

    @property
    def sampled(self) -> list[Node]:
        return [node for node in self.nodes if node.sample is not None]

    def before(self, node: Node) -> bytes:
        """The tokens on the path to a node, without its own."""
        return self._until[node.parent] if node.parent is not None else b""

    def until(self, node: Node) -> bytes:
        """The tokens on the path to a node and its own."""
        return self._until[node.index]

    def parent_reply(self, node: Node) -> Node | None:
        """The sampled node that a node stands behind; None at the root."""
        while node.parent is not None:
            node = self.nodes[node.parent]
            if node.sample is not None:
                return node
        return None

    def paired(self, replies: Sequence[Reply]) -> tuple[list[tuple[Node, Reply]], list[Node], list[Reply]]:
        """Nodes and replies of the same tokens behind the same ones, and what is left of both."""
        left: dict[tuple[bytes, bytes], list[Reply]] = {}
        for reply in replies:
            left.setdefault((reply.prompt, reply.whole), []).append(reply)
        pairs, nodes_left = [], []
        for node in self.sampled:
            same = left.get((self.before(node), self.until(node)), [])
            if same:
                # Of several that are alike in their tokens, the one by the same weights.
                same.sort(key=lambda reply: reply.versions != _labels(node))
                pairs.append((node, same.pop(0)))
            else:
                nodes_left.append(node)
        return pairs, nodes_left, [reply for rest in left.values() for reply in rest]

    def split_prompts(self) -> int:
        """Nodes that nobody drew and that say the same as one beside them."""
        places = Counter((node.parent, _key(node.token_ids)) for node in self.nodes if node.sample is None)
        return sum(number - 1 for number in places.values())


def _check_columns(node: Node, reply: Reply, faults: Faults) -> None:
    assert node.sample is not None
    labels = _labels(node)
    faults.versions_wrong += sum(ours != theirs for ours, theirs in zip(labels, reply.versions, strict=True))
    faults.logprobs_wrong += int((node.sample.logprobs != np.asarray(reply.logprobs, np.float32)).sum())
    if labels != reply.versions:
        faults.notes.append(f"node {node.index} names {sorted(set(labels))}, not {sorted(set(reply.versions))}")


def _check_branches(graph: Graph, replies: Sequence[Reply], faults: Faults) -> None:
    """Each reply must stand behind the longest other one that its prompt begins with, and end a branch if none does."""
    wholes = Counter(reply.whole for reply in replies if reply.token_ids)
    behind: Counter[bytes] = Counter()
    for node in graph.sampled:
        known = max((whole for whole in wholes if graph.before(node).startswith(whole)), key=len, default=None)
        found = graph.parent_reply(node)
        if known is not None:
            behind[known] += 1
        if known != (graph.until(found) if found is not None else None):
            faults.branches_wrong += 1
            faults.notes.append(f"node {node.index} does not stand behind the reply that its prompt holds")
    for whole in wholes | graph.leaves:
        # Of replies that are alike, some may be gone on behind and others not.
        least, most = wholes[whole] - behind[whole], wholes[whole] - min(behind[whole], 1)
        if not least <= graph.leaves[whole] <= most:
            faults.branches_wrong += 1
            faults.notes.append(f"{graph.leaves[whole]} branches end in the same tokens, not {least} to {most}")
    faults.branches_wrong += graph.split_prompts()


def _labels(node: Node) -> list[str]:
    assert node.sample is not None
    return [str(span.version) for span in node.sample.versions for _ in range(span.start, span.end)]


def _key(token_ids: Sequence[int] | np.ndarray) -> bytes:
    return np.asarray(token_ids, np.int32).tobytes()
