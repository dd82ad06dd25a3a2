"""SGLang's JSON for a generation, both ways, with the alignment checks of the replay contract."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson

from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.generation import FinishReason, Generation, GenerationRequest, KeptTokens, RoutedExperts
from agentrl.types.version import PolicyVersion, VersionSpan, spans_tile


def generation_body(request: GenerationRequest, cache_name: str | None = None, adapter: str | None = None) -> bytes:
    """The JSON body of ``POST /generate``; KV is shared only among requests of one `cache_name`."""
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
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def parse_generation(answer: Any, request: GenerationRequest, keeps_kv: bool = False) -> Generation:
    """What ``/generate`` answered; `keeps_kv` says that the engine's KV survives swaps of its weights.

    Raises:
        EpisodeError: fields are missing or do not align with the tokens (boundary contract).
    """
    try:
        meta = answer["meta_info"]
        token_ids = np.asarray(answer["output_ids"], np.int32)
        finish = FinishReason(meta["finish_reason"]["type"])
        if not len(token_ids):
            return Generation(token_ids, np.zeros(0, np.float32), (), (), finish)
        if request.sampling.truncates:
            logprobs = meta["output_token_sampling_logprobs"]
            kept = KeptTokens.from_lists(meta["output_token_sampling_mask"])
        else:
            logprobs, kept = [entry[0] for entry in meta["output_token_logprobs"]], None
            if [entry[1] for entry in meta["output_token_logprobs"]] != answer["output_ids"]:
                raise ValueError(f"the {len(logprobs)} logprobs are not of the {len(token_ids)} output_ids")
        versions = _parse_versions(meta, request, len(token_ids))
        generation = Generation(
            token_ids=token_ids,
            logprobs=np.asarray(logprobs, np.float32),
            versions=versions,
            kv_versions=_parse_kv_versions(meta, request, versions, keeps_kv),
            finish=finish,
            kept_tokens=kept,
            cached_tokens=int(meta.get("cached_tokens", 0)),
            routed_experts=_parse_routing(meta, request, len(token_ids)),
        )
        _check_alignment(generation)
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise EpisodeError(Boundary.CONTRACT, "engine.answer", f"{type(error).__name__}: {error}") from error
    return generation


def _parse_versions(meta: dict[str, Any], request: GenerationRequest, num_tokens: int) -> tuple[VersionSpan, ...]:
    """Version spans of the engine's own report.

    A server without spans names only the version at the end. The tokens lie between the version that the
    request expected and that one; the older is taken, so that they never pass for fresher than they are.
    """
    if "weight_versions" in meta:
        return _parse_spans(meta["weight_versions"])
    last = PolicyVersion.parse(meta["weight_version"])
    return (VersionSpan(min(last, request.expects or last), 0, num_tokens),)


def _parse_kv_versions(
    meta: dict[str, Any], request: GenerationRequest, versions: tuple[VersionSpan, ...], keeps_kv: bool
) -> tuple[VersionSpan, ...]:
    """KV version spans of the engine's own report, else the oldest weights that KV can be of.

    Where KV survives swaps, a request's own is as old as its oldest token. What it found in the cache is as old
    as the version that it expected, which names its part of the cache.

    Example: spans 7 over [0, 40) and 8 over [40, 120) have the KV version 7 over [0, 120).
    """
    if "kv_versions" in meta:
        return _parse_spans(meta["kv_versions"])
    if not keeps_kv or not versions:
        return versions
    oldest = min(span.version for span in versions)
    if request.expects is not None and int(meta.get("cached_tokens", 0)) > 0:
        oldest = min(oldest, request.expects)
    return (VersionSpan(oldest, 0, versions[-1].end),)


def _parse_spans(spans: list[dict[str, Any]]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(PolicyVersion.parse(s["version"]), s["start"], s["end"]) for s in spans)


def parse_checksums(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Digests by name. SGLang's are of a kind of their own, by rank, so their names must not be those of ours."""
    yield from answer.get("checksums", {}).items()
    for number, rank in enumerate(answer.get("ranks", [])):
        for name, digest in rank.get("checksums", {}).items():
            yield f"rank-{number}/{name}", digest


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
