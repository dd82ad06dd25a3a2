from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.jobs.config import JobConfig, load_job_config
from agentrl.jobs.job import JobState, JobSystem, Mark, Members
from agentrl.jobs.submission import build_job, submit_job
from agentrl.orchestration.config import load_run_config
from agentrl.orchestration.run_directory import RunDirectory, RunState, RunStatus
from agentrl.process.place import Role
from agentrl.types.errors import ConfigError, JobError
from agentrl.types.version import PolicyVersion
from tests.unit.jobs.scripted_system import ScriptedSystem

RAY = ("runtime.kind=ray", "runtime.address=auto")


def test_a_job_is_the_command_that_trains_the_recipe_and_may_be_called_again(recipe, tmp_path):
    given = ["steps=5", "job.grace_s=9", "seed=3"]
    system: JobSystem = ScriptedSystem(RAY)
    spec = build_job(recipe, given, load_job_config(recipe, given), system)
    assert spec.argv == ("agentrl", "train", str(recipe), "steps=5", "seed=3", *RAY, "--resume")
    assert (spec.run, spec.run_folder) == ("t-seed3", tmp_path / "runs" / "t-seed3")
    assert (spec.working_folder, spec.grace_s) == (tmp_path, 9)


def test_where_a_job_starts_elsewhere_its_run_folder_is_there_and_its_model_need_not_be_here(recipe):
    system = ScriptedSystem(working_folder=Path("/shared"))
    spec = build_job(recipe, ["policies.main.model=models/none", "runs_folder=r"], JobConfig(), system)
    assert (spec.working_folder, spec.run_folder) == (Path("/shared"), Path("/shared/r/t-seed0"))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("steps=0", "override 'steps=0': steps: "),
        ("environment.name=nowhere", "nowhere"),
        ("scaffold.name=nowhere", "nowhere"),
        ("policies.main.model=none", "policies.main.model: "),
        ("policies.main.publish.transport.kind=tensors", "shares memory, and engines are on several hosts"),
    ],
)
def test_a_recipe_that_is_not_sound_is_refused_before_the_system_is_asked(recipe, override, says):
    with pytest.raises(ConfigError) as refused:
        build_job(recipe, [override], JobConfig(), ScriptedSystem(RAY))
    assert says in str(refused.value)


def test_a_run_with_a_job_that_is_not_over_gets_no_second_one(recipe):
    system = ScriptedSystem()
    spec = build_job(recipe, [], JobConfig(), system)
    submit_job(system, spec)
    for state in (JobState.QUEUED, JobState.RUNNING, JobState.STOPPING):
        system.states = [state]
        with pytest.raises(JobError, match=f"scripted:1, which is {state}: `agentrl jobs stop scripted:1`"):
            submit_job(system, spec)
    submit_job(system, build_job(recipe, ["seed=1"], JobConfig(), system))
    system.states = [JobState.STOPPED, JobState.FAILED]
    assert submit_job(system, spec).id == "scripted:3"


def test_a_run_that_has_finished_is_not_submitted(recipe):
    run = RunDirectory.create(load_run_config(recipe, []))
    run.mark()
    run.write_state(RunState(RunStatus.STOPPED, {"main": PolicyVersion(0, 1)}))
    build_job(recipe, ["job.grace_s=5"], JobConfig(), ScriptedSystem())
    run.write_state(RunState(RunStatus.FINISHED, {"main": PolicyVersion(0, 1)}))
    with pytest.raises(JobError, match=r"finished at version 0\.1, so there is nothing to submit"):
        build_job(recipe, [], JobConfig(), ScriptedSystem())


def test_a_run_folder_of_another_configuration_is_refused(recipe):
    RunDirectory.create(load_run_config(recipe, ["steps=7"])).mark()
    with pytest.raises(ConfigError, match="was started with another steps"):
        build_job(recipe, [], JobConfig(), ScriptedSystem())


def test_a_run_that_this_machine_plays_is_not_submitted(recipe):
    """By the claim of this very process."""
    from agentrl.journal.claim import Claim

    run = RunDirectory.create(load_run_config(recipe, []))
    run.mark()
    Claim.take(run.journal)
    with pytest.raises(JobError, match="is in use by process"):
        build_job(recipe, [], JobConfig(), ScriptedSystem())


def test_a_job_takes_what_its_roles_take_together(recipe):
    """By hand: engines 2 x (4 CPU, 1 GPU), one more for evaluation, ranks 2 x (8, 2), workers 3 x 2, one evaluator."""
    given = [
        "runtime.engines={cpus=4, gpus=1}",
        "runtime.trainer={cpus=8, gpus=2}",
        "runtime.workers={cpus=2, resources={seat=1}}",
        "runtime.elastic=true",
        "policies.main.engine={kind='embedded', count=2}",
        "policies.main.trainer.ranks=2",
        "rollout.workers=3",
    ]
    spec = build_job(recipe, given, JobConfig(), ScriptedSystem(RAY))
    assert {members.role: members for members in spec.members} == {
        Role.ENGINE: Members(Role.ENGINE, count=3, least=2, cpus=4, gpus=1),
        Role.TRAINER: Members(Role.TRAINER, count=2, least=2, cpus=8, gpus=2),
        Role.WORKER: Members(Role.WORKER, count=3, least=1, cpus=2, resources={"seat": 1}),
        Role.EVALUATOR: Members(Role.EVALUATOR, count=1, least=1),
    }
    assert (spec.cpus, spec.gpus) == (1 + 12 + 16 + 6 + 1, 3 + 4)


@pytest.mark.parametrize(
    ("given", "gpus"),
    [
        ([], 0),
        (["policies.main.trainer={device='cuda', ranks=2}"], 2),
        (["policies.main.engine={kind='sglang', devices=['0,1', '2,3', '4']}"], 5),
        (["policies.main.engine={kind='sglang', count=2, args={tp-size=2}}"], 4),
        (["policies.main.engine={kind='embedded', count=2, args={device='cuda'}}"], 2),
    ],
)
def test_a_job_on_one_machine_takes_the_gpus_that_its_recipe_names(recipe, given, gpus):
    assert build_job(recipe, given, JobConfig(), ScriptedSystem()).gpus == gpus


def test_a_wrong_key_of_the_table_job_is_refused_with_the_one_that_was_meant(recipe):
    recipe.write_text(recipe.read_text() + "[job]\ngrace = 3\n")
    with pytest.raises(ConfigError, match=r"unknown key 'job.grace'.*did you mean 'grace_s'"):
        load_job_config(recipe, [])
    assert load_run_config(recipe, []).name == "t"


def test_a_mark_is_read_as_it_was_written_and_others_are_not():
    mark = Mark("a.b-seed0", Path("/shared/with: colon/a.b-seed0"))
    assert Mark.read(mark.text()) == mark
    for other in ("", "agentrl", "agentrl:run", "agentrl::/x", "agentrl:run:x", "slurm:run:/x"):
        assert Mark.read(other) is None


def test_a_job_name_suits_every_system_and_is_of_one_run_folder():
    long = Mark("Ünder_Score.And-a-very-long-name-of-a-run-seed12345", Path("/a"))
    name = long.job_name(123)
    assert len(name) <= 47
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert name.startswith("agentrl-")
    assert long.job_name(1) != Mark(long.run, Path("/b")).job_name(1)
