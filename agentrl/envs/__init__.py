"""How environments are written, and where they run: in this process, in killable workers, on servers.

`authoring.py` is where an author begins; `config.py` has a recipe's choice of a place, and `hosting.py` makes a host of
it.
"""
