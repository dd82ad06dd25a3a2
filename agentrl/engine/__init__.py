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

Two processes. One speaks HTTP and hands every call over by a socket (`front`), one computes. Whatever the interpreter
that draws tokens does besides, everybody's next token waits for: on one event loop with it an HTTP server's work for a
call took .3 ms between two passes of SmolLM2-135M (45 ms) and .8 beside one.
The front also frees that interpreter of requests for tokens: one of 20 tokens took 10.6 ms of processor time in one
process, and 9.8 and .5 in two.

The computing process takes calls, plans steps and hands out what they drew on its event loop. There it computes short
forward passes as well, so that calls wait for their end. A pass that is likely to take .1 s is computed in a thread
of its own, which does nothing else, and so is every pass while a broadcast comes in: calls are taken and answered
meanwhile. Not always, for two threads that take turns with the interpreter cost a tiny model a tenth of its tokens;
but a broadcast that waited for two passes took 1.8 times a bare one's time. Other threads read new weights into fresh
memory. What changes requests' slots, weights or adapters is done between two steps, in the order of its calls
(`Scheduler.between_steps`); done at another time it is an error.
"""
