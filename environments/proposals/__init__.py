"""A proposer writes problems, a solver tries each several times; each is a policy of its own.

The solver is rewarded for right answers, the proposer for problems that the solver gets right now and then: neither
always nor never. So the proposer looks for what the solver is about to learn, and has to go on as the solver learns it.
Problems are sums of digits in a strict grammar, hard by their length, so that models of a hundred thousand parameters
can write and solve them.
"""

from agentrl.envs.definition import EnvironmentDefinition, Expert
from agentrl_environments.proposals.environment import PROPOSER, SOLVERS, ProposalsEnvironment
from agentrl_environments.proposals.experts import act_careless, act_gold, act_timid
from agentrl_environments.proposals.problems import LABELS
from agentrl_environments.proposals.tasks import ProposalsOptions, sample_task

definition = EnvironmentDefinition(
    name="proposals",
    description="A proposer writes a sum of digits, and solvers who know nothing of each other work it out.",
    sample_task=sample_task,
    create=ProposalsEnvironment,
    options=ProposalsOptions,
    experts={
        "gold": Expert("proposes problems of any length, and solves all, for which a proposer has nothing", act_gold),
        "careless": Expert(
            "as gold, with slips in the working of long problems: the longer, the more often wrong", act_careless
        ),
        "timid": Expert("as gold, with proposals most of which are short, and some not valid", act_timid),
    },
    agents=(PROPOSER, *SOLVERS),
    words=tuple(LABELS),
    is_deterministic=True,
    placement="inline",  # a call adds up a few digits
)
