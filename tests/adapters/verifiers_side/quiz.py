"""A taskset of eight quizzes, and the environment that asks: three questions each, whatever is answered."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["QuizEnv", "QuizTaskset"]

TASKS, QUESTIONS = 8, 3


class QuizTask(vf.Task[vf.TaskData]):
    """Rewards that all questions were heard, whatever was said."""

    @vf.reward(weight=0.5)
    async def heard_all(self, trace: vf.Trace) -> float:
        return float(trace.num_turns == QUESTIONS)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(sum(len(node.message.content or "") for node in trace.nodes if node.sampled))


class QuizTaskset(vf.Taskset[QuizTask, vf.TasksetConfig]):
    """Tasks that differ in their number."""

    def load(self):
        for number in range(TASKS):
            yield QuizTask(vf.TaskData(name=f"quiz {number}"), self.config.task)


class QuizEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class QuizEnv(vf.Env[QuizEnvConfig]):
    """Asks one question behind the answer to the one before."""

    async def run(self, task: QuizTask, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as interaction:
            for number in range(QUESTIONS):
                await interaction.turn(f"{task.data.name}, question {number}: what is {number} and {number}?")
