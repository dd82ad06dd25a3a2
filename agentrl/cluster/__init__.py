"""A run on the machines of a Ray cluster: the only package that imports Ray.

`config.py` says what a recipe may ask for. `places.py` hands out places (`agentrl.process.place`), each a
`ProcessActor` (`actor.py`) on some node with the resources of its role; a process that is started there speaks with the
run through calls of that actor. `checks.py` looks at the cluster before anything is started.
"""
