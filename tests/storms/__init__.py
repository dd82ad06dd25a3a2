"""What tests and benchmarks share: storms of aborts, kills, faults and outages, simulated runs, workloads of a GPU."""
