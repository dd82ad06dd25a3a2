"""Where servers of the native protocol differ: each trait is a row of the table in deploy/sglang-cpu/README.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerTraits:
    """What a server does in its own way; tests that must differ read it here."""

    reports_kv_versions: bool
    labels_tokens_in_its_queue_late: bool
    draws_by_seed: bool
    aborts_by_prefix: bool
    aborts_frozen_at_once: bool
    answers_health_while_paused: bool
    aborts_held_back: bool
    aborts_streamed_ids_late: bool
    ignores_stop_tokens_with_eos: bool
    refuses_before_loading: bool
    refuses_unknown_tensors: bool
    draws_several_samples: bool
    gives_support_logprobs: bool
    counts_interrupted: bool
    reads_flattened_buckets: bool
    reuses_cache_of_old_weights: bool
    lists_checksums_by_rank: bool
    survives_malformed_input: bool
    reloads_unloaded_adapters: bool
    refuses_adapters_that_do_not_fit: bool
    stages_weights: bool
    serves_half_updates: bool
    serves_tied_experts: bool
    wants_a_payload_for_each_shard: bool
    names_the_last_token_0_when_scoring: bool


EMBEDDED = ServerTraits(
    reports_kv_versions=True,
    labels_tokens_in_its_queue_late=False,
    draws_by_seed=True,
    aborts_by_prefix=False,
    aborts_frozen_at_once=True,
    answers_health_while_paused=True,
    aborts_held_back=True,
    aborts_streamed_ids_late=False,
    ignores_stop_tokens_with_eos=False,
    refuses_before_loading=True,
    refuses_unknown_tensors=True,
    draws_several_samples=False,
    gives_support_logprobs=False,
    counts_interrupted=True,
    reads_flattened_buckets=False,
    reuses_cache_of_old_weights=False,
    lists_checksums_by_rank=False,
    survives_malformed_input=True,
    reloads_unloaded_adapters=False,
    refuses_adapters_that_do_not_fit=True,
    stages_weights=True,
    serves_half_updates=False,
    serves_tied_experts=True,
    wants_a_payload_for_each_shard=False,
    names_the_last_token_0_when_scoring=False,
)
SGLANG = ServerTraits(
    reports_kv_versions=False,
    labels_tokens_in_its_queue_late=True,
    draws_by_seed=False,
    aborts_by_prefix=True,
    aborts_frozen_at_once=False,
    answers_health_while_paused=False,
    aborts_held_back=False,
    aborts_streamed_ids_late=True,
    ignores_stop_tokens_with_eos=True,
    refuses_before_loading=False,
    refuses_unknown_tensors=False,
    draws_several_samples=True,
    gives_support_logprobs=True,
    counts_interrupted=False,
    reads_flattened_buckets=True,
    reuses_cache_of_old_weights=True,
    lists_checksums_by_rank=True,
    survives_malformed_input=False,
    reloads_unloaded_adapters=True,
    refuses_adapters_that_do_not_fit=False,
    stages_weights=False,
    serves_half_updates=True,
    serves_tied_experts=False,
    wants_a_payload_for_each_shard=True,
    names_the_last_token_0_when_scoring=True,
)
