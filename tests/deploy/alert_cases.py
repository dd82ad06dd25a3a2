"""For each alert, samples that fire it and samples that do not, and what it says then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RUN = 'job="agentrl_run", instance="trainer:9464"'
MAIN = f'{RUN}, policy="main"'
PRM = f'{RUN}, scorer="prm"'
SERVER = 'job="agentrl_env", instance="environment:8100"'
OF_RUN = {"job": "agentrl_run", "instance": "trainer:9464"}
OF_MAIN = {**OF_RUN, "policy": "main"}
OF_SERVER = {"job": "agentrl_env", "instance": "environment:8100"}


@dataclass(frozen=True)
class Case:
    """Samples of one a minute, in promtool's notation, after which an alert fires with a summary, or does not."""

    alert: str
    series: dict[str, str]
    minute: int
    summary: str = ""
    labels: dict[str, str] | None = None

    @property
    def fires(self) -> bool:
        return self.labels is not None

    def group(self, rules: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """As promtool reads it."""
        rule = rules[self.alert]
        expected = {
            "exp_labels": {**rule["labels"], **(self.labels or {})},
            "exp_annotations": {**rule["annotations"], "summary": self.summary},
        }
        return {
            "name": f"{self.alert} {'fires' if self.fires else 'does not fire'}: {self.series}",
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in self.series.items()],
            "alert_rule_test": [
                {
                    "alertname": self.alert,
                    "eval_time": f"{self.minute}m",
                    "exp_alerts": [expected] if self.fires else [],
                }
            ],
        }


AT_BOUND = {
    f"agentrl_staleness_max_steps{{{MAIN}}}": "4+0x60",
    f"agentrl_staleness_bound_steps{{{MAIN}}}": "4+0x60",
}
GAP_BOUND = {f"agentrl_fresh_gap_bound_nats{{{MAIN}}}": "0.5+0x60"}


CASES = (
    Case(
        "AgentrlRunStalled",
        {f"agentrl_last_step_timestamp_seconds{{{MAIN}}}": "60+0x60"},
        40,
        "main on trainer:9464 has made no step for 39m 0s",
        OF_MAIN,
    ),
    Case("AgentrlRunStalled", {f"agentrl_last_step_timestamp_seconds{{{MAIN}}}": "60+0x20 1260+0x40"}, 40),
    Case(
        "AgentrlStalenessAtBound",
        {**AT_BOUND, f"agentrl_masked_ratio{{{MAIN}}}": "0.25+0x60"},
        20,
        "tokens of main on trainer:9464 are 4 steps old, as old as they may be, and more than a tenth of them is "
        "too old to be trained",
        OF_MAIN,
    ),
    Case("AgentrlStalenessAtBound", {**AT_BOUND, f"agentrl_masked_ratio{{{MAIN}}}": "0.25+0x10 0.02+0x20"}, 20),
    Case(
        "AgentrlTrainerEngineGap",
        {**GAP_BOUND, f"agentrl_fresh_gap_max_nats{{{MAIN}}}": "0.75+0x30"},
        15,
        "trainer and engines of main on trainer:9464 differ by 750m nats on tokens of the same weights, more than "
        "trainer.max_gap_nats allows",
        OF_MAIN,
    ),
    Case("AgentrlTrainerEngineGap", {**GAP_BOUND, f"agentrl_fresh_gap_max_nats{{{MAIN}}}": "0.4+0x30"}, 15),
    Case(
        "AgentrlEpisodesFail",
        {
            f'agentrl_episodes_total{{{MAIN}, outcome="failed"}}': "0+1x60",
            f'agentrl_episodes_total{{{MAIN}, outcome="answered"}}': "0+3x60",
        },
        45,
        "25% of the episodes of main on trainer:9464 fail",
        OF_MAIN,
    ),
    Case(
        "AgentrlEpisodesFail",
        {
            f'agentrl_episodes_total{{{MAIN}, outcome="failed"}}': "0+1x60",
            f'agentrl_episodes_total{{{MAIN}, outcome="answered"}}': "0+19x60",
        },
        45,
    ),
    Case(
        "AgentrlTokensDropped",
        {
            f'agentrl_sampled_tokens_total{{{RUN}, outcome="trained"}}': "0+600x90",
            f'agentrl_sampled_tokens_total{{{RUN}, outcome="dropped_failed"}}': "0+300x90",
            f'agentrl_sampled_tokens_total{{{RUN}, outcome="regenerated"}}': "0+100x90",
        },
        75,
        "40% of the tokens that trainer:9464 samples are never trained",
        OF_RUN,
    ),
    Case(
        "AgentrlTokensDropped",
        {
            f'agentrl_sampled_tokens_total{{{RUN}, outcome="trained"}}': "0+600x90",
            f'agentrl_sampled_tokens_total{{{RUN}, outcome="masked_stale"}}': "0+300x90",
            f'agentrl_sampled_tokens_total{{{RUN}, outcome="dropped_failed"}}': "0+100x90",
        },
        75,
    ),
    Case(
        "AgentrlEnginesUnhealthy",
        {
            f'agentrl_engines{{{MAIN}, state="healthy"}}': "3+0x30",
            f'agentrl_engines{{{MAIN}, state="suspect"}}': "0+0x30",
            f'agentrl_engines{{{MAIN}, state="dead"}}': "1+0x30",
        },
        10,
        "1 engines of main on trainer:9464 do not serve",
        OF_MAIN,
    ),
    Case(
        "AgentrlEnginesUnhealthy",
        {
            f'agentrl_engines{{{MAIN}, state="healthy"}}': "3+0x30",
            f'agentrl_engines{{{MAIN}, state="starting"}}': "1+0x30",
            f'agentrl_engines{{{MAIN}, state="dead"}}': "0+0x4 1 0+0x20",
        },
        10,
    ),
    Case(
        "AgentrlNoEngineServes",
        {f'agentrl_engines{{{MAIN}, state="healthy"}}': "0+0x30"},
        10,
        "no engine of main on trainer:9464 serves",
        OF_MAIN,
    ),
    Case("AgentrlNoEngineServes", {f'agentrl_engines{{{MAIN}, state="healthy"}}': "1+0x30"}, 10),
    Case(
        "AgentrlProcessesRestart",
        {
            f"agentrl_engine_restarts_total{{{MAIN}}}": "0+0x20 2+0x60",
            f"agentrl_worker_restarts_total{{{RUN}}}": "0+0x40 2+0x60",
        },
        59,
        "4 engines and rollout workers of trainer:9464 were replaced within an hour",
        OF_RUN,
    ),
    Case(
        "AgentrlProcessesRestart",
        {
            f"agentrl_engine_restarts_total{{{MAIN}}}": "0+0x20 1+0x60",
            f"agentrl_worker_restarts_total{{{RUN}}}": "7+0x80",
        },
        59,
    ),
    Case(
        "AgentrlEpisodesGivenUp",
        {f"agentrl_episodes_given_up_total{{{RUN}}}": "0+0x20 1+0x60"},
        30,
        "episodes of trainer:9464 were given up, since each cost rollout.max_attempts workers",
        OF_RUN,
    ),
    Case("AgentrlEpisodesGivenUp", {f"agentrl_episodes_given_up_total{{{RUN}}}": "0+0x5 1+0x60"}, 50),
    Case(
        "AgentrlWeightsRefused",
        {
            f"agentrl_publish_refused_receipts_total{{{MAIN}}}": "0+0x20 1+0x60",
            f"agentrl_engine_distrusted_total{{{MAIN}}}": "0+0x60",
        },
        30,
        "an engine of main on trainer:9464 held other weights than it was given",
        OF_MAIN,
    ),
    Case(
        "AgentrlWeightsRefused",
        {
            f"agentrl_publish_refused_receipts_total{{{MAIN}}}": "1+0x60",
            f"agentrl_engine_distrusted_total{{{MAIN}}}": "0+0x60",
        },
        30,
    ),
    Case(
        "AgentrlScorerLate",
        {
            f"agentrl_scorer_deadline_misses_total{{{PRM}}}": "0+1x60",
            f'agentrl_episodes_total{{{MAIN}, outcome="answered"}}': "0+10x60",
        },
        45,
        "prm on trainer:9464 misses its deadline for 10% of the episodes",
        {**OF_RUN, "scorer": "prm"},
    ),
    Case(
        "AgentrlScorerLate",
        {
            f"agentrl_scorer_deadline_misses_total{{{PRM}}}": "0+1x60",
            f'agentrl_episodes_total{{{MAIN}, outcome="answered"}}': "0+40x60",
        },
        45,
    ),
    Case(
        "AgentrlDiskNearlyFull",
        {f"agentrl_disk_free_bytes{{{RUN}}}": "5e9+0x30", f"agentrl_disk_size_bytes{{{RUN}}}": "100e9+0x30"},
        10,
        "5% of the disk of the run on trainer:9464 is free",
        OF_RUN,
    ),
    Case(
        "AgentrlDiskNearlyFull",
        {f"agentrl_disk_free_bytes{{{RUN}}}": "20e9+0x30", f"agentrl_disk_size_bytes{{{RUN}}}": "100e9+0x30"},
        10,
    ),
    Case(
        "AgentrlEnvironmentServerDown",
        {f"up{{{SERVER}}}": "1+0x5 0+0x20"},
        10,
        "the environment server environment:8100 does not answer",
        OF_SERVER,
    ),
    Case("AgentrlEnvironmentServerDown", {f"up{{{SERVER}}}": "1+0x5 0 1+0x20", f"up{{{RUN}}}": "0+0x30"}, 10),
    Case(
        "AgentrlEnvironmentServerSaturated",
        {f"agentrl_env_free{{{SERVER}}}": "0+0x30", f"agentrl_env_refused_total{{{SERVER}}}": "0+0x30"},
        10,
        "the environment server environment:8100 takes no more sessions",
        OF_SERVER,
    ),
    Case(
        "AgentrlEnvironmentServerSaturated",
        {f"agentrl_env_free{{{SERVER}}}": "12+0x30", f"agentrl_env_refused_total{{{SERVER}}}": "5+0x30"},
        10,
    ),
    Case(
        "AgentrlEnvironmentsBreak",
        {
            f"agentrl_env_failed_opens_total{{{SERVER}}}": "0+0x20 1+0x20",
            f"agentrl_env_lost_total{{{SERVER}}}": "0+0x40",
            f"agentrl_env_restarts_total{{{SERVER}}}": "0+0x40",
        },
        25,
        "the environment server environment:8100 cannot make environments, or its processes die",
        OF_SERVER,
    ),
    Case(
        "AgentrlEnvironmentsBreak",
        {
            f"agentrl_env_failed_opens_total{{{SERVER}}}": "2+0x40",
            f"agentrl_env_lost_total{{{SERVER}}}": "0+0x40",
            f"agentrl_env_restarts_total{{{SERVER}}}": "0+0x40",
        },
        25,
    ),
)
