"""The gateway: programs speak their own dialect to it, and a policy of the run replies.

A dialect turns JSON into a `ModelCall` and a `ModelReply` into JSON or server-sent events, by pure functions without
HTTP: `chat.py` is OpenAI Chat Completions, `responses.py` OpenAI Responses, `messages.py` Anthropic Messages, and
`token_ids.py` the exchange of token ids that verifiers' TrainClient uses. `dialects.py` says what a dialect is;
`shapes.py` checks what programs send, and `rendering.py` has what all dialects do to texts, calls and streams. To
import a dialect takes seconds, which its SDK needs: whoever starts the gateway does that, and no command. `server.py`
is the HTTP server, `calls.py` answers each call of a session once, and `starting.py` starts all with the first
program.

What a request may look like is taken from the types of the official SDKs, and so are answers built. The other choice,
the dialects of verifiers 0.4.0, was judged by its source:

- They are a proxy's. A request is parsed for the trace and sent on, so wrong shapes are a provider's business: a call
  without ``function`` is a KeyError, an unknown role is read as a user's message. The gateway is the last in line.
- The streams that they render themselves know one text alone in Responses and Messages, neither calls nor reasoning.
- They widen the SDKs' answers where providers differ, which our own answers do not need, and pin openai below 3.
- They come with about 30 packages (an MCP SDK of one exact version, ZMQ, remote sandboxes), for some 2,500 lines.

The SDKs' types are generated from the vendors' own specifications and released every week, and programs use the very
same packages. They have three traps, which `shapes.py` meets: pydantic checks the items of an ``Iterable`` only as they
are asked for, so what is checked is walked; the error of a union of thirty kinds explains nothing, so each item is
checked as the kind that it names; and a list of literals ends where the SDK was released, so what is not read is not
checked.
"""
