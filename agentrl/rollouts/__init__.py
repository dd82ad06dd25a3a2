"""The activity of producing episodes: sessions, scaffold contexts, runners and workers.

Why scaffolds resume by being run again. A scaffold is somebody's program in the middle of its work; its state is on
a stack that nobody can write down. What can be written down is everything it ever heard: the opening, the replies,
the results. So a resumed scaffold starts from its first line and hears the same again, at once and without an engine
or an environment behind it, until it asks for something that is not on record; from there on it plays for real. Two
conditions make that sound. It must ask for the same, which is checked at every request by the digest of its
tokens and at every action by its calls; one that reads a clock or draws chance elsewhere than in its context is
found at the first difference and its episode fails as `scaffold(nondeterministic)`. And nothing it hears again may
happen again: recorded results stand for calls, and the environment behind them is brought to the same place in a
way that its author declared (`environment_recovery.py`). What is not recorded costs nothing to lose: a reply that no
one had heard is drawn again, with the same random numbers.

A scaffold that runs programs is the exception. What they heard is on record, but not what they did with it: their
state is in a process that ended. So such an episode is never resumed (`programs.py`): it fails as
`scaffold(cut_off)`, and its task is dispatched anew.
"""
