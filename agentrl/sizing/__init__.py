"""Sizing: how fast a run will be, by the latencies of its parts, and which of them holds it up.

    recipe -> Setup ----------+
                              +-> simulate (virtual clock) -> Outcome -> Plan: bottleneck, what-if, splits of GPUs
    run folder, file -> Latencies

Read `latencies.py`, then `simulation.py`. Admission and the order of groups are the buffer's own functions, so that
plan and run cannot differ there.
"""
