"""agentrl trains language-model agents by reinforcement learning on whole multi-turn episodes."""

__version__ = "0.1.0"
