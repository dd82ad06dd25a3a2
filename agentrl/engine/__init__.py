"""The embedded engine: SGLang's native protocol over a step loop of our own, for laptops and tests.

Why not continuous batching of transformers: it gives no partial output on cancel, scores no prompts, returns no
sampling mask, has no seed per request and no hook for a weight change. On two CPU cores it sampled 450 to 2,000
tokens/s of a tiny model where this loop samples about 10,000.

One process (`main`). Its event loop serves HTTP (`http`, by uvicorn) and runs the step loop (`scheduler`). Threads:

    engine-step     computes a forward pass that will probably take `--long-step-s` or longer, and every pass while a
                    broadcast or a large body comes in; all other passes run on the event loop, and calls wait
    read-, stage-   read files and payloads, check them and copy them to fresh memory
    receive-, join- wait for a broadcast group
    free-weights    frees the tensors that a swap has replaced

Short passes run on the event loop because two threads that share the interpreter cost a tiny model a tenth of its
tokens. A pass on the event loop delays every call by its length, hence the limit.

A request. `http` parses the body and calls `GenerationService` (`generation`), which builds a `Request` and submits it
to the `Scheduler`. A request waits, then owns a slot, a row of the KV cache (`slots`), which it takes with the longest
cached prefix of its context. Each step, `StepPlanner` (`steps`) plans one `ForwardPass`: pending prompt pieces of some
slots, or one token for all of them. `forward` computes it with the model (`model`, `attention`) and draws tokens
(`sampler`). The planner appends them with the label of the weights that drew them. A finished request sets its `done`
event, and `generation` writes SGLang's answer. Its slot keeps the tokens for the next request with that prefix. If a
client closes its connection, its request is aborted.

Random numbers are a function of (seed, position), so a draw does not depend on what else runs. Floating-point sums
do depend on it in their last bits; `--deterministic` computes in float64 and rounds log-probabilities to 2**-20, which
leaves a chance of about 1e-9 per token that batching shows.

A weight update (`updates`). Weights come from a folder, as pickled tensors (`unpickler`) or by broadcast (`broadcasts`,
`collective`). They are checked and copied beside those in use while steps go on (`weights`), then exchanged between
two steps by swapping pointers, with a new version label. KV remembers which weights made it and is never reused under
others. LoRA adapters (`adapters`, `peft`) are read the same way into a pool that stacks them (`lora`); each row of a
pass uses its own, and modules have hooks only while an adapter is loaded.

A pause (`server`) waits for the step under way. `abort` then ends all requests with what they have, `retract` puts
running ones back into the queue, `in_place` leaves them in their slots. Until `/continue_generation` no token is drawn.
Every change of requests' slots, weights, adapters or memory happens between two steps, in the order of the calls
(`Scheduler.between_steps`); elsewhere it raises RuntimeError.

For a mixture of experts the chosen experts of each position are kept beside its KV (`routing`). At the start
`verification` compares an architecture that is not known to be right with transformers.
"""
