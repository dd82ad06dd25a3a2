"""SGLang's JSON for a generation, both ways, with the alignment checks of the replay contract."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.generation import FinishReason, Generation, GenerationRequest, KeptTokens, RoutedExperts
from agentrl.types.version import PolicyVersion, VersionSpan, spans_tile

ReadLabel = Callable[[str], PolicyVersion]


def generation_body(
    request: GenerationRequest, cache_name: str | None = None, adapter: str | None = None
) -> dict[str, Any]:
    """The body of ``POST /generate``; KV is shared only among requests of one `cache_name`."""
    sampling: dict[str, Any] = {
        "max_new_tokens": request.max_new_tokens,
        "temperature": request.sampling.temperature,
        "stop_token_ids": list(request.stop_token_ids),
        "sampling_seed": request.seed,
    }
    if request.sampling.top_k is not None:
        sampling["top_k"] = request.sampling.top_k
    if request.sampling.top_p < 1.0:
        sampling["top_p"] = request.sampling.top_p
    body: dict[str, Any] = {
        "rid": request.rid,
        "input_ids": request.prompt_ids,
        "sampling_params": sampling,
        "return_logprob": True,
    }
    if request.sampling.truncates:
        body["return_sampling_mask"] = True
    if cache_name is not None:
        body["extra_key"] = cache_name
    if adapter is not None:
        body["lora_path"] = adapter
    if request.sampling.routing is not None:
        body["return_routed_experts"] = True
        body["routed_experts_start_len"] = request.routed_start
    return body


def score_body(rid: str, token_ids: Sequence[int], adapter: str | None, start: int = 1) -> dict[str, Any]:
    """The body of ``POST /generate`` that asks for nothing but the log-probabilities of the prompt from `start` on."""
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": list(token_ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start - 1,  # of the first that it names a server may not say any
    }
    if adapter is not None:
        body["lora_path"] = adapter
    return body


def parse_scores(answer: dict[str, Any], token_ids: Sequence[int]) -> list[float]:
    """Log-probabilities of all but the first of the tokens of a prompt that were scored.

    SGLang names the last token of its vocabulary 0 here (it replaces every id that is not below vocabulary size - 1),
    so a 0 may stand for one other token, the highest that was sent.

    Raises:
        LookupError, TypeError, ValueError: they are no numbers, or not of these tokens.
    """
    entries = answer["meta_info"]["input_token_logprobs"]
    scored = [entry[1] for entry in entries]
    highest = max(token_ids, default=0)
    named = [0 if sent == highest and got == 0 else sent for sent, got in zip(token_ids, scored, strict=False)]
    if len(scored) != len(token_ids) or scored != named:
        raise ValueError(f"{len(token_ids)} tokens were sent, {len(scored)} scored, {_difference(scored, token_ids)}")
    return [float(entry[0]) for entry in entries[1:]]


def _difference(scored: Sequence[Any], sent: Sequence[int]) -> str:
    pairs = enumerate(zip(sent, scored, strict=False))
    places = [f"token {ours} at position {place} is {theirs!r}" for place, (ours, theirs) in pairs if ours != theirs]
    return "; ".join(places[:3]) or "alike as far as they go"


def parse_generation(
    answer: Any, request: GenerationRequest, keeps_kv: bool = False, read: ReadLabel = PolicyVersion.parse
) -> Generation:
    """What ``/generate`` answered.

    `keeps_kv` says that the engine's KV survives swaps of its weights; `read` gives the version in a label.

    Raises:
        EpisodeError: fields are missing or do not align with the tokens (boundary contract).
        AgentRLError: what `read` raises, of weights that are not this run's.
    """
    try:
        meta = answer["meta_info"]
        token_ids = np.asarray(answer["output_ids"], np.int32)
        finish = FinishReason(meta["finish_reason"]["type"])
        if meta.get("completion_tokens", len(token_ids)) != len(token_ids):
            raise ValueError(f"{len(token_ids)} output_ids of {meta['completion_tokens']} tokens")
        if not len(token_ids):
            return Generation(token_ids, np.zeros(0, np.float32), (), (), finish)
        if request.sampling.truncates:
            logprobs = meta["output_token_sampling_logprobs"]
            kept = KeptTokens.from_lists(meta["output_token_sampling_mask"])
        else:
            logprobs, kept = [entry[0] for entry in meta["output_token_logprobs"]], None
            if [entry[1] for entry in meta["output_token_logprobs"]] != answer["output_ids"]:
                raise ValueError(f"the {len(logprobs)} logprobs are not of the {len(token_ids)} output_ids")
        versions = _parse_versions(meta, request, len(token_ids), read, keeps_kv)
        generation = Generation(
            token_ids=token_ids,
            logprobs=np.asarray(logprobs, np.float32),
            versions=versions,
            kv_versions=_parse_kv_versions(meta, request, versions, read, keeps_kv),
            finish=finish,
            kept_tokens=kept,
            cached_tokens=int(meta.get("cached_tokens", 0)),
            routed_experts=_parse_routing(meta, request, len(token_ids)),
        )
        _check_alignment(generation)
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise EpisodeError(Boundary.CONTRACT, "engine.answer", f"{type(error).__name__}: {error}") from error
    return generation


def _parse_versions(
    meta: dict[str, Any], request: GenerationRequest, num_tokens: int, read: ReadLabel, keeps_kv: bool
) -> tuple[VersionSpan, ...]:
    """Version spans of the engine's own report.

    A server without spans names only the version at the end. The tokens lie between the version that the
    request expected and that one; the older is taken, so that they never pass for fresher than they are. Where
    requests go on over a swap, they may be of both, and nobody can tell which.
    """
    if "weight_versions" in meta:
        return _parse_spans(meta["weight_versions"], read)
    last = read(meta["weight_version"])
    first = min(last, request.expects or last)
    if keeps_kv and first != last:
        raise ValueError(
            f"the engine names one version, {last}, for tokens of {first} to {last}; swaps in place need an SGLang "
            "that reports weight_versions (0.5.19 or newer)"
        )
    return (VersionSpan(first, 0, num_tokens),)


def _parse_kv_versions(
    meta: dict[str, Any],
    request: GenerationRequest,
    versions: tuple[VersionSpan, ...],
    read: ReadLabel,
    keeps_kv: bool,
) -> tuple[VersionSpan, ...]:
    """KV version spans of the engine's own report, else the oldest weights that KV can be of.

    Where KV survives swaps, a server that reports none cannot say how much of the prompt it had read when a swap
    came, nor which weights wrote what it found in its cache. Both are at least as new as the version that the request
    expected, which also names its part of the cache: the KV is given that version, so that it never passes for fresher.

    Example: a request that expected 7, with spans 7 over [0, 40) and 8 over [40, 120), or 8 alone, has the KV version
    7 over [0, 120).
    """
    if "kv_versions" in meta:
        return _parse_spans(meta["kv_versions"], read)
    if not keeps_kv or not versions:
        return versions
    oldest = min(span.version for span in versions)
    return (VersionSpan(min(oldest, request.expects or oldest), 0, versions[-1].end),)


def _parse_spans(spans: list[dict[str, Any]], read: ReadLabel) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(read(s["version"]), s["start"], s["end"]) for s in spans)


def parse_checksums(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Digests by name. SGLang's are of a kind of their own, by rank, so their names must not be those of ours."""
    yield from answer.get("checksums", {}).items()
    for number, rank in enumerate(answer.get("ranks", [])):
        for name, digest in rank.get("checksums", {}).items():
            yield f"rank-{number}/{name}", digest


def parse_num_requests(answer: dict[str, Any]) -> int | None:
    """Requests that run or wait, of ``/model_info`` of the embedded engine or ``/v1/loads`` of SGLang; None of others.

    Example: ``{"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}]}`` gives 3.
    """
    try:
        if "num_running" in answer:
            return int(answer["num_running"]) + int(answer["num_waiting"])
        return sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in answer["loads"])
    except (LookupError, TypeError, ValueError):
        return None


def _parse_routing(meta: dict[str, Any], request: GenerationRequest, num_tokens: int) -> RoutedExperts | None:
    """The experts of positions from `routed_start` to the one before the last sampled token."""
    shape = request.sampling.routing
    if shape is None:
        return None
    if meta.get("routed_experts") is None:
        raise ValueError(
            "the engine reports no routed_experts; start it with --enable-return-routed-experts and a model of "
            "experts, or set rollout.sampling.routed_experts=false"
        )
    ids = np.frombuffer(base64.b64decode(meta["routed_experts"], validate=True), "<i4")
    rows = len(request.prompt_ids) + num_tokens - 1 - request.routed_start
    if len(ids) != rows * shape[0] * shape[1]:
        raise ValueError(f"{len(ids)} routed experts for {rows} positions of {shape[0]} layers of {shape[1]}")
    return RoutedExperts.narrow(request.routed_start, ids.reshape(rows, *shape))


def _check_alignment(generation: Generation) -> None:
    num_tokens = len(generation.token_ids)
    kept = generation.kept_tokens
    broken = (
        (len(generation.logprobs) != num_tokens and f"{len(generation.logprobs)} logprobs")
        or (not np.isfinite(generation.logprobs).all() and "a logprob that is not finite")
        or (not spans_tile(generation.versions, num_tokens) and f"version spans {generation.versions}")
        or (not spans_tile(generation.kv_versions, num_tokens) and f"KV version spans {generation.kv_versions}")
        or (kept is not None and len(kept) != num_tokens and f"{len(kept)} kept sets")
        or (kept is not None and not _holds_each(kept, generation.token_ids) and "a kept set without its token")
    )  # fmt: skip
    if broken:
        raise EpisodeError(Boundary.CONTRACT, "engine.answer", f"{broken} for {num_tokens} tokens")


def _holds_each(kept: KeptTokens, token_ids: np.ndarray) -> bool:
    """Whether each token is once in its own kept set."""
    owners = np.repeat(np.arange(len(token_ids)), np.diff(kept.offsets))
    hits = owners[kept.ids == token_ids[owners]]
    return np.array_equal(hits, np.arange(len(token_ids)))
