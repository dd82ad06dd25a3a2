"""The episode buffer: admission, groups, staleness, and where every episode ended up.

Why the bound holds. Let B be episodes per step, S the staleness bound, v_l the version that engines have
loaded. Admission keeps (taken + outstanding) <= (S + v_l + 1) * B. An episode that starts at o = v_l has
at most (S + o + 1) * B - 1 others taken before it or with it if the oldest are taken first, so it is
taken at a step of version <= o + S. Engines load v+1 only after the trainer made it, so v_l <= v, and
places come back only with `loaded`. Under ``mask_spans`` younger episodes may be taken first: the bound
then acts on spans, by masking; under ``wait`` the take itself keeps the order that the argument needs.
"""
