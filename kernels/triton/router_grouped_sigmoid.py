"""Group-limited sigmoid routing with a bias that takes part in choosing alone (transformers' DeepseekV3TopkRouter)."""

import triton
import triton.language as tl


@triton.jit
def router_grouped_sigmoid(
    logits,
    bias,
    weights,
    indices,
    tokens,
    groups,
    members,
    factor,
    TOP_K: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    PICKS: tl.constexpr,
):
    """logits float32 [tokens, groups * members], bias float32 -> weights float32 and indices int64 [tokens, TOP_K].

    Chosen by sigmoid(logits) + bias: the TOP_GROUPS groups whose two best have the largest sums, then the TOP_K best
    experts of those; the lower index first where two are equal. The weights are the sigmoids, divided by their sum +
    1e-20 if RENORMALIZE, times `factor`.
    """
    group = tl.arange(0, GROUPS)
    member = tl.arange(0, MEMBERS)
    pick = tl.arange(0, PICKS)
    expert = group[:, None] * members + member[None, :]
    inside = (group < groups)[:, None] & (member < members)[None, :]
    # Lanes past a group's members would have the numbers of the next group's.
    number = tl.where(inside, expert, GROUPS * MEMBERS)
    offset = tl.load(bias + expert, mask=inside, other=0.0).to(tl.float32)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        x = tl.load(logits + token * (groups * members) + expert, mask=inside, other=0.0)
        score = 1.0 / (1.0 + tl.exp(-x))
        choice = tl.where(inside, score + offset, float("-inf"))
        first = tl.max(choice, axis=1)
        at = tl.min(tl.where(choice == first[:, None], member[None, :], MEMBERS), axis=1)
        second = tl.max(tl.where(member[None, :] == at[:, None], float("-inf"), choice), axis=1)
        of_group = tl.where(group < groups, first + second, float("-inf"))
        kept = tl.zeros((GROUPS,), tl.int32)
        for _ in range(TOP_GROUPS):
            best_group = tl.max(of_group, axis=0)
            at_group = tl.min(tl.where(of_group == best_group, group, GROUPS), axis=0)
            kept = tl.where(group == at_group, 1, kept)
            of_group = tl.where(group == at_group, float("-inf"), of_group)
        choice = tl.where(kept[:, None] > 0, choice, float("-inf"))
        picked = tl.zeros((PICKS,), tl.float32)
        chosen = tl.zeros((PICKS,), tl.int32)
        for i in range(TOP_K):
            top = tl.max(tl.max(choice, axis=1), axis=0)
            where = tl.min(tl.min(tl.where(choice == top, number, GROUPS * MEMBERS), axis=1), axis=0)
            value = tl.sum(tl.sum(tl.where(number == where, score, 0.0), axis=1), axis=0)
            picked = tl.where(pick == i, value, picked)
            chosen = tl.where(pick == i, where, chosen)
            choice = tl.where(number == where, float("-inf"), choice)
        if RENORMALIZE:
            picked = picked / (tl.sum(picked, axis=0) + 1e-20)
        inside_picks = pick < TOP_K
        tl.store(weights + token * TOP_K + pick, picked * factor, mask=inside_picks)
        tl.store(indices + token * TOP_K + pick, chosen.to(tl.int64), mask=inside_picks)
