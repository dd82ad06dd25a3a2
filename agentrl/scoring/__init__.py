"""The scoring tier: judges turns while the agent still acts, with a pool of its own for each scorer.

**The way of a turn.** A worker puts a reply on record and tells the run (`TurnPlayed`). `feed.py` makes of it what
scorers see, `queue.py` puts it in the line of each scorer of its environment, gathers batches, and gives them to
workers (`workers.py`): tasks of the run's event loop for scorers that wait for servers, processes for those that
compute (`process.py`). Nobody waits for that but the episode itself, at its end (`tier.py`): its place is free by then.

**What holds.** A score joins the turn whose episode, agent, number and tokens it names, and no other. A turn has one
score by each scorer; the first that came counts. Each is on record before anybody hears of it, so that a resumed run
asks for no turn twice. What a scorer did not say is absent, with a reason, and never 0. A turn is sent to a scorer
once: what becomes of a batch that was sent is either an answer or a failure of its turns; only what was never sent is
sent again. Turns whose episode needs them no more leave the line, and while a line is too long no episode begins; so
memory is bounded however slow a scorer is.

**Failures.** Whether an episode without all scores waits, is dropped, or counts by its outcome alone is declared by its
scorer (`late` in `agentrl.scorers.definition`). A score of one version may stand beside one of another in an episode:
each state is judged once, which is all that potential-based credit needs.
"""
