"""Runs as jobs of a cluster's own system: Ray Jobs, Slurm, KubeRay on Kubernetes.

`job.py` has the records and the seam, `config.py` the table [job] of a recipe, one file each a system. `submission.py`
makes a job of a recipe; it is the command ``agentrl train RECIPE --resume``, so that starting it once more after a
pre-emption goes on with the run. Which jobs are ours is written in the systems themselves, as a mark; there is no list
of jobs beside theirs.
"""
