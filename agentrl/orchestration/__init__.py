"""The loops that make a run of the components: training, evaluation, warm start, resume."""
