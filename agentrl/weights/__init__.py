"""Bringing new weights to engines: transports, one file each, and the publisher that proves the result.

A publication is staged. The trainer writes a folder of safetensors and never hears of engines; a transport
brings the bytes as near to each engine as it can while that generates (`prepare`), and has them served
(`send`). Embedded engines take them aside, checked and summed, while tokens are drawn, so that the pause
only exchanges pointers, and in place there is none; SGLang takes them in its pause. So trainer and
publication never wait for each other, and what may hang (a collective, a copy) hangs in a sender process
that is killed at its deadline.

Engines do not wait for each other. Each is paused, swaps, gives its receipt and resumes by itself; even a
broadcast is a collective of one sender and one engine's ranks. That costs a copy on the wire for each
engine, where one group of all would send a tree, and buys that a sick engine holds no healthy one.

A receipt is the version, checksums (equal to the trainer's where tensors have the same names, equal among
engines of one layout, changed since the last weights) and a canary: tokens whose log-probabilities the
trainer computed with the very weights that it staged. An engine that names its tensors in its own way can
only be compared with its likes, and of these only one that passed the canary is a measure. The canary is
scored after the resume, since engines score nothing while paused; replies under the new version wait for
its verdict (the publish fence, in `agentrl.inference.router`), and are thrown away if it is bad. An engine
that fails in any phase is STALE: it serves nobody, and `Resynchronizer` brings it back in the background.

The first weights are proven too, by what the trainer says of a fixed sentence before its first step. Engines that the
run started hold them already and only give their receipt. One that ran before may hold whatever an earlier run left in
it, so it gets them like any later version; where adapters alone are published it must hold the base weights, and the
run ends with an error if it does not.
"""
