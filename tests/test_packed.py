"""Linear layers from packed weights: the model's own values, and the model left as it was."""

import copy
import pickle
import threading

import pytest
import tiny_models
import torch
from torch import nn

from eagle2_kernels.decode import EagleDecoder
from eagle2_kernels.models.packed import PackedLinears
from eagle2_kernels.models.target import TargetModel


class Net(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 160, bias=bias), nn.Linear(160, 48, bias=bias)
        self.to(torch.bfloat16)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33, 200])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@torch.inference_mode()
def test_values_are_those_of_the_plain_layers(rows, bias):
    net = Net(bias)
    x = torch.randn(rows, 64, dtype=torch.bfloat16)
    expected = net.double()(x.double())
    net = net.to(torch.bfloat16)
    plain = (net(x).double() - expected).abs().max()
    packed = PackedLinears(net)
    assert len(packed) == 2
    with packed:
        got = net(x)
    assert got.shape == (rows, 48) and got.dtype == torch.bfloat16
    assert (got.double() - expected).abs().max() <= 2 * plain + 1e-3
    # packed for good, usable again, any leading shape
    with packed:
        assert torch.equal(net(x[None])[0], got)
        assert torch.equal(net.up(input=x), net.up(x))
        assert torch.equal(net(x.T.contiguous().T), got)


class Siblings(nn.Module):
    """Layers named as transformers names them, called in any order."""

    def __init__(self, bias=False, order=("q_proj", "k_proj", "v_proj"), odd=None):
        super().__init__()
        torch.manual_seed(1)
        self.order = order
        for name, out in (("q_proj", 64), ("k_proj", 32), ("v_proj", 48)):
            # the odd one has other biases, or else another input
            width = 96 if name == odd and not bias else 64
            setattr(self, name, nn.Linear(width, out, bias=bias and name != odd))
        self.to(torch.bfloat16)

    def forward(self, x):
        return {name: getattr(self, name)(x) for name in self.order}


ORDERS = [
    ("q_proj", "k_proj", "v_proj"),
    ("v_proj", "q_proj", "k_proj"),
    ("q_proj",),
    ("k_proj", "k_proj", "q_proj"),
]


@pytest.mark.parametrize("order", ORDERS, ids=["qkv", "vqk", "q", "kkq"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@torch.inference_mode()
def test_siblings_are_one_product_with_their_own_values(order, bias):
    net = Siblings(bias, order)
    packed = PackedLinears(net)
    assert len(packed) == 3
    assert packed.out_features(net.k_proj) == 144
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16)
    exact = copy.deepcopy(net).float()
    for _ in range(2):
        with packed:
            for _ in range(2):
                want, got = exact(x.float()), net(x)
                for name in order:
                    torch.testing.assert_close(got[name].float(), want[name], rtol=0.02, atol=0.02)
                # the next forward gets the same tensor with other values in it
                x.mul_(-3)
            y = x.clone()
            assert torch.equal(net.k_proj(input=y), net.k_proj(y))


@torch.inference_mode()
def test_a_changed_sibling_leaves_all_of_them_alone():
    net = Siblings()
    packed = PackedLinears(net)
    net.v_proj.weight = nn.Parameter(net.v_proj.weight * 2)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    want = net(x)
    with packed:
        assert all(torch.equal(got, want[name]) for name, got in net(x).items())
    assert net.q_proj not in packed and len(packed) == 3


@torch.no_grad()
def test_siblings_that_differ_are_packed_one_by_one():
    for net in (Siblings(True, odd="k_proj"), Siblings(odd="v_proj")):
        packed = PackedLinears(net)
        sizes = [packed.out_features(m) for m in (net.q_proj, net.k_proj, net.v_proj)]
        assert sizes == [64, 32, 48]
    net = Siblings()
    net.k_proj = net.v_proj
    packed = PackedLinears(net)
    assert packed.out_features(net.q_proj) == 64


@torch.inference_mode()
def test_only_the_block_runs_packed():
    net = Net()
    packed = PackedLinears(net)
    with packed:
        assert all("forward" in vars(m) for m in (net.up, net.down))
    assert not any("forward" in vars(m) for m in net.modules())
    with pytest.raises(ZeroDivisionError), packed:
        raise ZeroDivisionError
    assert not any("forward" in vars(m) for m in net.modules())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_packed_decoder_can_be_copied_and_its_copy_changed(copied):
    model = tiny_models.tiny_model(dtype=torch.bfloat16, tie_word_embeddings=False)
    head = tiny_models.tiny_head(model)
    decoder = EagleDecoder(TargetModel(model, pack_weights=True), head.pack_weights())
    tokens = decoder.generate([5, 6, 7], max_new_tokens=4).token_ids
    twin = copied(decoder)
    assert twin.generate([5, 6, 7], max_new_tokens=4).token_ids == tokens
    x = torch.randn(1, 3, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        for each in (twin.head, decoder.head):
            before = each.logits(x)
            each.lm_head_weight.mul_(2)
            torch.testing.assert_close(each.logits(x), 2 * before)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@torch.inference_mode()
def test_a_head_shares_the_targets_packed_lm_head(biased):
    model = tiny_models.tiny_model(dtype=torch.bfloat16, tie_word_embeddings=False)
    if biased:
        bias = torch.ones(model.lm_head.out_features, dtype=torch.bfloat16)
        model.lm_head.bias = nn.Parameter(bias)
    target, head = TargetModel(model, pack_weights=True), tiny_models.tiny_head(model)
    EagleDecoder(target, head)
    (product,) = target.packed_lm_head._products
    assert head._packed_lm_head[2] is product.multiply
    hidden = torch.randn(3, model.config.hidden_size, dtype=torch.bfloat16)
    assert torch.equal(head.logits(hidden), target.logits(hidden))
    # one whose draft vocabulary is another, or whose bias, has its own
    few = tiny_models.tiny_head(model, draft_vocab=range(40))
    EagleDecoder(target, few)
    assert few._packed_lm_head[2] is not product.multiply
    head.lm_head_bias = torch.zeros(model.lm_head.out_features, dtype=torch.bfloat16)
    head.pack_weights(target.packed_lm_head)
    assert head._packed_lm_head[2] is not product.multiply


def test_threads_take_turns_at_the_block():
    """The first to leave would take away the second's layers, or leave some behind."""
    net = Net()
    packed, entered = PackedLinears(net), threading.Event()

    def run():
        with packed:
            entered.set()

    second = threading.Thread(target=run)
    with packed:
        second.start()
        assert not entered.wait(0.2)
    second.join()
    assert entered.is_set() and "forward" not in vars(net.up) | vars(net.down)


@pytest.mark.parametrize("change", ["in place", "replaced", "data", "new bias"])
@torch.no_grad()
def test_a_changed_weight_is_seen(change):
    net = Net()
    packed = PackedLinears(net)
    if change == "in place":
        net.up.weight.mul_(2)
    elif change == "replaced":
        net.up.weight = nn.Parameter(net.up.weight * 2)
    elif change == "data":
        net.up.weight.data = net.up.weight.data * 2
    else:
        net.up.bias = nn.Parameter(torch.ones(160, dtype=torch.bfloat16))
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    expected = net(x)
    assert net.up not in packed
    assert net.down in packed
    with packed:
        assert torch.equal(net(x), expected)


@torch.no_grad()
def test_another_weight_in_the_memory_of_the_packed_one_is_seen():
    """So large a weight's memory goes back to the system, which gives it to the next but one."""
    linear = nn.utils.skip_init(nn.Linear, 4096, 5120, bias=False, dtype=torch.bfloat16)
    packed = PackedLinears(nn.Sequential(linear))
    assert linear in packed
    for value in (2.0, 3.0):
        linear.weight.data = torch.full_like(linear.weight, value)
    assert linear not in packed


def test_what_is_not_a_plain_bfloat16_linear_layer_is_left_alone():
    class Quantised(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 3

    hooked = nn.Linear(8, 8, dtype=torch.bfloat16)
    hooked.forward = lambda x: x
    model = nn.Sequential(Quantised(8, 8, dtype=torch.bfloat16), hooked, nn.Linear(8, 8))
    assert len(PackedLinears(model)) == 0
    with PackedLinears(model):
        assert hooked(1) == 1
    assert hooked(1) == 1


@torch.inference_mode()
def test_a_target_forward_has_the_same_bits_packed_or_not():
    model = tiny_models.tiny_model(dtype=torch.bfloat16)
    plain, packed = TargetModel(model), TargetModel(model, pack_weights=True)
    tokens = torch.arange(6)[None] + 3
    outputs = []
    for target in (plain, packed):
        cache = target.new_cache(1, 16)
        features = target.forward(
            cache, tokens, torch.arange(6)[None], torch.zeros(1, dtype=torch.int32)
        )
        outputs.append((features, target.logits(features), cache.k[0]))
    error = max((a.float() - b.float()).abs().max() for a, b in zip(*outputs, strict=True))
    scale = outputs[0][1].float().abs().max()
    assert error <= 0.03 * scale
    linears = [m for m in model.modules() if type(m) is nn.Linear]
    assert all(packed.is_packed(m) for m in linears)
    assert not any(plain.is_packed(m) for m in linears)
    assert not any("forward" in vars(m) for m in model.modules())


@torch.inference_mode()
def test_a_decoder_packs_its_head_with_its_target():
    model = tiny_models.tiny_model(dtype=torch.bfloat16)
    head = tiny_models.tiny_head(model, draft_vocab=range(40))
    prompts = [[5, 9, 11, 3], [7, 7]]
    EagleDecoder(model, head)
    hidden = torch.randn(3, model.config.hidden_size, dtype=torch.bfloat16)
    logits = head.logits(hidden)
    decoder = EagleDecoder(TargetModel(model, pack_weights=True), head)
    assert head.fc in head.packed
    got = decoder.generate(prompts, max_new_tokens=12, eos_token_ids=())
    plain = decoder.generate_plain(prompts, max_new_tokens=12, eos_token_ids=())
    assert [len(g) for g in got.token_ids] == [12, 12]
    assert decoder.target.row_invariant_rows() == 1
    assert got.token_ids == plain.token_ids
    assert (head.logits(hidden) - logits).abs().max() <= 0.03 * logits.abs().max()
    # bound to another target's lm_head: the packed one is not used any more
    other = tiny_models.tiny_model(seed=1, dtype=torch.bfloat16)
    head.bind(other)
    assert torch.equal(head.logits(hidden), torch.nn.functional.linear(hidden, head.lm_head_weight))
