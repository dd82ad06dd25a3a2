"""The embedded engine: SGLang's native protocol over a step loop of our own, for laptops and tests.

Why not transformers' continuous batching: it was tried first. It has no partial output on cancel, no
prompt scoring, no kept sets, no per-request randomness and no hook for a weight change, so most of its
files would have had to be touched; and on two CPU cores it sampled 450 to 2,000 tokens/s of a tiny
model where the loop here samples about 10,000.

How it works. Every running request owns a slot, a row of one KV cache. A step is one forward pass:
either the pending prompt pieces of some slots (prefill) or one token for all of them (decode). Slots of
finished requests keep their tokens, so that the next turn of an episode, or another episode of the same
task, starts from the longest common prefix. Random numbers are a function of (seed, position), so what
is drawn does not depend on what else runs. Floating-point sums do depend on it in the last bits; with
``--deterministic`` the engine computes in float64 and rounds log-probabilities to 2**-20, which leaves
a chance of about 1e-9 a token that batching shows.

A mixture of experts keeps the chosen experts of every position beside its KV. LoRA adapters are stacked, and
each row of a step goes through its own; KV is shared only among requests of one adapter. Without adapters
no module has a hook.

One thread does all that is served: HTTP handlers run between two steps, so no state needs a lock. Other
threads only read new weights into fresh memory; the exchange is a matter of pointers, between two steps.
"""
