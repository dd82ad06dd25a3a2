"""What a run serves to Prometheus, read by Prometheus's own parser."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agentrl.telemetry.prometheus import PrometheusServer
from agentrl.telemetry.prometheus_names import FAMILIES, Sample, StepNumbers, samples_of
from agentrl.types.errors import ConfigError
from tests.metric_table import documented_metrics

TABLE = Path(__file__).parents[3] / "agentrl" / "telemetry" / "README.md"
ROW = re.compile(r"^\| `(agentrl_[a-z0-9_]+)` \| (counter|gauge) \| ([^|]*) \| [^|]+ \|$", re.MULTILINE)


async def page_of(samples: Iterable[Sample]) -> str:
    server = PrometheusServer("127.0.0.1", 0, lambda: samples)
    try:
        url = f"http://127.0.0.1:{server.port}/metrics"
        return (await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=20).read())).decode()
    finally:
        server.close()


async def test_every_name_that_is_served_is_documented_with_its_type_and_labels_and_no_other_is():
    samples = [Sample(family.name, tuple(f"a {label}" for label in family.labels), 1.0) for family in FAMILIES]
    served = set()
    for family in text_string_to_metric_families(await page_of(samples)):
        (sample,) = family.samples
        served.add((sample.name, family.type, ", ".join(sorted(sample.labels))))
    rows = ROW.findall(TABLE.read_text())
    assert served == {(name, kind, ", ".join(sorted(labels.split(", ")))) for name, kind, labels in rows}


async def test_a_family_without_a_value_is_served_by_its_name_alone():
    families = list(text_string_to_metric_families(await page_of([])))
    assert len(families) == len(FAMILIES)
    assert [family.samples for family in families] == [[]] * len(FAMILIES)


def test_every_source_is_a_name_of_the_table_of_metrics():
    """Of a pattern, what it stands for: an instance of it would be counted."""
    names = [re.sub(r"<[a-z]+>", "word", name) for row in documented_metrics() for name in row.split("`, `")]
    for family in FAMILIES:
        if family.source and "scorer/" not in family.source:
            found = [name for name in names if re.fullmatch(family.source, name)]
            assert found, f"{family.name} comes from {family.source}, which no run writes"


def test_of_several_policies_each_has_its_own_rows_and_sums_go_on():
    numbers = StepNumbers(["speaker", "listener"])
    numbers.write(1, {"speaker/time/step_s": 2.0, "speaker/trainer/loss": 0.5})
    numbers.write(2, {"speaker/time/step_s": 3.0, "speaker/trainer/loss": 0.25})
    numbers.write(1, {"listener/time/step_s": 7.0, "listener/eval/reward_mean": 0.9})
    found = {(sample.family, sample.labels): sample.value for sample in numbers.samples()}
    assert found == {
        ("agentrl_step_seconds_total", ("speaker",)): 5.0,
        ("agentrl_loss_nats", ("speaker",)): 0.25,
        ("agentrl_step_seconds_total", ("listener",)): 7.0,
        ("agentrl_eval_reward_mean", ("listener",)): 0.9,
    }
    assert (numbers.num_steps["speaker"], numbers.last_step["speaker"][0]) == (2, 2)


def test_words_in_a_name_become_labels():
    counted = {"requests/resent_fenced_total": 3.0, "engines/healthy": 2.0, "scorer/prm/not_sent_total": 1.0}
    assert list(samples_of(counted, "main")) == [
        Sample("agentrl_engines", ("main", "healthy"), 2.0),
        Sample("agentrl_requests_resent_total", ("main", "fenced"), 3.0),
        Sample("agentrl_scorer_turns_total", ("prm", "not_sent"), 1.0),
    ]


async def test_a_port_that_is_taken_is_named_with_the_remedy():
    first = PrometheusServer("127.0.0.1", 0, lambda: [])
    try:
        with pytest.raises(
            ConfigError, match=f"metrics_port {first.port} of 127.0.0.1 cannot be served.*choose another"
        ):
            PrometheusServer("127.0.0.1", first.port, lambda: [])
    finally:
        first.close()
