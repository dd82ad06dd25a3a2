"""The embedded engine: SGLang's native protocol over a step loop of our own, for laptops and tests.

Why not continuous batching of transformers: it gives no partial output on cancel, scores no prompts, returns no
sampling mask, has no seed per request and no hook for a weight change. On two CPU cores it sampled 450 to 2,000
tokens/s of a tiny model where this loop samples about 10,000.

Files, from a call inwards:

    main, options           the process: device, port, signals
    http, server            calls by path; pause, abort, memory, health
    generation, request     a body becomes `Request`s, a finished request SGLang's answer
    scheduler               which requests run, when a pass is computed, what waits for its end
    steps                   plans a pass and appends what it drew
    forward                 computes a pass, on the event loop or in a thread
    model, attention        transformers' model over our KV cache
    slots                   the KV cache, and which tokens each of its rows holds
    sampler                 draws tokens
    updates, weights        new weights: staged beside those in use, then exchanged
    files                   files that a call names, from a disk that may not answer
    unpickler, pickles      tensors in a body, read without running code
    broadcasts, collective  tensors through a process group
    adapters, peft, lora    LoRA adapters: their routes, their files, their part in a pass
    routing                 the experts that a mixture chose, kept beside the KV
    verification            whether a model computes here what it does in transformers

The loop. A request waits, then owns a slot, a row of the KV cache, which it takes with the longest cached prefix of its
context. Each step, `StepPlanner` plans one `ForwardPass`: pending prompt pieces of some slots, or one token for all of
them. A finished request sets its `done` event, and its slot keeps the tokens for the next request with that prefix. If
a client closes its connection, its request is aborted. The event loop that answers calls also computes short passes,
because two threads that share the interpreter cost a tiny model a tenth of its tokens. A pass that will probably take
`--long-step-s`, and every pass while a broadcast or a large body comes in, is computed in the thread engine-step.

How a token gets its version. The scheduler has one list of labels, of all weights that were loaded; the last is served.
Weights are exchanged between two steps only, by swapping pointers, and the exchange appends a label. So one set of
weights computes a whole pass, and the planner gives each drawn token the last label. A slot remembers which weights
and adapter made its KV, which is reused under no others; a request that runs on in place over an exchange keeps its
KV, and its answer names that label beside (`kv_versions`).

Every change of requests' slots, weights, adapters or memory happens between two steps, in the order of the calls
(`Scheduler.between_steps`); elsewhere it raises RuntimeError. A pause waits for the step under way. `abort` then ends
all requests with what they have, `retract` puts running ones back into the queue, `in_place` leaves them in their
slots. Until `/continue_generation` no token is drawn.

Random numbers are a function of (seed, position), so a draw does not depend on what else runs. Floating-point sums do
depend on it in their last bits; `--deterministic` computes in float64 and rounds log-probabilities to 2**-20, which
leaves a chance of about 1e-9 per token that batching shows.
"""
