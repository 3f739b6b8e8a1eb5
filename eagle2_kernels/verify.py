"""Drawing the target's own tokens and following them through the tree.

The noise of a draw belongs to (seed, position, token), not to the step or the slot, so a tree step
emits exactly the tokens that plain decoding with the same seed emits. Temperature 0 is greedy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks, ops
from .tree import DraftTree, check_tree

_ops = getattr(torch.ops, ops.NAMESPACE)
_sample_tokens = _ops.sample_tokens.default
_verify_tree = _ops.verify_tree.default
_sample_and_verify = _ops.sample_and_verify.default
_verify_tree_coins = _ops.verify_tree_coins.default


def sample_tokens(
    logits: Tensor,
    position_ids: Tensor,
    seeds: Tensor | int,
    *,
    temperature: Tensor | float | None = None,
    top_k: Tensor | int | None = None,
    top_p: Tensor | float | None = None,
    min_p: Tensor | float | None = None,
    allowed_mask: Tensor | None = None,
    validate: bool = False,
) -> Tensor:
    """The argmax over tokens of filtered logits / temperature + G(seed, position, token).

    ::

        logits --allowed_mask--> --/ temperature--> --top-k--> --top-p--> --min-p--> + G --> argmax

    Adding Gumbel noise and taking the largest draws from the softmax of what the filters left. With
    temperature None or 0 the token is the plain argmax. Ties go to the lowest id. NaN logits count
    as -inf, +inf as the largest finite value; a row without a finite allowed logit yields its
    lowest allowed id.

    G = -log(-log1p(-v)), v = min((word + 0.5) * 2**-32, 1 - 2**-24), with word ``token % 4`` of
    Philox4x32-10 under key ``seed`` and counter (position, token // 4, 0).

    Args:
        logits: [B, N, V] float32, float64, float16 or bfloat16, any strides.
        position_ids: [B, N] int64, the position of the node whose logits these are.
        seeds: [B] int64, or one int: request i then uses seed + i.
        temperature: scalar or [B] float32; None or 0 is greedy.
        top_k: scalar or [B] int32 or int64; keep the k largest, lowest ids among equals. 0: off.
        top_p: scalar or [B] float32; keep the largest until their probability reaches p. 1: off.
        min_p: scalar or [B] float32; keep what reaches p times the largest probability. 0: off.
        allowed_mask: [B, N, ceil(V / 32)] int32, bit t % 32 of word t // 32 allows token t.
        validate: check ranges, and that every row has an allowed finite logit (reads them back).

    Returns:
        int64 [B, N].

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value, or requires grad in grad mode.

    Source: the Gumbel-max trick; filters in the order Hugging Face transformers applies them; the
    generator is Philox of Salmon et al., SC 2011.
    """
    _checks.refuse_grad(logits=logits, temperature=temperature, top_p=top_p, min_p=min_p)
    temperature, top_k, top_p, min_p = _filters(logits, temperature, top_k, top_p, min_p)
    return _checks.call(
        _call_sample_tokens,
        _check_sample_tokens,
        validate,
        logits,
        position_ids,
        _seeds(logits, seeds),
        temperature,
        top_k,
        top_p,
        min_p,
        allowed_mask,
    )


def _call_sample_tokens(logits, position_ids, seeds, *filters):
    return _sample_tokens(logits, position_ids, seeds, **_given(*filters))


_FILTERS = ("temperature", "top_k", "top_p", "min_p", "allowed_mask")


def _given(*filters: Tensor | None) -> dict[str, Tensor]:
    """Those that are there: the dispatcher takes half a microsecond for each keyword."""
    return {n: x for n, x in zip(_FILTERS, filters, strict=True) if x is not None}


def _filters(
    logits: Tensor,
    temperature: Tensor | float | None,
    top_k: Tensor | int | None,
    top_p: Tensor | float | None,
    min_p: Tensor | float | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    return (
        _per_request("temperature", logits, temperature, 0, float("inf"), 0, torch.float32),
        _per_request("top_k", logits, top_k, 0, 2**31 - 1, 0, torch.int32),
        _per_request("top_p", logits, top_p, 0, 1, 1, torch.float32),
        _per_request("min_p", logits, min_p, 0, 1, 0, torch.float32),
    )


def _per_request(
    name: str,
    logits: Tensor,
    value: Tensor | float | None,
    low: float,
    high: float,
    off: float,
    dtype: torch.dtype,
) -> Tensor | None:
    """A host number in [low, high] as a [B] tensor; None where it switches the filter off."""
    if value is None:
        return None
    if not isinstance(logits, Tensor):
        return None  # the op refuses the logits
    if not isinstance(value, (int, float)):
        return value
    if dtype is torch.int32 and not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{name}: expected a value from {low} to {high}, got {value}")
    if value == off:
        return None
    number = value if dtype is torch.int32 else float(value)
    return torch.full(logits.shape[:1], number, dtype=dtype, device=logits.device)


def _seeds(logits: Tensor, seeds: Tensor | int) -> Tensor:
    if isinstance(seeds, int) and isinstance(logits, Tensor):
        if not -(2**63) <= seeds < 2**64:
            raise ValueError(f"seeds: expected a 64-bit integer, got {seeds}")
        return seeds + torch.arange(logits.shape[0], dtype=torch.int64, device=logits.device)
    return seeds


def _check_sample_tokens(
    logits: Tensor,
    position_ids: Tensor,
    seeds: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    allowed_mask: Tensor | None,
    *,
    values: bool,
    live: Tensor | None = None,
) -> None:
    """``live`` [B, N]: the slots whose logits may be asked for; None is all of them."""
    _checks.tensor("logits", logits, _checks.FLOATS, (None, None, None), "[B, N, V]")
    b, n, v = logits.shape
    if v < 1:
        raise ValueError(f"logits: expected V of at least 1, got shape {tuple(logits.shape)}")
    _checks.tensor("position_ids", position_ids, torch.int64, (b, n), "[B, N]")
    _checks.tensor("seeds", seeds, torch.int64, (b,), "[B]")
    if top_k is not None:
        _checks.tensor("top_k", top_k, (torch.int32, torch.int64), (b,), "[B]")
    for name, value in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        if value is not None:
            _checks.tensor(name, value, torch.float32, (b,), "[B]")
    if allowed_mask is not None:
        words = (v + 31) // 32
        layout = "[B, N, ceil(V / 32)]"
        _checks.tensor("allowed_mask", allowed_mask, torch.int32, (b, n, words), layout)
    _checks.same_device(
        logits=logits,
        position_ids=position_ids,
        seeds=seeds,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        allowed_mask=allowed_mask,
    )
    if not values:
        return
    _checks.values_in("position_ids", position_ids, 0, 2**62)
    if temperature is not None:
        _checks.values_in("temperature", temperature, 0, float("inf"))
    if top_k is not None:
        _checks.values_in("top_k", top_k, 0, 2**31 - 1)
    if top_p is not None:
        _checks.values_in("top_p", top_p, 0, 1)
    if min_p is not None:
        _checks.values_in("min_p", min_p, 0, 1)
    drawable = logits > float("-inf")
    if allowed_mask is not None:
        bits = (allowed_mask[..., None] >> torch.arange(32, device=logits.device)) & 1
        drawable &= bits.flatten(-2)[..., :v].bool()
    empty = ~drawable.any(-1)
    if live is not None:
        empty &= live
    if bool(empty.any()):
        r, i = empty.nonzero()[0].tolist()
        raise ValueError(f"logits[{r}, {i}]: expected an allowed token above -inf, got none")


def verify_tree(
    target_tokens: Tensor,
    draft_tokens: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    max_depth: int,
    num_nodes: Tensor | None = None,
    *,
    validate: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Walk from the root to the child whose token is the target's token at this node.

    ::

        draft tree          target says         accept_index  [0, 2, 3, -1]
          0 "the"             0: "dog"          accept_length 2
         /      \             2: "ran"          bonus_token   "off"
        1 "cat"  2 "dog"      3: "off"          emitted: dog, ran, off
                 |
                 3 "ran"

    Emitted are ``target_tokens[accept_index[0 .. accept_length]]``: accept_length + 1 tokens, the
    bonus last. What the draft proposed has no influence on what is emitted, only on how much.

    Args:
        target_tokens: [B, N] int64, the target's token after each node (`sample_tokens`).
        draft_tokens: [B, N] int64, the token in each slot.
        first_child: [B, N] int32, -1 for none.
        next_sibling: [B, N] int32, -1 for none.
        max_depth: most drafts accepted. Links out of range end the walk.
        num_nodes: [B] int32; a request with none is inactive.
        validate: check links and siblings by value too (reads them back to the host).

    Returns:
        accept_index int32 [B, max_depth + 1]: visited slots, the root first, -1 padded.
        accept_length int32 [B]: drafts accepted, root and bonus not counted; -1 when inactive.
        bonus_token int64 [B]: the target's token at the last visited node; -1 when inactive.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source: exact for a deterministic draft tree: SpecInfer, arXiv 2305.09781 (greedy form), drawn
    with the target's own noise.
    """
    return _checks.call(
        _verify_tree,
        _check_verify_tree,
        validate,
        target_tokens,
        draft_tokens,
        first_child,
        next_sibling,
        max_depth,
        num_nodes,
    )


def _check_verify_tree(
    target_tokens: Tensor,
    draft_tokens: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    max_depth: int,
    num_nodes: Tensor | None,
    *,
    values: bool,
) -> None:
    _checks.tensor("target_tokens", target_tokens, torch.int64, (None, None), "[B, N]")
    b, n = target_tokens.shape
    _checks.same_device(target_tokens=target_tokens, draft_tokens=draft_tokens)
    _check_links(b, n, draft_tokens, first_child, next_sibling, max_depth, num_nodes, values=values)


def _check_links(
    b: int,
    n: int,
    draft_tokens: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    max_depth: int,
    num_nodes: Tensor | None,
    *,
    values: bool,
) -> None:
    _checks.tensor("draft_tokens", draft_tokens, torch.int64, (b, n), "[B, N]")
    _checks.tensor("first_child", first_child, torch.int32, (b, n), "[B, N]")
    _checks.tensor("next_sibling", next_sibling, torch.int32, (b, n), "[B, N]")
    _checks.integer("max_depth", max_depth, 0, 2**31 - 2)
    if num_nodes is not None:
        _checks.tensor("num_nodes", num_nodes, torch.int32, (b,), "[B]")
    _checks.same_device(
        draft_tokens=draft_tokens,
        first_child=first_child,
        next_sibling=next_sibling,
        num_nodes=num_nodes,
    )
    if not values:
        return
    if num_nodes is not None:
        _checks.values_in("num_nodes", num_nodes, 0, n)
    counts = [n] * b if num_nodes is None else num_nodes.tolist()
    arrays = (t.tolist() for t in (draft_tokens, first_child, next_sibling))
    for r, (count, tokens, first, sibling) in enumerate(zip(counts, *arrays, strict=True)):
        _check_request_links(r, count, tokens, first, sibling)


def _check_request_links(
    r: int, count: int, tokens: list[int], first: list[int], sibling: list[int]
) -> None:
    found = {0}
    reached = [0] if count else []
    for node in reached:
        seen: set[int] = set()
        link, child = f"first_child[{r}, {node}]", first[node]
        while child != -1:
            if not 0 <= child < count:
                raise ValueError(f"{link}: expected a slot from -1 to {count - 1}, got {child}")
            if child in found:
                raise ValueError(
                    f"{link}: expected each slot to be linked once, got slot {child} again"
                )
            if tokens[child] in seen:
                raise ValueError(
                    f"draft_tokens[{r}, {child}]: expected siblings to differ, got token "
                    f"{tokens[child]} twice under slot {node}"
                )
            found.add(child)
            seen.add(tokens[child])
            reached.append(child)
            link, child = f"next_sibling[{r}, {child}]", sibling[child]
    for slot in range(count):
        for name, links in (("first_child", first), ("next_sibling", sibling)):
            if slot not in found and links[slot] != -1:
                raise ValueError(
                    f"{name}[{r}, {slot}]: expected -1 at a slot that the root does not reach, "
                    f"got {links[slot]}"
                )


def _live_slots(like: Tensor, num_nodes: Tensor | None) -> Tensor:
    """Bool [B, N] of an argument [B, N, ...]: the slots below ``num_nodes``."""
    b, n = like.shape[:2]
    if num_nodes is None:
        return torch.ones(b, n, dtype=torch.bool, device=like.device)
    return torch.arange(n, device=like.device) < num_nodes[:, None]


def _check_vocabulary(draft_tokens: Tensor, live: Tensor, vocab: int) -> None:
    wrong = live & ((draft_tokens < 0) | (draft_tokens >= vocab))
    _checks.refuse_where(
        wrong, "draft_tokens", f"an id of the target, 0 to {vocab - 1}", draft_tokens
    )


def sample_and_verify(
    logits: Tensor,
    position_ids: Tensor,
    seeds: Tensor | int,
    draft_tokens: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    max_depth: int,
    num_nodes: Tensor | None = None,
    *,
    temperature: Tensor | float | None = None,
    top_k: Tensor | int | None = None,
    top_p: Tensor | float | None = None,
    min_p: Tensor | float | None = None,
    allowed_mask: Tensor | None = None,
    validate: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`sample_tokens` at the visited nodes only, fused with `verify_tree`; the same bits.

    ::

        draw at the root -> is it a child? -> draw there -> ... -> the draw with no child: the bonus

    Args:
        logits: [B, N, V], see `sample_tokens`.
        position_ids: [B, N] int64.
        seeds: [B] int64 or one int.
        draft_tokens: [B, N] int64, see `verify_tree`.
        first_child: [B, N] int32.
        next_sibling: [B, N] int32.
        max_depth: most drafts accepted.
        num_nodes: [B] int32; a request with none is inactive.
        temperature: see `sample_tokens`, as the filters that follow.
        top_k: see `sample_tokens`.
        top_p: see `sample_tokens`.
        min_p: see `sample_tokens`.
        allowed_mask: see `sample_tokens`.
        validate: check values too (reads them back to the host).

    Returns:
        emitted_tokens int64 [B, max_depth + 1], -1 padded, the bonus last; then accept_index,
        accept_length and bonus_token as `verify_tree` gives them.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value, or requires grad in grad mode.

    Source: see `sample_tokens` and `verify_tree`.
    """
    _checks.refuse_grad(logits=logits, temperature=temperature, top_p=top_p, min_p=min_p)
    temperature, top_k, top_p, min_p = _filters(logits, temperature, top_k, top_p, min_p)
    return _checks.call(
        _call_sample_and_verify,
        _check_sample_and_verify,
        validate,
        logits,
        position_ids,
        _seeds(logits, seeds),
        draft_tokens,
        first_child,
        next_sibling,
        max_depth,
        num_nodes,
        temperature,
        top_k,
        top_p,
        min_p,
        allowed_mask,
    )


def _call_sample_and_verify(*args):
    *rest, temperature, top_k, top_p, min_p, allowed_mask = args
    return _sample_and_verify(*rest, **_given(temperature, top_k, top_p, min_p, allowed_mask))


def _check_sample_and_verify(
    logits: Tensor,
    position_ids: Tensor,
    seeds: Tensor,
    draft_tokens: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    max_depth: int,
    num_nodes: Tensor | None,
    *filters: Tensor | None,
    values: bool,
) -> None:
    _check_sample_tokens(logits, position_ids, seeds, *filters, values=False)
    b, n, v = logits.shape
    _checks.same_device(logits=logits, draft_tokens=draft_tokens)
    _check_links(b, n, draft_tokens, first_child, next_sibling, max_depth, num_nodes, values=values)
    if not values:
        return
    live = _live_slots(logits, num_nodes)
    _check_sample_tokens(logits, position_ids, seeds, *filters, values=True, live=live)
    _check_vocabulary(draft_tokens, live, v)


def verify_tree_coins(
    target_probs: Tensor,
    draft_tokens: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    max_depth: int,
    num_nodes: Tensor | None = None,
    *,
    validate: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Walk to the first child whose cumulative target probability exceeds its parent's coin.

    ::

        p = target_probs[b, node]        coin = coins[b, node]

        0       p(c1)   p(c1)+p(c2)                        1
        |--- c1 ---|---- c2 ----|--- every other token ---|
                          ^ coin: c2 is accepted

    At a node the children are looked at in sibling order; accepted is the first with p(c) > 0 and
    p(c1) + ... + p(c) > coin (strictly), and the walk goes on there. Where no child is accepted the
    walk ends. The bonus token is then the lowest id whose cumulative probability exceeds
    ``final_coins[b]`` times the total, p being 0 at the tokens of this node's children. A leaf, and
    the node at which ``max_depth`` drafts are accepted, have no children: all of p counts.

    With independent coins, uniform in [0, 1), the tokens emitted follow the target's own law,
    whatever the tree proposes, and `expected_accept_length` drafts are accepted on average. They
    are ``draft_tokens[accept_index[1 .. accept_length]]``, then the bonus.

    A token that is emitted has a positive probability, whatever the coins are (0, 1, NaN, out of
    range). Where the children leave nothing to draw from, and rounding or a coin of 1 kept the coin
    above their sum, the last child with a positive probability is accepted. NaN and negative
    probabilities count as 0; a node without any probability ends the walk with id 0. A child whose
    token an earlier sibling has counts as 0, and so does one outside the vocabulary. Sums are
    float64, in sibling order and in ascending id.

    Args:
        target_probs: [B, N, V] float32, float64, float16 or bfloat16, any strides: the target's
            distribution after each node, temperature and filters applied. Rows of visited nodes
            only are read.
        draft_tokens: [B, N] int64, the token in each slot.
        first_child: [B, N] int32, -1 for none.
        next_sibling: [B, N] int32, -1 for none.
        coins: [B, N] float32 or float64, uniform in [0, 1): the coin of slot s decides which child
            of s is accepted. Leaves do not use theirs.
        final_coins: [B] float32 or float64, uniform in [0, 1): draws the bonus token.
        max_depth: most drafts accepted. Links out of range end the walk.
        num_nodes: [B] int32; a request with none is inactive.
        validate: check values too: links, siblings, coins, ids in the vocabulary, and rows that are
            not negative and sum to about 1, all below ``num_nodes`` (reads them back to the host).

    Returns:
        accept_index int32 [B, max_depth + 1]: visited slots, the root first, -1 padded.
        accept_length int32 [B]: drafts accepted, root and bonus not counted; -1 when inactive.
        bonus_token int64 [B]: the token drawn at the last visited node; -1 when inactive.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value, or requires grad in grad mode.

    Source: the inverse-transform draw of the target's token, its children first; exact and, for a
    given tree, of the greatest acceptance (see `verify_tree`). Slots of coins as in SGLang's
    target-only tree sampling.
    """
    _checks.refuse_grad(target_probs=target_probs, coins=coins, final_coins=final_coins)
    return _checks.call(
        _verify_tree_coins,
        _check_verify_tree_coins,
        validate,
        target_probs,
        draft_tokens,
        first_child,
        next_sibling,
        coins,
        final_coins,
        max_depth,
        num_nodes,
    )


def _check_verify_tree_coins(
    target_probs: Tensor,
    draft_tokens: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    max_depth: int,
    num_nodes: Tensor | None,
    *,
    values: bool,
) -> None:
    _check_target_probs(target_probs)
    b, n, v = target_probs.shape
    widths = (torch.float32, torch.float64)
    _checks.tensor("coins", coins, widths, (b, n), "[B, N]")
    _checks.tensor("final_coins", final_coins, widths, (b,), "[B]")
    _checks.same_device(
        target_probs=target_probs,
        draft_tokens=draft_tokens,
        coins=coins,
        final_coins=final_coins,
    )
    _check_links(b, n, draft_tokens, first_child, next_sibling, max_depth, num_nodes, values=values)
    if not values:
        return
    live = _live_slots(target_probs, num_nodes)
    _check_vocabulary(draft_tokens, live, v)
    _check_rows(target_probs, live)
    for name, coin, used in (("coins", coins, live), ("final_coins", final_coins, live.any(-1))):
        wrong = used & ~((coin >= 0) & (coin < 1))
        _checks.refuse_where(wrong, name, "a value in [0, 1)", coin)


def _check_target_probs(target_probs: Tensor) -> None:
    _checks.tensor("target_probs", target_probs, _checks.FLOATS, (None, None, None), "[B, N, V]")
    if target_probs.shape[2] < 1:
        shape = tuple(target_probs.shape)
        raise ValueError(f"target_probs: expected V of at least 1, got shape {shape}")


def _check_rows(target_probs: Tensor, live: Tensor) -> None:
    """Rows of live slots are not negative and sum to 1, as closely as their dtype can say."""
    wrong = live[..., None] & ~(target_probs >= 0)
    _checks.refuse_where(wrong, "target_probs", "a probability", target_probs)
    slack = 1e-3 if target_probs.dtype in (torch.float32, torch.float64) else 2e-2
    sums = target_probs.sum(-1, dtype=torch.float64)
    wrong = live & ~((sums - 1).abs() <= slack)
    _checks.refuse_where(wrong, "target_probs", "a row that sums to 1", sums)


def expected_accept_length(
    target_probs: Tensor, tree: DraftTree, *, validate: bool = False
) -> Tensor:
    r"""The drafts that verification accepts on average: the sum of the paths' probabilities.

    ::

        E[accept_length] = sum over nodes s, the root left out, of
                           product over the nodes a from s up to below the root of
                           target_probs[parent(a), token(a)]

    It holds for `sample_and_verify` under random seeds (temperature and filters applied to
    ``target_probs``) and for `verify_tree_coins`, with ``max_depth`` at least the tree's depth, and
    no lossless verification of the same tree accepts more. One target forward emits one token more
    than that. Plain PyTorch operations: differentiable, on any device.

    Args:
        target_probs: [B, N, V] float32, float64, float16 or bfloat16, the target's distribution
            after each node. NaN and negative numbers count as 0.
        tree: a `DraftTree` of N slots. Tokens outside the vocabulary count as 0.
        validate: check the tree's invariants and the rows too (reads them back to the host).

    Returns:
        [B], float64 for float64 probabilities, else float32; 0 for an inactive request.

    Raises:
        TypeError: ``target_probs`` has the wrong type or dtype.
        ValueError: shapes do not fit each other, or a value is wrong under ``validate``.

    Source: SpecInfer, arXiv 2305.09781, and Sequoia, arXiv 2402.12374: the score a tree is built
    for, here under the target itself.
    """
    _check_target_probs(target_probs)
    b, n, v = target_probs.shape
    if not isinstance(tree, DraftTree):
        raise TypeError(f"tree: expected a DraftTree, got {type(tree).__name__}")
    _checks.tensor("tree.draft_tokens", tree.draft_tokens, torch.int64, (b, n), "[B, N]")
    _checks.tensor("tree.parents", tree.parents, torch.int32, (b, n), "[B, N]")
    _checks.tensor("tree.num_nodes", tree.num_nodes, torch.int32, (b,), "[B]")
    _checks.same_device(
        target_probs=target_probs,
        **{
            f"tree.{name}": getattr(tree, name) for name in ("draft_tokens", "parents", "num_nodes")
        },
    )
    live = _live_slots(target_probs, tree.num_nodes)
    if validate or _checks.VALIDATE:
        check_tree(tree)
        _check_rows(target_probs, live)
        _check_vocabulary(tree.draft_tokens, live, v)
    parents, tokens = tree.parents.long(), tree.draft_tokens
    slots = torch.arange(n, device=parents.device)
    child = live & (slots > 0) & (parents >= 0) & (parents < n)
    known = child & (tokens >= 0) & (tokens < v)
    up = torch.where(child, parents, 0)
    request = torch.arange(b, device=up.device)[:, None]
    edge = target_probs[request, up, torch.where(known, tokens, 0)]
    edge = edge if edge.dtype == torch.float64 else edge.float()
    path = torch.where(slots == 0, 1, torch.where(known & (edge > 0), edge, 0))
    # After round i a slot holds the product over its 2**(i + 1) nearest nodes: parents are doubled.
    for _ in range(n.bit_length()):
        path = path * path.gather(1, up)
        up = up.gather(1, up)
    return torch.where(child & (up == 0), path, 0).sum(-1)
