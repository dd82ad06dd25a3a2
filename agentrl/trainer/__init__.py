"""The trainer: FSDP2 ranks that turn version v of a policy into v+1, and the handle that drives them.

Only `handle` and `config` are imported by the driver; they load neither torch nor transformers.
"""
