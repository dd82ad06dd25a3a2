"""What trainer and engine share of a model: attention, output head, what is supported, and the check of both sides.

Both run transformers' own models with an attention function of ours, and the head by ourselves. transformers' masks
and attention interfaces were judged for this, and are not used:

- Its masks for packed rows (`create_causal_mask` and its kind, with `position_ids` that start again) are tables of
  [T, T] over the whole micro-batch, one for each kind of layer. At 8192 tokens that is 64 MB and 67 million scores a
  head, where the sequences side by side need the sum of their squares, and plain causal layers no table at all.
- Its masks for caches (`create_sliding_window_causal_mask`) know one length for all rows; rows of an engine's cache
  stand at lengths of their own, and a decode step must not copy them.
- Its `sdpa` function refuses soft caps and drops attention sinks. Its `eager` functions know both, hold all scores at
  once, and differ from model to model. `flex_attention` knows all, but only as compiled code, which not every CPU has.

So the attention functions here take what a model passes to transformers' attention functions by keyword (window, soft
cap, sinks), honour it, and refuse every other keyword by name. That leaves features that a model has beside its
attention functions. These show in `verification`: both sides are held against the unmodified model before they start.
"""
