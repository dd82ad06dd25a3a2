"""The mathematics of training: pure functions on tensors, one idea a file.

Symbols used throughout: mu is the policy that sampled a token (its log-probability as the engine
reported it), pi_prox the proximal policy that a ratio is taken against, pi the policy being trained,
A the advantage, d = log pi_prox - log mu. Log-ratios are clamped to +-20 before they are exponentiated
and computed in float32.
"""
