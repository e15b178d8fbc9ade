"""Tests of logra.py and train.py: each is named after what it proves, and shows where it can that
the wrong formula would differ.  Expected values come from float64 formulas written here, from
autograd's dense gradients and from finite differences, never from the function under test.

    pytest                      everything but the benchmarks, real engines included
    pytest -m "not slow"        without an engine or a second process
    pytest -m benchmark -s      time and memory of a training step against AdamW
    pytest -m benchmark -s -k step    of these the table of methods, minutes

Faults that projects of this kind have had in public, and the tests that would see them:

row | fault                                    | test_...
  1 | EOS masked because pad == eos            | loss_covers_the_generated_tokens
  2 | tokens after EOS, secondary EOS ids      | generation_stops_at_any_end_token,
    |                                          | every_eos_id_ends_an_answer
  3 | EOS inside the prompt taken for the end  | loss_covers_the_generated_tokens,
    |                                          | end_token_in_the_prompt_ends_nothing,
    |                                          | eos_in_the_prompt_does_not_end_the_answer,
    |                                          | an_end_token_that_the_tokenizer_adds_is_no_prompt
  4 | BOS twice                                | a_template_with_bos_gives_one_bos,
    |                                          | a_prompt_is_the_template_of_its_turns
  6 | padding shifts positions or log-probs    | padding_and_order_change_nothing
  7 | long prompts crash or are cut            | long_prompts_are_left_out_and_counted
  8 | all or some answers truncated            | truncated_answers_are_trained_on,
    |                                          | masked_answers_add_nothing_and_are_not_divided_by,
    |                                          | all_answers_masked_move_nothing
 10 | mean of micro-batch means                | sketch_does_not_depend_on_micro_batches,
    |                                          | micro_batch_changes_no_weight
 11 | denominator divided by accumulation      | sketch_does_not_depend_on_micro_batches
 12 | learning depends on the number of ranks  | learning_does_not_depend_on_the_number_of_ranks
 13 | group std 0, or G = 1                    | equal_rewards_get_exactly_zero,
    |                                          | running_mean_trains_on_one_answer_a_prompt
 14 | groups by prompt text                    | groups_go_by_position
 17 | an empty batch divides 0 by 0            | dead_groups_move_nothing
 18 | no temperature in the log-probs          | token_logprobs_are_at_temperature,
    |                                          | generator_logprobs_are_the_trainers,
    |                                          | engine_logprobs_are_the_trainers
 19 | raw log-probs; the support is changed    | every_sampling_field_is_set,
    |                                          | bad_input_is_answered_by_one_sentence[top-p]
 22 | dropout on in one pass only              | dropout_is_off_in_both_passes
 23 | stale prefix cache                       | no_stale_prefix_is_left_in_the_cache
 25 | a reload overwrites the new weights      | an_update_reaches_the_engine_and_stays
 27 | an unknown name is swallowed             | nothing_to_train_raises,
    |                                          | every_target_layer_is_reached_or_it_raises
 29 | the engine is in another process         | the_engine_is_in_this_process_whatever_is_asked
 30 | the seed is ignored, or all alike        | seed_decides_the_sample,
    |                                          | a_seed_decides_its_engine_sample,
    |                                          | ranks_sample_different_answers_to_an_equal_prompt
 31 | an engine a rank does not start          | the_engine_of_every_rank_has_the_trainers_weights,
    |                                          | a_generation_rank_changes_nothing
 32 | unequal passes, NaN on one rank: a hang  | norms_and_kl_are_those_of_all_ranks,
    |                                          | nan_on_one_rank_stops_all_before_a_weight_moves
 33 | norms of sharded tensors are local       | norms_and_kl_are_those_of_all_ranks
 35 | frozen embedding, checkpointed           | first_layer_is_sketched,
    |                                          | sharded_checkpointed_layers_have_the_same_sketch
 37 | bfloat16 weights swallow the update      | engine_weights_after_50_updates
 38 | moments kept in a basis that is gone     | no_state_of_width_r_lives_between_updates
 39 | A depends on order or wrapper name       | projection_depends_on_seed_update_and_width,
    |                                          | layer_path_has_no_wrapper_names
 40 | side guessed, r >= d_in, nothing trained | sketch_of_any_shape,
    |                                          | nothing_to_train_raises,
    |                                          | summary_counts_what_is_trained_and_frozen
 41 | tangent lost; non-finite sketch          | logit_tangent_is_the_finite_difference,
    |                                          | nan_in_the_sketch_moves_no_weight
 42 | resume: off by one, RNG                  | resumed_run_is_the_same_run,
    |                                          | state_dict_roundtrip_is_bitwise,
    |                                          | a_killed_run_resumes_to_the_same_bits,
    |                                          | the_objectives_run_and_resume

Row 24, sleep level 2 of an engine on a GPU, is not tested: level 1 alone is used.
"""

import contextlib
import copy
import datetime
import fcntl
import functools
import io
import itertools
import json
import math
import operator
import os
import random
import re
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: these models are fastest so
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # what a shell may have; must be overruled

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

import logra
import train

HERE = Path(__file__).parent

import tokenizers  # after train, which hides what cannot be imported
import transformers
from safetensors.torch import load_file

torch.set_num_threads(1)  # these models are fastest so


# ------------------------------------------------------------------------------------------------
# Helpers
# ------------------------------------------------------------------------------------------------


def tiny(family, dtype=torch.float32, seed=0, peak=1.0, **kw):
    """A model of 2 layers, vocabulary 64, hidden 64, heads of 32; logits `peak` times as sharp."""
    shape = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{text}Config")(**{**shape, **kw})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)  # zeros would hide a bias that is lost
        model.lm_head.weight.mul_(peak)
    return model


tiny_qwen2 = functools.partial(tiny, "Qwen2")  # biases on q, k, v
tiny_llama = functools.partial(tiny, "Llama")  # none


def answers(lengths, seed=0, prompt=(1, 4)):
    """Samples of random tokens: prompts of prompt[0] ..., prompt[1] tokens in turn."""
    g = torch.Generator().manual_seed(seed)
    samples = []
    for i, n in enumerate(lengths):
        size = prompt[0] + i % (prompt[1] - prompt[0] + 1)
        ids = torch.randint(64, (size + n,), generator=g).tolist()
        adv = torch.randn(1, generator=g).item()
        samples.append(logra.Sample(ids[:size], ids[size:], [-4.0] * n, True, advantage=adv))
    return samples


def weighted_logp(model, samples):
    """sum over generated tokens of advantage * log p, in the model's own precision."""
    hidden, target = logra.response_hidden(model, samples, model.device)
    logp = model.lm_head(hidden).log_softmax(-1).gather(1, target[:, None])[:, 0]
    adv = torch.tensor([s.advantage for s in samples for _ in s.completion], dtype=logp.dtype)
    return (adv * logp).sum()


def dense_gradients(model, layers, samples):
    """{path: G} by autograd, on a model without sketches."""
    weights = [model.get_submodule(path).weight for path in layers]
    return dict(zip(layers, torch.autograd.grad(weighted_logp(model, samples), weights)))


def rel(a, b):
    """||a - b|| / ||b||."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def sketched(model, rank=8, samples=None, update_ratio=1e-3, rule="row_adam", **kw):
    """Sketches and optimizer; with samples, U of their weighted log-prob stands in the buffer."""
    sketches = logra.attach_sketches(model, rank, **kw)
    optimizer = logra.LoGRA(sketches, update_ratio, rule=rule)
    if samples:
        (-weighted_logp(model, samples)).backward()
        optimizer.propose(sum(len(s.completion) for s in samples))
    return sketches, optimizer


def logits_along(model, plain, sketches, samples, a):
    """Logits [n, V] in float64 at the generated positions, with W - a U A in `plain`."""
    rows = []
    with torch.no_grad():
        for path, module in sketches.layers.items():
            U, A = sketches.rows[path].double(), sketches.A[module.in_features].double()
            W = plain.get_submodule(path).weight
            W.copy_(module.weight.double() - a * U @ A)
        for s in samples:
            z = plain(torch.tensor([s.prompt + s.completion])).logits[0].double()
            rows.append(z[len(s.prompt) - 1 : -1])
    return torch.cat(rows)


def kl64(z, z_after, T=1.0):
    """sum_v p (log p - log q) per position [n], naive and in float64."""
    log_p, log_q = ((x.double() / T).log_softmax(-1) for x in (z, z_after))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


# ------------------------------------------------------------------------------------------------
# 1  Projection
# ------------------------------------------------------------------------------------------------


def splitmix64(seed, n):
    """The generator as published, on Python's integers."""
    mask, words = (1 << 64) - 1, []
    for _ in range(n):
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        x = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        words.append(x ^ (x >> 31))
    return words


def test_random_words_are_splitmix64():
    """The published outputs of seed 0, and the plain-integer generator at a large seed."""
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [w & (2**64 - 1) for w in logra.random_words(0, 3).tolist()] == known
    seed = 2**63 - 3
    assert [w & (2**64 - 1) for w in logra.random_words(seed, 99).tolist()] == splitmix64(seed, 99)


def test_random_uniform_is_the_top_52_bits(monkeypatch):
    """u = (word >> 12 + 1/2) / 2^52: in (0, 1), mean 1/2, variance 1/12."""
    u = logra.random_uniform(5, 20_000)
    expected = torch.tensor([((w >> 12) + 0.5) / 2**52 for w in splitmix64(5, 20_000)])
    assert u.dtype == torch.float64 and torch.equal(u.float(), expected.float())
    assert u.min() > 0 and u.max() < 1
    assert abs(u.mean() - 1 / 2) < 6 * (12 * 20_000) ** -0.5
    assert abs(u.var() - 1 / 12) < 6 * (180 * 20_000) ** -0.5
    for word in (0, -1):  # all bits 0 and all bits 1
        monkeypatch.setattr(
            logra, "random_words", lambda seed, n, word=word: torch.full((n,), word)
        )
        assert 0 < logra.random_uniform(0, 1) < 1


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
@pytest.mark.parametrize("r", [4, 6])
def test_projection_is_the_identity_on_average(kind, r):
    """E[A^T A] = I: each entry of the mean within 5 of its standard errors.  1/r would not do."""
    d_in, n = 12, 600
    As = [logra.make_projection(r, d_in, seed, kind, dtype=torch.float64) for seed in range(n)]
    error = torch.stack([A.T @ A for A in As]).mean(0) - torch.eye(d_in)
    off = ~torch.eye(d_in, dtype=torch.bool)
    assert error[off].abs().max() < 5 * (r * n) ** -0.5  # Var(sum_k A_ki A_kj) = 1/r
    assert error[off].std() > 0.8 * (r * n) ** -0.5  # independent, not orthogonal
    diagonal = 1e-12 if kind == "rademacher" else 5 * (2 / (r * n)) ** 0.5
    assert error.diag().abs().max() < diagonal
    assert abs(error + torch.eye(d_in) / r - torch.eye(d_in)).max() > 0.1  # scaled r^-1/2 too far
    assert abs(torch.stack(As).mean()) < 5 * (r * r * d_in * n) ** -0.5


@pytest.mark.parametrize("r, d_in", [(4, 10), (6, 5), (7, 64), (70, 3), (1, 1)])
def test_signs_are_exactly_one_over_root_r(r, d_in):
    """A_ij = +-1/sqrt(r), correctly rounded, for any r and also for r > d_in."""
    A = logra.make_projection(r, d_in, 3)
    assert A.shape == (r, d_in) and A.dtype == torch.float32
    assert torch.equal(A.abs(), torch.full((r, d_in), 1 / math.sqrt(r)))
    bits = "".join(f"{w:064b}"[::-1] for w in splitmix64(3, r * d_in // 64 + 1))
    signs = [2.0 * int(bit) - 1 for bit in bits[: r * d_in]]
    assert A.sign().flatten().tolist() == signs


def test_projection_never_changes_silently():
    """Golden bits: a checkpoint made by an older logra.py goes on with the same A."""
    assert logra.stable_seed("a", 1, "b") == 3159813902661208101
    seed = logra.stable_seed("projection", 7, 3, "in_features=5")
    assert seed == 5683219885378934218
    A = logra.make_projection(3, 5, seed)
    assert ["".join("+" if x > 0 else "-" for x in row) for row in A] == ["---+-", "-++--", "+---+"]
    A = logra.make_projection(1, 3, seed, "gaussian")[0]
    assert A.tolist() == pytest.approx([0.1922531575, -2.1922950745, 0.9538047314], rel=1e-6)


def test_projection_depends_on_seed_update_and_width():
    """Same A for other targets and another order of layers; another for another seed or update."""
    wide, narrow = torch.nn.Linear(9, 4), torch.nn.Linear(5, 4)
    others = {"z": copy.deepcopy(narrow), "x": copy.deepcopy(wide)}
    one = logra.Sketches({"x": wide, "y": narrow}, 6, seed=3)
    two = logra.Sketches(others, 6, seed=3)
    lone = logra.Sketches({"w": torch.nn.Linear(9, 11)}, 6, seed=3)
    assert all(torch.equal(one.A[d], two.A[d]) for d in (5, 9))
    assert torch.equal(one.A[9], lone.A[9])
    before = lone.A[9]
    lone.redraw(1)
    assert not torch.equal(lone.A[9], before)
    lone.redraw(0)
    assert torch.equal(lone.A[9], before)
    other = logra.Sketches({"w": torch.nn.Linear(9, 11)}, 6, seed=4)
    assert not torch.equal(other.A[9], before)
    assert not torch.equal(one.A[9][:, :5], one.A[5])  # nor is a width a part of another


@pytest.mark.parametrize("refresh", [1, 3, 0])
def test_refresh_keeps_a_projection_for_so_many_updates(refresh):
    """A(update) = A(update // refresh); 0: the first for ever."""
    sketches = logra.Sketches({"x": torch.nn.Linear(9, 4)}, 6, refresh=refresh)
    drawn = []
    for update in range(7):
        sketches.redraw(update)
        drawn.append(sketches.A[9])
    for i in range(7):
        for j in range(7):
            same = i // refresh == j // refresh if refresh else True
            assert torch.equal(drawn[i], drawn[j]) == same


def test_unknown_projection_raises():
    """Neither rademacher, gaussian nor identity: ValueError, which names it."""
    with pytest.raises(ValueError, match="'sparse'"):
        logra.make_projection(2, 3, 0, "sparse")


def test_layer_path_has_no_wrapper_names():
    """A wrapped layer has the path, and so the checkpoint, of a plain one."""
    name = "_orig_mod.model._fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.q_proj"
    assert logra.layer_path(name) == "model.layers.0.q_proj"
    assert logra.layer_path("model.orig_mod.layers") == "model.orig_mod.layers"
    model = tiny_llama()
    plain = set(logra.find_targets(model))
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.nn.ModuleDict({"_checkpoint_wrapped_module": layer})
    assert set(logra.find_targets(model)) == plain


# ------------------------------------------------------------------------------------------------
# 2  Sketch
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("make", [tiny_qwen2, tiny_llama], ids=["qwen2", "llama"])
def test_sketch_equals_dense_gradient_times_projection(make, checkpointed):
    """S = G A^T, in float64, and neither G nor the gradient of anything else exists."""
    model, samples = make(dtype=torch.float64), answers([3, 5, 2])
    plain = copy.deepcopy(model)
    if checkpointed:
        train.checkpoint_layers(model)
    sketches, _ = sketched(model, rank=8)
    weighted_logp(model, samples).backward()
    G = dense_gradients(plain, sketches.layers, samples)
    assert len(G) == 14
    for path, module in sketches.layers.items():
        A, S = sketches.A[module.in_features], sketches.rows[path]
        assert S.shape == (module.out_features, 8)
        assert rel(S, G[path] @ A.T) < 1e-10
        other = logra.make_projection(8, module.in_features, 1, dtype=torch.float64)
        assert rel(G[path] @ other.T, S) > 0.5  # wrong: the A of another seed
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-10)])
def test_sketch_does_not_depend_on_micro_batches(dtype, tolerance):
    """S is a sum over tokens, so any split gives it; a mean of micro-batch means does not."""
    samples = answers(range(1, 10))
    tokens = sum(len(s.completion) for s in samples)
    found, means = {}, {}
    for size in (1, 3, 9):
        model = tiny_qwen2(dtype=dtype)
        sketches, _ = sketched(model)
        for micro in logra.micro_batches(samples, size):
            weighted_logp(model, micro).backward()
        found[size] = sketches.buffer.clone() / tokens
        sketches.buffer.zero_()
        batches = logra.micro_batches(samples, size)
        for micro in batches:
            mean = weighted_logp(model, micro) / sum(len(s.completion) for s in micro)
            (mean / len(batches)).backward()
        means[size] = sketches.buffer.clone()
    assert rel(found[1], found[9]) < tolerance and rel(found[3], found[9]) < tolerance
    assert rel(means[1], found[9]) > 0.1 and rel(means[3], found[9]) > 0.1  # wrong
    assert rel(means[9], found[9]) < 1e-6  # right only where there is one


def test_micro_batches_keep_every_sample_once():
    """At most `size` in each, every sample in exactly one, and like lengths together."""
    samples = answers([5, 1, 9, 3, 3, 7, 2])
    batches = logra.micro_batches(samples, 3)
    assert [len(b) for b in batches] == [3, 3, 1]
    assert sorted(id(s) for b in batches for s in b) == sorted(map(id, samples))
    lengths = [len(s.prompt + s.completion) for b in batches for s in b]
    assert lengths == sorted(lengths)


def test_sketch_under_autocast_is_near_and_stays_float32():
    """S in bfloat16 compute is the float32 one to some per cent, and sums in float32."""
    samples, found = answers([4, 6]), []
    for on in (False, True):
        model = tiny_qwen2()
        sketches, _ = sketched(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            loss = weighted_logp(model, samples)
        loss.backward()
        assert sketches.buffer.dtype == torch.float32
        found.append(sketches.buffer.clone())
    assert 1e-5 < rel(found[1], found[0]) < 0.05


def test_first_layer_is_sketched():
    """Checkpointed, its S is as without; a reentrant checkpoint needs a live input and loses it."""
    samples, found = answers([4, 6]), []
    reentrant = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
    for kind in ("plain", "checkpointed", "reentrant"):
        model = tiny_qwen2()
        if kind == "checkpointed":
            train.checkpoint_layers(model)
        elif kind == "reentrant":
            layer = model.model.layers[0]
            forward = layer.forward
            layer.forward = lambda X, f=forward, **kw: reentrant(functools.partial(f, **kw), X)
        sketches, _ = sketched(model)
        assert not model.model.embed_tokens.weight.requires_grad
        weighted_logp(model, samples).backward()
        found.append(sketches.rows["model.layers.0.self_attn.q_proj"].clone())
    assert found[0].norm() > 0 and torch.equal(found[0], found[1])
    assert found[2].norm() == 0  # wrong


def test_checkpointed_layers_run_twice_where_gradients_are_recorded_only():
    """Once under no_grad; forward and once more in backward otherwise."""
    model, calls = tiny_llama(), []
    sketched(model)
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    train.checkpoint_layers(model)
    with torch.no_grad():
        weighted_logp(model, answers([3]))
    assert len(calls) == 1
    loss = weighted_logp(model, answers([3]))
    assert len(calls) == 2
    loss.backward()
    assert len(calls) == 3


def test_attach_changes_no_key_and_no_output_and_detach_restores():
    """The modules stay: same state_dict, same logits with and without gradients."""
    model, ids = tiny_qwen2(), torch.arange(12)[None]
    keys, before = list(model.state_dict()), model(ids).logits
    sketches, _ = sketched(model)
    assert list(model.state_dict()) == keys
    assert torch.equal(model(ids).logits, before)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
    sketches.detach()
    assert not any("forward" in vars(module) for module in model.modules())
    model.requires_grad_(True)
    model(ids).logits.sum().backward()
    assert sketches.buffer.norm() == 0
    assert all(module.weight.grad.norm() > 0 for module in sketches.layers.values())


class Stack(torch.nn.Module):
    """Linear layers one after another, of any shape."""

    def __init__(self, *sizes, bias=True):
        super().__init__()
        pairs = itertools.pairwise(sizes)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(a, b, bias) for a, b in pairs])

    def forward(self, X):
        for layer in self.layers:
            X = layer(X).tanh()
        return X


@pytest.mark.parametrize("rank", [1, 5, 40])
def test_sketch_of_any_shape(rank):
    """Tall, wide, square and a single row, r below and above d_in: always S = G A^T [d_out, r]."""
    torch.manual_seed(0)
    model = Stack(8, 24, 6, 6, 1).double()
    plain = copy.deepcopy(model)
    sketches, optimizer = sketched(model, rank)
    X = torch.randn(3, 7, 8, dtype=torch.float64)
    model(X).square().sum().backward()
    plain(X).square().sum().backward()
    for path, module in sketches.layers.items():
        G = plain.get_submodule(path).weight.grad
        assert sketches.rows[path].shape == (module.out_features, rank)
        assert rel(sketches.rows[path], G @ sketches.A[module.in_features].T) < 1e-12
    optimizer.propose(21)  # each layer meets the A of its own width
    UA = [sketches.rows[p] @ sketches.A[m.in_features] for p, m in sketches.layers.items()]
    W = [module.weight.detach() for module in sketches.layers.values()]
    UA, W = (math.sqrt(sum(x.square().sum().item() for x in xs)) for xs in (UA, W))
    assert UA / W == pytest.approx(1e-3)


def test_nothing_to_train_raises():
    """No list of layers, no linear layer in it, an unknown target, rank 0, bfloat16: ValueError."""
    with pytest.raises(ValueError, match="no list of decoder layers"):
        logra.attach_sketches(torch.nn.Linear(3, 3), 4)
    stack = Stack(3, 3)
    stack.layers[0] = torch.nn.Tanh()
    with pytest.raises(ValueError, match="no nn.Linear"):
        logra.attach_sketches(stack, 4)
    with pytest.raises(ValueError, match="called Wq"):
        logra.attach_sketches(tiny_llama(), 4, ["q_proj", "Wq"])
    with pytest.raises(ValueError, match="rank"):
        logra.attach_sketches(tiny_llama(), 0)
    with pytest.raises(ValueError, match="q_proj is torch.bfloat16"):
        logra.attach_sketches(tiny_llama(dtype=torch.bfloat16), 4)


def test_targets_narrow_what_is_trained():
    """Only layers of those names, never the head."""
    model = tiny_llama()
    sketches = logra.attach_sketches(model, 4, ["q_proj", "down_proj"])
    paths = {
        f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")
    }
    assert set(sketches.layers) == paths
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"{path}.weight" for path in paths}
    assert "lm_head" not in logra.find_targets(model)


def test_summary_counts_what_is_trained_and_frozen(capsys):
    """Counts from the shapes of the configuration, biases included."""
    logra.attach_sketches(tiny_qwen2(), 4)
    trained = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96)  # q o, k v, gate up down
    biases = 2 * (64 + 32 + 32)
    frozen = 2 * 64 * 64 + 5 * 64 + biases  # embedding and head, norms
    assert capsys.readouterr().err == (
        f"rank 4: 14 linear layers ({trained:,} weights) are trained; 13 tensors ({frozen:,}) are"
        f" frozen, among them 6 biases ({biases:,})\n"
    )


# ------------------------------------------------------------------------------------------------
# 3  RowAdam
# ------------------------------------------------------------------------------------------------


RULES = ("row_adam", "sketch_muon", "sketch_adam", "sketch_sgd")


def row_adam64(S, v, t, beta2=0.95, eps=1e-8, keep=True):
    """RowAdam of one layer as method.md states it, in float64: D and the new v."""
    v = beta2 * v + (1 - beta2) * (S**2).mean(1)
    root = (v / (1 - beta2**t)).sqrt()
    s = 1 / (root + eps * root.mean())
    D = s[:, None] * S
    return (D * S.norm() / D.norm() if keep else D), v  # with it, a factor of s does not matter


@pytest.mark.parametrize("keep", [True, False])
def test_row_adam_is_the_formula_layer_by_layer(keep):
    """Five updates of two layers in one buffer; one mean or norm over both would differ."""
    g = torch.Generator().manual_seed(0)
    sizes, v = [5, 7], torch.zeros(12)
    scale = torch.logspace(-3, 1, 12)[:, None] * torch.tensor([1.0] * 5 + [30.0] * 7)[:, None]
    reference, joint = [torch.zeros(n, dtype=torch.float64) for n in sizes], torch.zeros(12)
    for t in range(1, 6):
        S = torch.randn(12, 6, generator=g) * scale
        D = logra.row_adam(S.clone(), v, sizes, keep_layer_norm=keep)
        parts = [
            row_adam64(s, v_l, t, keep=keep) for s, v_l in zip(S.double().split(sizes), reference)
        ]
        reference = [v_l for _, v_l in parts]
        bias = 1 if keep else (1 - 0.95**t) ** 0.5  # of Adam; one factor for all layers
        assert rel(bias * D, torch.cat([d for d, _ in parts])) < 1e-6
        assert rel(v, torch.cat(reference)) < 1e-6
        D_joint, joint = row_adam64(S.double(), joint, t, keep=keep)
        if keep:
            assert rel(D_joint, D) > 0.1  # wrong: one norm over the whole buffer
            for d, s in zip(D.split(sizes), S.split(sizes)):
                assert d.norm().item() == pytest.approx(s.norm().item(), rel=1e-6)


@pytest.mark.parametrize("keep", [True, False])
def test_only_layers_that_keep_their_norm_know_the_size_of_their_sketch(keep):
    """One layer's S a thousand times as large: so is its D if norms are kept, else D is Adam's."""
    S = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    large = torch.cat([S[:5], 1e3 * S[5:]])
    D, D_large = (
        logra.row_adam(x.clone(), torch.zeros(12), [5, 7], keep_layer_norm=keep) for x in (S, large)
    )
    assert rel(D_large[5:], (1e3 if keep else 1) * D[5:]) < 1e-6
    assert torch.equal(D_large[:5], D[:5])


def test_row_adam_options_are_used():
    """beta2 and eps are the caller's: a large eps turns the row scales off."""
    S = (
        torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
        * torch.logspace(-2, 2, 6)[:, None]
    )
    v = torch.full((6,), 0.5)
    D = logra.row_adam(S.clone(), v, [6], beta2=0.8, eps=1e-2)
    expected, v64 = row_adam64(S.double(), torch.full((6,), 0.5).double(), 3, 0.8, 1e-2)
    assert rel(D, expected) < 1e-6 and rel(v, v64) < 1e-6
    flat = logra.row_adam(S.clone(), torch.zeros(6), [6], eps=1e9)
    assert rel(flat, S) < 1e-6


@pytest.mark.parametrize("keep", [True, False])
def test_rows_and_layers_without_gradient_do_not_move(keep):
    """A row of zeros leaves the others as if alone; a layer of zeros gives D = 0 and no NaN."""
    S = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    S[1], S[5:] = 0, 0  # one row of the first layer, all of the second
    D = logra.row_adam(S.clone(), torch.zeros(9), [5, 4], keep_layer_norm=keep)
    assert torch.isfinite(D).all() and (D[1] == 0).all() and (D[5:] == 0).all()
    live = [0, 2, 3, 4]
    alone, _ = row_adam64(S[live].double(), torch.zeros(4), 1, keep=keep)
    ratio = (D[live].double() / alone).flatten()
    assert torch.allclose(ratio, ratio[:1].expand(16), rtol=1e-5)
    assert ratio[0].item() == pytest.approx(1 if keep else 0.05**-0.5, rel=1e-5)  # bias of v


@pytest.mark.parametrize("rule", RULES)
def test_zero_sketch_proposes_nothing(rule):
    """S = 0: U = 0, F = 0, W stays, and nothing is NaN."""
    model = tiny_llama()
    sketches, optimizer = sketched(model, rule=rule)
    before = copy.deepcopy(model.state_dict())
    optimizer.propose(7)
    assert (sketches.buffer == 0).all()
    factors = optimizer.step(1.0)
    assert all((f == 0).all() for f in factors.values())
    assert all(torch.equal(before[k], W) for k, W in model.state_dict().items())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_in_the_sketch_moves_no_weight(bad):
    """FloatingPointError before v or any W is written; after zero_grad the run can go on."""
    model, samples = tiny_llama(), answers([4])
    sketches, optimizer = sketched(model)
    before = copy.deepcopy(model.state_dict())
    sketches.buffer[17, 3] = bad
    with pytest.raises(FloatingPointError, match="update 0"):
        optimizer.propose(4)
    assert all(torch.equal(before[k], W) for k, W in model.state_dict().items())
    assert (optimizer.moments["v"] == 0).all() and optimizer.update == 0
    optimizer.zero_grad()
    weighted_logp(model, samples).backward()
    optimizer.propose(4)
    assert torch.isfinite(sketches.buffer).all() and sketches.buffer.norm() > 0


def test_projected_norm_by_gram_is_the_explicit_one():
    """||D A||_F^2 = <D^T D, A A^T>; ||D||_F^2, as if A were orthogonal, is another number."""
    D = torch.randn(11, 6, generator=torch.Generator().manual_seed(0))
    A = logra.make_projection(6, 9, 1)
    explicit = (D.double() @ A.double()).square().sum().item()
    assert logra.projected_norm_squared(D, A).item() == pytest.approx(explicit, rel=1e-6)
    assert abs(D.double().square().sum().item() / explicit - 1) > 0.02


@pytest.mark.parametrize("rank", [8, 80])
def test_proposal_has_the_size_of_update_ratio(rank):
    """sqrt(sum ||U A||^2 / sum ||W||^2) = update_ratio over all layers together."""
    model, samples = tiny_qwen2(), answers([4, 6])
    sketches, _ = sketched(model, rank, samples, update_ratio=3e-4)
    UA, W = 0.0, 0.0
    for path, module in sketches.layers.items():
        U, A = sketches.rows[path].double(), sketches.A[module.in_features].double()
        UA += (U @ A).square().sum().item()
        W += module.weight.double().square().sum().item()
    assert math.sqrt(UA / W) == pytest.approx(3e-4, rel=1e-5)
    ratios = {
        (sketches.rows[p].norm() / m.weight.norm()).item() for p, m in sketches.layers.items()
    }
    assert max(ratios) > 2 * min(ratios)  # wrong: each layer by itself


def test_proposal_is_row_adam_of_the_mean_sketch():
    """U = update_ratio ||W|| / ||D A|| D of S / tokens, by dense float64 gradients; for descent."""
    model, samples = tiny_qwen2(dtype=torch.float64), answers([4, 6])
    plain = copy.deepcopy(model)
    sketches, optimizer = sketched(model)
    weighted_logp(model, samples).backward()
    optimizer.propose(10)
    G = dense_gradients(plain, sketches.layers, samples)
    D, total, W2 = {}, 0.0, 0.0
    for path, module in sketches.layers.items():
        A = sketches.A[module.in_features]
        S = G[path] @ A.T / 10
        D[path], _ = row_adam64(S, torch.zeros(len(S), dtype=torch.float64), 1)
        total += (D[path] @ A).square().sum()
        W2 += module.weight.detach().square().sum()
    for path in sketches.layers:
        assert rel(sketches.rows[path], D[path] * 1e-3 * (W2 / total).sqrt()) < 1e-6
    norm = sum(
        (G[p] @ sketches.A[m.in_features].T / 10).square().sum() for p, m in sketches.layers.items()
    )
    assert optimizer.sketch_norm == pytest.approx(norm.sqrt().item(), rel=1e-6)
    before = weighted_logp(plain, samples).item()
    optimizer.step(1.0)
    with torch.no_grad():
        assert weighted_logp(model, samples).item() < before - 1e-4  # the loss went down


def test_step_subtracts_the_rounded_factor_times_projection():
    """W <- W - F A, F = bfloat16(alpha U); without the rounding it would be another W."""
    model, samples = tiny_qwen2(dtype=torch.float64), answers([4, 6])
    sketches, optimizer = sketched(model, samples=samples)
    frozen = {k: p.clone() for k, p in model.named_parameters() if not p.requires_grad}
    W = {p: m.weight.detach().clone() for p, m in sketches.layers.items()}
    U = {p: rows.clone() for p, rows in sketches.rows.items()}
    A = dict(sketches.A)
    factors = optimizer.step(0.7)
    assert list(factors) == list(sketches.layers)
    for path, module in sketches.layers.items():
        rounded, A_l = (0.7 * U[path]).bfloat16(), A[module.in_features]
        assert factors[path].dtype == torch.bfloat16 and torch.equal(factors[path], rounded)
        delta = module.weight.detach() - W[path]
        assert rel(delta, -rounded.double() @ A_l) < 1e-8
        assert 1e-3 < rel(delta, -0.7 * U[path] @ A_l) < 4e-3  # wrong
    assert all(torch.equal(p, frozen[k]) for k, p in model.named_parameters() if k in frozen)
    assert optimizer.update == 1 and (sketches.buffer == 0).all()
    assert not torch.equal(sketches.A[64], A[64])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_factor_is_subtracted_in_the_precision_of_the_weights(dtype, tolerance):
    """W - F A to the rounding of W's own dtype; a product in bfloat16 would be 1e-3 off."""
    W = torch.randn(5, 7, dtype=dtype, generator=torch.Generator().manual_seed(0))
    factor, A = W[:, :3].bfloat16(), logra.make_projection(3, 7, 2, dtype=dtype)
    expected = W.double() - factor.double() @ A.double()
    wrong = W - (factor @ A.bfloat16()).to(dtype)
    logra.subtract_factor(W, factor, A)
    assert (W.double() - expected).abs().max() < tolerance < (wrong - expected).abs().max() / 100


@pytest.mark.parametrize("rule", ["row_adam", "sketch_muon", "sketch_sgd"])
def test_no_state_of_width_r_lives_between_updates(rule):
    """Between updates there is v [sum d_out], or nothing, and a number; S and U are gone."""
    model = tiny_llama()
    sketches, optimizer = sketched(model, 13, answers([4]), rule=rule)
    optimizer.step(1.0)

    def tensors(x):
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, dict):
            for value in x.values():
                yield from tensors(value)

    rows = 2 * (64 + 32 + 32 + 64 + 96 + 96 + 64)
    state = [(rows,)] if rule == "row_adam" else []
    assert [tuple(t.shape) for t in tensors(optimizer.state_dict())] == state
    assert [tuple(t.shape) for t in tensors(vars(optimizer))] == state
    assert not optimizer.state and (sketches.buffer == 0).all()


@pytest.mark.parametrize("rule", RULES)
def test_state_dict_roundtrip_is_bitwise(rule):
    """Saved, loaded with weights_only=True: the next update is the same to the bit, A included."""
    samples, model = answers([4, 6]), tiny_qwen2()
    sketches, optimizer = sketched(model, samples=samples, rule=rule)
    optimizer.step(1.0)
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), model.state_dict()], file)
    file.seek(0)
    state, weights = torch.load(file, weights_only=True)
    twin = tiny_qwen2(seed=1)
    twin.load_state_dict(weights)
    twin_sketches, twin_optimizer = sketched(twin, rule=rule)
    assert not torch.equal(twin_sketches.A[64], sketches.A[64])
    twin_optimizer.load_state_dict(state)
    assert twin_optimizer.update == 1
    for m, s, o in ((model, sketches, optimizer), (twin, twin_sketches, twin_optimizer)):
        (-weighted_logp(m, samples)).backward()
        o.propose(10)
        o.step(1.0)
    assert all(torch.equal(twin_sketches.A[d], A) for d, A in sketches.A.items())
    assert_same_tensors(twin_optimizer.moments, optimizer.moments)
    assert all(torch.equal(W, model.state_dict()[k]) for k, W in twin.state_dict().items())


@pytest.mark.parametrize(
    "change",
    [
        *({"rank": 9}, {"seed": 1}, {"kind": "gaussian"}, {"refresh": 2}, {"targets": ["q_proj"]}),
        *({"rule": "sketch_muon"}, {"rule": "sketch_adam"}),
    ],
)
def test_state_of_another_run_is_refused(change):
    """Another rank, seed, kind, refresh, rule or set of layers: ValueError, nothing taken over."""
    _, optimizer = sketched(tiny_llama(), 8, answers([4]))
    optimizer.step(1.0)
    _, other = sketched(tiny_llama(), **{"rank": 8, **change})
    with pytest.raises(ValueError, match="layers" if "targets" in change else next(iter(change))):
        other.load_state_dict(optimizer.state_dict())
    assert other.update == 0 and all((x == 0).all() for x in other.moments.values())


def newton_schulz64(S):
    """Five steps of the quintic on X itself, in float64: no Gram form."""
    X = S.double() / S.double().norm()
    for _ in range(5):
        Q = X.T @ X
        X = 3.4445 * X + X @ (-4.775 * Q + 2.0315 * Q @ Q)
    return X


def test_newton_schulz_is_about_the_polar_factor():
    """Layer by layer, tall, wide and of zeros: U V^T of the SVD within .68 to 1.21, and the plain
    iteration to 1e-4.  A fourth step, or one norm for all layers, would be another matrix."""
    g = torch.Generator().manual_seed(0)
    sizes, scales, r = [40, 7, 5, 12], [1.0, 2.5, 1.0, 1.0], 12
    S = torch.randn(64, r, generator=g) * torch.logspace(0, -1, r)
    S[40:47] *= 1e-6
    S[47:52] = 0
    S[52:] *= 1e6
    D = logra.newton_schulz(S.clone(), sizes, scales, batch=3)
    assert (D[47:52] == 0).all()
    for D_l, S_l, scale in zip(D.split(sizes), S.split(sizes), scales):
        if not S_l.any():
            continue
        U, sigma, Vh = torch.linalg.svd(S_l.double(), full_matrices=False)
        inside = U.T @ (D_l.double() / scale) @ Vh.T  # diagonal: the singular vectors stay
        assert (inside - inside.diag().diag()).abs().max() < 1e-4
        reached = sigma > 2e-3 * sigma.norm()
        assert reached.sum() > 4
        assert 0.68 < inside.diag()[reached].min() and inside.diag()[reached].max() < 1.21
        assert rel(D_l, scale * newton_schulz64(S_l)) < 1e-4
    four = logra.newton_schulz(S.clone(), sizes, scales, steps=4)
    assert rel(four, D) > 0.05
    assert rel(logra.newton_schulz(S.clone(), [64], [1.0]), D) > 0.5


def test_sketch_muon_proposes_the_polar_factors_of_all_layers():
    """D = sqrt(max(1, d_out / d_in)) polar(S), all layers together of size update_ratio."""
    model, samples = tiny_qwen2(dtype=torch.float64), answers([9, 9])
    plain = copy.deepcopy(model)
    sketches, _ = sketched(model, samples=samples, rule="sketch_muon")
    G = dense_gradients(plain, sketches.layers, samples)
    D, total, W2 = {}, 0.0, 0.0
    for path, module in sketches.layers.items():
        A, W = sketches.A[module.in_features], module.weight.detach()
        D[path] = -(max(1, len(W) / W.shape[1]) ** 0.5) * newton_schulz64(G[path] @ A.T)
        total, W2 = total + (D[path] @ A).square().sum(), W2 + W.square().sum()
    for path in sketches.layers:
        assert rel(sketches.rows[path], D[path] * 1e-3 * (W2 / total).sqrt()) < 1e-6
    up, q = (sketches.rows[LAYERS[i]].norm().item() for i in (5, 0))
    assert up / q == pytest.approx(1.5**0.5, rel=0.2)  # d_out / d_in is 96 / 64


@pytest.mark.parametrize("refresh", [1, 2, 0])
def test_sketch_adam_is_adam_with_its_first_moment_taken_to_the_new_basis(refresh):
    """Five updates in float64: m, v as published; m <- m A_old A_new^T where A changes, v stays."""
    torch.manual_seed(0)
    model, ratio = Stack(9, 7, 5, bias=False).double(), 1e-2
    sketches, optimizer = sketched(
        model, 4, update_ratio=ratio, rule="sketch_adam", refresh=refresh
    )
    m, v, stale = {}, {}, {}
    for t in range(1, 6):
        A = dict(sketches.A)
        D, W2, total = {}, 0.0, 0.0
        for path, module in sketches.layers.items():
            S = torch.randn(module.out_features, 4).double()
            sketches.rows[path].copy_(S)
            m[path] = 0.9 * m.get(path, 0) + 0.1 * S
            stale[path] = 0.9 * stale.get(path, 0) + 0.1 * S
            v[path] = 0.95 * v.get(path, 0) + 0.05 * S**2
            D[path] = m[path] / (1 - 0.9**t) / (v[path] / (1 - 0.95**t)).sqrt()
            W2 = W2 + module.weight.detach().square().sum()
            total = total + (D[path] @ A[module.in_features]).square().sum()
        optimizer.propose(1)
        for path, D_l in D.items():
            assert rel(sketches.rows[path], ratio * (W2 / total).sqrt() * D_l) < 1e-9
        optimizer.step()
        for path, module in sketches.layers.items():
            new = A[module.in_features], sketches.A[module.in_features]
            if refresh and t % refresh == 0:
                m[path] = m[path] @ new[0] @ new[1].T
            else:
                assert torch.equal(*new)
    kept = torch.cat([m[path] for path in sketches.layers])
    assert rel(optimizer.moments["m"], kept) < 1e-9
    wrong = rel(optimizer.moments["m"], torch.cat([stale[path] for path in sketches.layers]))
    assert wrong > 0.5 if refresh else wrong < 1e-9


def test_sketch_sgd_proposes_the_sketch_itself():
    """U = update_ratio ||W|| / ||S A|| S, one factor for all layers."""
    model, samples = tiny_qwen2(dtype=torch.float64), answers([4, 6])
    plain = copy.deepcopy(model)
    sketches, _ = sketched(model, samples=samples, rule="sketch_sgd")
    G = dense_gradients(plain, sketches.layers, samples)
    S, total, W2 = {}, 0.0, 0.0
    for path, module in sketches.layers.items():
        A, W = sketches.A[module.in_features], module.weight.detach()
        S[path] = -G[path] @ A.T
        total, W2 = total + (S[path] @ A).square().sum(), W2 + W.square().sum()
    for path, S_l in S.items():
        assert rel(sketches.rows[path], 1e-3 * (W2 / total).sqrt() * S_l) < 1e-9


def test_identity_projection_makes_row_adam_dense():
    """A = I: S is G, beside zeros in narrower layers; two updates are RowAdam on dense float64
    gradients, and the predicted KL is that of the dense direction."""
    model, samples = tiny_qwen2(dtype=torch.float64), answers([4, 6])
    plain = copy.deepcopy(model)
    sketches, optimizer = sketched(model, 96, kind="identity")
    v = {path: torch.zeros(len(m.weight)).double() for path, m in sketches.layers.items()}
    for t in (1, 2):
        before = copy.deepcopy(plain)
        G = dense_gradients(plain, sketches.layers, samples)
        weighted_logp(model, samples).backward()
        D, D2, W2 = {}, 0.0, 0.0
        for path, module in sketches.layers.items():
            S, d_in = sketches.rows[path], module.in_features
            assert rel(S[:, :d_in], G[path]) < 1e-9 and (S[:, d_in:] == 0).all()
            D[path], v[path] = row_adam64(G[path] / 10, v[path], t)
            D2, W2 = D2 + D[path].square().sum(), W2 + module.weight.detach().square().sum()
        optimizer.propose(10)
        curve, _ = logra.predict_kl(model, sketches, samples, chunk=5)
        z, z_after = (logits_along(model, plain, sketches, samples, a) for a in (0.0, 1e-2))
        assert curve[1][0] == pytest.approx(1e4 * kl64(z, z_after).mean().item(), rel=1e-2)
        optimizer.step(1.0)
        for path, module in sketches.layers.items():
            W, W_0 = (m.get_submodule(path).weight.detach() for m in (plain, before))
            W.copy_(W_0 - (D[path] * 1e-3 * (W2 / D2).sqrt()).bfloat16().double())
            assert rel(module.weight.detach() - W_0, W - W_0) < 1e-4


def test_dense_row_adam_with_free_norms_moves_rows_of_all_widths_as_adam_does():
    """A = I of rank 96: at the first update every row of D has length sqrt(d_in), not sqrt(96)."""
    model, samples = tiny_qwen2(dtype=torch.float64), answers([4, 6])
    sketches = logra.attach_sketches(model, 96, kind="identity")
    optimizer = logra.LoGRA(sketches, keep_layer_norm=False)
    weighted_logp(model, samples).backward()
    optimizer.propose(10)
    lengths = {m.in_features: sketches.rows[p].norm(dim=1) for p, m in sketches.layers.items()}
    for length in lengths.values():
        assert rel(length, length[:1].expand(len(length))) < 1e-6
    ratio = (lengths[96][0] / lengths[64][0]).item()
    assert ratio == pytest.approx((96 / 64) ** 0.5, rel=1e-6)


def test_what_is_taken_back_is_rounded_and_has_the_old_projection():
    """W - F A + bfloat16(back F) A, A of the update that was made, not of the next."""
    model, samples = tiny_qwen2(dtype=torch.float64), answers([4, 6])
    sketches, optimizer = sketched(model, samples=samples)
    W, A = {p: m.weight.detach().clone() for p, m in sketches.layers.items()}, dict(sketches.A)
    factors = optimizer.step(0.7)
    optimizer.take_back(factors, 0.3)
    for path, module in sketches.layers.items():
        back = (0.3 * factors[path].float()).bfloat16()
        kept = W[path] - (factors[path].double() - back.double()) @ A[module.in_features]
        assert rel(module.weight.detach() - W[path], kept - W[path]) < 1e-9
        assert not torch.equal(sketches.A[module.in_features], A[module.in_features])
    assert optimizer.update == 1


def test_dense_control_is_adamw_on_the_mean_gradient():
    """DenseAdamW: two updates of Adam, no weight decay, on G / tokens, in float64 by hand."""
    torch.manual_seed(0)
    model, X = Stack(4, 3, bias=False).double(), torch.randn(5, 4, dtype=torch.float64)
    optimizer = train.DenseAdamW(logra.find_targets(model), (1e-2, 2e-3), 3)
    W = model.layers[0].weight.detach().clone()
    m, v = torch.zeros_like(W), torch.zeros_like(W)
    for t, lr in ((1, 1e-2), (2, 6e-3)):  # halfway along the cosine
        live = W.clone().requires_grad_()
        (G,) = torch.autograd.grad((X @ live.T).tanh().square().sum() / 5, live)
        m, v = 0.9 * m + 0.1 * G, 0.95 * v + 0.05 * G**2
        W = W - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        model(X).square().sum().backward()
        optimizer.propose(5)
        assert optimizer.sketch_norm == pytest.approx(G.norm().item(), rel=1e-9)
        optimizer.step()
        assert rel(model.layers[0].weight.detach(), W) < 1e-9
    assert optimizer.update == 2
    model(X).square().sum().backward()
    model.layers[0].weight.grad[0, 0] = math.nan
    with pytest.raises(FloatingPointError):
        optimizer.propose(5)


def test_lora_control_is_the_textbook_adapter():
    """Three updates of Y = X W_0^T + (X A^T) B^T by autograd and torch's AdamW: the same W."""
    torch.manual_seed(0)
    model, X = Stack(6, 5, 3, bias=True).double(), torch.randn(7, 6, dtype=torch.float64)
    layers = logra.find_targets(model)
    logra.freeze_all_but(model, {})
    W_0 = [module.weight.clone() for module in layers.values()]
    biases = [module.bias for module in layers.values()]
    optimizer = train.LoRA(layers, 2, (1e-2, 1e-2))
    pairs = [
        [p.detach().clone().requires_grad_() for p in pair] for pair in optimizer.adapters.values()
    ]
    adam = torch.optim.AdamW([p for pair in pairs for p in pair], 1e-2, (0.9, 0.95), weight_decay=0)
    assert all((B == 0).all() and A.std() > 0 for A, B in pairs)
    for update in range(3):
        Y = X
        for W, bias, (A, B) in zip(W_0, biases, pairs, strict=True):
            Y = (Y @ W.T + bias + Y @ A.T @ B.T).tanh()
        adam.zero_grad()
        (Y.square().sum() / 7).backward()
        adam.step()
        model(X).square().sum().backward()
        optimizer.propose(7)
        optimizer.step()
        for module, W, (A, B) in zip(layers.values(), W_0, pairs, strict=True):
            assert module.weight.grad is None and rel(module.weight, W + B @ A) < 1e-12
    assert rel(model.layers[0].weight, W_0[0]) > 1e-4  # it moved
    twin = train.LoRA(layers, 2, (1e-2, 1e-2), seed=1)
    twin.load_state_dict(optimizer.state_dict())
    assert twin.update == 3
    for mine, other in zip(twin.adapters.values(), optimizer.adapters.values(), strict=True):
        assert all(torch.equal(p, q) for p, q in zip(mine, other, strict=True))


# ------------------------------------------------------------------------------------------------
# 4  Predicted KL
# ------------------------------------------------------------------------------------------------


def proposal(dtype=torch.float32, seed=0, ratio=2e-3, rank=8, **kw):
    """A peaked model, a float64 twin without sketches, sketches with a U, optimizer, a probe."""
    model = tiny_qwen2(dtype=dtype, seed=seed, peak=12.0, **kw)
    plain, probe = copy.deepcopy(model).double().requires_grad_(False), answers([7, 4, 9], seed)
    sketches, optimizer = sketched(model, rank, probe, update_ratio=ratio)
    return model, plain, sketches, optimizer, probe


def tangent_of_logits(model, sketches, samples):
    """z and z' [n, V] as predict_kl has them inside."""
    with torch.no_grad(), logra.probe_mode(model, sketches), forward_ad.dual_level():
        hidden, _ = logra.response_hidden(model, samples, model.device)
        return forward_ad.unpack_dual(logra.policy_head(model)(hidden))


def test_logit_tangent_is_the_finite_difference():
    """z' = d/da logits(W - a U A): central difference in the default attention, float64."""
    model, plain, sketches, _, probe = proposal(torch.float64)
    assert model.config._attn_implementation == plain.config._attn_implementation == "sdpa"
    probe = logra.micro_batches(probe, 9)[0]
    z, dz = tangent_of_logits(model, sketches, probe)
    h = 0.1
    ahead, behind = (logits_along(model, plain, sketches, probe, a) for a in (h, -h))
    assert rel(z, logits_along(model, plain, sketches, probe, 0)) < 1e-6
    assert rel(dz, (ahead - behind) / (2 * h)) < 1e-3
    assert rel(dz, (behind - ahead) / (2 * h)) > 1.9  # wrong: W + a U A
    sketches.rows["model.layers.0.self_attn.v_proj"].zero_()
    _, lost = tangent_of_logits(model, sketches, probe)
    assert rel(lost, dz) > 0.01  # wrong: the tangent of one layer is lost


@pytest.mark.parametrize("T", [1.0, 0.6])
def test_predicted_kl_is_the_curvature_of_the_exact_kl(T):
    """(KL(h) + KL(-h)) / 2 h^2 = mean Var_p(z' / T) / 2; without T, or without 1/2, it is not."""
    model, plain, sketches, _, probe = proposal(torch.float64, ratio=1e-3)
    ([one], [kl]), _ = logra.predict_kl(model, sketches, probe, T)
    h = 0.1
    z, ahead, behind = (logits_along(model, plain, sketches, probe, a) for a in (0, h, -h))
    curvature = ((kl64(z, ahead, T) + kl64(z, behind, T)).mean() / (2 * h**2)).item()
    assert one == 1.0 and kl == pytest.approx(curvature, rel=3e-3)
    assert abs(kl / 2 / curvature - 1) > 0.4 and abs(kl * 2 / curvature - 1) > 0.9  # wrong
    if T != 1:
        ((_, [at_one]), _) = logra.predict_kl(model, sketches, probe, 1.0)
        assert abs(at_one / curvature - 1) > 0.2  # wrong: temperature missing


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("linearised, budget", [(False, 1e-5), (True, 1e-4)])
def test_realised_kl_is_the_predicted_one(linearised, budget, seed):
    """Within 3%, by a float64 KL of the two policies; realised_kl itself within 1% of that."""
    model, plain, sketches, optimizer, probe = proposal(seed=seed)
    control = logra.KLControl(budget, alpha_max=100.0)
    steps = control.grid() if linearised else None
    curve, before = logra.predict_kl(model, sketches, probe, steps=steps)
    alpha = control.scale(curve, 0)
    assert 0 < alpha < 100 and logra.kl_at(curve, alpha) == pytest.approx(budget)
    ids = [torch.tensor([s.prompt + s.completion]) for s in probe]
    optimizer.step(alpha)
    with torch.no_grad():
        pairs = [(plain(x).logits[0], copied(model, plain)(x).logits[0]) for x in ids]
    kl = [kl64(z, z_after)[len(s.prompt) - 1 : -1] for (z, z_after), s in zip(pairs, probe)]
    realised = torch.cat(kl).mean().item()
    assert realised == pytest.approx(budget, rel=0.03)
    assert logra.realised_kl(model, probe, before) == pytest.approx(realised, rel=0.01)


def copied(model, plain):
    """A float64 model without sketches that has the weights of `model`."""
    twin = copy.deepcopy(plain)
    twin.load_state_dict(model.state_dict())
    return twin


def test_step_spends_the_kl_budget():
    """KL(alpha U) = budget: predicted anew for U scaled by alpha = sqrt(budget / KL)."""
    model, _, sketches, _, probe = proposal()
    curve, _ = logra.predict_kl(model, sketches, probe)
    control = logra.KLControl(budget=3e-5, alpha_max=100.0)
    alpha = control.scale(curve, 0)
    assert alpha == pytest.approx((3e-5 / curve[1][0]) ** 0.5)
    sketches.buffer.mul_(alpha)
    ((_, [kl]), _) = logra.predict_kl(model, sketches, probe)
    assert kl == pytest.approx(3e-5, rel=1e-4)
    assert abs(kl / (curve[1][0] * alpha) - 1) > 0.3  # wrong: KL ~ alpha


@pytest.mark.parametrize("steps", [None, [0.01, 0.1, 1.0]])
def test_prediction_does_not_depend_on_batches_or_chunks(steps):
    """Mean over generated tokens: any micro_batch (padding) and any chunk; not a mean of means."""
    model, _, sketches, _, probe = proposal()
    (_, kls), hidden = logra.predict_kl(model, sketches, probe, steps=steps)
    assert [len(h) for h in hidden] == sorted(len(s.completion) for s in probe)
    for micro_batch, chunk in ((3, 512), (2, 512), (1, 3), (3, 1)):
        (_, other), _ = logra.predict_kl(
            model, sketches, probe, 1.0, steps, micro_batch=micro_batch, chunk=chunk
        )
        assert other == pytest.approx(kls, rel=1e-4)
    means = [logra.predict_kl(model, sketches, [s], steps=steps)[0][1][-1] for s in probe]
    assert abs(sum(means) / 3 / kls[-1] - 1) > 1e-2  # wrong


def test_prediction_writes_nothing():
    """U, W and the attention stay as they were, also when the model raises inside."""
    model, _, sketches, optimizer, probe = proposal()
    U, W = sketches.buffer.clone(), copy.deepcopy(model.state_dict())
    logra.predict_kl(model, sketches, probe)
    seen = []
    hook = model.model.norm.register_forward_hook(
        lambda *_: seen.append(model.config._attn_implementation) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        logra.predict_kl(model, sketches, probe)
    hook.remove()
    assert seen == ["logra_probe"] and model.config._attn_implementation == "sdpa"
    assert not sketches.probing and torch.equal(sketches.buffer, U)
    assert all(torch.equal(W[k], x) for k, x in model.state_dict().items())
    with pytest.raises(RuntimeError, match="between"):  # it would add S to U
        model(torch.arange(5)[None]).logits.sum().backward()
    with pytest.raises(RuntimeError, match="twice"):  # it would take U for S
        optimizer.propose(1)
    optimizer.step()
    model(torch.arange(5)[None]).logits.sum().backward()
    assert sketches.buffer.any()  # and training goes on


def test_dense_control_predicts_nothing_but_keeps_its_hidden_states():
    """sketches=None: no curve; realised_kl is 0 while nothing moved, and sees what did."""
    model, probe = tiny_qwen2(peak=12.0), answers([4, 6])
    curve, before = logra.predict_kl(model, None, probe)
    assert curve is None and logra.realised_kl(model, probe, before) == 0
    plain = copy.deepcopy(model).double()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.1)
        twin, kl = copied(model, plain), []
        for s in probe:
            ids = torch.tensor([s.prompt + s.completion])
            kl.append(kl64(plain(ids).logits[0], twin(ids).logits[0])[len(s.prompt) - 1 : -1])
    expected = torch.cat(kl).mean().item()
    for size, chunk in ((1, 512), (1, 3), (2, 512)):
        _, before = logra.predict_kl(plain.float(), None, probe, micro_batch=size)
        found = logra.realised_kl(model, probe, before, micro_batch=size, chunk=chunk)
        assert found == pytest.approx(expected, rel=1e-3)


def policies(n=50, V=64, seed=0, peak=3.0):
    """Logits and their derivative, float32 [n, V]."""
    g = torch.Generator().manual_seed(seed)
    return peak * torch.randn(n, V, generator=g), torch.randn(n, V, generator=g)


@pytest.mark.parametrize("T", [1.0, 0.7])
def test_linearised_kl_is_the_kl_of_the_linearised_policy(T):
    """KL(p || softmax((z + a z') / T)) at every size of step, where naive float32 is worthless."""
    z, dz = policies()
    steps = [1e-4, 1e-2, 0.3, 1.0, 5.0]
    found = logra.linearised_kl(z, dz, T, steps)
    expected = [kl64(z, z.double() + a * dz.double(), T).sum().item() for a in steps]
    assert found.tolist() == pytest.approx(expected, rel=1e-4)
    log_p, log_q = ((x / T).log_softmax(-1) for x in (z, z + 1e-4 * dz))
    naive = (log_p.exp() * (log_p - log_q)).sum().item()
    assert abs(naive / expected[0] - 1) > 0.5  # wrong
    quadratic = logra.quadratic_kl(z, dz, T).item()
    assert quadratic * 1e-8 == pytest.approx(expected[0], rel=1e-3)  # a = 1e-4
    assert abs(quadratic * 25 / expected[4] - 1) > 0.1  # and not at a = 5


def test_linearised_kl_is_never_negative_and_never_overflows():
    """Also for tiny, huge and constant z'; a constant moves no policy."""
    z, dz = policies(peak=30.0)
    steps = [1e-6, 1e-3, 1.0, 1e3]
    kls = logra.linearised_kl(z, dz, 1.0, steps)
    assert (kls > 0).all() and torch.isfinite(kls).all() and (kls.diff() > 0).all()
    assert (logra.linearised_kl(z, torch.full_like(dz, 7.0), 1.0, steps) < 1e-3).all()
    assert (logra.linearised_kl(z, torch.zeros_like(dz), 1.0, steps) == 0).all()


def test_exact_kl_is_the_float64_one_at_tiny_steps():
    """sum p (log p - log q), by phi; the naive float32 sum is off at 1e-8."""
    z, dz = policies()
    for a in (1.0, 1e-2, 1e-3):
        after = z + a * dz
        expected = kl64(z, after, 0.7).sum().item()
        assert logra.exact_kl(z, after, 0.7).item() == pytest.approx(expected, rel=5e-3)
    z_after = z + 1e-4 * dz
    log_p, log_q = z.log_softmax(-1), z_after.log_softmax(-1)
    naive = abs((log_p.exp() * (log_p - log_q)).sum().item() / kl64(z, z_after).sum().item() - 1)
    found = abs(logra.exact_kl(z, z_after, 1.0).item() / kl64(z, z_after).sum().item() - 1)
    assert found < 0.05 and naive > 10 * found


def test_phi_is_exact_on_both_sides_of_the_series():
    """phi(x) = sum_{k >= 2} x^k / k!, by 60 terms in float64; e^x - 1 - x in float32 is not."""
    x = torch.cat([torch.logspace(-8, 1, 60), torch.tensor([0.0999, 0.1, 0.1001])])
    x = torch.cat([x, -x])
    expected = [math.fsum(v**k / math.factorial(k) for k in range(2, 90)) for v in x.tolist()]
    assert logra.phi(x).tolist() == pytest.approx(expected, rel=1e-5)
    assert logra.phi(torch.zeros(1)).item() == 0
    small = torch.tensor([1e-4])
    assert abs((small.exp() - 1 - small).item() / 5e-9 - 1) > 0.1  # wrong


@pytest.mark.parametrize("budget", [1e-7, 1e-4, 3e-3, 0.1, 1.0])
@pytest.mark.parametrize("T", [1.0, 0.7])
def test_grid_finds_the_step_within_one_per_cent(budget, T):
    """alpha from 16 points against bisection of the float64 KL; also below the grid."""
    z, dz = policies()
    control = logra.KLControl(budget, alpha_max=3.0)
    grid = control.grid()
    assert len(grid) == 16 and grid[-1] == 3.0 and grid[0] == pytest.approx(3 / 1024)
    curve = grid, (logra.linearised_kl(z, dz, T, grid) / len(z)).tolist()
    low, high = 0.0, 3.0
    for _ in range(60):
        middle = (low + high) / 2
        above = kl64(z, z.double() + middle * dz.double(), T).mean() > budget
        low, high = (low, middle) if above else (middle, high)
    assert high < 2.9
    alpha = control.scale(curve, 0)
    assert alpha == pytest.approx(high, rel=0.01)
    assert logra.kl_at(curve, alpha) == pytest.approx(budget)


def test_budget_is_a_cosine_with_both_ends():
    """Endpoints at update 0 and updates - 1, the middle between them, constant after."""
    control = logra.KLControl()
    assert control.budget(0) == pytest.approx(2e-4) and control.budget(299) == pytest.approx(2e-5)
    assert control.budget(298) > control.budget(299) == control.budget(300) == control.budget(9999)
    expected = 2e-5 + 1.8e-4 * (1 + math.cos(math.pi * 100 / 299)) / 2
    assert control.budget(100) == pytest.approx(expected)
    assert logra.KLControl(3.0, 1.0, 5).budget(2) == pytest.approx(2.0)
    assert logra.KLControl(3.0, 1.0, 1).budget(0) == 3.0


def test_mismatch_is_an_average_taken_off_the_budget():
    """m <- 0.7 m + 0.3 max(0, x); budget <- max(budget - m, budget / 2)."""
    control = logra.KLControl(2e-4, 2e-4)
    expected = 0.0
    for x in (1e-4, -5.0, 2e-4):  # each clamped before it is averaged
        control.observe(x)
        expected = 0.7 * expected + 0.3 * max(x, 0)
    assert control.mismatch == pytest.approx(expected) and 0 < expected < 1e-4
    assert control.budget(0) == pytest.approx(2e-4 - expected)
    control.observe(1.0)
    assert control.budget(0) == pytest.approx(1e-4)


def test_alpha_is_bounded_and_odd_predictions_are_refused():
    """alpha_max binds; KL 0 -> 1; disabled -> 1; negative, NaN and inf raise."""
    control = logra.KLControl(1e-4, alpha_max=3.0)
    assert control.scale(([1.0], [4e-4]), 0) == pytest.approx(0.5)
    assert control.scale(([1.0], [1e-12]), 0) == 3.0
    assert control.scale(([0.1, 3.0], [1e-9, 1e-8]), 0) == 3.0
    assert control.scale(([1.0], [0.0]), 0) == 1.0
    assert logra.KLControl(1e-4, enabled=False).scale(([1.0], [4e-4]), 0) == 1.0
    for bad in (-1e-9, math.nan, math.inf):
        with pytest.raises(FloatingPointError, match="update 5"):
            control.scale(([0.1, 1.0], [1e-4, bad]), 5)
    assert logra.kl_at(([1.0], [4e-4]), 0.5) == pytest.approx(1e-4)
    assert logra.kl_at(([1.0], [0.0]), 1.0) == 0 and logra.kl_at(([1.0], [1.0]), 0.0) == 0


def test_excess_brings_a_quadratic_kl_to_the_budget():
    """Keep sqrt(budget / realised), at least .1, also where alpha is 1; 0 within the budget."""
    control = logra.KLControl(1e-3, 1e-3)
    for kl in (1.1e-3, 4e-3, 9e-2):
        assert kl * (1 - control.excess(kl, 0)) ** 2 == pytest.approx(1e-3)
    assert control.excess(1.0, 0) == pytest.approx(0.9)
    assert control.excess(1e-3, 0) == control.excess(0.0, 0) == 0
    control.observe(1.0)  # the mismatch takes half of the budget
    assert control.excess(1e-3, 0) == pytest.approx(1 - 0.5**0.5)
    assert logra.KLControl(1e-3, enabled=False).excess(4e-3, 0) == pytest.approx(0.5)
    for bad in (math.nan, math.inf):
        with pytest.raises(FloatingPointError, match="update 7"):
            control.excess(bad, 7)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_blockwise_attention_is_attention(kv_heads, window):
    """softmax(Q K^T scale + mask) V over 1100 queries, so three blocks, against torch's own."""
    g = torch.Generator().manual_seed(0)
    L, pad = 1100, 30
    Q = torch.randn(2, 4, L, 8, generator=g)
    K, V = (torch.randn(2, kv_heads, L, 8, generator=g) for _ in range(2))
    seen = torch.ones(L, L).tril().bool()
    if window:
        seen &= torch.ones(L, L).triu(1 - window).bool()
    seen = seen.repeat(2, 1, 1, 1)
    seen[1, ..., :pad] = False  # padding on the left of the second row
    seen |= torch.eye(L).bool()
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    found, _ = logra.blockwise_attention(None, Q, K, V, mask, 0.3)
    expected = F.scaled_dot_product_attention(Q, K, V, seen, scale=0.3, enable_gqa=True)
    assert (found - expected.transpose(1, 2)).abs().max() < 1e-5
    wrong, _ = logra.blockwise_attention(None, Q, K, V, mask.roll(512, 2), 0.3)
    assert (wrong - expected.transpose(1, 2)).abs().max() > 0.1  # the mask of another block


def test_blockwise_attention_caps_scores():
    """softcap: scores <- c tanh(scores / c)."""
    g = torch.Generator().manual_seed(0)
    Q, K, V = (torch.randn(1, 2, 9, 4, generator=g) for _ in range(3))
    mask = torch.zeros(1, 1, 9, 9).masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
    found, _ = logra.blockwise_attention(None, Q, K, V, mask, 1.0, softcap=0.5)
    scores = 0.5 * torch.tanh(Q.double() @ K.double().mT / 0.5) + mask
    assert rel(found, (scores.softmax(-1) @ V.double()).transpose(1, 2)) < 1e-6


@pytest.mark.parametrize("window", [None, 8])
def test_probe_attention_computes_what_the_model_does(window):
    """Logits inside the probe = logits outside, beyond 512 tokens and with a sliding window."""
    kw = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    model = tiny_qwen2(peak=12.0, **(kw if window else {}))
    ids = torch.arange(600)[None] % 61
    with torch.no_grad():
        outside = model(ids).logits
        with logra.probe_mode(model):
            inside = model(ids).logits
        assert (inside - outside).abs().max() < 1e-4
        if window:
            full = tiny_qwen2(peak=12.0)(ids).logits
            assert (full - outside).abs().max() > 0.01  # the window matters


# ------------------------------------------------------------------------------------------------
# 5  GRPO objective
# ------------------------------------------------------------------------------------------------


def test_equal_rewards_get_exactly_zero():
    """std 0 and G = 1 give 0, not NaN; also 0.1, whose mean is not exactly itself."""
    adv = logra.group_advantages(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
    assert adv.tolist() == [[0.0, 0.0], [-1.0, 1.0]]
    assert logra.group_advantages(torch.tensor([[3.0], [0.1]])).tolist() == [[0.0], [0.0]]
    for value in (0.1, -0.01, 1e-30, 1e30, 0.0):
        for n in (3, 7, 10):
            for std in (True, False):
                for dtype in (torch.float32, torch.float64):
                    same = torch.full((1, n), value, dtype=dtype)
                    assert (logra.group_advantages(same, std) == 0).all()
    tiny_difference = torch.tensor([[0.1, 0.1 + 1e-6]], dtype=torch.float64)
    assert logra.group_advantages(tiny_difference)[0].tolist() == pytest.approx([-1, 1])


def test_advantages_are_the_group_formula():
    """(r - mean) / std with the std of the group itself (no n - 1); off: r - mean."""
    r = [1.0, 0.0, 0.0, 0.5]
    mean = sum(r) / 4
    std = math.sqrt(sum((x - mean) ** 2 for x in r) / 4)
    found = logra.group_advantages(torch.tensor([r, [5.0, 5.0, 5.0, 9.0]]))
    assert found[0].tolist() == pytest.approx([(x - mean) / std for x in r])
    centred = logra.group_advantages(torch.tensor([r]), divide_by_std=False)
    assert centred[0].tolist() == pytest.approx([x - mean for x in r])
    sample_std = torch.tensor(r).std().item()
    assert abs((r[0] - mean) / sample_std - found[0, 0].item()) > 0.1  # wrong


def test_groups_go_by_position():
    """Two equal prompts, rewards [1, 0] and [1, 1]: two groups; one of four would differ."""
    rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    assert logra.group_advantages(rewards).tolist() == [[1.0, -1.0], [0.0, 0.0]]
    merged = logra.group_advantages(rewards.view(1, 4)).view(2, 2)
    assert (merged[1] != 0).all()  # wrong


def test_running_mean_judges_by_the_steps_before(monkeypatch):
    """Worked by hand: baseline b <- 0.9 b + 0.1 mean, the first mean to begin with; one answer to
    a prompt will do, and a difference that is rounding is no signal."""
    rewards = torch.tensor([[1.0], [0.0], [0.0], [1.0]])
    first, b = logra.running_mean_advantages(rewards, None)
    assert first.tolist() == [[0.5], [-0.5], [-0.5], [0.5]] and b == 0.5
    second, b = logra.running_mean_advantages(torch.ones(4, 1), b)
    assert second.tolist() == [[0.5]] * 4 and b == pytest.approx(0.9 * 0.5 + 0.1 * 1.0)
    third, b = logra.running_mean_advantages(torch.tensor([[-0.01], [1.0]]), b)
    assert third.flatten().tolist() == pytest.approx([-0.01 - 0.55, 1 - 0.55], rel=1e-6)
    same = torch.full((7, 1), 0.1, dtype=torch.float64)
    for baseline in (None, 0.1 + 1e-16):
        assert (logra.running_mean_advantages(same, baseline)[0] == 0).all()
    others = torch.tensor([0.0, 2.0])  # two answers of another rank, neither right
    monkeypatch.setattr(logra, "rank_sum", lambda total: total + others)
    fourth, b = logra.running_mean_advantages(rewards, None)
    assert b == pytest.approx(2 / 6) and fourth[1].item() == pytest.approx(-2 / 6)


@pytest.mark.parametrize("chunk", [512, 4, 1])
def test_token_logprobs_are_at_temperature(chunk):
    """log_softmax(head(h) / T)[id] and its gradient, chunked or not; without T it is another."""
    torch.manual_seed(0)
    hidden, head = torch.randn(11, 16, requires_grad=True), torch.nn.Linear(16, 64)
    ids, weight = torch.randint(64, (11,)), torch.randn(11)
    found = logra.token_logprobs(hidden, head, ids, 0.6, chunk)
    (found * weight).sum().backward()
    h = hidden.detach().double().requires_grad_()
    z = h @ head.weight.detach().double().T + head.bias.detach().double()
    expected = (z / 0.6).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    (expected * weight.double()).sum().backward()
    assert (found.double() - expected).abs().max() < 1e-5
    assert rel(hidden.grad, h.grad) < 1e-6
    assert (z.log_softmax(-1).gather(1, ids[:, None])[:, 0] - expected).abs().mean() > 0.1


def test_policy_loss_is_the_table():
    """-sum w min(ratio adv, clip(ratio) adv): both clips, both signs, and the cap of w at 2."""
    # ratio, old - engine, advantage -> loss, d loss / d logp
    table = [
        (1.0, 0.0, 2.0, -2.0, -2.0),
        (1.0, 0.0, -2.0, 2.0, 2.0),
        (1.5, 0.0, 1.0, -1.28, 0.0),  # above 1 + 0.28: no further up
        (1.5, 0.0, -1.0, 1.5, 1.5),  # but down again
        (1.25, 0.0, 1.0, -1.25, -1.25),  # between the two: clip_high is not clip_low
        (0.5, 0.0, 1.0, -0.5, -0.5),
        (0.5, 0.0, -1.0, 0.8, 0.0),  # below 1 - 0.2: no further down
        (1.0, math.log(1.5), 1.0, -1.5, -1.5),  # importance
        (1.0, math.log(5.0), 1.0, -2.0, -2.0),  # capped
        (1.0, math.log(0.1), -1.0, 0.1, 0.1),  # not from below
        (1.5, math.log(5.0), 1.0, -2.56, 0.0),
        (1.1, 0.3, 0.0, 0.0, 0.0),
    ]
    ratio, drift, adv, loss, slope = torch.tensor(table, dtype=torch.float64).T
    old = torch.linspace(-3, -1, len(table), dtype=torch.float64)
    logp = (old + ratio.log()).requires_grad_()
    found = logra.policy_loss(logp, old, old - drift, adv, 0.2, 0.28)
    found.backward()
    assert found.item() == pytest.approx(loss.sum().item())  # a sum; a mean would be a twelfth
    assert logp.grad.tolist() == pytest.approx(slope.tolist())
    for i in range(len(table)):
        one = slice(i, i + 1)
        args = logp.detach()[one], old[one], (old - drift)[one], adv[one]
        assert logra.policy_loss(*args, 0.2, 0.28).item() == pytest.approx(loss[i].item())


def test_loss_covers_the_generated_tokens():
    """pad = eos = 9, prompt [1, 9, 2], answer [5, 6, 9]: three tokens, by position, not value."""
    model = tiny_qwen2(eos_token_id=9, pad_token_id=9)
    samples = [
        logra.Sample([1, 9, 2], [5, 6, 9], [0.0] * 3, True),
        logra.Sample([9], [0, 9], [0.0] * 2, True),  # 0 is what rows are padded with
        logra.Sample([9, 9, 3, 9], [7], [0.0], False),
    ]
    with torch.no_grad():
        hidden, target = logra.response_hidden(model, samples, model.device)
        alone = []
        for s in samples:
            out = model.model(input_ids=torch.tensor([s.prompt + s.completion])).last_hidden_state
            alone.append(out[0, len(s.prompt) - 1 : len(s.prompt) + len(s.completion) - 1])
    assert target.tolist() == [5, 6, 9, 0, 9, 7]
    assert hidden.shape == (6, 64) and torch.allclose(hidden, torch.cat(alone), atol=1e-5)


def test_padding_and_order_change_nothing():
    """Log-probs and S of a batch, of its rows alone and of the batch reversed are the same."""
    samples, found = answers([2, 9, 5, 1]), {}
    for name, batches in {
        "batch": [samples],
        "alone": [[s] for s in samples],
        "reversed": [samples[::-1]],
    }.items():
        model = tiny_qwen2(peak=12.0)
        sketches, _ = sketched(model)
        logps = []
        for batch in batches:
            hidden, target = logra.response_hidden(model, batch, model.device)
            logp = logra.token_logprobs(hidden, model.lm_head, target, 1.0)
            logps += zip(map(id, batch), logp.split([len(s.completion) for s in batch]))
            weighted_logp(model, batch).backward()
        logps = dict(logps)
        found[name] = torch.cat([logps[id(s)] for s in samples]).detach(), sketches.buffer.clone()
    for name in ("alone", "reversed"):
        assert (found[name][0] - found["batch"][0]).abs().max() < 1e-5
        assert rel(found[name][1], found["batch"][1]) < 1e-5


def test_dropout_is_off_in_both_passes():
    """Dropout 0.1 in the config: engine and trainer agree in eval(), the first ratio is 1."""
    model = tiny_qwen2(peak=12.0, attention_dropout=0.1)  # eval(), as train.load_model does
    [s] = logra.HFGenerator(model, []).generate([[1, 2, 3]], [0], 8)

    def ratios():
        with torch.no_grad():
            hidden, target = logra.response_hidden(model, [s], model.device)
            logp = logra.token_logprobs(hidden, model.lm_head, target, 1.0)
        return (logp - torch.tensor(s.logprobs)).exp()

    assert (ratios() - 1).abs().max() < 1e-4
    model.train()
    assert (ratios() - 1).abs().max() > 1e-3  # wrong


# ------------------------------------------------------------------------------------------------
# 6  Generation without vLLM
# ------------------------------------------------------------------------------------------------

PROMPTS = [[5], [1, 2, 3], [9, 9], [4, 3, 2, 1, 0, 7], [1, 2, 3]]


class Scripted:
    """A language model in which each token has one successor."""

    device = torch.device("cpu")

    def __init__(self, successor):
        self.successor, self.calls = successor, []

    def __call__(self, ids, attention_mask, position_ids, **_):
        self.calls.append((attention_mask.tolist(), position_ids.tolist()))
        logits = torch.zeros(*ids.shape, 64)
        for place, token in enumerate(ids.flatten().tolist()):
            logits.view(-1, 64)[place, self.successor.get(token, 0)] = 100.0
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits)


def test_generation_stops_at_any_end_token():
    """eos {7, 9}: [5, 9] for 5 -> 9 -> 6 -> 7, the end token in it and nothing after it."""
    generator = logra.HFGenerator(Scripted({1: 5, 5: 9, 9: 6, 6: 7, 7: 1, 2: 3, 3: 2}), [9, 7])
    samples = generator.generate([[2, 1], [9], [2]], [0, 1, 2], 4)
    assert [s.completion for s in samples] == [[5, 9], [6, 7], [3, 2, 3, 2]]
    assert [s.finished for s in samples] == [True, True, False]
    assert [len(s.logprobs) for s in samples] == [2, 2, 4]
    [s] = generator.generate([[1]], [0], 2)  # ends on the last token it may have
    assert s.completion == [5, 9] and s.finished


def test_positions_count_from_the_first_token_of_a_prompt():
    """Left padding is masked and counts for nothing; then one position a token."""
    model = Scripted({1: 5, 2: 5, 5: 5})
    logra.HFGenerator(model, []).generate([[4, 3, 2], [1]], [0, 1], 2)
    (mask, places), (mask_2, places_2) = model.calls
    assert mask == [[1, 1, 1], [0, 0, 1]] and mask_2 == [[1, 1, 1, 1], [0, 0, 1, 1]]
    assert places[0] == [0, 1, 2] and places[1][2] == 0 and places_2 == [[3], [1]]


def test_end_token_in_the_prompt_ends_nothing():
    """Prompts made of end tokens are answered."""
    samples = logra.HFGenerator(Scripted({9: 5, 5: 6, 6: 9}), [9]).generate(
        [[9, 9], [9]], [0, 1], 5
    )
    assert [s.completion for s in samples] == [[5, 6, 9]] * 2
    assert [s.prompt for s in samples] == [[9, 9], [9]]


def test_stopping_cuts_and_changes_nothing_else():
    """With end tokens, a sample is the one without them up to the first."""
    model, ends = tiny_qwen2(peak=12.0), [3, 11, 20, 33, 47, 60]
    free = logra.HFGenerator(model, []).generate(PROMPTS, range(5), 12)
    cut = logra.HFGenerator(model, ends).generate(PROMPTS, range(5), 12)
    assert {s.finished for s in cut} == {True, False} and not any(s.finished for s in free)
    for a, b in zip(free, cut):
        n = next((i + 1 for i, x in enumerate(a.completion) if x in ends), 12)
        assert b.completion == a.completion[:n]
        assert b.finished == (a.completion[n - 1] in ends)


def test_samples_do_not_depend_on_the_batch():
    """A prompt and its seed decide: alone, among others, in another order, in several calls."""
    generator = logra.HFGenerator(tiny_qwen2(peak=12.0), [3, 11])
    together = generator.generate(PROMPTS, range(5), 10)
    backwards = generator.generate(PROMPTS[::-1], range(4, -1, -1), 10)[::-1]
    in_parts = generator.generate(PROMPTS, range(5), 10, rows=2)
    for i, sample in enumerate(together):
        [alone] = generator.generate([PROMPTS[i]], [i], 10)
        for other in (alone, backwards[i], in_parts[i]):
            assert other.prompt == PROMPTS[i] and other.completion == sample.completion
            assert other.logprobs == pytest.approx(sample.logprobs, abs=1e-4)
    assert together[1].completion != together[4].completion  # one prompt, two seeds


def test_greedy_is_argmax():
    """temperature 0: a plain loop of argmax, whatever the seed."""
    model = tiny_qwen2(peak=12.0)
    samples = logra.HFGenerator(model, []).generate(PROMPTS, range(5), 6, temperature=0.0)
    for s in samples:
        ids = list(s.prompt)
        for logp in s.logprobs:
            with torch.no_grad():
                z = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(z.argmax().item())
            assert logp == pytest.approx(z.max().item(), abs=1e-4)
        assert s.completion == ids[len(s.prompt) :]


def test_generator_logprobs_are_the_trainers():
    """At T = 0.7 engine and trainer agree within 1e-4; without the temperature they do not."""
    model = tiny_qwen2(peak=12.0)
    samples = logra.HFGenerator(model, [3]).generate(PROMPTS, range(5), 10, temperature=0.7)
    engine = torch.tensor([x for s in samples for x in s.logprobs])
    with torch.no_grad():
        hidden, target = logra.response_hidden(model, samples, model.device)
        right, wrong = (
            logra.token_logprobs(hidden, model.lm_head, target, T) - engine for T in (0.7, 1.0)
        )
    assert right.abs().max() < 1e-4 and wrong.abs().mean() > 1e-2


def test_seed_decides_the_sample():
    """Same seed, same answer; other seeds, other answers."""
    generator = logra.HFGenerator(tiny_qwen2(), [])
    first, again = (generator.generate([[1, 2]] * 20, range(20), 6) for _ in range(2))
    assert [s.completion for s in first] == [s.completion for s in again]
    assert len({tuple(s.completion) for s in first}) == 20
    others = generator.generate([[1, 2]] * 20, range(20, 40), 6)
    assert not {tuple(s.completion) for s in first} & {tuple(s.completion) for s in others}


def test_tokens_are_drawn_from_the_softmax():
    """chi^2 of 4096 first tokens against softmax(z / T) within 6 sigma; at another T far off."""
    model, n = tiny_qwen2(peak=12.0), 4096
    seeds = [logra.stable_seed("sample", i) for i in range(n)]
    samples = logra.HFGenerator(model, []).generate([[1, 2, 3]] * n, seeds, 1, temperature=0.7)
    counts = torch.bincount(torch.tensor([s.completion[0] for s in samples]), minlength=64)
    with torch.no_grad():
        z = model(torch.tensor([[1, 2, 3]])).logits[0, -1].double()

    def chi_squared(T):
        expected, found = n * (z / T).softmax(-1), counts.double()
        rare = expected < 5  # one cell
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
        found = torch.cat([found[~rare], found[rare].sum()[None]])
        k = len(expected) - 1
        return (((found - expected) ** 2 / expected).sum().item() - k) / math.sqrt(2 * k)

    assert abs(chi_squared(0.7)) < 6 and chi_squared(1.0) > 50


# ------------------------------------------------------------------------------------------------
# 7  The loop, without vLLM
# ------------------------------------------------------------------------------------------------


def low_tokens(sample):
    """A toy reward: the share of tokens below 16."""
    return sum(token < 16 for token in sample.completion) / len(sample.completion)


def spread_of_tokens(sample):
    """A toy reward of which no two answers are likely to have the same."""
    return sum(token * (i + 1) for i, token in enumerate(sample.completion)) % 97 / 97


def sketch_norm(samples):
    """||sum adv grad log p A^T|| over the layers, by autograd on the model of loop()."""
    sketches, _ = sketched(tiny_qwen2(peak=3.0))
    G = dense_gradients(tiny_qwen2(peak=3.0), sketches.layers, samples)
    S = [G[p] @ sketches.A[layer.in_features].T for p, layer in sketches.layers.items()]
    return math.sqrt(sum(x.square().sum().item() for x in S))


LAYERS = [
    f"model.layers.{i}.{name}"
    for i in (0, 1)
    for name in [f"self_attn.{x}_proj" for x in "qkvo"]
    + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
]


def draw_three(step):
    """Three prompts a step, of unequal lengths."""
    return [(3 * step + i, [1 + i] * (i + 1), None) for i in range(3)]


def settings(**changes):
    """What grpo reads of a configuration; the defaults of train.Config but for the sizes."""
    fields = {"seed": 0, "temperature": 1.0, "updates_per_batch": 1, "divide_by_std": True}
    fields |= {"clip_low": 0.2, "clip_high": 0.28, "probe_responses": 2, "kl_check_every": 1}
    fields |= {"kl_predictor": "quadratic", "sync": "factors", "dtype": "float32"}
    fields |= {"advantage": "group", "denominator": "tokens", "mask_truncated": False}
    fields |= {"verify_step": False}
    assert changes.keys() <= {*fields, "steps", "group_size", "max_new_tokens", "micro_batch"}
    return types.SimpleNamespace(**fields | changes)


def loop(
    steps,
    resume=None,
    reward=low_tokens,
    dense=False,
    checkpointed=False,
    ratio=3e-2,
    control=None,
    budget=3e-2,
    ends=(3, 40),
    draw=draw_three,
    first_step=0,
    rule="row_adam",
    refresh=1,
    **kw,
):
    """Run grpo on a fresh tiny model.  Returns the metrics, model, optimizer and control."""
    model = tiny_qwen2(peak=3.0)
    if checkpointed:
        train.checkpoint_layers(model)
    if dense:
        layers = logra.find_targets(model)
        logra.freeze_all_but(model, layers)
        optimizer = train.DenseAdamW(layers, (1e-3, 1e-3))
    else:
        optimizer = logra.LoGRA(logra.attach_sketches(model, 8, refresh=refresh), ratio, rule=rule)
    control = control or logra.KLControl(budget, budget / 10, 20)
    if resume:
        file = io.BytesIO()
        torch.save([resume[1].state_dict(), resume[2].state_dict(), resume[3].mismatch], file)
        file.seek(0)
        weights, state, control.mismatch = torch.load(file, weights_only=True)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    generator = logra.HFGenerator(model, ends)
    options = {"group_size": 4, "max_new_tokens": 5, "micro_batch": 5, "steps": steps, **kw}
    run = logra.grpo(
        model, generator, optimizer, control, draw, reward, settings(**options), first_step
    )
    return list(run), model, optimizer, control


TIMED = {"seconds": {}, "tokens_per_second": 0.0, "peak_gib": 0.0}  # what train adds to metrics


def same_weights(a, b):
    return all(torch.equal(x, b.state_dict()[k]) for k, x in a.state_dict().items())


@pytest.mark.parametrize("predictor", ["quadratic", "linearised"])
def test_reward_rises(predictor):
    """From one quarter to above two fifths in 25 steps of 24 answers."""
    metrics, *_ = loop(25, kl_predictor=predictor, group_size=8, ends=(), budget=0.1)
    rewards = [m["reward"] for m in metrics]
    assert sum(rewards[:3]) / 3 < 0.33 and sum(rewards[-3:]) / 3 > 0.42
    assert [m["step"] for m in metrics] == [m["update"] for m in metrics] == list(range(1, 26))
    for m in metrics:
        assert 0 < m["alpha"] <= 3 and m["kl_predicted"] <= m["budget"] * 1.0001
        assert 0 < m["kl_realised"] < 10 * m["budget"]


@pytest.mark.parametrize("updates_per_batch", [1, 2])
def test_micro_batch_changes_no_weight(updates_per_batch):
    """It decides memory and speed: W after two steps is the same, up to a bfloat16 on the edge."""
    start, found = tiny_qwen2(peak=3.0), {}
    for size in (1, 5, 100):
        _, model, optimizer, _ = loop(2, micro_batch=size, updates_per_batch=updates_per_batch)
        W, W_0 = (
            torch.cat([m.get_submodule(path).weight.detach().flatten() for path in LAYERS])
            for m in (model, start)
        )
        found[size] = W, W - W_0
        assert optimizer.update == 2 * updates_per_batch
    for size in (1, 5):
        assert rel(found[size][0], found[100][0]) < 1e-5
        assert rel(found[size][1], found[100][1]) < 2e-3
    assert rel(found[100][0], found[100][0] - found[100][1]) > 1e-3  # something was learned


def test_first_update_is_the_policy_gradient():
    """S = -sum adv grad log p A^T / tokens of the batch, the dead groups' tokens included."""

    def reward(sample):  # the group of the first prompt is dead
        return 0.0 if sample.index == 0 else low_tokens(sample)

    [m], *_ = loop(1, reward=reward)
    samples, plain = m["samples"], tiny_qwen2(peak=3.0)
    adv = torch.tensor([s.advantage for s in samples]).view(3, 4)
    assert (adv[0] == 0).all() and (adv[1:] != 0).any() and m["dead_groups"] >= 1 / 3
    sketches, _ = sketched(tiny_qwen2(peak=3.0))
    G = dense_gradients(plain, sketches.layers, samples)
    S = [G[p] @ sketches.A[layer.in_features].T for p, layer in sketches.layers.items()]
    norm = math.sqrt(sum(x.square().sum().item() for x in S))
    tokens = sum(len(s.completion) for s in samples)
    alive = sum(len(s.completion) for s in samples if s.advantage)
    assert m["grad_sketch_norm"] == pytest.approx(norm / tokens, rel=1e-3)
    assert abs(m["grad_sketch_norm"] / (norm / alive) - 1) > 0.1  # wrong


def test_dead_groups_move_nothing():
    """All rewards equal: no update, W bitwise the same, alpha 0, one line a step and no NaN."""
    metrics, model, optimizer, _ = loop(2, reward=lambda sample: 0.1, updates_per_batch=2)
    assert same_weights(model, tiny_qwen2(peak=3.0)) and optimizer.update == 0
    assert (optimizer.moments["v"] == 0).all()
    assert len(metrics) == 2 and all(m["last"] for m in metrics)
    for m in metrics:
        assert m["alpha"] == m["update_ratio"] == m["sync_bytes"] == m["update"] == 0
        assert m["kl_predicted"] is None and m["kl_realised"] is None and m["dead_groups"] == 1
        assert all(math.isfinite(x) for x in m.values() if isinstance(x, float))


def test_truncated_answers_are_trained_on():
    """None finished: they count in the loss, the mismatch hears of none, and nothing is NaN."""
    metrics, model, optimizer, control = loop(2, ends=())
    assert all(m["truncated"] == 1 and m["length"] == 5 for m in metrics)
    assert control.mismatch == 0 and optimizer.update == 2
    assert all(math.isfinite(x) for m in metrics for x in m.values() if isinstance(x, float))
    assert all(torch.isfinite(W).all() for W in model.state_dict().values())
    assert not same_weights(model, tiny_qwen2(peak=3.0))


def test_masked_answers_add_nothing_and_are_not_divided_by():
    """S = -sum adv grad log p A^T over finished answers / their tokens; G of all gives the mean."""
    [m], *_ = loop(1, ends=range(40, 64), mask_truncated=True, reward=spread_of_tokens)
    cut = [s for s in m["samples"] if not s.finished]
    finished = [s for s in m["samples"] if s.finished]
    assert cut and finished and all(s.advantage == 0 for s in cut)
    rewards = torch.tensor([s.reward for s in m["samples"]]).view(3, 4)
    adv = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, correction=0, keepdim=True)
    for s, a in zip(m["samples"], adv.flatten().tolist(), strict=True):
        assert not s.finished or s.advantage == pytest.approx(a, abs=1e-5)
    tokens = sum(len(s.completion) for s in finished)
    assert m["grad_sketch_norm"] == pytest.approx(sketch_norm(finished) / tokens, rel=1e-3)
    everyone = sum(len(s.completion) for s in m["samples"])
    assert m["length"] == everyone / 12 and abs(everyone / tokens - 1) > 0.1  # diluted: wrong


def test_all_answers_masked_move_nothing():
    """None finished: no update and no NaN, and the line says that all are cut."""
    metrics, model, optimizer, _ = loop(2, ends=(), mask_truncated=True, reward=spread_of_tokens)
    assert same_weights(model, tiny_qwen2(peak=3.0)) and optimizer.update == 0
    for m in metrics:
        assert m["last"] and m["alpha"] == 0 and m["length"] == 5
        assert all(math.isfinite(x) for x in m.values() if isinstance(x, float))
        assert "every answer is cut" in train.step_line(m | TIMED)


def test_constant_denominator_is_answers_times_longest():
    """Dr. GRPO: no std, and 12 answers x 5 tokens whatever was generated."""
    kw = {"divide_by_std": False, "reward": spread_of_tokens}
    [m], *_ = loop(1, denominator="constant", **kw)
    norm = sketch_norm(m["samples"])
    assert m["grad_sketch_norm"] == pytest.approx(norm / (12 * 5), rel=1e-3)
    [n], *_ = loop(1, **kw)
    tokens = sum(len(s.completion) for s in n["samples"])
    assert n["grad_sketch_norm"] == pytest.approx(norm / tokens, rel=1e-3) and tokens < 12 * 5


def test_running_mean_trains_on_one_answer_a_prompt():
    """G = 1: nothing is dead but for chance; the baseline is that of all steps before."""
    metrics, model, _, control = loop(3, group_size=1, advantage="running_mean")
    b = None
    for m in metrics:
        rewards = [s.reward for s in m["samples"]]
        mean = sum(rewards) / 3
        b = mean if b is None else b
        assert [s.advantage for s in m["samples"]] == pytest.approx([r - b for r in rewards])
        b += 0.1 * (mean - b)
    assert control.baseline == pytest.approx(b) and not same_weights(model, tiny_qwen2(peak=3.0))


def test_mismatch_hears_finished_answers_only(monkeypatch):
    """Engine log-probs 1e-3 too high where finished, 1 too high where cut: mismatch = 0.3e-3."""
    generate = logra.HFGenerator.generate

    def biased(*args, **kw):
        samples = generate(*args, **kw)
        for s in samples:
            s.logprobs = [x + (1e-3 if s.finished else 1.0) for x in s.logprobs]
        return samples

    monkeypatch.setattr(logra.HFGenerator, "generate", biased)
    [m], *_ = loop(1, ends=range(40, 64))
    assert 0 < m["truncated"] < 1
    assert m["mismatch"] == pytest.approx(3e-4, rel=0.01)
    assert m["budget"] == pytest.approx(3e-2 - 3e-4, rel=1e-3)


def test_old_logprobs_are_those_of_the_first_update(monkeypatch):
    """updates_per_batch=2: two lines a step; the ratio is 1 at the first, and then moves."""
    calls, loss = [], logra.policy_loss

    def recorded(logp, old, *rest):
        calls.append((logp.detach(), old))
        return loss(logp, old, *rest)

    monkeypatch.setattr(logra, "policy_loss", recorded)
    metrics, *_ = loop(2, updates_per_batch=2, micro_batch=100)
    assert [(m["step"], m["update"]) for m in metrics] == [(1, 1), (1, 2), (2, 3), (2, 4)]
    assert [m["last"] for m in metrics] == [False, True] * 2
    for (logp, old), (logp_2, old_2) in (calls[:2], calls[2:]):
        assert torch.equal(logp, old) and torch.equal(old_2, old)
        assert (logp_2 - old_2).abs().max() > 1e-3


@pytest.mark.parametrize(
    "kw",
    [
        *({"updates_per_batch": 1}, {"updates_per_batch": 2}, {"verify_step": True, "budget": 0.1}),
        *({"rule": "sketch_muon"}, {"rule": "sketch_sgd"}, {"rule": "sketch_adam", "refresh": 3}),
    ],
    ids=str,
)
def test_resumed_run_is_the_same_run(kw):
    """2 steps + save + load + 2 = 4 steps: samples, metrics and W to the bit."""
    kw = {"kl_predictor": "linearised", **kw}
    whole, model, *_ = loop(4, **kw)
    half = loop(2, **kw)
    rest, resumed, *_ = loop(4, resume=half, first_step=2, **kw)
    assert same_weights(resumed, model)
    for a, b in zip(whole, half[0] + rest, strict=True):
        assert [s.completion for s in a["samples"]] == [s.completion for s in b["samples"]]
        for key in a.keys() - {"samples", "seconds", "tokens_per_second", "peak_gib"}:
            assert a[key] == b[key], key
    _, other, *_ = loop(4, resume=half, first_step=1, **kw)  # off by one
    assert not same_weights(other, model)


def test_everything_follows_from_the_seed():
    """Another seed or step, other samples; so it is within a group and for two equal prompts."""

    def same_prompts(step):
        return [(i, [1, 2], None) for i in range(3)]

    kw = {"draw": same_prompts, "reward": lambda sample: 0.0}  # W stays
    one, two = (loop(2, seed=seed, **kw)[0] for seed in (0, 1))
    answers_of = [[tuple(s.completion) for s in m["samples"]] for m in (*one, *two)]
    assert all(a != b for i, a in enumerate(answers_of) for b in answers_of[:i])
    assert all(len(set(a[i : i + 4])) > 1 for a in answers_of for i in (0, 4, 8))
    assert all(len({a[:4], a[4:8], a[8:]}) == 3 for a in map(tuple, answers_of))


def test_without_kl_control_the_step_is_one():
    """enabled=False, kl_check_every=0: alpha 1, ||F A|| / ||W|| = update_ratio, none realised."""
    control = logra.KLControl(1e-9, enabled=False)
    [m], model, *_ = loop(1, ratio=1e-3, control=control, kl_check_every=0)
    assert m["alpha"] == 1.0 and m["kl_realised"] is None and m["update_ratio"] == 1e-3
    start, moved, size = tiny_qwen2(peak=3.0), 0.0, 0.0
    for path in LAYERS:
        W, W_0 = (x.get_submodule(path).weight.detach().double() for x in (model, start))
        moved, size = moved + (W - W_0).square().sum(), size + W_0.square().sum()
    assert (moved / size).sqrt().item() == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("rule", ["row_adam", "sketch_muon"])
def test_verified_steps_stay_within_the_budget(rule, monkeypatch):
    """Where the prediction lets every second step go 1.5 times too far, that step is cut to the
    budget and the others are left alone; the metrics tell of the steps that stay."""

    class Optimistic(logra.KLControl):
        def scale(self, curve, update):
            return super().scale(curve, update) * (1.5 if update % 2 else 0.7)

    backs, take_back = {}, logra.LoGRA.take_back

    def counted(self, factors, back):
        backs[self.update - 1] = back
        take_back(self, factors, back)

    monkeypatch.setattr(logra.LoGRA, "take_back", counted)
    kw = {"rule": rule, "ends": (), "kl_predictor": "linearised", "ratio": 1e-2}
    plain, *_ = loop(6, control=Optimistic(2e-3, 2e-3, alpha_max=30.0), **kw)
    assert not backs and all(m["kl_realised"] > 1.5 * m["budget"] for m in plain[1::2])
    control = Optimistic(2e-3, 2e-3, alpha_max=30.0)
    metrics, *_ = loop(6, control=control, verify_step=True, kl_check_every=0, **kw)
    assert list(backs) == [1, 3, 5]
    for update, m in enumerate(metrics):
        budget = m["budget"]
        if update % 2:
            assert 0.2 < backs[update] < 0.5 and 0.8 < m["kl_realised"] / budget < 1.1
        else:
            assert 0.3 < m["kl_realised"] / budget < 0.7
        assert m["kl_predicted"] == pytest.approx(m["kl_realised"], rel=0.3)
        assert m["update_ratio"] == pytest.approx(1e-2 * m["alpha"])


def test_dense_control_runs_in_the_same_loop():
    """AdamW: the reward rises, the realised KL is measured, none is predicted."""
    metrics, *_ = loop(12, dense=True, group_size=8, ends=(), sync="full")
    rewards = [m["reward"] for m in metrics]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
    assert all(m["kl_predicted"] is None and m["kl_realised"] > 0 for m in metrics)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_bfloat16_compute_trains_float32_weights(checkpointed):
    """dtype=bfloat16: autocast in training and probe, W float32, realised KL near the budget."""
    control = logra.KLControl(1e-2, 1e-2)
    kw = {"checkpointed": checkpointed, "kl_predictor": "linearised", "dtype": "bfloat16"}
    metrics, model, *_ = loop(2, control=control, ends=(), **kw)
    for m in metrics:
        assert m["kl_realised"] == pytest.approx(m["kl_predicted"], rel=0.5)
        assert m["kl_predicted"] == pytest.approx(m["budget"]) and m["alpha"] < 3
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert not same_weights(model, loop(2, control=logra.KLControl(1e-2, 1e-2), ends=())[1])


EOS = (1, 7, 9)
sorting_rows = train.sorting_rows  # before the fixture small_task shortens it
SETTINGS = {"rank": 8, "seed": 3, "kind": "rademacher", "refresh": 1}


# ------------------------------------------------------------------------------------------------
# A trainer and an engine of the same tiny model
# ------------------------------------------------------------------------------------------------


def model_with_biases(kind):
    """A model with logits that are not flat and biases that are not zero, vocabulary 64."""
    common = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,  # heads of 32: vLLM's attention on a CPU refuses 16
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    torch.manual_seed(0)
    if kind == "llama":  # untied
        config = transformers.LlamaConfig(**common, tie_word_embeddings=False)
        return transformers.LlamaForCausalLM(config)
    model = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**common, tie_word_embeddings=True)
    )
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """{name: directory}: qwen2, llama, and qwen2 with a generation config that interferes."""
    root = tmp_path_factory.mktemp("models")
    for kind in ("qwen2", "llama"):
        model_with_biases(kind).save_pretrained(root / kind)
    shutil.copytree(root / "qwen2", root / "meddling")
    meddling = {"do_sample": True, "top_p": 0.1, "temperature": 0.1, "repetition_penalty": 2.0}
    meddling |= {"top_k": 3, "bos_token_id": 0, "eos_token_id": list(EOS)}
    (root / "meddling" / "generation_config.json").write_text(json.dumps(meddling))
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="session")
def engines(models):
    """engine(name, dtype): a VLLMGenerator, started once and shared."""
    started = {}

    def engine(name, dtype="float32"):
        if (name, dtype) not in started:
            started[name, dtype] = logra.VLLMGenerator(
                models[name], EOS, 384, SETTINGS, dtype, kv_gib=0.05
            )
        return started[name, dtype]

    return engine


@pytest.fixture
def pair(models, engines):
    """pair(name, dtype, update_ratio): a fresh model with its optimizer, and an engine like it."""

    def make(name, dtype="float32", update_ratio=6e-5):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            models[name], dtype=torch.float32
        ).eval()
        optimizer = logra.LoGRA(logra.attach_sketches(model, 8, seed=3), update_ratio)
        generator = engines(name, dtype)
        generator.load(weights(optimizer).items())
        return model, optimizer, generator

    return make


def weights(optimizer):
    return {path: m.weight.detach() for path, m in optimizer.sketches.layers.items()}


def random_update(optimizer, alpha=1.0):
    """(factors, update) of a step along a random sketch."""
    update = optimizer.update
    optimizer.sketches.buffer.normal_()
    optimizer.propose(1)
    return optimizer.step(alpha), update


def prompts_of(*lengths):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(10, 64, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def trainer_logprobs(model, samples, temperature):
    hidden, ids = logra.response_hidden(model, samples, "cpu")
    return logra.token_logprobs(hidden, model.get_output_embeddings(), ids, temperature)


def engine_logprobs(samples):
    return torch.tensor([x for s in samples for x in s.logprobs])


def apart(x, y):
    return (x - y).abs().max().item()


# ------------------------------------------------------------------------------------------------
# 6  The engine samples from the trainer's policy
# ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_engine_logprobs_are_the_trainers(pair, name):
    """Both are log softmax(z / T) of the same weights, before and after updates (18)."""
    model, optimizer, generator = pair(name, update_ratio=3e-2)
    prompts = prompts_of(1, 4, 9, 30, 5, 2)
    for _ in range(4):
        samples = generator.generate(prompts, range(6), 24, temperature=0.7)
        engine = engine_logprobs(samples)
        assert apart(engine, trainer_logprobs(model, samples, 0.7)) < 1e-4
        assert apart(engine, trainer_logprobs(model, samples, 1.0)) > 0.1
        before = trainer_logprobs(model, samples, 0.7)
        generator.update(*random_update(optimizer))
        assert apart(before, trainer_logprobs(model, samples, 0.7)) > 0.02  # it did move


@pytest.mark.slow
def test_every_sampling_field_is_set(pair):
    """A generation config in the model's directory changes no token and no log-prob (19)."""
    plain, meddling = pair("qwen2")[2], pair("meddling")[2]
    for generator in (plain, meddling):
        assert generator.llm.llm_engine.model_config.logprobs_mode == "processed_logprobs"
    prompts = prompts_of(*[4] * 32)
    a, b = (g.generate(prompts, range(32), 16, temperature=0.7) for g in (plain, meddling))
    assert [(s.completion, s.logprobs) for s in a] == [(s.completion, s.logprobs) for s in b]
    assert len({token for s in b for token in s.completion}) > 20  # top-p 0.1 leaves few


@pytest.mark.slow
def test_every_eos_id_ends_an_answer(pair):
    """An answer ends with whichever of them comes first, and holds it (2)."""
    samples = pair("llama")[2].generate(prompts_of(*[4] * 200), range(200), 24)
    for s in samples:
        assert not set(s.completion[:-1]) & set(EOS)
        assert s.finished == (s.completion[-1] in EOS)
        assert s.finished or len(s.completion) == 24
        assert len(s.logprobs) == len(s.completion)
    assert {s.completion[-1] for s in samples if s.finished} == set(EOS)


@pytest.mark.slow
def test_eos_in_the_prompt_does_not_end_the_answer(pair):
    """Only what is generated can end it (3)."""
    prompts = [[5, 9, 6], [9, 7, 1]] * 8
    samples = pair("llama")[2].generate(prompts, range(16), 8)
    assert [s.prompt for s in samples] == prompts
    assert max(len(s.completion) for s in samples) > 2


@pytest.mark.slow
def test_a_seed_decides_its_engine_sample(pair):
    """Same seed, same sample, also alone or elsewhere in the batch; other seeds differ (30)."""
    generator = pair("llama")[2]
    prompts, seeds = prompts_of(6) * 12, list(range(12))

    def completions(prompts, seeds):
        return [s.completion for s in generator.generate(prompts, seeds, 12)]

    first = completions(prompts, seeds)
    assert len({tuple(c) for c in first}) > 10  # equal prompts
    assert completions(prompts, seeds) == first
    assert completions(prompts, seeds[::-1]) == first[::-1]
    assert completions(prompts[:1], [7]) == [first[7]]
    assert completions(prompts, [s + 100 for s in seeds]) != first


@pytest.mark.slow
def test_temperature_zero_is_greedy(pair):
    """Each token is the argmax of the trainer's logits, so any two seeds agree."""
    model, _, generator = pair("qwen2")
    a, b = generator.generate(prompts_of(7) * 2, [1, 2], 12, temperature=0.0)
    assert a.completion == b.completion
    z = model(input_ids=torch.tensor([a.prompt + a.completion])).logits[0, 6:-1]
    assert z.argmax(-1).tolist() == a.completion


@pytest.mark.slow
def test_vllm_and_hf_generators_are_greedy_alike(pair):
    """One interface, one answer, whatever the lengths of the prompts in the batch."""
    model, _, generator = pair("llama")
    prompts = prompts_of(3, 11, 1, 7, 20)
    a = generator.generate(prompts, range(5), 12, 0.0)
    b = logra.HFGenerator(model, EOS).generate(prompts, range(5), 12, 0.0)
    assert [(s.completion, s.finished) for s in a] == [(s.completion, s.finished) for s in b]


def test_hf_generator_samples_by_seed_whatever_the_batch():
    """Padding, batch and place change no token; log-probs are the trainer's (6, 18, 30)."""
    model = model_with_biases("qwen2").eval()
    generator = logra.HFGenerator(model, EOS)
    prompts = prompts_of(3, 11, 1, 7, 20)
    samples = generator.generate(prompts, range(5), 12, 0.7)
    assert apart(engine_logprobs(samples), trainer_logprobs(model, samples, 0.7)) < 1e-4
    assert apart(engine_logprobs(samples), trainer_logprobs(model, samples, 1.0)) > 0.1
    for rows in (1, 2):
        again = generator.generate(prompts, range(5), 12, 0.7, rows=rows)
        assert [s.completion for s in again] == [s.completion for s in samples]
    for s in samples:
        assert not set(s.completion[:-1]) & set(EOS) and s.finished == (s.completion[-1] in EOS)


# ------------------------------------------------------------------------------------------------
# 6  The engine's weights are the trainer's
# ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_engine_weights_after_50_updates(pair, name, dtype):
    """To the bit, rounded once for a bfloat16 engine; in place it would be elsewhere (37)."""
    _, optimizer, generator = pair(name, dtype, update_ratio=6e-5)
    start = {path: W.clone() for path, W in weights(optimizer).items()}
    in_place = {path: W.to(torch.bfloat16) for path, W in start.items()}
    for _ in range(50):
        A = dict(optimizer.sketches.A)
        factors, update = random_update(optimizer)
        generator.update(factors, update)
        for path, W in in_place.items():
            W.sub_((factors[path].float() @ A[W.shape[1]]).to(torch.bfloat16))
    engine = generator.read()
    assert engine.keys() == start.keys() and len(start) == 14
    for path, W in weights(optimizer).items():
        assert torch.equal(engine[path], W.to(getattr(torch, dtype))), path
        assert not torch.equal(engine[path], start[path].to(getattr(torch, dtype)))
        wrong = (in_place[path] != W.to(torch.bfloat16)).float().mean().item()
        assert wrong > 0.05, path


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_follows_what_is_taken_back(pair, dtype):
    """After ten updates, every second one of them cut, to the bit."""
    _, optimizer, generator = pair("qwen2", dtype, update_ratio=1e-3)
    start = generator.read()
    for i in range(10):
        factors, update = random_update(optimizer)
        back = 0.1 * i * (i % 2)
        if back:
            optimizer.take_back(factors, back)
        generator.update(factors, update, back)
    for path, W in weights(optimizer).items():
        engine = generator.read()[path]
        assert torch.equal(engine, W.to(getattr(torch, dtype))), path
        assert not torch.equal(engine, start[path])


def test_an_engine_takes_back_in_the_blocks_of_two_ranks():
    """The worker's arithmetic against two ranks' rows, each multiplied by itself, to the bit."""
    engine, linear = logra.SketchSync(), torch.nn.Linear(64, 97, bias=False)
    engine.get_model = lambda: torch.nn.ModuleDict({"x": linear})
    W = linear.weight.detach().clone()
    settings = {"rank": 8, "seed": 0, "kind": "rademacher", "refresh": 1}
    engine.sync_weights([("x", W)], settings, 2)
    shards = [part.clone() for part in W.chunk(2)]
    for update in range(3):
        factor, back = torch.randn(97, 8).bfloat16(), 0.37
        A = logra.draw_projections([64], update, W, **settings)[64]
        for sign, F_part in ((-1, factor), (1, (back * factor.float()).bfloat16())):
            for shard, part in zip(shards, F_part.chunk(2)):
                shard.addmm_(part.float(), A, alpha=sign)
        engine.sync_factors({"x": factor}, update, back)
        assert torch.equal(linear.weight, torch.cat(shards))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_load_brings_an_engine_to_a_trainer_that_moved_on(pair, dtype):
    """The full sync: weights whole, and factors count from there."""
    _, optimizer, generator = pair("qwen2", dtype, update_ratio=1e-2)
    for _ in range(3):
        random_update(optimizer)
    path, W = next(iter(weights(optimizer).items()))
    assert not torch.equal(generator.read()[path], W.to(getattr(torch, dtype)))
    generator.load(weights(optimizer).items())
    generator.update(*random_update(optimizer))
    for path, W in weights(optimizer).items():
        assert torch.equal(generator.read()[path], W.to(getattr(torch, dtype))), path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_an_update_reaches_the_engine_and_stays(pair, name):
    """After a huge update the samples are others, score as the trainer's, and stay so (25)."""
    model, optimizer, generator = pair(name, update_ratio=1.0)
    prompts = prompts_of(5, 6, 7)
    before = generator.generate(prompts, range(3), 12)
    generator.update(*random_update(optimizer))
    after = generator.generate(prompts, range(3), 12)
    again = generator.generate(prompts, range(3), 12)
    assert [s.completion for s in after] != [s.completion for s in before]
    assert [(s.completion, s.logprobs) for s in again] == [
        (s.completion, s.logprobs) for s in after
    ]
    assert apart(engine_logprobs(again), trainer_logprobs(model, again, 1.0)) < 1e-4
    assert apart(engine_logprobs(before), trainer_logprobs(model, before, 1.0)) > 0.5


@pytest.mark.slow
def test_no_stale_prefix_is_left_in_the_cache(pair):
    """Greedy answers to a prompt of three blocks are those of the new weights (23)."""
    model, optimizer, generator = pair("qwen2", update_ratio=0.3)
    prompt = prompts_of(300)[0]
    params = generator.vllm.SamplingParams(
        max_tokens=8, temperature=0.0, logprobs=0, flat_logprobs=True, detokenize=False
    )

    def direct():  # generate(), but for the reset that it makes itself
        output = generator.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        o = output[0].outputs[0]
        sample = logra.Sample(prompt, list(o.token_ids), list(o.logprobs.logprobs), False)
        return sample, apart(engine_logprobs([sample]), trainer_logprobs(model, [sample], 1.0))

    assert direct()[1] < 1e-4  # and its keys and values are cached
    generator.llm.collective_rpc("sync_factors", args=random_update(optimizer))
    assert direct()[1] > 0.1  # what happens without the reset
    generator.load(weights(optimizer).items())
    for sync in ("full", "factors"):
        assert direct()[1] < 1e-4
        factors, update = random_update(optimizer)
        if sync == "factors":
            generator.update(factors, update)
        else:
            generator.load(weights(optimizer).items())
        sample, difference = direct()
        assert difference < 1e-4
        z = model(input_ids=torch.tensor([prompt + sample.completion])).logits[0, 299:-1]
        assert z.argmax(-1).tolist() == sample.completion


@pytest.mark.slow
def test_the_engine_is_in_this_process_whatever_is_asked(pair):
    """Tensors reach the weights by reference, so that the other mode is not used, though the
    environment asks for it (29)."""
    _, optimizer, generator = pair("qwen2")
    assert type(generator.llm.llm_engine.engine_core).__name__ == "InprocClient"
    generator.update(*random_update(optimizer))
    read, trained = generator.read(), weights(optimizer)
    assert read.keys() == trained.keys() and all(torch.equal(read[p], trained[p]) for p in read)


@pytest.mark.slow
def test_every_target_layer_is_reached_or_it_raises(pair):
    """A factor too few, a layer unknown, a shape that does not fit: RuntimeError (27)."""
    _, optimizer, generator = pair("llama")
    factors, update = random_update(optimizer)
    path = "model.layers.1.self_attn.k_proj"
    fewer = {p: f for p, f in factors.items() if p != path}
    with pytest.raises(logra.StopRun, match=path):
        generator.update(fewer, update)
    with pytest.raises(logra.StopRun, match="layers.7"):
        generator.update({**factors, "model.layers.7.mlp.up_proj": factors[path]}, update)
    with pytest.raises(logra.StopRun, match="differ: .*k_proj"):
        generator.update({**factors, path: factors[path][:-1]}, update)
    W = weights(optimizer)
    for unknown in ("model.layers.7.mlp.up_proj", "model.layers.1.self_attn.kk_proj"):
        with pytest.raises(logra.StopRun, match=unknown):
            generator.load({**W, unknown: W[path]}.items())
    with pytest.raises(logra.StopRun, match=path):
        generator.load({**W, path: W[path][:-1]}.items())


# ------------------------------------------------------------------------------------------------
# Families: pytest -k families -s prints a table of them
# ------------------------------------------------------------------------------------------------

WINDOW = {"head_dim": 32, "sliding_window": 8}
TIED = {"tie_word_embeddings": True}
FAMILIES = {
    "Qwen2": TIED,  # and Qwen2.5; biases on q, k, v
    "Qwen3": {"head_dim": 32, **TIED},  # norms of q and k
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": WINDOW,
    "Gemma2": {  # caps on scores and logits, every other layer with a window
        **WINDOW,
        **TIED,
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 2.0,
    },
    "Gemma3": {**WINDOW, **TIED, "query_pre_attn_scalar": 32},  # norms of q and k
    "Phi3": {"sliding_window": 8},  # one layer for q, k, v and one for gate, up
    "Olmo2": {},  # norms of q and k, and norms after the layers
    "Glm4": {"head_dim": 32, "attention_bias": True},  # one layer for gate, up
    "SmolLM3": TIED,
    "Granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 0.5,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.1,
    },
    "Cohere": {**TIED, "logit_scale": 0.25, "use_qk_norm": True},
}
of_every_family = pytest.mark.parametrize("family", FAMILIES)


@functools.cache
def family_prototype(family):
    """Made once: an engine of some families leaves their class unfit to make another."""
    model = tiny(
        family,
        **{"bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.1} | FAMILIES[family],
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # the norms too
                parameter.add_(0.1 * torch.randn_like(parameter))
    if family == "Gemma2":  # as load_model does
        model.set_attn_implementation("eager")
    return model


def family_model(family, dtype=torch.float32):
    return copy.deepcopy(family_prototype(family)).to(dtype)


def whole_model_logprobs(model, samples, temperature=1.0):
    """log p of the generated tokens by model(...).logits, a sample at a time.

    The call is torch's own: an engine that uses transformers' class has put another there.
    """
    rows = []
    with mock.patch.object(type(model.base_model), "__call__", torch.nn.Module.__call__):
        for s in samples:
            z = model(torch.tensor([s.prompt + s.completion])).logits[0, len(s.prompt) - 1 : -1]
            z = (z / temperature).log_softmax(-1)
            rows.append(z.gather(1, torch.tensor(s.completion)[:, None])[:, 0])
    return torch.cat(rows)


def training_logprobs(model, samples):
    """The same as training has them."""
    hidden, ids = logra.response_hidden(model, samples, "cpu")
    return logra.token_logprobs(hidden, logra.policy_head(model), ids, 1.0)


def advantages_of(samples):
    return torch.tensor([s.advantage for s in samples for _ in s.completion])


@of_every_family
def test_families_logprobs_are_those_of_the_whole_model(family):
    """In training and of the generator: caps, scales, windows, padding, whatever the family has."""
    model, samples = family_model(family), answers([7, 20, 9])
    with torch.no_grad():
        expected = whole_model_logprobs(model, samples)
        assert apart(training_logprobs(model, samples), expected) < 1e-5
        hidden, ids = logra.response_hidden(model, samples, "cpu")
        bare = logra.token_logprobs(hidden, model.get_output_embeddings(), ids, 1.0)
        changes = family in ("Gemma2", "Granite", "Cohere")
        assert (apart(bare, expected) > 0.05) == changes  # wrong: the head's product alone
        wide = copy.deepcopy(model)
        for config in {
            id(m.config): m.config for m in wide.modules() if hasattr(m, "config")
        }.values():
            config.sliding_window = 1000
        bound = "sliding_window" in FAMILIES[family]
        assert (apart(whole_model_logprobs(wide, samples), expected) > 1e-3) == bound
    assert not any(m.training for m in model.modules())
    drawn = logra.HFGenerator(model, EOS).generate(prompts_of(3, 11, 1), range(3), 16, 0.7)
    assert apart(engine_logprobs(drawn), whole_model_logprobs(model, drawn, 0.7)) < 1e-4


@of_every_family
def test_families_step_along_their_dense_gradient(family):
    """S = G A^T with G by autograd through model(...).logits, and W moves by bfloat16(U) A."""
    model, samples = family_model(family, torch.float64), answers([7, 20, 9])
    plain, ratio = copy.deepcopy(model), 1e-2
    sketches, optimizer = sketched(model, 8, update_ratio=ratio)
    (training_logprobs(model, samples) * advantages_of(samples)).sum().backward()
    W = {path: plain.get_submodule(path).weight for path in sketches.layers}
    loss = (whole_model_logprobs(plain, samples) * advantages_of(samples)).sum()
    A = {path: sketches.A[w.shape[1]].clone() for path, w in W.items()}
    D = {}
    for path, G in zip(W, torch.autograd.grad(loss, list(W.values()))):
        assert rel(sketches.rows[path], G @ A[path].T) < 1e-5, path
        D[path], _ = row_adam64(G @ A[path].T / 36, torch.zeros(len(G)).double(), 1)
    norms = [sum(w.detach().square().sum() for w in W.values())]
    norms += [sum((D[path] @ A[path]).square().sum() for path in W)]
    size = ratio * (norms[0] / norms[1]).sqrt()
    optimizer.propose(36)
    optimizer.step(1.0)
    for path, w in W.items():
        dW = model.get_submodule(path).weight - w
        assert rel(dW.detach(), -size * D[path] @ A[path]) < 5e-3, path  # but for the rounding
    frozen = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        assert name.removesuffix(".weight") in W or torch.equal(p, frozen[name]), name


@of_every_family
def test_families_probe_predicts_the_change_of_their_logits(family):
    """z' is the central difference of model(...).logits, and the KL its curvature, in float64."""
    model, samples = family_model(family, torch.float64), answers([7, 20, 9])
    plain = copy.deepcopy(model).requires_grad_(False)
    sketches, _ = sketched(model, 8, samples)
    samples = logra.micro_batches(samples, 9)[0]
    _, dz = tangent_of_logits(model, sketches, samples)
    ([_], [kl]), _ = logra.predict_kl(model, sketches, samples)
    h = 0.1
    z, ahead, behind = (logits_along(model, plain, sketches, samples, a) for a in (0, h, -h))
    assert rel(dz, (ahead - behind) / (2 * h)) < 1e-3
    curvature = ((kl64(z, ahead) + kl64(z, behind)).mean() / (2 * h**2)).item()
    assert kl == pytest.approx(curvature, rel=3e-3)


@pytest.fixture(scope="session")
def family_table():
    rows = []
    yield rows
    heads = "family | layers found | biases | tied | generator | max difference of log-probs | s"
    print("\n| " + heads + " |\n" + "|---" * 7 + "|")
    print("\n".join(f"| {' | '.join(map(str, row))} |" for row in rows))


@pytest.mark.slow
@of_every_family
def test_families_engine_follows_the_trainer(family, tmp_path, family_table):
    """After 5 updates by factors: weights to the bit, log-probs within 2e-4, in float32."""
    start, model = time.perf_counter(), family_model(family)
    model.save_pretrained(tmp_path)
    optimizer = logra.LoGRA(logra.attach_sketches(model, 8, seed=3), 3e-2)
    first = copy.deepcopy(model)
    generator = logra.VLLMGenerator(tmp_path, EOS, 128, SETTINGS, kv_gib=0.02)
    generator.load(weights(optimizer).items())
    for _ in range(5):
        generator.update(*random_update(optimizer))
    read, W = generator.read(), weights(optimizer)
    assert read.keys() == W.keys()
    assert all(torch.equal(read[path], W[path]) for path in W)
    samples = generator.generate(prompts_of(1, 4, 9, 30, 5, 2), range(6), 24, 0.7)
    with torch.no_grad():
        difference = apart(engine_logprobs(samples), whole_model_logprobs(model, samples, 0.7))
        assert apart(whole_model_logprobs(first, samples, 0.7), engine_logprobs(samples)) > 0.02
        assert apart(training_logprobs(model, samples), whole_model_logprobs(model, samples)) < 1e-5
    assert difference < 2e-4
    layers = optimizer.sketches.layers
    names = sorted({path.rpartition(".")[2] for path in layers})
    biases = sum(module.bias is not None for module in layers.values())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    seconds = time.perf_counter() - start
    served = generator.llm.apply_model(lambda module: type(module).__name__)[0]
    family_table.append(
        [family, f"{len(layers)}: {', '.join(names)}", biases, "yes" if tied else "no"]
        + [f"vLLM, {served}", f"{difference:.1e}", f"{seconds:.1f}"]
    )


def families_on_ranks():
    """{family: S, log-probs of this rank's samples, predicted KL, weights after a step}."""
    samples, results = answers([7, 20, 9, 4]), {}
    for family in FAMILIES:
        model = family_model(family)
        if logra.world() > 1:
            train.checkpoint_layers(model)
            logra.shard_model(model, torch.float32)
        sketches, optimizer = sketched(model, 8)
        share = samples[logra.my_rank() :: logra.world()]
        logp = training_logprobs(model, share)
        (logp * advantages_of(share)).sum().backward()
        S = sketch_of_all(sketches)
        optimizer.propose(40)
        kl = logra.predict_kl(model, sketches, share)[0][1]
        optimizer.step(1.0)
        W = gathered(sketches.layers)
        results[family] = {"S": S, "logp": logp.detach(), "kl": kl, "W": W}
    return results


@pytest.mark.slow
def test_families_on_two_ranks_are_those_of_one(tmp_path):
    """Sharded, scaled embeddings, tied or not: the same log-probs, sketches, KL and step."""
    process, one = torchrun(2, __file__, "families_on_ranks", tmp_path / "2"), families_on_ranks()
    words = said(process)
    assert process.returncode == 0, words
    both = [torch.load(tmp_path / "2" / f"{rank}.pt") for rank in (0, 1)]
    lengths = [7, 20, 9, 4]
    for family, expected in one.items():
        parts = expected["logp"].split(lengths)
        for rank, found in enumerate(r[family] for r in both):
            assert apart(found["logp"], torch.cat(parts[rank::2])) < 1e-5, family
            assert found["kl"] == pytest.approx(expected["kl"], rel=1e-3), family
            for path, S in expected["S"].items():
                assert rel(found["S"][path], S) < 1e-4, (family, path)
                assert rel(found["W"][path], expected["W"][path]) < 1e-5, (family, path)


def other(kind, config=None, **changes):
    """A tiny model of a kind that logra was not made for, by the names of its classes."""
    shape = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2} | changes
    config = getattr(transformers, config or f"{kind.removesuffix('ForCausalLM')}Config")(**shape)
    return getattr(transformers, kind)(config)


EXPERTS = {"num_local_experts": 4, "moe_intermediate_size": 32, "head_dim": 32}
BART = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 96}
# How it is made, what is added to its config, flags, and words of the sentence that answers it
REFUSED = {
    "experts": (lambda: other("MixtralForCausalLM", **EXPERTS), {}, "", "--targets gate_up_proj"),
    "sinks": (
        lambda: other("GptOssForCausalLM", **EXPERTS),
        {},
        "--targets q_proj",
        "--model GptOssForCausalLM attention",
    ),
    "Conv1D": (
        lambda: other("GPT2LMHeadModel", "GPT2Config"),
        {},
        "",
        "--targets mlp.c_fc.weight nn.Linear",
    ),
    "bypassed layers": (lambda: other("MambaForCausalLM"), {}, "", "--model dt_proj --targets"),
    "no forward mode": (lambda: other("BloomForCausalLM"), {}, "", "--model Bloom predicted"),
    "encoder": (lambda: other("BertLMHeadModel", "BertConfig"), {}, "", "--model BertLMHeadModel"),
    "decoder of two": (lambda: other("BartForCausalLM", **BART), {}, "", "--model encoder_attn"),
    "encoder-decoder": (
        lambda: other("T5ForConditionalGeneration", "T5Config", d_model=64, d_kv=32, num_heads=2),
        {},
        "",
        "--model T5Config",
    ),
    "images": (lambda: other("ViTModel", "ViTConfig"), {}, "", "--model ViTConfig"),
    "quantised": (
        lambda: tiny_llama(),
        {"quantization_config": {"quant_method": "fp8"}},
        "",
        "--model quantised",
    ),
    "adapters": (lambda: tiny_llama(), None, "", "--model adapters"),
}


def saved_model(directory, model, **more):
    """A directory of the model and a tokenizer, `more` added to its config."""
    model.save_pretrained(directory)
    tokenizer_with_bos().save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | more))
    return directory


def train_on(directory, lab, run, flags=""):
    argv = f"--engine hf --model {directory} --data {lab}/good.jsonl --out {run} --rank 4 --steps 1"
    argv += f" --max-prompt-tokens 16 --max-new-tokens 8 --prompts-per-step 2 {flags}"
    return train.main(argv.split())


@pytest.mark.parametrize("kind", REFUSED)
def test_families_that_cannot_be_trained_are_refused(kind, lab, tmp_path, capsys):
    """One sentence names what is in the way, and nothing is written."""
    make, more, flags, words = REFUSED[kind]
    directory = saved_model(tmp_path / "model", make(), **(more or {}))
    if more is None:
        (directory / "adapter_config.json").write_text("{}")
    assert train_on(directory, lab, tmp_path / "run", flags) == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err and not (tmp_path / "run").exists()
    assert err.splitlines()[-1].startswith("error: ")
    assert all(word in err.splitlines()[-1] for word in words.split()), err


def test_families_of_experts_train_what_is_named(lab, tmp_path):
    """Targets narrow a mixture to its attention: the run ends, and only that has moved."""
    directory = saved_model(tmp_path / "model", other("MixtralForCausalLM", **EXPERTS))
    flags = f"--targets q_proj o_proj --reward {lab}/reward.py:spread --group-size 4"
    assert train_on(directory, lab, tmp_path / "run", flags) == 0
    before, after = (
        load_file(d / "model.safetensors") for d in (directory, tmp_path / "run/step-1")
    )
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "o_proj"}


def test_families_with_a_capped_attention_keep_the_cap(tmp_path):
    """The default attention of transformers forgets Gemma 2's cap: load_model takes another."""
    directory = saved_model(tmp_path, family_model("Gemma2"))
    model, ids = train.load_model(str(directory), "--model")[0], torch.arange(20)[None]
    with torch.no_grad():
        assert apart(model(ids).logits, family_model("Gemma2")(ids).logits) < 1e-5
        model.set_attn_implementation("sdpa")
        assert apart(model(ids).logits, family_model("Gemma2")(ids).logits) > 0.01  # wrong


def test_families_that_see_train_their_text_model(tmp_path):
    """Gemma 3 with its vision tower: the text layers are found, and the probe knows them."""
    text = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, **FAMILIES["Gemma3"]}
    sight = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    sight |= {"num_attention_heads": 1, "image_size": 28, "patch_size": 14}
    tokens = {"mm_tokens_per_image": 4, "image_token_index": 62, "boi_token_index": 61}
    tokens |= {"eoi_token_index": 63, "text_config": text, "vision_config": sight}
    config = transformers.Gemma3Config(**tokens)
    saved_model(tmp_path, transformers.Gemma3ForConditionalGeneration(config))
    model, _, _ = train.load_model(str(tmp_path), "--model")
    layers = logra.find_targets(model)
    assert len(layers) == 14 and all("language_model.layers" in path for path in layers)
    train.check_model(model, layers, [5, 6, 7, 8])


def test_families_with_adapters_or_split_weights_are_refused():
    """Adapters that peft has attached, and tensor-parallel weights: ValueError."""
    for name, value, word in (("peft_config", {}, "adapters"), ("_tp_size", 2, "tensor")):
        model = tiny_llama()
        setattr(model, name, value)
        with pytest.raises(ValueError, match=word):
            logra.attach_sketches(model, 4)


# ------------------------------------------------------------------------------------------------
# The command line: fixtures
# ------------------------------------------------------------------------------------------------

SMALL = "--engine hf --reward {lab}/reward.py:spread --prompts-per-step 4 --group-size 4"
SMALL += " --eval-rows 6 --eval-every 2 --save-every 2"
TEXT = "two and two are four . a cat sat on a mat . ten dogs ran to the red house . 0 1 2 3 4"
REWARD = """
import time
def spread(completion, row):
    if row["answer"] == "bad":
        raise KeyError("nothing there")
    if row["answer"] == "nan":
        return float("nan")
    if row["answer"] == "slow":
        time.sleep(60)
    return len(completion) % 5 + len(set(completion)) / 7
number = 3
def one(completion):
    return 1.0
"""
# Templates as there are in public: one refuses a system turn, one does not look at it
STRICT = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('not supported') }}"
STRICT += "{% endif %}{{ m.content }} {% endfor %}"
DEAF = "{% for m in messages if m.role == 'user' %}{{ m.content }} {% endfor %}"
CHATTY = "{{ bos_token }}{% for m in messages %}{{ m.role[0] }} {{ m.content }} . {% endfor %}"
CHATTY += "{% if add_generation_prompt %}four{% if thinking is false %} 0{% endif %}{% endif %}"


@pytest.fixture(scope="session")
def small_task():
    """The built-in task in this process: 2 batches of warm-up, not 200, on 2,000 rows."""
    rows, warm_up = train.sorting_rows, train.warm_up
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "sorting_rows", lambda seed: [part[:2000] for part in rows(seed)])
        patch.setattr(train, "warm_up", lambda *args: warm_up(*args, batches=2))
        yield


def tokenizer_with_bos():
    """A small byte-pair tokenizer that puts <s> before every text, as Llama's does."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = ["<s>", "</s>", "<unk>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=64, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def jsonl(path, *rows):
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in rows))


def row(prompt="two and two", answer="1", **more):
    return {"prompt": prompt, "answer": answer, **more}


def main(lab, argv):
    """train.py in this process.  Returns its exit code."""
    return train.main(argv.format(lab=lab).split())


@pytest.fixture(scope="session")
def lab(tmp_path_factory, small_task):
    """A directory with models, data, rewards and a finished run, good and bad."""
    lab = tmp_path_factory.mktemp("lab")
    for kind in ("llama", "qwen2"):
        model = model_with_biases(kind).to(torch.bfloat16 if kind == "qwen2" else torch.float32)
        model.save_pretrained(lab / kind)
        tokenizer_with_bos().save_pretrained(lab / kind)
    (lab / "empty").mkdir()
    jsonl(
        lab / "good.jsonl", *(row(p, str(i)) for i, p in enumerate(("a cat", "ten dogs", "four")))
    )
    jsonl(lab / "nothing.jsonl")
    jsonl(lab / "blank.jsonl", "", "   ", "")
    jsonl(lab / "noprompt.jsonl", row(), {"answer": "4"})
    jsonl(lab / "noanswer.jsonl", row(), "", {"prompt": "two"})
    jsonl(lab / "notjson.jsonl", row(), row(), '{"prompt": "two", ')
    jsonl(lab / "notobject.jsonl", row(), '["two", "four"]')
    jsonl(lab / "chat.jsonl", row([{"role": "user", "content": "two"}]))
    jsonl(lab / "turn.jsonl", row(), row([{"role": "user"}]))
    jsonl(lab / "words.jsonl", row(), row("two", "none at all"))
    jsonl(lab / "deep.jsonl", row(), '{"prompt": ' + "[" * 100_000)
    jsonl(lab / "half.jsonl", row(), row("\ud800"))
    jsonl(lab / "true.jsonl", row(), row(answer=True))
    picture = [{"type": "image", "url": "cat.png"}]
    jsonl(lab / "picture.jsonl", row(), row([{"role": "user", "content": picture}]))
    told = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "2"}]
    jsonl(lab / "ended.jsonl", row(), {"messages": told, "answer": "2"})
    for name, template in (("strict", STRICT), ("deaf", DEAF), ("small", None)):
        tokenizer = tokenizer_with_bos()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(lab / name)
        model_with_biases("llama").save_pretrained(lab / name)
    small = transformers.AutoModelForCausalLM.from_pretrained(lab / "small")
    small.resize_token_embeddings(8)
    small.save_pretrained(lab / "small")
    (lab / "binary.jsonl").write_bytes(b"\xff\xfe\x00\x80")
    (lab / "reward.py").write_text(REWARD)
    (lab / "broken.py").write_text("def spread(completion, row:\n")
    assert main(lab, f"{SMALL} --steps 4 --out {{lab}}/done") == 0
    for torn, file in (
        ("torn-state", "step-4/trainer.pt"),
        ("torn-model", "step-4/model.safetensors"),
        ("torn-config", "config.json"),
    ):
        shutil.copytree(lab / "done", lab / torn)
        whole = (lab / torn / file).read_bytes()
        (lab / torn / file).write_bytes(whole[: len(whole) // 2])
    shutil.copytree(lab / "done", lab / "unsaved", ignore=shutil.ignore_patterns("step-*"))
    shutil.copytree(lab / "done", lab / "bare-config")
    (lab / "bare-config" / "config.json").write_text("{}")
    for kind in ("GPT2", "T5"):
        getattr(transformers, f"{kind}Config")().to_json_file(lab / f"{kind.lower()}.json")
    quantised = transformers.LlamaConfig(quantization_config={"quant_method": "fp8"})
    quantised.to_json_file(lab / "fp8.json")
    return lab


MODEL = "--engine hf --model {lab}/llama --max-prompt-tokens 16 --max-new-tokens 8"
DATA = f"{MODEL} --data {{lab}}/good.jsonl"

# The command line, and words of the one sentence that answers it
BAD_INPUT = {
    "unknown model path": ("--model {lab}/nowhere --data {lab}/good.jsonl", "--model nowhere"),
    "unknown model name": ("--model no/such --data {lab}/good.jsonl", "--model no/such"),
    "no model in directory": ("--model {lab}/empty --data {lab}/good.jsonl", "--model empty"),
    "model without data": ("--model {lab}/llama", "--model --data"),
    "data without model": ("--data {lab}/good.jsonl", "--data --model"),
    "eval data without model": ("--eval-data {lab}/good.jsonl", "--eval-data --model"),
    "data not there": (f"{MODEL} --data {{lab}}/nowhere.jsonl", "nowhere.jsonl"),
    "data is a directory": (f"{MODEL} --data {{lab}}/empty", "/empty"),
    "data empty": (f"{MODEL} --data {{lab}}/nothing.jsonl", "nothing.jsonl rows"),
    "data blank": (f"{MODEL} --data {{lab}}/blank.jsonl", "blank.jsonl rows"),
    "data binary": (f"{MODEL} --data {{lab}}/binary.jsonl", "binary.jsonl"),
    "row without prompt": (f"{MODEL} --data {{lab}}/noprompt.jsonl", "noprompt.jsonl:2 prompt"),
    "row without answer": (f"{MODEL} --data {{lab}}/noanswer.jsonl", "noanswer.jsonl:3 answer"),
    "row not JSON": (f"{MODEL} --data {{lab}}/notjson.jsonl", "notjson.jsonl:3 JSON"),
    "row not an object": (f"{MODEL} --data {{lab}}/notobject.jsonl", "notobject.jsonl:2 object"),
    "row nested too deep": (f"{MODEL} --data {{lab}}/deep.jsonl", "deep.jsonl:2 JSON"),
    "row with half a character": (f"{MODEL} --data {{lab}}/half.jsonl", "half.jsonl:2 tokenizer"),
    "answer true": (f"{MODEL} --data {{lab}}/true.jsonl", "true.jsonl:2 answer"),
    "chat without template": (f"{MODEL} --data {{lab}}/chat.jsonl", "chat.jsonl:1 template"),
    "turn without content": (f"{MODEL} --data {{lab}}/turn.jsonl", "turn.jsonl:2 content"),
    "turn of pictures": (f"{MODEL} --data {{lab}}/picture.jsonl", "picture.jsonl:2 content text"),
    "chat with its answer": (f"{MODEL} --data {{lab}}/ended.jsonl", "ended.jsonl:2 assistant"),
    "template arguments no JSON": (f"{DATA} --template-kwargs {{{{a", "--template-kwargs JSON"),
    "template argument cut short": (
        f'{DATA} --template-kwargs {{{{"enable":false}}}}',
        "--template-kwargs enable",
    ),
    "template arguments no object": (f"{DATA} --template-kwargs [1]", "--template-kwargs object"),
    "template argument unknown": (
        f'{DATA} --template-kwargs {{{{"thinking":false}}}}',
        "--template-kwargs thinking",
    ),
    "template refuses a system turn": (
        f"{DATA} --model {{lab}}/strict --system hush",
        "--system template supported",
    ),
    "template leaves the system turn out": (
        f"{DATA} --model {{lab}}/deaf --system hush",
        "--system template out",
    ),
    "tokenizer of another model": (
        f"{MODEL} --model {{lab}}/small --data {{lab}}/good.jsonl",
        "--model 8 good.jsonl:1",
    ),
    "answer without number": (f"{MODEL} --data {{lab}}/words.jsonl", "words.jsonl:2 number"),
    "bad held-out row": (f"{DATA} --eval-data {{lab}}/noanswer.jsonl", "noanswer.jsonl:3 answer"),
    "all prompts too long": (f"{DATA} --max-prompt-tokens 1", "--data --max-prompt-tokens 3"),
    "more tokens than positions": (f"{DATA} --max-new-tokens 4000", "--max-new-tokens 4016 512"),
    "rank 0": ("--rank 0", "--rank 0"),
    "rank -1": ("--rank -1", "--rank -1"),
    "group of one": ("--group-size 1", "--group-size 2 running_mean"),
    "group of none": ("--group-size 0 --advantage running_mean", "--group-size 1"),
    "no such advantage": ("--advantage critic", "--advantage running_mean"),
    "no such denominator": ("--denominator groups", "--denominator constant"),
    "top-p": ("--top-p 0.9", "--top-p"),
    "top-k": ("--top-k 50", "--top-k"),
    "no steps": ("--steps 0", "--steps 1"),
    "no new tokens": ("--max-new-tokens 0", "--max-new-tokens"),
    "negative seed": ("--seed -1", "--seed -1"),
    "ratio nan": ("--update-ratio nan", "--update-ratio nan"),
    "ratio inf": ("--update-ratio inf", "--update-ratio inf"),
    "ratio negative": ("--update-ratio -0.1", "--update-ratio -0.1"),
    "ratio 0": ("--update-ratio 0", "--update-ratio 0"),
    "temperature 0": ("--temperature 0", "--temperature 0"),
    "temperature nan": ("--temperature nan", "--temperature nan"),
    "eval temperature nan": ("--eval-temperature nan", "--eval-temperature nan"),
    "budget negative": ("--kl-budget -1", "--kl-budget -1"),
    "clip below 0": ("--clip-low 1", "--clip-low 1"),
    "unknown flag": ("--no-such-flag 1", "--no-such-flag"),
    "abbreviated flag": ("--update-rat 1e-3", "--update-rat"),
    "stray word": ("train", "train"),
    "word for a number": ("--steps many", "--steps many"),
    "fraction for an integer": ("--rank 1.5", "--rank 1.5"),
    "no such choice": ("--engine tpu", "--engine tpu hf"),
    "flag without value": ("--resume", "--resume"),
    "target unknown": ("--engine hf --targets q_proj nonsense", "--targets nonsense o_proj"),
    "run directory exists": ("--out {lab}/done", "--out done --resume"),
    "run directory is a file": ("--out {lab}/good.jsonl", "--out good.jsonl"),
    "run directory under a file": ("--engine hf --out {lab}/good.jsonl/run", "good.jsonl"),
    "nothing to resume": ("--resume {lab}/nowhere", "nowhere"),
    "resume, no run": ("--resume {lab}/empty", "empty config.json"),
    "resume, fewer steps": ("--resume {lab}/done --steps 2", "--steps 2 4"),
    "resume, another directory": ("--resume {lab}/done --out {lab}/new", "--resume --out"),
    "resume, other rank": ("--resume {lab}/done --rank 5", "--rank 16 5"),
    "resume, other optimizer": ("--resume {lab}/done --optimizer sketch_muon", "--optimizer muon"),
    "verified without sketch": ("--optimizer lora --verify-step", "--verify-step --optimizer lora"),
    "no norms to keep": ("--optimizer lora --no-keep-layer-norm", "--no-keep-layer-norm lora"),
    "no such optimizer": ("--optimizer galore", "--optimizer galore sketch_muon"),
    "resume, other seed": ("--resume {lab}/done --seed 9", "--seed 0 9"),
    "resume, other model": ("--resume {lab}/done --model {lab}/llama", "--model llama"),
    "resume, other targets": ("--resume {lab}/done --targets q_proj", "--targets q_proj"),
    "resume, torn trainer.pt": ("--resume {lab}/torn-state", "step-4/trainer.pt"),
    "resume, torn weights": ("--resume {lab}/torn-model", "torn-model/step-4"),
    "resume, torn config": ("--resume {lab}/torn-config", "torn-config/config.json"),
    "resume, config of nothing": ("--resume {lab}/bare-config", "bare-config/config.json"),
    "estimate without model": ("--estimate-memory", "--estimate-memory --model"),
    "estimate, config not there": ("--estimate-memory --model {lab}/nowhere", "{lab}/nowhere"),
    "estimate, not JSON": ("--estimate-memory --model {lab}/notjson.jsonl", "notjson.jsonl"),
    "estimate, no model": (
        "--estimate-memory --model {lab}/bare-config",
        "bare-config/config.json",
    ),
    "estimate, no ranks": (
        "--estimate-memory --model {lab}/llama --world-size 0",
        "--world-size 0",
    ),
    "estimate, no tokens": (
        "--estimate-memory --model {lab}/llama --max-length -1",
        "--max-length",
    ),
    "estimate, target unknown": (
        "--estimate-memory --model {lab}/llama --targets nonsense",
        "llama/config.json --targets nonsense o_proj",
    ),
    "estimate, no linear layers": ("--estimate-memory --model {lab}/gpt2.json", "gpt2.json Linear"),
    "estimate, quantised": ("--estimate-memory --model {lab}/fp8.json", "fp8.json quantised"),
    "ranks of an estimate alone": ("--world-size 4", "--world-size --estimate-memory torchrun"),
    "estimate, no causal model": ("--estimate-memory --model {lab}/t5.json", "t5.json CausalLM"),
    "reward unknown": ("--reward nosuch", "--reward nosuch"),
    "reward file not there": ("--reward {lab}/nowhere.py:f", "--reward nowhere.py:f"),
    "reward function not there": ("--reward {lab}/reward.py:missing", "--reward missing"),
    "reward with a syntax error": ("--reward {lab}/broken.py:spread", "--reward broken.py"),
    "reward of one argument": ("--reward {lab}/reward.py:one", "--reward one TypeError"),
    "reward without time": ("--reward-seconds 0", "--reward-seconds 0"),
    "nothing to evaluate": ("--eval-only", "--eval-only --resume"),
    "evaluation without rows": (f"{DATA} --eval-only", "--eval-only --eval-data"),
    "evaluation of no checkpoint": ("--eval-only --resume {lab}/unsaved", "unsaved checkpoint"),
    "evaluation of nothing": ("--eval-only --resume {lab}/done/step-3", "step-3/config.json"),
    "evaluation of a torn state": (
        "--eval-only --resume {lab}/torn-state/step-4",
        "step-4/trainer.pt",
    ),
    "evaluation over a run": (
        "--eval-only --resume {lab}/done --out {lab}/done",
        "--out done exists",
    ),
    "reward not a function": ("--engine hf --reward {lab}/reward.py:number", "--reward number"),
}


def snapshot(root):
    """Everything below a directory: what is there, how long, and when it was written."""
    stats = ((p, p.stat()) for p in sorted(root.rglob("*")) if "__pycache__" not in str(p))
    return [(str(p), s.st_size if p.is_file() else 0, s.st_mtime_ns) for p, s in stats]


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_answered_by_one_sentence(case, lab, tmp_path, monkeypatch, capsys):
    """Exit code 2, the flag, file or row at fault is named, and nothing is written."""
    argv, words = (text.format(lab=lab) for text in BAD_INPUT[case])
    monkeypatch.chdir(tmp_path)  # where runs/ would be
    before = snapshot(lab)
    assert train.main(argv.split()) == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    sentences = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(sentences) == 1 and sentences[0] == err.splitlines()[-1]
    assert all(word in sentences[0] for word in words.split()), sentences[0]
    assert snapshot(lab) == before and not list(tmp_path.iterdir())


def test_ranks_that_torchrun_has_not_started_are_refused(tmp_path, monkeypatch, capsys):
    """A WORLD_SIZE that something else has left behind would be waited for without end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for variable in ("2", "x"):
        monkeypatch.setenv("WORLD_SIZE", variable)
        assert train.main(["--steps", "1"]) == 2
        (sentence,) = errors(capsys.readouterr().err)
        assert f"WORLD_SIZE is {variable}" in sentence and "torchrun" in sentence
    assert not list(tmp_path.iterdir())


def test_an_estimate_needs_no_prompts_for_its_ranks(lab, capsys):
    """32 ranks and 16 prompts: refused in a run, of no matter to an estimate."""
    assert main(lab, "--estimate-memory --model {lab}/llama --world-size 32") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["world_size"] == 32


def test_two_runs_do_not_share_a_directory(lab, capsys):
    """A run directory is locked while a run writes there, and free when that ends."""
    with open(lab / "done" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(lab, "--resume {lab}/done") == 2
        assert "another run" in capsys.readouterr().err
    assert main(lab, "--resume {lab}/done") == 0


def made_run(path, seed=0, scores=(0.2, 0.9, 0.8), **settings):
    """A run directory written by hand: an evaluation before and after each of its updates."""
    config = train.Config(seed=seed, steps=len(scores) - 1, out=str(path), **settings)
    records = [{"step": 0, "eval_accuracy": scores[0], "greedy": 0.25}]
    for i, score in enumerate(scores[1:], 1):
        phases, gib = {"generate": 2.0, "train": 0.5 * i}, 3.0 / i
        records += [{"step": i, "update": i, "reward": 0.1, "seconds": phases, "peak_gib": gib}]
        records += [{"step": i, "eval_accuracy": score}]
    records[-1]["greedy"] = 0.75
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"config": train.dataclasses.asdict(config)}))
    jsonl(path / "metrics.jsonl", *records)
    return str(path)


def test_summary_of_runs_is_that_of_hand_made_ones(tmp_path, capsys):
    """Mean and sd (n - 1) of a group, what a run took, who collapsed, and how groups are named."""
    paths = [
        made_run(tmp_path / "a", 4, (0.2, 0.9, 0.8)),
        made_run(tmp_path / "b", 4, (0.1, 0.8, 0.39), optimizer="adamw", lr=3e-4),
        made_run(tmp_path / "c", 5, (0.3, 0.9, 0.5)),
        made_run(tmp_path / "d", 6, (0.1, 0.3, 0.5)),
    ]
    assert train.main(["--summarize", *paths]) == 0
    out, err = capsys.readouterr()
    assert not err
    *lines, last = out.splitlines()
    found = json.loads(last)
    assert [run["out"] for run in found["runs"]] == paths
    first = {"optimizer": "row_adam", "seed": 4, "steps": 2, "accuracy_before": 0.2}
    first |= {"accuracy": 0.8, "greedy": 0.75, "collapsed": False, "seconds": 5.5, "peak_gib": 3.0}
    assert found["runs"][0] == {"out": paths[0], **first}
    assert [run["collapsed"] for run in found["runs"]] == [False, True, False, False]
    sketched, dense = found["groups"]  # of .8, .5, .5: variance (.2^2 + .1^2 + .1^2) / 2
    assert sketched["group"] == "optimizer=row_adam lr=1e-06"
    assert dense["group"] == "optimizer=adamw lr=0.0003"
    assert (sketched["n"], sketched["seeds"], sketched["collapsed"]) == (3, [4, 5, 6], 0)
    assert sketched["mean"] == pytest.approx(0.6) and sketched["sd"] == pytest.approx(0.03**0.5)
    assert (dense["n"], dense["mean"], dense["sd"], dense["collapsed"]) == (1, 0.39, None, 1)
    rows = [line.split() for line in lines]
    words = "adamw 4 2 0.100 0.390 0.750 yes 5.500 3.000"
    assert f"{paths[1]} {words}".split() in rows
    # All take 5.5 s, 2.5 of them for the first update: at the end nothing is left between them
    assert sketched["mean_then"] == pytest.approx(0.6) and dense["mean_then"] == 0.39
    assert dense["eval_accuracy"] == [[0, 0.1], [1, 0.8], [2, 0.39]]
    assert sketched["kl"] == {"updates": 0} and "realised KL" not in out  # never measured here
    plots = [line[6:] for line in lines if "|" in line]
    assert len(plots) == 20 and plots[8] == "b" * 60  # the reward, .1; the later on top
    # Accuracy a: .2, .7, .6 in the mean.  b: .1, .8, .39; between the evaluations a straight line
    assert plots[10 + 2].strip() == "b" * len(plots[12].strip()) and plots[10 + 1] == ""
    assert plots[10 + 8][0] == "b" and plots[10 + 7][0] == "a" and plots[10 + 3].endswith("a")


def test_summary_tells_accuracy_at_equal_seconds_and_kl_over_prediction(tmp_path, capsys):
    """By hand: a run of one update of 2.5 s against one of two, 2.5 + 3 s; ratios .5, 1 and 2."""
    paths = [made_run(tmp_path / "one", scores=(0.2, 0.4))]
    paths += [made_run(tmp_path / "two", scores=(0.1, 0.5, 0.9))]
    paths += [made_run(tmp_path / "slow", scores=(0.1, 0.9), lr=1.0)]
    slow = tmp_path / "slow" / "metrics.jsonl"
    slow.write_text(slow.read_text().replace('"train": 0.5', '"train": 3.0'))  # 5 s: half is done
    kls = [
        {"kl_predicted": p, "kl_realised": x, "budget": 2.0} for p, x in ((2, 1), (3, 3), (2, 4))
    ]
    kls += [{"kl_predicted": 1.0, "kl_realised": None, "budget": 2.0}]
    records = [
        {"step": i, "update": i, "seconds": {"train": 2.0}, "peak_gib": 1.0} for i in range(4)
    ]
    jsonl(tmp_path / "two" / "metrics.jsonl", *(a | b for a, b in zip(records, kls, strict=True)))
    assert train.main(["--summarize", *paths]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    one, two, slow = json.loads(last)["groups"]
    assert [one["mean_then"], two["mean_then"], slow["mean_then"]] == [
        0.4,
        None,
        pytest.approx(0.5),
    ]
    wanted = {"updates": 3, "median": 1.0, "5%": 0.55, "95%": 1.9, "worst": 2.0}
    assert two["kl"] == pytest.approx(wanted | {"within": 1 / 3, "largest": 2.0})
    row = "b 3 1.000 0.550 1.900 2.000 0.333 2.000"
    assert row in [" ".join(line.split()) for line in lines]


def test_the_state_of_a_run_on_a_gpu_is_read_without_one(tmp_path):
    """Moments and adapters are saved from where they are; each rank reads them into the host."""
    parts = ("step", "mismatch", "baseline", "prompts", "optimizer", "weights")
    with mock.patch("torch.serialization.location_tag", lambda storage: "cuda:0"):
        torch.save(dict.fromkeys(parts, torch.ones(3)), tmp_path / "trainer.pt")
    assert train.load_state(tmp_path)["optimizer"].tolist() == [1, 1, 1]


def test_a_group_that_ends_at_zero_has_an_accuracy(tmp_path, capsys):
    """Zero is a mean, at equal seconds too; it is no dash."""
    assert train.main(["--summarize", made_run(tmp_path / "run", scores=(0.2, 0.1, 0.0))]) == 0
    (group,) = json.loads(capsys.readouterr().out.splitlines()[-1])["groups"]
    assert group["mean"] == group["mean_then"] == 0 and group["collapsed"] == 1


def test_runs_that_are_not_finished_are_named_and_left_out(tmp_path, capsys):
    """One sentence each on stderr; exit code 0 as long as one run is left, else 2."""
    good, names = made_run(tmp_path / "good"), ("torn", "short", "late", "foreign", "empty", "gone")
    bad = [str(tmp_path / name) for name in names]
    for path in map(Path, bad[:5]):
        made_run(path)
    text = (tmp_path / "good" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "torn" / "metrics.jsonl").write_text("".join(text)[:-9])
    (tmp_path / "short" / "metrics.jsonl").write_text("".join(text[:3]))  # killed in step 2
    (tmp_path / "late" / "metrics.jsonl").write_text("".join(text[:4]))  # before it was evaluated
    (tmp_path / "foreign" / "config.json").write_text('{"config": {"colour": 1}}')
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    assert train.main(["--summarize", *bad, good]) == 0
    out, err = capsys.readouterr()
    assert [run["out"] for run in json.loads(out.splitlines()[-1])["runs"]] == [good]
    assert len(err.splitlines()) == len(bad)
    for line, path in zip(err.splitlines(), bad, strict=True):
        assert path in line
    assert "step 1 of 2" in err.splitlines()[1] and "step 1 of 2" in err.splitlines()[2]
    assert train.main(["--summarize", *bad]) == 2
    out, err = capsys.readouterr()
    assert not out and err.splitlines()[-1].startswith("error: --summarize")
    assert len(err.splitlines()) == len(bad) + 1


def test_runs_without_held_out_rows_are_summarized_by_reward(tmp_path, capsys):
    """No accuracy, nobody known to have collapsed, one curve; a reward below 0 is in its place."""
    path = tmp_path / "run"
    made_run(path, scores=(0.1, 0.2, 0.3))
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    jsonl(path / "metrics.jsonl", *({**r, "reward": -3.0} for r in records if "update" in r))
    assert train.main(["--summarize", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert {found["runs"][0][k] for k in ("accuracy_before", "accuracy", "collapsed")} == {None}
    assert found["groups"][0]["group"] == "all runs" and found["groups"][0]["mean"] is None
    plot = [line[6:] for line in lines if "|" in line]
    assert plot == [""] * 9 + ["a" * 60]


def test_a_run_that_is_complete_is_not_run_again(lab, capsys):
    """The same command line again is answered by a sentence; another one is refused."""
    again = f"{SMALL} --steps 4 --out {{lab}}/done"
    before = snapshot(lab)
    assert main(lab, again) == 0
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1 and "lab" in err and "done" in err
    for other in (again.replace("--steps 4", "--steps 2"), f"{again} --seed 1"):
        assert main(lab, other) == 2
        assert "exists" in capsys.readouterr().err
    checkpoint = lab / "done" / "step-4"
    checkpoint.rename(lab / "moved")  # killed before the last checkpoint: it is to be resumed
    assert main(lab, again) == 2
    (lab / "moved").rename(checkpoint)
    assert "exists" in capsys.readouterr().err
    assert [x[:2] for x in snapshot(lab)] == [x[:2] for x in before]


def test_a_reward_that_exits_is_a_reward_that_fails():
    """sys.exit() in a reward, even with 0, does not end the run as if it had succeeded."""
    sample = logra.Sample([1], [], [], True, row=train.Example([1], {}, "rows.jsonl:7"))
    with pytest.raises(train.UserError, match="rows.jsonl:7"):
        train.score(lambda completion, row: sys.exit(0), tokenizer_with_bos(), 9, sample)


def test_help_has_every_flag_and_its_default(capsys):
    """--help ends with exit code 0."""
    with pytest.raises(SystemExit) as end:
        train.main(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    for name in train.Config.__dataclass_fields__:
        assert train.dashed(name) in text
    assert "(default: 6e-05)" in text


# ------------------------------------------------------------------------------------------------
# Data
# ------------------------------------------------------------------------------------------------


def test_blank_lines_crlf_and_a_byte_order_mark_are_no_rows(tmp_path):
    """Rows keep the number of their line; GSM8K's names are known."""
    path = tmp_path / "rows.jsonl"
    text = '\ufeff{"prompt": "a", "answer": 1}\r\n\r\n{"question": "b", "answer": "so #### 2"}'
    path.write_bytes(text.encode())
    rows = train.read_rows(str(path))
    assert [where for where, _ in rows] == [f"{path}:1", f"{path}:3"]
    assert [(row["prompt"], row["answer"]) for _, row in rows] == [("a", 1), ("b", "so #### 2")]


@pytest.mark.parametrize("character", ["\u2028", "\x85", "\u2029"])
def test_only_a_newline_ends_a_row(tmp_path, character):
    """JSON allows these inside a string, though str.splitlines() splits there."""
    path = tmp_path / "rows.jsonl"
    line = json.dumps(row(f"a{character}b"), ensure_ascii=False)
    path.write_text(f"{line}\n{line}\n", encoding="utf-8")
    rows = train.read_rows(str(path))
    assert [(where, r["prompt"]) for where, r in rows] == [
        (f"{path}:{i}", f"a{character}b") for i in (1, 2)
    ]


def test_long_prompts_are_left_out_and_counted(capsys):
    """What is kept is whole: nothing is cut (7)."""
    tokenizer = tokenizer_with_bos()
    rows = [("at", row(p)) for p in ("a cat", "a cat sat on a mat . " * 9, "four", "ten dogs " * 9)]
    kept = train.load_examples(rows, tokenizer, 8, "--data")
    assert [example.row["prompt"] for example in kept] == ["a cat", "four"]
    assert [example.ids for example in kept] == [tokenizer.encode(p) for p in ("a cat", "four")]
    assert "--data: 2 of 4" in "".join(capsys.readouterr())


def test_a_template_with_bos_gives_one_bos():
    """The template is tokenised without special tokens; text would get a second one (4)."""
    tokenizer = tokenizer_with_bos()
    assert train.encode(tokenizer, "a cat", "at").count(0) == 1
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }} {% endfor %}"
    chat = [{"role": "user", "content": "a cat"}]
    for prompt in (chat, "a cat"):
        ids = train.encode(tokenizer, prompt, "at")
        assert ids.count(0) == 1 and ids[0] == 0 and len(ids) > 1
    assert tokenizer.encode(tokenizer.apply_chat_template(chat, tokenize=False)).count(0) == 2


def test_a_prompt_is_the_template_of_its_turns():
    """--system goes before chats and texts that have no system turn of their own, and what is in
    --template-kwargs reaches the template; without one there is a blank line between."""
    tokenizer = tokenizer_with_bos()
    plain = functools.partial(tokenizer.encode, add_special_tokens=False)
    ids = train.encode(tokenizer, "a cat", "at", "ten dogs")
    assert ids == tokenizer.encode("ten dogs\n\na cat") == [0, *plain("ten dogs a cat")]
    tokenizer.chat_template = CHATTY
    user, own = {"role": "user", "content": "a cat"}, {"role": "system", "content": "red"}
    for prompt, system, options, expected in [
        ("a cat", None, {}, "u a cat . four"),
        ([user], None, {"thinking": True}, "u a cat . four"),
        ([user], None, {"thinking": False}, "u a cat . four 0"),
        ("a cat", "ten dogs", {}, "s ten dogs . u a cat . four"),
        ([own, user], "ten dogs", {}, "s red . u a cat . four"),
    ]:
        ids = train.encode(tokenizer, prompt, "at", system, options)
        assert ids == [0, *plain(expected)] and tokenizer.unk_token_id not in ids


def test_rows_of_any_shape_are_read(tmp_path):
    """`messages`, null prompts, Unicode, a row of 100 kB, CRLF; a prompt has precedence."""
    chat, long = [{"role": "user", "content": "двa 🐈"}], "a cat " * 20_000
    rows = [{"messages": chat}, {"prompt": None, "question": "q"}, {"prompt": long}]
    rows += [{"prompt": "p", "messages": chat, "question": "q"}]
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({**r, "answer": "1"}, ensure_ascii=False) for r in rows]
    path.write_bytes("\r\n".join(lines).encode())
    assert [r["prompt"] for _, r in train.read_rows(str(path))] == [chat, "q", long, "p"]


def test_the_flags_of_the_template_reach_every_prompt(lab, tmp_path, monkeypatch):
    """Rows, held-out rows and a resumed run; other flags on resuming are refused."""
    shutil.copytree(lab / "llama", tmp_path / "chatty")
    (tmp_path / "chatty" / "chat_template.jinja").write_text(CHATTY)
    prompts, generate = set(), logra.HFGenerator.generate

    def watched(self, ids, *args):
        prompts.update(map(tuple, ids))
        return generate(self, ids, *args)

    monkeypatch.setattr(logra.HFGenerator, "generate", watched)
    plain = functools.partial(tokenizer_with_bos().encode, add_special_tokens=False)
    texts = [f"s red . u {p} . four 0" for p in ("a cat", "ten dogs", "four")]
    expected = {(0, *plain(text)) for text in texts}
    argv = f"{DATA} --model {tmp_path}/chatty --eval-data {{lab}}/good.jsonl --system red"
    argv = argv + ' --template-kwargs {{"thinking":false}} --rank 8 --prompts-per-step 3 --steps'
    assert main(lab, f"{argv} 1 --group-size 2 --out {tmp_path}/run") == 0
    assert prompts == expected
    prompts.clear()
    assert main(lab, f"--resume {tmp_path}/run --steps 2") == 0
    assert prompts == expected
    assert main(lab, f"--resume {tmp_path}/run --steps 3 --system four") == 2


def test_an_end_token_that_the_tokenizer_adds_is_no_prompt():
    """The answer would begin behind the end; one that stands in the text stays (3)."""
    tokenizer = tokenizer_with_bos()
    ids = tokenizer.encode("a cat")
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    assert tokenizer.encode("a cat") == [*ids, 1] and train.encode(tokenizer, "a cat", "at") == ids
    assert train.encode(tokenizer, "a cat</s>", "at")[-2:] == [1, 1]


def test_all_end_tokens_are_known(models):
    """Those of the generation config, the model's own and the tokenizer's (2)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(models["meddling"])
    tokenizer = tokenizer_with_bos()
    assert train.end_tokens(model, tokenizer) == [1, 7, 9]
    tokenizer.eos_token = "<unk>"
    assert train.end_tokens(model, tokenizer) == [1, 2, 7, 9]
    model.config.eos_token_id = 8
    assert train.end_tokens(model, tokenizer) == [1, 2, 7, 8, 9]


def test_every_epoch_has_every_row_once_in_an_order_of_its_own():
    """The order follows from the seed and the epoch."""
    first, second, other = (train.epoch_order(50, *key) for key in ((0, 0), (0, 1), (1, 0)))
    assert sorted(first) == sorted(second) == sorted(other) == list(range(50))
    assert first != second and first != other and first != list(range(50))


def test_held_out_rows_are_never_trained_on():
    """The built-in task's two sets share no prompt, and together they are all 100,000."""
    sets = ({row["prompt"] for _, row in rows} for rows in sorting_rows(seed=0))
    training, held_out = sets
    assert not training & held_out and len(training) + len(held_out) == 100_000
    assert 9_000 < len(held_out) < 11_000


def test_warm_up_sees_training_rows_only(lab, tmp_path, monkeypatch):
    """Neither the demonstrations nor the rollouts have a held-out prompt."""
    seen, played = [], []
    monkeypatch.setattr(train, "warm_up", lambda model, tokenizer, rows, seed: seen.extend(rows))
    grpo = logra.grpo

    def watched(*args, **kwargs):
        for metrics in grpo(*args, **kwargs):
            played.extend(sample.row.row["prompt"] for sample in metrics["samples"])
            yield metrics

    monkeypatch.setattr(logra, "grpo", watched)
    assert main(lab, f"{SMALL} --steps 2 --out {tmp_path}/run") == 0
    held_out = {row["prompt"] for _, row in train.sorting_rows(seed=0)[1]}
    assert len(seen) == 2000 and len(set(played)) == 8
    assert not held_out & {row["prompt"] for row in seen} and not held_out & set(played)


# ------------------------------------------------------------------------------------------------
# Runs with --engine hf
# ------------------------------------------------------------------------------------------------

FIELDS = """step update reward solved dead_groups length truncated kl_predicted kl_realised alpha
budget mismatch update_ratio grad_sketch_norm sync_bytes wire_bytes tokens_per_second
peak_gib seconds"""
TIMES = ("seconds", "tokens_per_second", "peak_gib")


def journal(run, evaluations=False):
    """The lines of metrics.jsonl, without what a clock or the memory decides."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if evaluations or "update" in line]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def tensors(checkpoint):
    return load_file(checkpoint / "model.safetensors")


def assert_same_tensors(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def test_run_directory_has_what_the_design_says(lab):
    """config.json, a metrics line an update, evaluations, samples, checkpoints that load."""
    run = lab / "done"
    settings = json.loads((run / "config.json").read_text())
    assert settings["config"]["seed"] == 0 and settings["world_size"] == 1
    assert settings["versions"]["torch"] == torch.__version__
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "update" in line]
    assert [line["step"] for line in updates] == [1, 2, 3, 4]
    assert all(set(line) == set(FIELDS.split()) for line in updates)
    phases = {"generate", "train", "probe", "update", "sync"}
    assert all(set(u["seconds"]) == phases for u in updates if u["alpha"])
    assert any(u["alpha"] for u in updates)
    evaluations = [line for line in lines if "eval_accuracy" in line]
    assert lines[0] == evaluations[0] and [line["step"] for line in evaluations] == [0, 2, 4]
    assert ["greedy" in line for line in evaluations] == [True, False, True]
    assert all(line["eval_rows"] == 6 for line in evaluations)
    for line in (run / "samples.jsonl").read_text().splitlines():
        assert set(json.loads(line)) == {"step", "prompt", "completion", "reward"}
    assert sorted(p.name for p in run.glob("step-*")) == ["step-0", "step-2", "step-4"]
    before = transformers.AutoModelForCausalLM.from_pretrained(run / "step-0").state_dict()
    after = transformers.AutoModelForCausalLM.from_pretrained(run / "step-4").state_dict()
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert len(moved) == 14 and all(name.endswith("proj.weight") for name in moved)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "step-4")
    assert tokenizer.encode("41725=") == [6, 3, 9, 4, 7, 12]


def test_prediction_and_budget_are_those_of_the_step_taken(lab):
    """kl_predicted is after alpha: within the budget, and what was realised."""
    for line in journal(lab / "done"):
        if line["alpha"]:
            assert line["kl_predicted"] <= line["budget"] * (1 + 1e-6)
            assert line["kl_realised"] == pytest.approx(line["kl_predicted"], rel=0.2)
            assert line["update_ratio"] == pytest.approx(2e-3 * line["alpha"])


TRAIN = f"{DATA} --reward {{lab}}/reward.py:spread --prompts-per-step 2 --group-size 4 --rank 8"
TRAIN += " --kl-budget 1e-2 --update-ratio 1e-3 --save-every 2"


def whole_and_halves(lab, tmp_path, argv):
    """trainer.pt of four steps at once and of 2 steps and 2 more, whose journals and exports are
    equal to the bit; and the journal."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert main(lab, f"{argv} --steps 4 --out {whole}") == 0
    assert main(lab, f"{argv} --steps 2 --out {halves}") == 0
    assert main(lab, f"--resume {halves} --steps 4") == 0
    assert journal(halves) == journal(whole)
    assert_same_tensors(tensors(whole / "step-4"), tensors(halves / "step-4"))
    return *(train.load_state(run / "step-4") for run in (whole, halves)), journal(whole)


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_two_steps_and_two_more_are_four(lab, tmp_path, name):
    """Resume is exact, with float32 masters where the model is stored in bfloat16 (42)."""
    whole = tmp_path / "whole"
    a, b, lines = whole_and_halves(lab, tmp_path, f"{TRAIN} --model {{lab}}/{name}")
    assert all(line["alpha"] > 0 for line in lines)
    assert_same_tensors(a["weights"], b["weights"])
    assert torch.equal(a["optimizer"]["v"], b["optimizer"]["v"])
    assert a["optimizer"]["update"] == b["optimizer"]["update"] == 4
    for path, W in a["weights"].items():  # from the export alone it would go on from elsewhere
        assert not torch.equal(W, tensors(whole / "step-4")[f"{path}.weight"].float())
    assert bool(a["weights"]) == (name == "qwen2")


def test_export_keeps_dtype_and_tied_weights(lab, tmp_path):
    """A bfloat16 model stays one, as large as before, and its head stays its embedding."""
    argv = f"{TRAIN} --model {{lab}}/qwen2 --steps 2 --out {tmp_path}/run"
    assert main(lab, argv) == 0
    before, after = tensors(lab / "qwen2"), tensors(tmp_path / "run" / "step-2")
    assert before.keys() == after.keys() and "lm_head.weight" not in after
    assert {W.dtype for W in after.values()} == {torch.bfloat16}
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "step-2")
    assert model.dtype == torch.bfloat16 and model.lm_head.weight is model.model.embed_tokens.weight
    masters = train.load_state(tmp_path / "run" / "step-2")["weights"]
    for path, W in masters.items():
        assert W.dtype == torch.float32
        assert torch.equal(W.to(torch.bfloat16), after[f"{path}.weight"])


def test_a_run_of_one_seed_is_one_run(lab, tmp_path):
    """Same seed, same metrics and weights; another seed, another run (30)."""
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        argv = f"{TRAIN} --steps 2 --seed {seed} --out {tmp_path}/{name}"
        assert main(lab, argv) == 0
    a, b, c = (tmp_path / name for name in "abc")
    assert journal(a) == journal(b) != journal(c)
    assert_same_tensors(tensors(a / "step-2"), tensors(b / "step-2"))


def test_resuming_before_the_first_save_repeats_nothing(lab, tmp_path):
    """A run that stopped before its first checkpoint starts over: one evaluation a step."""
    run = tmp_path / "run"
    assert main(lab, f"{SMALL} --steps 2 --out {run}") == 0
    whole = journal(run, evaluations=True)
    shutil.rmtree(run / "step-2")
    assert main(lab, f"--resume {run}") == 0
    assert journal(run, evaluations=True) == whole


def test_a_finished_run_resumes_to_nothing(lab, tmp_path):
    """No line and no tensor changes, and the first checkpoint, once deleted, is not made again."""
    run = tmp_path / "run"
    shutil.copytree(lab / "done", run, ignore=shutil.ignore_patterns("step-0"))
    before, checkpoint = journal(run, evaluations=True), snapshot(run / "step-4")
    assert main(lab, f"--resume {run}") == 0
    assert journal(run, evaluations=True) == before and snapshot(run / "step-4") == checkpoint
    assert not (run / "step-0").exists()


def test_a_half_written_checkpoint_is_not_resumed_from(lab, tmp_path):
    """What a kill left under another name is not a checkpoint, nor is half a journal line one."""
    run = tmp_path / "run"
    shutil.copytree(lab / "done", run)
    (run / "step-4").rename(run / ".step-4.partial")
    (run / ".step-4.partial" / "trainer.pt").unlink()
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "rew')
    assert main(lab, f"--resume {run}") == 0
    assert journal(run, evaluations=True) == journal(lab / "done", evaluations=True)
    assert_same_tensors(tensors(run / "step-4"), tensors(lab / "done" / "step-4"))
    assert not list(run.glob(".step-*"))


def test_updates_per_batch_writes_a_line_an_update(lab, tmp_path):
    """Two updates a step: old log-probs stay, the number of the update goes on."""
    argv = f"{SMALL} --prompts-per-step 16 --steps 2 --updates-per-batch 2 --out {tmp_path}/run"
    assert main(lab, argv) == 0
    lines = journal(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 1, 2, 2]
    assert [line["update"] for line in lines] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "argv",
    [
        *("--optimizer adamw", "--optimizer lora", "--optimizer sketch_muon --verify-step"),
        *("--optimizer sketch_adam --refresh 50", "--optimizer sketch_sgd --projection gaussian"),
        *("--optimizer dense_row_adam", "--kl-predictor linearised", "--no-kl-control"),
        *("--no-keep-layer-norm", "--refresh 0", "--rank 4", "--verify-step"),
    ],
)
def test_the_ablations_run(lab, tmp_path, argv):
    """Each flag that changes the method makes a run, and moves the weights."""
    argv = f"{SMALL} --prompts-per-step 8 --steps 2 {argv} --out {tmp_path}/run"
    assert main(lab, argv) == 0
    before, after = (tensors(tmp_path / "run" / f"step-{n}") for n in (0, 2))
    assert sum(not torch.equal(before[name], after[name]) for name in after) == 14


def test_last_screen_pairs_the_same_prompt_before_and_after(lab, tmp_path, capsys):
    """One held-out row: one line, from the first evaluation's answer to the last one's."""
    argv = f"{SMALL} --eval-rows 1 --steps 4 --update-ratio 0.1 --out {tmp_path}/run"
    assert main(lab, f"{argv} --no-kl-control") == 0
    lines = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    first, last = (json.loads(lines[i])["completion"] for i in (0, -1))
    shown = [x for x in capsys.readouterr().out.splitlines() if x.startswith("held-out prompt")]
    assert len(lines) == 3 and len(shown) == 1
    assert f"before {first!r}" in shown[0] and f"after {last!r}" in shown[0]


# ------------------------------------------------------------------------------------------------
# Rewards
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["3\\sqrt{2}", "(3, 4)", "3+2i", "5 or 7", "1 1/2", "- 18"])
def test_an_answer_that_is_no_number_is_refused(answer):
    """Read as strictly as a box, or completions would be paid for another number than meant."""
    assert train.wanted_number({"answer": answer}) is None


def test_a_sign_apart_from_its_marked_number_is_in_doubt():
    for text in ("\\boxed{- 18}", "#### - 18", "\\boxed{-{18}}", "\\boxed{-(18)}"):
        assert train.number_reward(text, {"answer": 18}) == 0
    assert train.number_reward("\\boxed{-18}", {"answer": -18}) == 1


def test_a_reward_cannot_change_its_row(tmp_path):
    """What it writes there would be another answer in the next step."""
    seen = []

    def reward(completion, row):
        seen.append(row["answer"])
        row["answer"] = "changed"
        return 1.0

    sample = logra.Sample([1], [1], [0.0], True, row=train.Example([1], {"answer": "a"}, "here:1"))
    for _ in range(2):
        assert train.score(reward, tokenizer_with_bos(), 5.0, sample) == 1.0
    assert seen == ["a", "a"]


def test_reward_arguments_out_of_order_are_refused(tmp_path):
    for arguments in ("row, completion", "prompt, completion"):
        (tmp_path / "mine.py").write_text(f"def f({arguments}):\n    return 0.0\n")
        with pytest.raises(train.UserError, match="completion, row"):
            train.load_reward(f"{tmp_path}/mine.py:f")


def test_weights_that_the_files_lack_are_not_made_up(tmp_path):
    model = tiny_llama()
    kept = {k: v for k, v in model.state_dict().items() if "layers.0.mlp.up_proj" not in k}
    saved_model(tmp_path, model)
    model.save_pretrained(tmp_path, state_dict=kept)
    with pytest.raises(train.UserError, match="lack 1 weights, such as .*up_proj"):
        train.load_model(str(tmp_path), "--model")


def test_a_head_of_its_own_survives_a_config_that_says_tied(lab, tmp_path):
    """The export has both matrices, and a config that says so."""
    saved_model(tmp_path / "model", tiny_llama(seed=5, vocab_size=64), tie_word_embeddings=True)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["tie_word_embeddings"]
    argv = f"--model {tmp_path}/model --data {{lab}}/good.jsonl --engine hf --steps 1 --rank 4"
    argv += f" --max-new-tokens 4 --out {tmp_path}/run"
    assert main(lab, argv) == 0
    before, after = tensors(tmp_path / "model"), tensors(tmp_path / "run" / "step-1")
    assert torch.equal(after["lm_head.weight"], before["lm_head.weight"])
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "step-1")
    assert torch.equal(reloaded.lm_head.weight, before["lm_head.weight"])
    assert not torch.equal(reloaded.lm_head.weight, reloaded.model.embed_tokens.weight)


def test_a_deep_bfloat16_model_is_known_and_a_head_that_scales_is_not(monkeypatch):
    """Rounding of 40 layers refuses nothing; a head 5% off, or no attention, is refused."""
    model = tiny_qwen2(torch.bfloat16, num_hidden_layers=40, initializer_range=0.06)
    ids, layers, head = [1, 5, 9, 33, 7], logra.find_targets(model), logra.policy_head(model)
    train.check_model(model, layers, ids)
    with monkeypatch.context() as patch, pytest.raises(train.UserError, match="not supported"):
        patch.setattr(logra, "policy_head", lambda _: lambda h: 1.05 * head(h))
        train.check_model(model, layers, ids)
    with monkeypatch.context() as patch, pytest.raises(train.UserError, match="not supported"):
        attend = logra.blockwise_attention
        nothing = lambda *args, **kw: (0 * attend(*args, **kw)[0], None)
        patch.setattr(logra, "blockwise_attention", nothing)
        train.check_model(model, layers, ids)


def test_end_tokens_outside_the_vocabulary_are_none():
    model, tokenizer = tiny_llama(), tokenizer_with_bos()
    model.generation_config.eos_token_id = [2, -1, 99_999]
    assert train.end_tokens(model, tokenizer) == sorted({2, tokenizer.eos_token_id})


def test_a_state_that_is_not_whole_is_refused(tmp_path):
    """One sentence that names the file and what it lacks, not a KeyError."""
    torch.save({"step": 1, "weights": {}}, tmp_path / "trainer.pt")
    with pytest.raises(train.UserError, match="trainer.pt cannot be read: it has no baseline"):
        train.load_state(tmp_path)


def test_other_prompts_are_not_resumed_on(lab, tmp_path, capsys):
    """The same path with another row would be another run from the next step on."""
    shutil.copy(lab / "good.jsonl", tmp_path / "rows.jsonl")
    argv = f"{DATA} --data {tmp_path}/rows.jsonl --steps 1 --save-every 1 --prompts-per-step 2"
    assert main(lab, f"{argv} --group-size 2 --out {tmp_path}/run") == 0
    jsonl(tmp_path / "rows.jsonl", row("three"))
    before = snapshot(tmp_path / "run")
    assert main(lab, f"--resume {tmp_path}/run --steps 2") == 2
    (sentence,) = errors(capsys.readouterr().err)
    assert "--data" in sentence and "rows.jsonl" in sentence
    assert snapshot(tmp_path / "run") == before


def test_an_evaluation_whose_reward_failed_is_made_up_for(lab, tmp_path):
    """After the last step, too: the resumed run has the evaluation of step 2, greedy included."""
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\n"
        "def f(completion, row):\n"
        f"    fails = Path('{tmp_path}/run/step-1').exists()\n"
        f"    fails = fails and Path('{tmp_path}/fails').exists()\n"
        "    if fails and row['answer'] == 'held out':\n"
        "        raise ValueError('not now')\n"
        "    return float(len(completion))\n"
    )
    (tmp_path / "fails").touch()
    jsonl(tmp_path / "held.jsonl", row(answer="held out"))
    argv = f"{DATA} --eval-data {tmp_path}/held.jsonl --reward {tmp_path}/mine.py:f --steps 2"
    argv = f"{argv} --prompts-per-step 2 --group-size 2 --save-every 1 --eval-every 2"
    assert main(lab, f"{argv} --out {tmp_path}/run") == 2
    assert [r["step"] for r in journal(tmp_path / "run", evaluations=True)] == [0, 1, 2]
    (tmp_path / "fails").unlink()
    assert main(lab, f"--resume {tmp_path}/run") == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    made = [r for r in map(json.loads, lines) if "eval_accuracy" in r]
    assert [r["step"] for r in made] == [0, 2] and "greedy" in made[1]


def test_reward_file_sees_the_completion_and_the_row(lab, tmp_path):
    """function(completion, row): every key of the row is there, and its value is the reward."""
    (tmp_path / "mine.py").write_text(
        "def f(completion, row):\n"
        "    assert isinstance(completion, str) and '</s>' not in completion\n"
        "    return row['worth'] + row['answer']\n"
    )
    jsonl(tmp_path / "rows.jsonl", row(answer=2, worth=0.25))
    argv = f"{DATA} --data {tmp_path}/rows.jsonl --reward {tmp_path}/mine.py:f --steps 1"
    argv = f"{argv} --prompts-per-step 2 --group-size 2 --out {tmp_path}/run"
    assert main(lab, argv) == 0
    (line,) = journal(tmp_path / "run")
    assert line["reward"] == 2.25 and line["dead_groups"] == 1 and line["alpha"] == 0


# fmt: off
NUMBERS = [  # what a text says, and the number it ends with
    ("18", 18), ("The answer is 18.", 18), ("18.0", 18), ("18.00 dollars", 18), ("$18", 18),
    ("18$", 18), (r"\$18", 18), ("$ 18", 18), ("€18,50", None), ("£1,234.50", "1234.5"),
    ("USD 18", 18), ("18USD", 18), ("USD18", None), ("1,234", 1234), ("1,234,567", 1234567),
    ("12,34", None), ("1,2345", None), ("1234,567", None), ("0,123", 123), ("1.234.567", None),
    ("1 234", 234), ("1_000", None), ("1{,}234", 1234), (r"1\,234", 1234), (r"1,\!234", 1234),
    ("-5", -5), ("+5", 5), ("−5", -5), ("–5", -5), ("- 5", 5), ("-$5", -5), ("$-5", -5),
    (r"-\$1,000", -1000), ("x=-5", -5), ("10-5", 5), ("10 - 5", 5), ("10 -5", -5), ("pages 3-5", 5),
    ("3–5", 5), ("x-5", 5), ("(7)-5", 5), ("--5", 5), ("covid-19", 19), ("50%", 50), (r"50\%", 50),
    ("0.5%", "1/2"), ("40%-50%", 50), ("18km", 18), ("18 km/h", 18), ("18 cm^2", 18),
    ("18 cm^{2}", 18), (r"18\text{ cm}^2", 18), ("18 m2", 18), ("18 cm²", 18), ("5 s^{-1}", 5),
    ("18°", 18), (r"18^\circ", 18), (r"18^{\circ}", 18), ("the 5th", 5), ("3 million", 3),
    ("x2", None), ("H2O", None), ("0.5", "1/2"), (".5", "1/2"), ("-.5", "-1/2"), ("5.", 5),
    ("so...5", None), ("Rs.500", None), ("1.2.3", None), ("007", 7), ("3/4", "3/4"),
    ("-3/4", "-3/4"), ("3/4.", "3/4"), ("1/0", None), ("1/2/3", None), ("1.5/2", "3/4"),
    ("km/2", None), ("5/day", 5), (r"\frac{3}{4}", "3/4"), (r"\dfrac{3}{4}$", "3/4"),
    (r"\frac34", "3/4"), (r"-\frac{3}{4}", "-3/4"), (r"\frac{-3}{4}", "-3/4"),
    (r"3\frac{1}{2}", None), (r"\frac{1}{2}3", None), (r"\frac{1,000}{4}", 250), ("1e5", 100000),
    ("1.5e-3", "3/2000"), ("2E3", 2000), ("1e999", "1e999"), ("1e9999", None), ("10^3", None),
    ("10^{-3}", None), (r"2\times 10^3", None), (r"2 \times 3", None), ("2×3", None), ("2*3", None),
    ("2 * 3", 3), ("9**9**9", None), ("3:30", None), ("12/10/2020", None), ("2020-10-12", 12),
    ("A:5", 5), ("**5**", 5), ("**Answer: 5.**", 5), ("__5__", 5), ("`5`", 5), ("x_1", None),
    ("1, 2, 3", 3), ("1,2,3", None), ("(1, 2)", 2), ("[7]", 7), ("5!", 5), ("", None),
    ("none", None), ("NaN", None), ("inf", None), ("１８", None), ("½", None), ("2 + 3 = 5", 5),
    ("5 = 2 + 3", 3), ("18\n\nDone", 18), ("First 1. Then 2.", 2), (r"\boxed{18}", 18),
    (r"\boxed{18} of 20", 18), (r"so $\boxed{\$1,234.50}$.", "1234.5"),
    (r"\boxed{\frac{3}{4}}", "3/4"), (r"\boxed{-3}", -3), (r"\boxed{18\text{ cm}^2}", 18),
    (r"\boxed{\text{18 dollars}}", 18), (r"\boxed{x = 5}", 5), (r"\boxed{5\%}", 5),
    (r"\boxed{\mathbf{5}}", 5), (r"\boxed{\left(5\right)}", 5), (r"\boxed{1} then \boxed{2}", 2),
    (r"\boxed{\boxed{5}}", 5), (r"\boxed{}", None), (r"5 \boxed{none}", None),
    (r"5 \boxed{18", None), (r"\boxed{1, 2}", None), (r"\boxed{2 + 3}", None),
    (r"\boxed{3 1/2}", None), (r"\boxed{2\sqrt{3}}", None), (r"\boxed{\sqrt{3}}", None),
    (r"\boxed{2\pi}", None), (r"\boxed{\pm 2}", None), (r"\boxed{5^x}", None),
    (r"\boxed{x^2}", None), (r"\boxed 5", 5), ("#### 18", 18), ("####18", 18),
    ("#### 18\nQuestion: 5 and 6?", 18), ("#### $1,234", 1234), ("#### -5", -5), ("#### **5**", 5),
    ("#### 18 dollars", 18), ("#### 18 (of 20)", None), ("#### 18 #### 19", None),
    ("#### 18\n#### 19", 19), ("18 ####", 18), ("#### Step 2\nso 18", 18),
    ("#### 18\n\\boxed{19}", 19), ("\\boxed{19}\n#### 18", 18), ("7 <<3+4=7>>7\n#### 7", 7),
]
# fmt: on


@pytest.mark.parametrize("text, number", NUMBERS, ids=range(len(NUMBERS)))
def test_the_number_of_a_text(text, number):
    """As train.last_number states the rule; so for the answer of a row and for a completion."""
    expected = None if number is None else Fraction(number)
    assert train.last_number(text) == expected
    right = {"prompt": "p", "answer": "7" if number is None else str(number)}
    assert train.number_reward(text, right) == float(number is not None)
    assert train.number_reward(text, {"prompt": "p", "answer": 123456}) == 0


@pytest.mark.parametrize(
    "text",
    ["9**9**9", "1e999999999", "NaN", "inf", "-1e999", *(x * 100_000 for x in "19 .,-#{}$\\^_")]
    + ["1 " * 50_000, "x1" * 50_000, "1e" * 50_000, "1," * 50_000, "1" + ",111" * 25_000]
    + ["\\boxed{" * 14_000, "\\boxed{" + "{}" * 50_000, "\\frac{1" * 12_000, "#### 1" * 16_000]
    + ["####" + " " * 100_000, "1 \\times" * 11_000, "1" + " " * 100_000 + "2", "####-" * 20_000],
    ids=lambda text: text[:9],
)
def test_hostile_text_is_answered_at_once(text):
    """Nothing is evaluated, and 100 kB of anything take less than a tenth of a second."""
    seconds = []
    for _ in range(3):  # in one of them no garbage is collected
        start = time.thread_time()
        train.number_reward(text, row())
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 0.1


def test_a_reward_gets_what_it_asks_for_by_name(lab, tmp_path):
    """token_ids and finish_reason, each alone or both, are the sample's own."""
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Seen:\n"
        "    ids: list\n"
        "def both(completion, row, *, token_ids, finish_reason):\n"
        "    assert completion == 'a cat'\n"
        "    return {'stop': 1, 'length': 2}[finish_reason] + 10 * len(Seen(token_ids).ids)\n"
        "def one(completion, row, finish_reason='none', other=0.5):\n"
        "    return {'stop': 1, 'length': 2}[finish_reason] + other\n"
    )
    tokenizer = tokenizer_with_bos()
    ids = tokenizer.encode("a cat")
    for finished in (True, False):
        sample = logra.Sample([1], ids, [], finished, row=train.Example([1], row(), "at"))
        for name, more in (("both", 10 * len(ids)), ("one", 0.5)):
            reward = train.load_reward(f"{tmp_path}/mine.py:{name}")
            found = train.score(reward, tokenizer, 9, sample)
            assert found == (1 if finished else 2) + more


def test_a_reward_that_takes_too_long_is_stopped():
    """Even one that catches every Exception; the next call has its time again."""
    sample = logra.Sample([1], [], [], True, row=train.Example([1], row(), "rows.jsonl:7"))
    before = signal.getsignal(signal.SIGALRM)

    def endless(completion, row):
        end = time.monotonic() + 5
        while time.monotonic() < end:
            try:
                time.sleep(0.01)
            except Exception:  # noqa: BLE001, S112
                continue
        return 0.0

    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(train.UserError, match="--reward-seconds 0.1.*rows.jsonl:7"):
            train.score(endless, tokenizer_with_bos(), 0.1, sample)
    assert time.monotonic() - start < 3
    assert train.score(lambda completion, row: 2, tokenizer_with_bos(), 60, sample) == 2
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert signal.getsignal(signal.SIGALRM) == before


@pytest.mark.parametrize(
    "answer, words", [("bad", "KeyError"), ("nan", "nan"), ("slow", "--reward-seconds")]
)
def test_a_reward_that_fails_stops_the_run_and_names_the_row(lab, tmp_path, capsys, answer, words):
    """Exit code 2; the steps before it are saved and the run can go on."""
    bad = train.epoch_order(3, 0, 0)[2]  # the row of step 3
    rows = [row(p, answer if i == bad else "1") for i, p in enumerate(("a cat", "ten", "four"))]
    jsonl(tmp_path / "rows.jsonl", *rows)
    run = tmp_path / "run"
    argv = f"{TRAIN} --prompts-per-step 1 --data {tmp_path}/rows.jsonl --steps 4 --save-every 100"
    argv += " --reward-seconds 0.2"
    assert main(lab, f"{argv} --out {run}") == 2
    out, err = capsys.readouterr()
    sentences = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(sentences) == 1 and "Traceback" not in out + err
    for word in (words, f"rows.jsonl:{bad + 1}", "step-2"):
        assert word in sentences[0]
    assert [line["step"] for line in journal(run)] == [1, 2]
    assert [p.name for p in run.glob("step-*")] == ["step-2"]
    transformers.AutoModelForCausalLM.from_pretrained(run / "step-2")
    rows[bad]["answer"] = "1"
    jsonl(tmp_path / "rows.jsonl", *rows)
    assert main(lab, f"--resume {run}") == 0
    assert [line["step"] for line in journal(run)] == [1, 2, 3, 4]


# ------------------------------------------------------------------------------------------------
# Evaluation
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("right, n", [(0, 5), (5, 10), (300, 300), (1, 3), (17, 500)])
def test_interval_is_wilsons(right, n):
    """Its ends are the p with (right / n - p)^2 = 1.96^2 p (1 - p) / n, in [0, 1]."""
    low, high = train.wilson(right / n, n)
    assert 0 <= low < high <= 1 and low - 1e-12 < right / n < high + 1e-12
    for p in (low, high):
        assert (right / n - p) ** 2 == pytest.approx(1.96**2 * p * (1 - p) / n, abs=1e-12)


def test_interval_of_a_textbook():
    """5 of 10: 0.2366 to 0.7634."""
    assert train.wilson(0.5, 10) == pytest.approx([0.2366, 0.7634], abs=5e-5)


class Dice:
    """A generator of answers [seed % 7], which notes what it was asked."""

    def __init__(self):
        self.calls = []

    def generate(self, prompts, seeds, max_new_tokens, temperature):
        self.calls.append((prompts, seeds, temperature))
        return [logra.Sample(p, [s % 7], [-1.0], True) for p, s in zip(prompts, seeds, strict=True)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("rows, samples", [(7, 4), (2, 1), (1, 3)])
def test_every_row_is_evaluated_once_on_any_number_of_ranks(monkeypatch, ranks, rows, samples):
    """The table that the ranks add up: each row with its samples, none twice; the same draws, so
    the same mean, pass@k and interval."""
    examples = [train.Example([i], {}, "at") for i in range(rows)]
    config = train.Config(eval_samples=samples)
    reward = lambda s: float(s.completion[0] < 2)
    whole, _ = train.evaluate(Dice(), examples, reward, config, 0.7)
    drawn = [logra.stable_seed("eval", 0, i, k) % 7 for i in range(rows) for k in range(samples)]
    right = torch.tensor(drawn).view(rows, samples) < 2
    mean, passed = right.double().mean().item(), right.any(1).double().mean().item()
    assert whole == {
        "rows": rows,
        "samples_per_row": samples,
        "mean_at_k": pytest.approx(mean),
        "pass_at_k": pytest.approx(passed),
        "interval": pytest.approx(train.wilson(mean, rows)),
    }
    tables, dice = [], Dice()
    monkeypatch.setattr(logra, "world", lambda: ranks)
    monkeypatch.setattr(logra, "raise_together", lambda error: None)
    monkeypatch.setattr(logra, "rank_sum", lambda table: tables.append(table) or sum(tables))
    for rank in range(ranks):
        monkeypatch.setattr(logra, "my_rank", lambda rank=rank: rank)
        if rank == ranks - 1:
            assert train.evaluate(dice, examples, reward, config, 0.7)[0] == whole
        else:
            with contextlib.suppress(ZeroDivisionError):  # the rows of this one alone
                train.evaluate(dice, examples, reward, config, 0.7)
    seen = [s for call in dice.calls for s in call[1]]
    assert len(seen) == len(set(seen)) == rows * samples and {c[2] for c in dice.calls} == {0.7}


def test_a_penalty_is_a_wrong_answer_and_rewards_above_one_have_no_interval():
    """1 and the paper's -0.01 give the share that is right; fractions are as exact as float64."""
    examples = [train.Example([i], {}, "at") for i in range(50)]
    reward = lambda s: 1.0 if s.completion[0] < 2 else -0.01
    found, samples = train.evaluate(Dice(), examples, reward, train.Config(), 0.7)
    right = sum(s.completion[0] < 2 for s in samples) / 50
    assert found["mean_at_k"] == found["pass_at_k"] == right and 0 < right < 1
    assert found["interval"] == train.wilson(right, 50)
    assert {s.reward for s in samples} == {1.0, -0.01}
    double = lambda s: 2 * reward(s)
    found, _ = train.evaluate(Dice(), examples, double, train.Config(), 0.7)
    assert found["interval"] is None and found["mean_at_k"] == 2 * right
    fractions = lambda s: 0.1
    assert train.evaluate(Dice(), examples, fractions, train.Config(), 0.7)[0]["mean_at_k"] == 0.1


def evaluated(capsys):
    """What --eval-only printed last, and the line before it."""
    *_, line, answer = capsys.readouterr().out.splitlines()
    return json.loads(answer), line


def test_eval_only_answers_and_writes_nothing(lab, tmp_path, monkeypatch, capsys):
    """Of a run, of one of its checkpoints (what that run measured there), and of a model."""
    monkeypatch.chdir(tmp_path)
    before = snapshot(lab)
    for where, step in (("done", 4), ("done/step-2", 2), ("done/step-0", 0)):
        assert main(lab, f"--eval-only --resume {{lab}}/{where}") == 0
        found, line = evaluated(capsys)
        measured = next(
            r for r in journal(lab / "done", True) if r["step"] == step and "eval_rows" in r
        )
        assert found["mean_at_k"] == measured["eval_accuracy"] and found["rows"] == 6
        assert found["interval"] is None and line.startswith(f"step {step} | held-out accuracy")
    argv = f"--eval-only {MODEL} --eval-data {{lab}}/good.jsonl --eval-samples 4 --reward exact"
    assert main(lab, argv) == 0
    found, line = evaluated(capsys)
    assert list(found) == ["rows", "samples_per_row", "mean_at_k", "pass_at_k", "interval"]
    assert (found["rows"], found["samples_per_row"]) == (3, 4) and "pass@4" in line
    low, high = found["interval"]
    assert f"{found['mean_at_k']:.3f} [{low:.3f}, {high:.3f}]" in line
    assert snapshot(lab) == before and not list(tmp_path.iterdir())
    assert main(lab, f"{argv} --out {tmp_path}/out") == 0
    found, _ = evaluated(capsys)
    [record] = journal(tmp_path / "out", evaluations=True)
    assert record["eval_accuracy"] == found["mean_at_k"] and record["eval_rows"] == 3
    assert record["eval_pass_at_k"] == found["pass_at_k"] and record["eval_samples"] == 4
    assert (tmp_path / "out" / "samples.jsonl").exists() and snapshot(lab) == before


def test_eval_only_sees_the_weights_that_rounding_would_lose(lab, tmp_path, monkeypatch):
    """A checkpoint in bfloat16 is evaluated with the float32 weights of trainer.pt."""
    assert main(lab, f"{TRAIN} --model {{lab}}/qwen2 --steps 2 --out {tmp_path}/run") == 0
    masters, seen = train.load_state(tmp_path / "run" / "step-2")["weights"], []

    generate = logra.HFGenerator.generate

    def noted(self, *args):
        seen.append({path: self.model.get_submodule(path).weight.clone() for path in masters})
        return generate(self, *args)

    monkeypatch.setattr(logra.HFGenerator, "generate", noted)
    argv = f"--eval-only --resume {tmp_path}/run --eval-data {{lab}}/good.jsonl"
    assert main(lab, argv) == 0
    assert masters and all(torch.equal(seen[-1][path], masters[path]) for path in masters)


def test_accuracies_have_their_interval_on_screen_and_in_the_journal(lab, tmp_path, capsys):
    """Before, between and after, sampled and greedy."""
    argv = f"{SMALL} --reward exact --eval-samples 2 --steps 2 --out {tmp_path}/run"
    assert main(lab, argv) == 0
    out = capsys.readouterr().out
    records = [r for r in journal(tmp_path / "run", evaluations=True) if "eval_rows" in r]
    assert [r["step"] for r in records] == [0, 2]
    for r in records:
        p, (low, high) = r["eval_accuracy"], r["eval_interval"]
        assert [low, high] == pytest.approx(train.wilson(p, 6)) and r["eval_pass_at_k"] >= p
        assert (
            f"step {r['step']} | held-out accuracy {p:.3f} [{low:.3f}, {high:.3f}] | pass@2" in out
        )
        g, (low, high) = r["greedy"], r["greedy_interval"]
        assert f"greedy {g:.3f} [{low:.3f}, {high:.3f}]" in out


@pytest.mark.parametrize(
    "argv",
    ["--advantage running_mean --group-size 1", "--denominator constant", "--mask-truncated"],
)
def test_the_objectives_run_and_resume(lab, tmp_path, argv):
    """2 steps and 2 more are 4, to the bit: the running mean is in the checkpoint."""
    *states, lines = whole_and_halves(lab, tmp_path, f"{TRAIN} --max-new-tokens 40 {argv}")
    assert any(line["alpha"] > 0 for line in lines)
    a, b = (state["baseline"] for state in states)
    assert a == b and (a is not None) == ("running_mean" in argv)


# ------------------------------------------------------------------------------------------------
# The real thing
# ------------------------------------------------------------------------------------------------


BUDGET = "--kl-budget {0} --kl-budget-final {0}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        *("", "--dtype bfloat16", "--sync full", "--optimizer adamw", "--optimizer lora"),
        f"--dtype bfloat16 --optimizer sketch_muon --verify-step {BUDGET.format('1e-8')}",
    ],
)
def test_the_engine_ends_a_run_with_the_trainers_weights(lab, tmp_path, monkeypatch, flags):
    """A whole run with vLLM: at its end the engine has the weights of the last checkpoint."""
    started, backs = [], []

    class Watched(logra.VLLMGenerator):
        def __init__(self, *args):
            super().__init__(*args)
            started.append(self)

        def update(self, factors, update, back):
            backs.append(back)
            return super().update(factors, update, back)

    monkeypatch.setattr(logra, "VLLMGenerator", Watched)
    argv = f"{SMALL} --engine vllm --steps 4 --kv-gib 0.05 {flags}"
    assert main(lab, f"{argv} --out {tmp_path}/run") == 0
    engine = started[0].read()
    first, last = (tensors(tmp_path / "run" / f"step-{n}") for n in (0, 4))
    dtype = torch.bfloat16 if "bfloat16" in flags else torch.float32
    assert len(engine) == 14 and len(started) == 1
    for path, W in engine.items():
        assert torch.equal(W, last[f"{path}.weight"].to(dtype))
        assert not torch.equal(W, first[f"{path}.weight"].to(dtype))
    factors = not any(flag in flags for flag in ("full", "adamw", "lora"))
    sent = sum(2 * 16 * len(W) if factors else 4 * W.numel() for W in engine.values())
    assert [line["sync_bytes"] for line in journal(tmp_path / "run")] == [sent] * 4
    assert all(line["kl_realised"] > 0 for line in journal(tmp_path / "run"))
    assert any(backs) == ("verify" in flags)


@pytest.mark.slow
def test_an_engine_that_cannot_start_is_answered_by_one_sentence(lab, tmp_path, capsys):
    """Exit code 2 and vLLM's reason, here a cache too small for one block."""
    argv = f"{TRAIN} --engine vllm --kv-gib 0.00001 --steps 1 --out {tmp_path}/run"
    assert main(lab, argv) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err and err.splitlines()[-1].startswith("error:")
    assert "memory" in err.splitlines()[-1]


@pytest.mark.slow
def test_a_run_resumes_without_the_model_it_started_from(lab, tmp_path):
    """A checkpoint is a whole model: the engine starts from it, and ends with its weights."""
    shutil.copytree(lab / "llama", tmp_path / "model")
    argv = f"{TRAIN} --engine vllm --kv-gib 0.05 --model {tmp_path}/model --steps 4"
    assert main(lab, f"{argv} --out {tmp_path}/whole") == 0
    assert main(lab, f"{argv} --steps 2 --out {tmp_path}/run") == 0
    shutil.rmtree(tmp_path / "model")
    assert main(lab, f"--resume {tmp_path}/run --steps 4") == 0
    assert journal(tmp_path / "run") == journal(tmp_path / "whole")


def launch(*argv):
    """train.py in a process of its own; its errors go to a file beside the run."""
    return subprocess.Popen(
        [sys.executable, Path(train.__file__), *map(str, argv)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_step(run, step, process):
    """Until metrics.jsonl has that step."""
    for _ in range(12_000):
        text = (run / "metrics.jsonl").read_text() if (run / "metrics.jsonl").exists() else ""
        if f'"step": {step}, "update"' in text:
            return
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    raise AssertionError(f"step {step} was not reached in two minutes")


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    """SIGKILL, resume, Ctrl-C, resume: metrics and weights are those of an undisturbed run (42)."""
    settings = ("--steps", 24, "--save-every", 2, "--eval-rows", 4, "--eval-every", 5)
    settings += ("--prompts-per-step", 8, "--kv-gib", 0.05)
    whole, run = tmp_path / "whole", tmp_path / "run"
    undisturbed = launch("--out", whole, *settings)
    _, err = undisturbed.communicate(timeout=300)
    assert undisturbed.returncode == 0, err

    killed = launch("--out", run, *settings)
    wait_for_step(run, 3, killed)
    killed.kill()
    killed.communicate()
    assert not (run / "step-24").exists()

    interrupted = launch("--resume", run)
    wait_for_step(run, 12, interrupted)
    interrupted.send_signal(signal.SIGINT)
    _, err = interrupted.communicate(timeout=300)
    assert interrupted.returncode == 130
    last = [line for line in err.splitlines() if line.strip()][-1]
    assert "Traceback" not in err and err.count("interrupted") == 1
    assert last.startswith("interrupted") and f"--resume {run}" in last
    assert not (run / "step-24").exists()

    resumed = launch("--resume", run)
    _, err = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, err
    assert journal(run, evaluations=True) == journal(whole, evaluations=True)
    assert (run / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    assert_same_tensors(tensors(run / "step-24"), tensors(whole / "step-24"))
    states = [train.load_state(path / "step-24") for path in (run, whole)]
    assert torch.equal(states[0]["optimizer"]["v"], states[1]["optimizer"]["v"])
    assert states[0]["mismatch"] == states[1]["mismatch"]


@pytest.mark.parametrize(
    "words, said",
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "out of memory: CUDA"),
        ("[enforce fail] DefaultCPUAllocator: can't allocate memory", "out of memory: [enforce"),
        ("[pair.cc:547] Connection closed by peer [127.0.0.1]:9", "another rank is gone"),
    ],
)
def test_full_memory_and_lost_ranks_are_one_sentence(
    lab, tmp_path, monkeypatch, capsys, words, said
):
    """With the last checkpoint that is whole; any other RuntimeError is a fault, and shown."""
    steps = iter([0, 0, 1])

    def fails(*args, **kwargs):
        if next(steps):
            raise RuntimeError(words)
        return backward(*args, **kwargs)

    backward = logra.backward
    monkeypatch.setattr(logra, "backward", fails)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert main(lab, f"{SMALL} --steps 4 --out {tmp_path}/run") == 1
    (sentence,) = errors(capsys.readouterr().err)
    assert said in sentence and "step-2" in sentence
    steps, words = iter([0, 1]), "a fault"
    with pytest.raises(RuntimeError, match="a fault"):
        main(lab, f"{SMALL} --steps 4 --out {tmp_path}/again")


# ------------------------------------------------------------------------------------------------
# The README: its scripts run, its flags and links exist
# ------------------------------------------------------------------------------------------------


README = (HERE / "README.md").read_text()


def script(name):
    """Write the Python block of the README that begins with this file's name, and run it."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (text,) = (block for block in blocks if block.startswith(f"# {name}"))
    Path(name).write_text(text)
    return runpy.run_path(name)


def test_flags_and_links_of_the_readme_exist():
    """A flag that was renamed, a function that has moved: the README would lead astray."""
    ours = {train.dashed(f.name) for f in train.dataclasses.fields(train.Config)}
    ours |= {"--no" + name.removeprefix("-") for name in ours} | {"--help"}
    others = {"--nproc-per-node", "--extra-index-url"}
    found = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert len(found) > 50 and found <= ours | others, found - ours - others
    links = re.findall(r"\[`([\w.]+)`\]\((\w+)\.py\)", README)
    assert len(links) >= 8
    for name, module in links:
        assert operator.attrgetter(name)({"logra": logra, "train": train}[module]), name


def test_scripts_of_the_readme_make_a_second_task(small_task, tmp_path, monkeypatch):
    """task.py writes a model and rows, places.py judges them, and a run takes both."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["task.py", "32", "5"])
    script("task.py")
    share = script("places.py")["share"]
    rows = [json.loads(line) for line in Path("tiny-32-5/turn-test.jsonl").read_text().splitlines()]
    assert {len(row["answer"]) for row in rows} == {5} and len(rows) == 2000
    assert all(row["prompt"] == row["answer"][::-1] + "=" for row in rows)
    judged = [share(text, {"answer": "12345"}) for text in ("12345", "12543", "1234", "")]
    assert judged == [1.0, 0.6, 0.0, 0.0]
    flags = "--model tiny-32-5 --data tiny-32-5/turn-train.jsonl --reward places.py:share"
    flags = f"{train.BUILT_IN} {flags} --engine hf --steps 1 --out r"
    assert train.main(flags.split()) == 0 and Path("r/step-1").exists()


# ------------------------------------------------------------------------------------------------
# Benchmarks: pytest -m benchmark -s
# ------------------------------------------------------------------------------------------------


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ONE_LAYER = (1, 1536, 8960, 12, 2, 1000)  # of a 1.5 B model: 46.8 M weights are trained
MODEL_370M = (24, 1024, 3584, 16, 4, 32_000)
BENCHMARKED = [("adamw_foreach", None), ("adamw_fused", None)]  # and the rank of the others
RANKED = ("row_adam", "sketch_muon", "lora", "lora_merged")
BENCHMARKED += [(method, r) for method in RANKED for r in (64, 256)]


def qwen2_of_size(layers, hidden, inner, heads, kv_heads, vocabulary):
    """A float32 Qwen2 of the given shape with random weights."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
    )
    return transformers.Qwen2ForCausalLM(config).eval().to(DEVICE)


def training_step(model, method, rank):
    """step(ids): forward, backward, propose, step, by a rule on sketches, LoRA or AdamW on the same
    weights; float32 on a CPU, bfloat16 compute on a GPU.

    lora is the textbook's; lora_merged also puts B A into W, as train.LoRA does for the engine."""
    layers = logra.find_targets(model)
    if rank and "lora" not in method:
        optimizer = logra.LoGRA(logra.attach_sketches(model, rank), rule=method)
    else:
        logra.freeze_all_but(model, layers)
        weights, kind = [module.weight for module in layers.values()], method.removeprefix("adamw_")
        optimizer = (
            train.LoRA(layers, rank)
            if rank
            else torch.optim.AdamW(weights, 1e-6, weight_decay=0, **{kind: True})
        )

    def step(ids):
        with logra.compute_dtype(ids.device, "bfloat16" if ids.is_cuda else "float32"):
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            head = model.get_output_embeddings()
            logp = logra.token_logprobs(hidden[0, :-1], head, ids[0, 1:], 1.0)
        logp.sum().backward()
        if rank:
            optimizer.propose(len(logp))
        if method == "lora":
            train.DenseAdamW.step(optimizer)
        else:
            optimizer.step()
        optimizer.zero_grad()

    return step


def peak_above_model(method, rank, tokens, shape):
    """MB that one step takes above the model (resident, or CUDA's); runs in its own process."""
    model = qwen2_of_size(*shape)
    ids = torch.randint(0, shape[-1], (1, tokens), device=DEVICE)
    train.peak_gib()
    before = train.peak_gib()
    training_step(model, method, rank)(ids)
    return (train.peak_gib() - before) * 2**30 / 1e6


def peaks_above_model(cases):
    """{case: MB} of peak_above_model(*case), each in a process of its own, two at a time."""

    def peak(case):
        code = f"import test_logra as t; print(t.peak_above_model(*{case!r}))"
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=HERE, stdout=subprocess.PIPE, text=True, check=True
        )
        return float(run.stdout.split()[-1])

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(cases, pool.map(peak, cases), strict=True))


def seconds_of(act):
    """Seconds that act() takes, on a GPU until its work is done."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else int
    wait()
    start = time.perf_counter()
    act()
    wait()
    return time.perf_counter() - start


def interleaved(acts, rounds=12):
    """{name: median seconds}, the first two left out; in turn, so that what else the machine does
    falls on all alike."""
    seconds = {name: [] for name in acts}
    for _ in range(rounds):
        for name, act in acts.items():
            seconds[name].append(seconds_of(act))
    return {name: statistics.median(times[2:]) for name, times in seconds.items()}


@functools.lru_cache
def seconds_of_steps(tokens, rounds):
    """{(method, rank): median seconds of a step} of one decoder layer of a 1.5 B model."""
    ids, models = torch.randint(0, 1000, (1, tokens), device=DEVICE), {}
    for method in BENCHMARKED:
        models[method] = functools.partial(training_step(qwen2_of_size(*ONE_LAYER), *method), ids)
    return interleaved(models, rounds)


def floor_ratio(layers, method, r, N):
    """Operations that a step cannot do without, over the 6 N P of one with dense gradients."""
    if r is None:
        return 1.0
    P, d_in, d_out = (
        sum(f(m) for m in layers.values())
        for f in (lambda m: m.weight.numel(), lambda m: m.in_features, lambda m: m.out_features)
    )
    if "lora" in method:  # X A^T and its B^T, the backward of both; B A taken off W and put back
        own = 2 * N * r * (2 * d_in + 3 * d_out) + 4 * r * P * (method == "lora_merged")
    else:  # X A^T, one for q, k, v and for gate, up, and dY^T P; F A; D^T D and A A^T of each width
        same = ("k_proj", "v_proj", "up_proj")
        inputs = sum(m.in_features for path, m in layers.items() if not path.endswith(same))
        widths = sum({m.in_features for m in layers.values()})
        own = 2 * N * r * (inputs + d_out) + 2 * r * P + 2 * r * r * (widths + d_out)
    if method == "sketch_muon":  # S^T S, S P and eighteen products of r x r
        own += 4 * r * r * d_out + 36 * r**3 * len(layers)
    return (4 * N * P + own) / (6 * N * P)


def probe_forwards(tokens=512):
    """Seconds of the KL probe, rank 256, over those of a plain forward of its tokens."""
    model, ids = qwen2_of_size(*ONE_LAYER), torch.randint(0, 1000, (1, tokens), device=DEVICE)
    sketches = logra.attach_sketches(model, 256)
    sketches.buffer.normal_(0, 1e-3)
    probe = [logra.Sample(ids[0, :1].tolist(), ids[0, 1:].tolist(), [], True)]

    @torch.no_grad()
    def forward():
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logra.policy_head(model)(hidden)

    acts = {"probe": lambda: logra.predict_kl(model, sketches, probe), "forward": forward}
    with logra.compute_dtype(ids.device, "bfloat16" if ids.is_cuda else "float32"):
        seconds = interleaved(acts)
    return seconds["probe"] / seconds["forward"]


@pytest.mark.parametrize("method", BENCHMARKED[2:], ids=str)
def test_floor_is_what_a_step_computes(method):
    """The products that torch counts, beyond those of dense AdamW, are the floor's: none is made
    twice that could be shared."""
    N, operations = 64, []
    ids = torch.randint(0, 8, (1, N), device=DEVICE)
    in_place = {torch.ops.aten.addmm_: lambda _, X, Y, **kw: 2 * X[0] * X[1] * Y[1]}
    for one in (BENCHMARKED[0], method):
        model = qwen2_of_size(1, 256, 512, 4, 2, 8)
        step = training_step(model, *one)
        step(ids)  # what only the first one does
        with FlopCounterMode(display=False, custom_mapping=in_place) as c:
            step(ids)
        operations.append(c.get_total_flops())
    layers = logra.find_targets(model)
    dense = 6 * N * sum(module.weight.numel() for module in layers.values())
    counted = 1 + (operations[1] - operations[0]) / dense
    assert floor_ratio(layers, *method, N) == pytest.approx(counted, rel=1e-9)


@pytest.mark.slow
@pytest.mark.benchmark
def test_benchmark_of_a_step(tmp_path):
    """Time, memory and floor of a step by every method, the probe, the synchronisation: a table,
    then one line of JSON."""
    layers = logra.find_targets(qwen2_of_size(*ONE_LAYER))
    cases = [(*method, N, ONE_LAYER) for N in (512, 1024) for method in BENCHMARKED]
    peaks, rows = peaks_above_model(cases), []
    for (method, rank, N, _), peak in peaks.items():
        seconds = seconds_of_steps(N, 9 if N == 512 else 6)
        ratio = seconds[method, rank] / seconds["adamw_foreach", None]
        row = {"method": method, "rank": rank, "tokens": N, "step_seconds": seconds[method, rank]}
        row |= {"ratio_to_adamw_foreach": ratio, "peak_mb": peak}
        rows.append(row | {"floor_ratio": floor_ratio(layers, method, rank, N)})
    probe, (seconds, *_) = probe_forwards(), synchronised(tmp_path, qwen2_of_size(*ONE_LAYER))
    sync, shown = {name: statistics.median(times) for name, times in seconds.items()}, []
    for row in rows:
        foreach = peaks["adamw_foreach", None, row["tokens"], ONE_LAYER]
        over = {"ratio/floor": row["ratio_to_adamw_foreach"] / row["floor_ratio"]}
        shown.append({**row, **over, "peak/foreach": row["peak_mb"] / foreach})
    print(f"\n{train.table(shown)}\n\nKL probe: {probe:.2f} forwards of its tokens")
    print(f"synchronisation: factors {sync['factors']:.3f} s, full {sync['full']:.3f} s")
    print(f"on {DEVICE}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
    print(json.dumps({"rows": rows, "probe_forwards": probe, "sync_seconds": sync}))


@pytest.mark.slow
@pytest.mark.benchmark
def test_peak_memory_of_a_step():
    """A LoGRA step takes at most .35 of the memory of an AdamW (foreach) step above the model."""
    cases = [(*method, 512, MODEL_370M) for method in (("row_adam", 256), BENCHMARKED[0])]
    peaks = peaks_above_model(cases)
    ratio = peaks[cases[0]] / peaks[cases[1]]
    print(f"\npeak above the model, MB: {peaks}, ratio {ratio:.3f}")
    assert ratio <= 0.35


@pytest.mark.slow
@pytest.mark.benchmark
def test_time_of_a_step():
    """One decoder layer of a 1.5 B model, 512 tokens: time relative to AdamW (foreach)."""
    seconds = seconds_of_steps(512, 9)
    r64, r256 = (seconds["row_adam", r] / seconds["adamw_foreach", None] for r in (64, 256))
    print(f"\nseconds {seconds}, ratios {r64:.3f} {r256:.3f}")
    # Where AdamW's memory traffic is cheap only its products are left to save, and of their
    # operations LoGRA needs .93 at rank 256: on such a machine this bar was missed, at .84.
    assert r64 <= 0.70 and r256 <= 0.80


def two_threads(first, second):
    """Run first(wire), second(wire) at the two ends of a wire; seconds until both are done."""
    store, barrier = dist.HashStore(), threading.Barrier(3)

    def end(rank, act):
        wire = dist.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=300))
        barrier.wait()
        act(wire)

    threads = [threading.Thread(target=end, args=pair) for pair in enumerate((first, second))]
    for thread in threads:
        thread.start()
    barrier.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def synchronised(directory, model):
    """Seconds of three synchronisations with a vLLM engine, rank 256, by factors and by weights;
    the last factors; the weights.  The engine has the trainer's rounded weights in the end."""
    model.to(torch.bfloat16).save_pretrained(directory)
    optimizer = logra.LoGRA(logra.attach_sketches(model.float(), 256))
    settings, W = optimizer.sketches.settings, weights(optimizer)
    engine = logra.VLLMGenerator(directory, [0], 64, settings, "bfloat16", 0.1)
    engine.load(W.items())
    seconds = {"factors": [], "full": []}
    for _ in range(3):
        optimizer.sketches.buffer.normal_()
        optimizer.propose(1)
        update = optimizer.update
        factors = optimizer.step(1.0)
        for name, act in (
            ("factors", lambda: engine.update(factors, update)),  # noqa: B023, called at once
            ("full", lambda: engine.load(W.items())),
        ):
            seconds[name].append(seconds_of(act))
    assert all(torch.equal(x, W[path].bfloat16()) for path, x in engine.read().items())
    return seconds, factors, W


@pytest.mark.slow
@pytest.mark.benchmark
def test_time_of_a_synchronisation(tmp_path):
    """A 370 M model's engine, rank 256: bytes and seconds of factors over those of --sync full."""
    seconds, factors, W = synchronised(tmp_path, qwen2_of_size(*MODEL_370M))
    sent = {"factors": factors, "full": {path: x.bfloat16() for path, x in W.items()}}
    for name, tensors_sent in sent.items():

        def send(wire, tensors_sent=tensors_sent):
            for x in tensors_sent.values():
                wire.broadcast(x, wire.rank()).wait()

        def receive(wire, tensors_sent=tensors_sent):
            for x in tensors_sent.values():
                wire.broadcast(torch.empty_like(x), 0).wait()

        seconds[f"{name} over loopback"] = [two_threads(send, receive) for _ in range(5)]
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    size = {k: sum(x.numel() * x.element_size() for x in v.values()) for k, v in sent.items()}
    by_wire = medians["factors over loopback"] / medians["full over loopback"]
    print(f"\nbytes {size}, ratio 1/{size['full'] / size['factors']:.1f}; seconds {medians}")
    print(f"engine {medians['factors'] / medians['full']:.2f}, wire {by_wire:.2f} of the full sync")
    d_out, weights_7B = 2 * (3584 + 512 + 18944) + 3584, 2 * 3584 * (3584 + 512) + 3 * 3584 * 18944
    assert 256 * d_out <= weights_7B / 18  # one layer of 7 B shape, both in bfloat16
    assert size["full"] / size["factors"] > 3 and by_wire < 1  # loopback has little to carry


# ------------------------------------------------------------------------------------------------
# Many ranks: this file is also what torchrun starts, see its end
# ------------------------------------------------------------------------------------------------


def torchrun(ranks, *argv):
    """A script on so many ranks; end it with said()."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return subprocess.Popen(
        [*command, *map(str, (ranks, *argv))],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(process, limit=180):
    """What a torchrun said until its end; it fails, and leaves no process, after `limit` s."""
    try:
        return process.communicate(timeout=limit)[1]
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks, by force after 30 s
        words = process.communicate(timeout=60)[1]
        raise AssertionError(f"no end within {limit} s:\n{words[-3000:]}") from None


def errors(text):
    """The sentences meant for the user."""
    return [line for line in text.splitlines() if line.startswith("error:")]


METHODS = ("sketch", "muon", "adam", "dense", "lora")
SKETCHED = {"sketch": "row_adam", "muon": "sketch_muon", "adam": "sketch_adam"}
ROUNDING = {"muon": 10, "adam": 10}  # small singular values, or entries, are enlarged with theirs
FIRST = (True, False, True)  # of three updates: whether it is the first of its batch
UNEVEN = functools.partial(tiny_qwen2, intermediate_size=97)  # no number of ranks divides 97


def recorded():
    """Seven samples of 1 to 9 tokens.  Two teach nothing: on three ranks all that rank 1 has."""
    samples, g = answers([3, 9, 1, 5, 2, 7, 4], seed=3), torch.Generator().manual_seed(0)
    for s in samples:
        s.logprobs = (2 * torch.rand(len(s.completion), generator=g) - 5.5).tolist()
    samples[1].advantage = samples[4].advantage = 0.0
    return samples


def sharded(method, weights=None, state=None, dtype="float32"):
    """A model on all ranks, checkpointed if there are several, and its optimizer."""
    model = UNEVEN()
    model.load_state_dict(weights or {}, strict=False)
    layers = logra.find_targets(model)
    if method in SKETCHED:
        sketches = logra.attach_sketches(model, 16, refresh=2 if method == "adam" else 1)
    else:
        logra.freeze_all_but(model, layers if method == "dense" else {})
    if logra.world() > 1:
        train.checkpoint_layers(model)
        logra.shard_model(model, getattr(torch, dtype))
    if method in SKETCHED:
        optimizer = logra.LoGRA(sketches, 1e-2, rule=SKETCHED[method])
    elif method == "dense":
        optimizer = train.DenseAdamW(layers, (1e-3, 1e-3))
    else:
        optimizer = train.LoRA(layers, 16, (1e-3, 1e-3))
    if state:
        optimizer.load_state_dict(copy.deepcopy(state))
    return model, optimizer, layers


def add_share(model, samples, first=True, dtype="float32"):
    """backward() on this rank's share, as grpo calls it."""
    share = samples[logra.my_rank() :: logra.world()]
    alive = [s for s in share if s.advantage] or share[:1]
    return logra.backward(model, alive, settings(micro_batch=1, dtype=dtype), first)


def sketch_of_all(sketches):
    """{path: S [d_out, r]} of all ranks."""
    return {
        path: logra.gather_rows(rows, sketches.layers[path].out_features).clone()
        for path, rows in sketches.rows.items()
    }


def gathered(layers):
    return {path: logra.whole(module.weight).clone() for path, module in layers.items()}


def update_on_ranks(model, optimizer, samples, first, seen):
    """One update of size 1e-2 with its KL; what is to be the same on all ranks goes into seen."""
    share = samples[logra.my_rank() :: logra.world()]
    tokens = sum(len(s.completion) for s in samples)
    sketches = getattr(optimizer, "sketches", None)
    mismatch = add_share(model, samples, first)
    seen["mismatch"].append(mismatch or 0.0)  # None: not the first of its batch
    if sketches:
        seen.setdefault("S", sketch_of_all(sketches))
        seen["weight grads"] = [n for n, p in model.named_parameters() if p.grad is not None]
    optimizer.propose(tokens)
    seen["norm"].append(optimizer.sketch_norm)
    curve, before = logra.predict_kl(model, sketches, share)
    if sketches:
        seen["local norm"] = sketches.buffer.norm().item()
        UA = W = 0.0
        for path, module in sketches.layers.items():
            U = logra.gather_rows(sketches.rows[path], module.out_features)
            UA += (U @ sketches.A[module.in_features]).double().square().sum().item()
            W += logra.whole(module.weight).double().square().sum().item()
        seen["ratio"].append(math.sqrt(UA / W))
        seen["all norm"] = math.sqrt(UA)
        seen["predicted"].append(curve[1][0])
    factors = optimizer.step(1.0)
    seen["factors"] = factors
    seen["realised"].append(logra.realised_kl(model, share, before))


def on_ranks():
    """Everything that the tests below compare, as this rank has it."""
    rank, ranks, samples = logra.my_rank(), logra.world(), recorded()
    result = {"split": {}}
    for method in METHODS:
        names = ("mismatch", "norm", "ratio", "predicted", "realised")
        seen = {name: [] for name in names}
        model, optimizer, layers = sharded(method)
        for first in FIRST:
            weights = gathered(layers)
            state = copy.deepcopy(optimizer.state_dict())
            update_on_ranks(model, optimizer, samples, first, seen)
        seen |= {"W": gathered(layers), "W at 2": weights, "state at 2": state}
        # The last update again, from what a checkpoint would hold
        again = {f"{path}.weight": W for path, W in weights.items()}
        model, optimizer, layers = sharded(method, again, state)
        update_on_ranks(model, optimizer, samples, True, {name: [] for name in names})
        seen["W again"] = gathered(layers)
        result[method] = seen

        # Not a number, on the last rank alone
        before, moments = gathered(layers), copy.deepcopy(getattr(optimizer, "moments", {}))
        add_share(model, samples)
        if rank == ranks - 1:
            if method in SKETCHED:
                optimizer.sketches.buffer[17, 3] = math.nan
            elif method == "dense":
                logra.local(layers[LAYERS[0]].weight.grad)[0, 0] = math.nan
            else:
                optimizer.adapters[LAYERS[0]][1].grad[0, 0] = math.nan
        try:
            optimizer.propose(31)
        except FloatingPointError as error:
            seen["nan"] = str(error)
        after = gathered(layers)
        seen["moved"] = [path for path in before if not torch.equal(before[path], after[path])]
        seen["kept"] = all(torch.equal(x, optimizer.moments[key]) for key, x in moments.items())

    model, optimizer, _ = sharded("sketch", dtype="bfloat16")
    add_share(model, samples, dtype="bfloat16")
    result["bfloat16 S"] = sketch_of_all(optimizer.sketches)

    if ranks > 1:
        mesh = logra.init_device_mesh("cpu", (ranks,))
        for d_out in (1, 2, 7, 8):
            S = torch.arange(d_out * 3.0).view(d_out, 3) * (rank + 1)
            mine = logra.scatter_rows(S)
            linear = torch.nn.Linear(3, d_out, bias=False)
            torch.nn.init.constant_(linear.weight, 0)
            linear.weight.data += torch.arange(d_out)[:, None]
            fsdp = logra.fully_shard(linear, mesh=mesh).weight.to_local()[:, 0].tolist()
            split = {"owned": list(range(d_out))[logra.owned(d_out)], "FSDP2": fsdp}
            split |= {"rows": mine.clone(), "whole": logra.gather_rows(mine, d_out)}
            result["split"][d_out] = split
    return result


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """{1, 2, 3: what on_ranks() gave, rank by rank}."""
    out, results = tmp_path_factory.mktemp("ranks"), {1: [on_ranks()]}
    for n in (2, 3):
        process = torchrun(n, __file__, "on_ranks", out / str(n))
        words = said(process)
        assert process.returncode == 0, words
        files = [out / str(n) / f"{rank}.pt" for rank in range(n)]
        results[n] = [torch.load(file, weights_only=False) for file in files]
    return results


def losses64(model, samples, old, first):
    """The clipped policy loss of each sample, in float64 and by the formula."""
    for i, s in enumerate(samples):
        z = model(torch.tensor([s.prompt + s.completion])).logits[0, len(s.prompt) - 1 : -1]
        logp = z.log_softmax(-1).gather(1, torch.tensor(s.completion)[:, None])[:, 0]
        if first:
            old[i] = logp.detach()
        weight = (old[i] - torch.tensor(s.logprobs)).exp().clamp(max=2)
        ratio = (logp - old[i]).exp()
        clipped = ratio.clamp(1 - 0.2, 1 + 0.28)
        yield -(weight * torch.minimum(ratio * s.advantage, clipped * s.advantage)).sum()


def adam64(m, v, G, t):
    """Adam's step of length 1 as published, and its moments."""
    m, v = 0.9 * m + 0.1 * G, 0.95 * v + 0.05 * G**2
    return m / (1 - 0.9**t) / ((v / (1 - 0.95**t)).sqrt() + 1e-8), m, v


@functools.cache
def reference64(method, parts=1):
    """{path: dW} after three updates, from dense gradients in float64 with the factor rounded.

    parts > 1 is the wrong formula: the mean of the means of so many ranks.
    """
    model, samples, old = UNEVEN().double(), recorded(), {}
    W = {path: model.get_submodule(path).weight for path in LAYERS}
    start = {path: w.detach().clone() for path, w in W.items()}
    v = {path: torch.zeros(len(w)).double() for path, w in W.items()}
    moments = dict.fromkeys([(path, i) for path in W for i in (0, 1, 2, "S")], (0, 0))
    bases = {}
    adapters = {}
    for path, w in W.items():
        seed = logra.stable_seed("lora", 0, path)
        A = logra.make_projection(16, w.shape[1], seed, "gaussian") * (16 / w.shape[1]) ** 0.5
        adapters[path] = [A.double(), torch.zeros(len(w), 16).double()]
    for t, first in enumerate(FIRST, 1):
        losses, loss = list(losses64(model, samples, old, first)), 0
        for part in range(parts):
            tokens = sum(len(s.completion) for s in samples[part::parts])
            loss = loss + sum(losses[part::parts]) / tokens / parts
        G = dict(zip(W, torch.autograd.grad(loss, list(W.values()))))
        P, D, DA = {}, {}, {}
        for path, w in W.items():
            refresh, last = 2 if method == "adam" else 1, bases.get(path)
            key = ("projection", 0, (t - 1) // refresh, f"in_features={w.shape[1]}")
            seed = logra.stable_seed(*key)
            P[path] = logra.make_projection(16, w.shape[1], seed, dtype=torch.float64)
            S, bases[path] = G[path] @ P[path].T, P[path]
            D[path], v[path] = row_adam64(S, v[path], t)
            if method == "muon":
                D[path] = max(1, len(w) / w.shape[1]) ** 0.5 * newton_schulz64(S)
            if method == "adam":
                m, second = moments[path, "S"]
                m = m if t == 1 else m @ last @ P[path].T if t == 3 else m
                D[path], *moments[path, "S"] = adam64(m, second, S, t)
            DA[path] = D[path] @ P[path]
        norms = [sum(x.detach().square().sum() for x in xs.values()).sqrt() for xs in (W, DA)]
        for path, w in W.items():
            A, B = adapters[path]
            steps = []
            for i, gradient in enumerate((G[path], B.T @ G[path], G[path] @ A.T)):
                step, *moments[path, i] = adam64(*moments[path, i], gradient, t)
                steps.append(1e-3 * step)
            if method in SKETCHED:
                factor = (D[path] * 1e-2 * norms[0] / norms[1]).bfloat16()
                w.data -= factor.double() @ P[path]
            elif method == "dense":
                w.data -= steps[0]
            else:
                adapters[path] = [A - steps[1], B - steps[2]]
                w.data += adapters[path][1] @ adapters[path][0] - B @ A
    return {path: w.detach() - start[path] for path, w in W.items()}


def moved(W):
    """One vector of all dW."""
    model = UNEVEN()
    start = {path: model.get_submodule(path).weight.detach() for path in LAYERS}
    return torch.cat([(W[path].double() - start[path].double()).flatten() for path in LAYERS])


def vector(dW):
    return torch.cat([dW[path].flatten() for path in LAYERS])


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_learning_does_not_depend_on_the_number_of_ranks(ranks, method):
    """Three updates on 1, 2, 3 ranks and by dense float64 gradients; means of means differ (12)."""
    reference, times = vector(reference64(method)), ROUNDING.get(method, 1)
    one = moved(ranks[1][0][method]["W"])
    for n in (1, 2, 3):
        first, *others = [result[method]["W"] for result in ranks[n]]
        for other in others:
            assert_same_tensors(first, other)
        assert rel(moved(first), one) < 1e-4 * times
        assert rel(moved(first), reference) < 1e-3 * times
        if n > 1:
            assert rel(vector(reference64(method, n)), reference) > 2e-2  # wrong


@pytest.mark.slow
def test_rows_are_summed_and_split_as_fsdp_does(ranks):
    """scatter_rows, gather_rows, owned: shards uneven and empty, every row at one rank (35)."""
    for n in (2, 3):
        for d_out in (1, 2, 7, 8):
            parts = [result["split"][d_out] for result in ranks[n]]
            total = torch.arange(d_out * 3.0).view(d_out, 3) * sum(range(1, n + 1))
            assert [i for part in parts for i in part["owned"]] == list(range(d_out))
            for part in parts:
                assert part["owned"] == part["FSDP2"]
                assert torch.equal(part["rows"], total[part["owned"]])
                assert torch.equal(part["whole"], total)
    sizes = {d_out: [len(r["split"][d_out]["owned"]) for r in ranks[3]] for d_out in (1, 2, 7, 8)}
    assert sizes == {1: [1, 0, 0], 2: [1, 1, 0], 7: [3, 3, 1], 8: [3, 3, 2]}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_norms_and_kl_are_those_of_all_ranks(ranks, method):
    """||S||, ratio, KL and mismatch: one number on all ranks, and that of one rank (33)."""
    one, bound = ranks[1][0][method], 1e-4 * ROUNDING.get(method, 1)
    for n in (2, 3):
        for name in ("mismatch", "norm", "ratio", "predicted", "realised"):
            first, *others = [result[method][name] for result in ranks[n]]
            assert all(other == first for other in others), name
            assert first == pytest.approx(one[name], rel=bound), name
            dense = method not in SKETCHED and name in ("ratio", "predicted")
            assert len(first) == (0 if dense else 3)
    if method in SKETCHED:
        for n in (1, 2, 3):
            assert ranks[n][0][method]["ratio"] == pytest.approx([1e-2] * 3, rel=1e-5)
            first, *others = [result[method]["factors"] for result in ranks[n]]
            for other in others:  # each engine is sent the whole factor
                assert_same_tensors(first, other)
        local = [result[method]["local norm"] for result in ranks[2]]
        assert max(local) < 0.95 * math.hypot(*local)  # wrong: the norm of one shard


@pytest.mark.slow
def test_sharded_checkpointed_layers_have_the_same_sketch(ranks):
    """Frozen embedding, FSDP2 and recomputation: S as without, and no gradient of a weight (35)."""
    for n in (2, 3):
        for name, bound in (("S", 1e-5), ("bfloat16 S", 2e-2)):
            a, b = [
                r["sketch"]["S"] if name == "S" else r[name] for r in (ranks[n][0], ranks[1][0])
            ]
            assert a.keys() == b.keys() == set(LAYERS)
            for path in a:
                assert 0 < b[path].norm() and rel(a[path], b[path]) < bound, path
        assert all(result["sketch"]["weight grads"] == [] for result in ranks[n])


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_nan_on_one_rank_stops_all_before_a_weight_moves(ranks, method):
    """FloatingPointError everywhere, in the same words; W and v as before (32, 41)."""
    for n in (2, 3):
        for result in ranks[n]:
            assert "update 3 is not finite" in result[method]["nan"]
            assert result[method]["moved"] == [] and result[method]["kept"]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_state_fits_any_number_of_ranks(ranks, method):
    """Saved after two updates of n ranks: the third is the same to the bit, and near on one."""
    for n in (1, 2, 3):
        seen = ranks[n][0][method]
        assert_same_tensors(seen["W again"], seen["W"])
        weights = {f"{path}.weight": W for path, W in seen["W at 2"].items()}
        model, optimizer, layers = sharded(method, weights, seen["state at 2"])
        state = optimizer.state_dict()
        assert state["update"] == 2
        for key in {"sketch": ("v",), "adam": ("m", "v")}.get(method, ()):
            assert torch.equal(state[key], seen["state at 2"][key]) and state[key].norm() > 0
        add_share(model, recorded())
        optimizer.propose(31)
        optimizer.step(1.0)
        assert rel(moved(gathered(layers)), moved(seen["W"])) < 1e-4 * ROUNDING.get(method, 1)


def train_and_read(runs, patch):
    """train.main() on each of {name: argv}: exit code, what a resumed run was given back, what was
    generated, and the engine's weights; a rank without an engine has none."""
    started, calls, results, restored = [], [], {}, {}
    restore = train.restore

    def watched(state, path, optimizer, control):
        step = restore(state, path, optimizer, control)
        restored["W"] = gathered(optimizer.sketches.layers)
        restored["optimizer"] = optimizer.state_dict()
        return step

    class Watched(logra.VLLMGenerator):
        def __init__(self, *args):
            super().__init__(*args)
            started.append(self)

        def generate(self, prompts, seeds, *args):
            samples = super().generate(prompts, seeds, *args)
            calls.append((prompts, seeds, [s.completion for s in samples]))
            return samples

    patch.setattr(logra, "VLLMGenerator", Watched)
    patch.setattr(train, "restore", watched)
    small(patch)
    for name, argv in runs.items():
        code = train.main(argv)
        engine = started[-1].read() if code == 0 and started else None
        results[name] = {"code": code, "engine": engine, "calls": [*calls], "restored": restored}
        calls.clear()
    return results


def small(patch):
    """The built-in task without its long warm-up, as in small_task."""
    rows, warm_up = train.sorting_rows, train.warm_up
    patch.setattr(train, "sorting_rows", lambda seed: [part[:2000] for part in rows(seed)])
    patch.setattr(train, "warm_up", lambda *args: warm_up(*args, batches=2))


def results_of(out, ranks=2):
    return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


STEPS = 12
REWARD_OF_A_ROW = """
def f(completion, row):
    if {fails} and row["answer"] == "fails":
        raise KeyError("nothing there")
    return len(completion) % 5 + len(set(completion)) / 7
"""


@pytest.fixture(scope="session")
def two_ranks(lab, tmp_path_factory):
    """An undisturbed run on two ranks, tied bfloat16 weights and float32 compute, and after it the
    built-in task in bfloat16, in the same processes."""
    out = tmp_path_factory.mktemp("two")
    fails = train.epoch_order(40, 0, 0)[2 * 3 + 1]  # in step 3 at place 1, which is rank 1's
    prompts = ("a cat", "ten dogs", "a cat", "two and two are four", "a cat")
    jsonl(
        out / "rows.jsonl",
        *(row(prompts[i % 5], "fails" if i == fails else "1") for i in range(40)),
    )
    argv = f"--model {lab}/qwen2 --data {out}/rows.jsonl --eval-data {out}/rows.jsonl --eval-rows 1"
    argv += f" --reward {out}/fine.py:f --max-prompt-tokens 16 --max-new-tokens 8 --kv-gib 0.05"
    argv += " --prompts-per-step 3 --group-size 4 --probe-responses 2 --micro-batch 1 --rank 8"
    argv += " --kl-budget 1e-2 --update-ratio 1e-3 --kl-check-every 2 --save-every 2"
    argv += f" --eval-every 5 --steps {STEPS}"
    (out / "fine.py").write_text(REWARD_OF_A_ROW.format(fails=False))
    built_in = f"--reward {out}/fine.py:f --dtype bfloat16 --steps 4 --prompts-per-step 5"
    built_in += " --eval-rows 3 --kv-gib 0.05"
    runs = {
        "float32": f"{argv} --out {out}/float32".split(),
        "bfloat16": f"{built_in} --out {out}/bfloat16".split(),
    }
    process = torchrun(2, __file__, "train", out, json.dumps(runs))
    words = said(process)
    assert process.returncode == 0, words
    return types.SimpleNamespace(out=out, argv=argv, row=fails + 1, results=results_of(out))


def trained(checkpoint):
    """{path: float32 weights} of a checkpoint's target layers."""
    masters = train.load_state(checkpoint)["weights"]
    found = masters or {
        name.removesuffix(".weight"): W
        for name, W in tensors(checkpoint).items()
        if name.removesuffix(".weight") in LAYERS
    }
    assert {W.dtype for W in found.values()} == {torch.float32}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_of_every_rank_has_the_trainers_weights(two_ranks, dtype):
    """Two ranks end with round(W), bit by bit, in both engines, and W has moved (37)."""
    run = two_ranks.out / dtype
    first, *_, last = sorted(run.glob("step-*"), key=lambda p: int(p.name[5:]))
    W, before = trained(last), tensors(first)
    assert {"float32": STEPS, "bfloat16": 4}[dtype] == int(last.name[5:])
    for result in two_ranks.results:
        assert result[dtype]["code"] == 0 and result[dtype]["engine"].keys() == W.keys()
        for path, engine in result[dtype]["engine"].items():
            assert engine.dtype == getattr(torch, dtype)
            assert torch.equal(engine, W[path].to(engine.dtype)), path
            assert not torch.equal(engine, before[f"{path}.weight"].to(engine.dtype)), path
    assert json.loads((run / "config.json").read_text())["world_size"] == 2
    assert [line["step"] for line in journal(run)] == list(range(1, int(last.name[5:]) + 1))


@pytest.mark.slow
def test_ranks_sample_different_answers_to_an_equal_prompt(two_ranks):
    """No seed is used by both ranks in a step, and equal prompts get other answers (30)."""
    compared, alike = 0, 0
    calls = [  # of training: 2 prompts of 4 answers on rank 0, 1 prompt on rank 1
        [call for call in result["float32"]["calls"] if len(call[0]) == n]
        for result, n in zip(two_ranks.results, (8, 4), strict=True)
    ]
    assert len(calls[0]) == STEPS
    for a, b in zip(*calls, strict=True):
        assert len({*a[1], *b[1]}) == 12
        for prompt, _, answer in zip(*b, strict=True):
            for other_prompt, _, other in zip(*a, strict=True):
                compared += prompt == other_prompt
                alike += prompt == other_prompt and answer == other
    assert compared > 100 and alike < 0.1 * compared


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_with_one(two_ranks, tmp_path, monkeypatch):
    """W, v and the counter are restored to the bit, and the prompts and seeds are the same."""
    run, seen, calls = tmp_path / "run", {}, []
    shutil.copytree(two_ranks.out / "float32", run)
    for path in run.glob("step-*"):
        if int(path.name[5:]) > STEPS - 2:
            shutil.rmtree(path)
    restore, generate = train.restore, logra.HFGenerator.generate

    def restored(state, path, optimizer, control):
        step = restore(state, path, optimizer, control)
        seen["W"] = gathered(optimizer.sketches.layers)
        seen["v"], seen["update"] = optimizer.moments["v"].clone(), optimizer.update
        return step

    def recorded_generate(self, prompts, seeds, *args):
        calls.append((prompts, seeds))
        return generate(self, prompts, seeds, *args)

    monkeypatch.setattr(train, "restore", restored)
    monkeypatch.setattr(logra.HFGenerator, "generate", recorded_generate)
    assert train.main(f"--resume {run} --engine hf --eval-every 100".split()) == 0
    checkpoint = run / f"step-{STEPS - 2}"
    state = train.load_state(checkpoint)
    assert_same_tensors(seen["W"], state["weights"])
    assert torch.equal(seen["v"], state["optimizer"]["v"]) and seen["v"].norm() > 0
    assert seen["update"] == state["optimizer"]["update"] == STEPS - 2
    of_ranks = [
        [call for call in result["float32"]["calls"] if len(call[0]) == 8 - 4 * rank][-2:]
        for rank, result in enumerate(two_ranks.results)
    ]
    for one, a, b in zip([c for c in calls if len(c[0]) == 12], *of_ranks, strict=True):
        pairs = [list(zip(call[0], call[1], strict=True)) for call in (one, a, b)]
        assert sorted(pairs[0]) == sorted(pairs[1] + pairs[2])
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.dtype == torch.bfloat16 and model.lm_head.weight is model.model.embed_tokens.weight
    for path, W in state["weights"].items():
        assert torch.equal(model.get_submodule(path).weight, W.bfloat16())


@pytest.mark.slow
def test_eval_only_is_the_same_on_one_rank_and_on_two(two_ranks, tmp_path):
    """40 rows, 4 samples each, drawn by row and sample: the same mean reward and pass@k."""
    argv = f"--eval-only --resume {two_ranks.out}/float32 --eval-rows 0 --eval-samples 4 --reward"
    argv += f" {tmp_path}/cat.py:f --out {tmp_path}/"
    (tmp_path / "cat.py").write_text("def f(completion, row):\n    return 'a' in completion\n")
    process = torchrun(2, HERE / "train.py", *f"{argv}two".split())
    words = said(process)
    assert process.returncode == 0, words
    assert train.main(f"{argv}one".split()) == 0
    [one], [two] = (journal(tmp_path / name, evaluations=True) for name in ("one", "two"))
    assert one == two and one["eval_rows"] == 40 and one["eval_samples"] == 4
    assert 0 < one["eval_accuracy"] < one["eval_pass_at_k"] <= 1


def rank_of(process, rank):
    """The process id of one of torchrun's ranks."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    mine = [
        c for c in children if f"RANK={rank}" in Path(f"/proc/{c}/environ").read_text().split("\0")
    ]
    assert len(mine) == 1
    return int(mine[0])


@pytest.mark.slow
def test_two_ranks_that_fail_and_are_killed_resume_to_the_same_bits(two_ranks, tmp_path):
    """A reward that raises on rank 1, then SIGKILL of rank 1: each ends the run within a minute
    and leaves a whole checkpoint; resumed, the run is the undisturbed one (42)."""
    run, whole = tmp_path / "run", two_ranks.out / "float32"
    reward = tmp_path / "mine.py"
    reward.write_text(REWARD_OF_A_ROW.format(fails=True))
    argv = f"{two_ranks.argv} --reward {reward}:f --save-every 100 --out {run}".split()
    failing = torchrun(2, train.__file__, *argv)
    wait_for_step(run, 2, failing)
    words = said(failing, 60)
    assert failing.returncode != 0
    (sentence,) = errors(words)
    for word in ("error: rank 1: ", "KeyError", f"rows.jsonl:{two_ranks.row}", "step-2"):
        assert word in sentence
    assert [p.name for p in run.glob("step-*")] == ["step-2"]
    assert_same_tensors(tensors(run / "step-2"), tensors(whole / "step-2"))

    reward.write_text(REWARD_OF_A_ROW.format(fails=False))
    resumed = ("--resume", run, "--save-every", 2)
    killed = torchrun(2, train.__file__, *resumed)
    wait_for_step(run, 5, killed)
    os.kill(rank_of(killed, 1), signal.SIGKILL)
    words = said(killed, 60)
    assert killed.returncode != 0 and not (run / f"step-{STEPS}").exists()
    last = train.last_checkpoint(run)
    assert last.name != "step-2"
    assert_same_tensors(tensors(last), tensors(whole / last.name))
    assert_same_tensors(trained(last), trained(whole / last.name))
    assert 'logra.py", line' not in words  # rank 0 does not show where it was

    final = torchrun(2, train.__file__, *resumed)
    words = said(final)
    assert final.returncode == 0, words
    assert journal(run, evaluations=True) == journal(whole, evaluations=True)
    assert_same_tensors(tensors(run / f"step-{STEPS}"), tensors(whole / f"step-{STEPS}"))
    states = [train.load_state(path / f"step-{STEPS}") for path in (run, whole)]
    assert_same_tensors(*(state["weights"] for state in states))
    assert torch.equal(states[0]["optimizer"]["v"], states[1]["optimizer"]["v"])
    assert states[0]["mismatch"] == states[1]["mismatch"]


@pytest.mark.slow
@pytest.mark.benchmark
def test_ten_kills_at_random_points(two_ranks, tmp_path):
    """SIGKILL of a random rank at a random point, ten times: over within a minute, the checkpoint
    whole; resumed at last, the run is the undisturbed one (pytest -m benchmark -k kills)."""
    run, whole, chance = tmp_path / "run", two_ranks.out / "float32", random.Random(0)
    shutil.copytree(whole, run)
    resumed, seconds = ("--resume", run, "--save-every", 1), []

    def back_to(step):
        (run / "metrics.jsonl").write_text("")
        for path in run.glob("step-*"):
            if int(path.name[5:]) > step:
                shutil.rmtree(path)

    for _ in range(10):
        back_to(4)
        process = torchrun(2, train.__file__, *resumed)
        wait_for_step(run, 5, process)
        time.sleep(chance.uniform(0, 1))  # a step takes about .15 s, saving included
        rank, start = chance.randrange(2), time.perf_counter()
        os.kill(rank_of(process, rank), signal.SIGKILL)
        said(process, 60)
        seconds.append(time.perf_counter() - start)
        last = train.last_checkpoint(run)
        print(f"rank {rank}: over after {seconds[-1]:.1f} s, {last.name} is whole")
        reference = whole / last.name
        if reference.exists():  # it has every other step
            assert_same_tensors(trained(last), trained(reference))
        assert train.load_state(last)["step"] == int(last.name[5:])
        assert tensors(last).keys() == tensors(whole / "step-2").keys()
    back_to(STEPS - 1)
    process = torchrun(2, train.__file__, *resumed)
    words = said(process)
    assert process.returncode == 0, words
    assert_same_tensors(trained(run / f"step-{STEPS}"), trained(whole / f"step-{STEPS}"))


class Listening:
    """An engine apart that answers a prompt p, seed s with [p, s] and keeps what it is sent."""

    def __init__(self, *options):
        self.options, self.asked, self.sent = options, [], []

    def generate(self, prompts, seeds, *options):
        self.asked.append((prompts, seeds, *options))
        return [
            logra.Sample(p, [*p, seed], [-0.5] * (len(p) + 1), seed % 2 == 0)
            for p, seed in zip(prompts, seeds, strict=True)
        ]

    def update(self, factors, update, back):
        self.sent.append((factors, (update, back)))

    def load(self, pairs, ranks):
        self.sent.append((dict(pairs), ranks))


def test_generation_ranks_share_the_prompts_and_hear_every_update():
    """One training rank, two that generate, as three threads: order kept, tensors to the bit."""
    store, engines = dist.HashStore(), []

    def wire(rank):
        return dist.ProcessGroupGloo(store, rank, 3, datetime.timedelta(seconds=30))

    def start(*options):
        engines.append(Listening(*options))
        return engines[-1]

    threads = [threading.Thread(target=lambda n=n: logra.serve(wire(n), start)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    remote = logra.RemoteGenerator(wire(0), "directory", [1, 2])
    prompts, seeds = prompts_of(3, 1, 4, 1, 5), [11, 12, 13, 14, 15]
    samples = remote.generate(prompts, seeds, 7, 0.6)
    assert [s.prompt for s in samples] == prompts
    assert [s.completion for s in samples] == [[*p, x] for p, x in zip(prompts, seeds, strict=True)]
    assert [s.finished for s in samples] == [False, True, False, True, False]
    assert samples[2].logprobs == [-0.5] * 5
    assert remote.generate([], [], 7, 0.6) == []  # as a rank does that has no row to evaluate
    of_prompts = remote.crossed
    remote.generate(prompts, seeds, 7)
    assert of_prompts < remote.crossed < 4000
    before, g = remote.crossed, torch.Generator().manual_seed(0)
    factors = {"a": torch.randn(5, 3, generator=g).bfloat16(), "b": torch.ones(1, 2).bfloat16()}
    remote.update(factors, 41, 0.25)
    assert 34 < remote.crossed - before < 2000  # 17 numbers of 2 bytes
    loaded = {"a": torch.randn(5, 4, generator=g), "b": torch.ones(2, 3).bfloat16()}
    remote.load(loaded.items())  # bfloat16: of a model as it is stored, for --eval-only
    remote.stop()
    for thread in threads:
        thread.join(30)
    assert [len(e.asked[0][0]) for e in sorted(engines, key=lambda e: len(e.asked[0][0]))] == [2, 3]
    for engine in engines:
        assert engine.options == ("directory", [1, 2])
        assert engine.asked[0][2:] == (7, 0.6) and engine.asked[2][2:] == (7, 1.0)
        (seen, update), (weights, ranks) = engine.sent
        assert_same_tensors(seen, factors)
        assert (update, ranks) == ((41, 0.25), 1)
        assert_same_tensors(weights, loaded)


class Failing(Listening):
    """An engine that fails at what its fault names, once it has taken one tensor of several."""

    fault = ""

    def generate(self, *args):
        if self.fault == "generate":
            raise AssertionError  # without a word
        return super().generate(*args)

    def load(self, pairs, ranks):
        if self.fault == "load":
            raise ValueError(f"{next(pairs)[0]} is not there")
        super().load(pairs, ranks)


def test_an_engine_that_fails_is_heard_by_the_training_ranks():
    """As StopRun that names the rank and the reason; the wire is in order after it, and a
    generation rank whose training ranks are gone ends in silence."""
    store, engines, ends = dist.HashStore(), [], []

    def wire(rank):
        return dist.ProcessGroupGloo(store, rank, 3, datetime.timedelta(seconds=3))

    def start(name):
        engines.append(Failing())
        if name == "bad":
            raise train.UserError("the engine does not start")
        return engines[-1]

    def serve(rank):
        logra.serve(wire(rank), start)
        ends.append(rank)

    threads = [threading.Thread(target=serve, args=(n,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    remote = logra.RemoteGenerator(line := wire(0), "good")
    weights = {name: torch.full((64, 64), i).float() for i, name in enumerate("abc")}
    for fault, words in (("generate", "AssertionError()"), ("load", "a is not there")):
        engines[1].fault = fault
        with pytest.raises(logra.StopRun, match=r"rank [12]: ") as caught:
            remote.load(weights.items())
            remote.generate([[1], [2]], [5, 6], 7)
        assert words in str(caught.value)
        engines[1].fault = ""
        assert [s.completion for s in remote.generate([[1], [2]], [5, 6], 7)] == [[1, 5], [2, 6]]
    remote.load(weights.items())
    for engine in engines[:2]:
        assert_same_tensors(engine.sent[-1][0], weights)
    with pytest.raises(logra.StopRun, match="rank 1: the engine does not start"):
        logra.RemoteGenerator(line, "bad")
    for thread in threads:
        thread.join(20)  # no word for three seconds, and they are done
    assert sorted(ends) == [1, 2]
    with pytest.raises(logra.StopRun, match="gone"):
        remote.generate([[1]], [5], 7)


def generation_rank(ranks, out, argv):
    """A run whose last rank only generates: what each rank has seen."""
    process = torchrun(ranks, __file__, "train", out, json.dumps({"run": argv.split()}))
    words = said(process)
    assert process.returncode == 0, words
    return [result["run"] for result in results_of(out, ranks)]


@pytest.mark.slow
def test_a_generation_rank_changes_nothing(lab, tmp_path):
    """One rank trains and one generates: the run of one rank, to the bit, also in its engine."""
    rest = f"{SMALL} --engine vllm --dtype bfloat16 --steps 4 --kv-gib 0.05"
    assert main(lab, f"{rest} --out {tmp_path}/one") == 0
    argv = f"{rest} --out {tmp_path}/two --generation-ranks 1".format(lab=lab)
    trainer, generator = generation_rank(2, tmp_path / "ranks", argv)
    one, two = tmp_path / "one", tmp_path / "two"
    assert_same_tensors(tensors(two / "step-4"), tensors(one / "step-4"))
    for a, b in zip(journal(one, evaluations=True), journal(two, evaluations=True), strict=True):
        if "wire_bytes" in a:
            tokens = 16 * b["length"]
            assert a.pop("wire_bytes") == 0 and b.pop("wire_bytes") > b["sync_bytes"] + 9 * tokens
        assert a == b
    W = tensors(two / "step-4")
    assert trainer["engine"] is None and len(generator["engine"]) == 14
    for path, engine in generator["engine"].items():
        assert torch.equal(engine, W[f"{path}.weight"].bfloat16()), path


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_with_three_and_an_engine_apart(two_ranks, tmp_path):
    """W, v and counter restored to the bit, the same prompts and seeds, the engine in step."""
    run = tmp_path / "run"
    shutil.copytree(two_ranks.out / "float32", run)
    for path in run.glob("step-*"):
        if int(path.name[5:]) > STEPS - 2:
            shutil.rmtree(path)
    argv = f"--resume {run} --generation-ranks 1 --eval-every 100"
    *trainers, generator = generation_rank(4, tmp_path / "ranks", argv)
    state = train.load_state(run / f"step-{STEPS - 2}")
    for trainer in trainers:
        assert_same_tensors(trainer["restored"]["W"], state["weights"])
        assert torch.equal(trainer["restored"]["optimizer"]["v"], state["optimizer"]["v"])
        assert trainer["restored"]["optimizer"]["update"] == STEPS - 2
    before = [
        [call for call in result["float32"]["calls"] if len(call[0]) == 8 - 4 * rank][-2:]
        for rank, result in enumerate(two_ranks.results)
    ]
    calls = [call for call in generator["calls"] if len(call[0]) == 12]
    for three, a, b in zip(calls, *before, strict=True):
        pairs = [list(zip(call[0], call[1], strict=True)) for call in (three, a, b)]
        assert sorted(pairs[0]) == sorted(pairs[1] + pairs[2])
    W = trained(run / f"step-{STEPS}")
    for path, engine in generator["engine"].items():
        assert torch.equal(engine, W[path]) and not torch.equal(engine, state["weights"][path])


@pytest.mark.slow
def test_bad_input_to_ranks_is_answered_by_one_sentence(tmp_path):
    """Once, whichever rank is first to find it, also if only one does; no directory is made."""
    cases = {  # argv of both ranks, what rank 1 alone has on top, and words of the answer
        "split": (["--prompts-per-step", "1"], [], "--prompts-per-step 1 2 ranks"),
        "hf": (["--engine", "hf"], [], "--engine hf"),
        "none": (["--generation-ranks", "2"], [], "--generation-ranks 2 no rank"),
        "flag": (["--rank", "0"], [], "--rank 0"),
        "one": ([], ["--reward", "nowhere.py:f"], "rank 1: --reward nowhere.py:f"),
        "early": ([], ["--rank", "0"], "rank 1: --rank 0"),  # before the ranks have met
    }
    running = {}
    for name, (argv, more, _) in cases.items():
        argv = [*argv, "--out", str(tmp_path / "run")]
        running[name] = torchrun(2, __file__, "bad", tmp_path, json.dumps([argv, argv + more]))
    for name, process in running.items():
        words = said(process, 100)
        assert process.returncode != 0
        found = errors(words)
        assert len(found) == 1, (name, words)
        for word in cases[name][2].split():
            assert word in found[0], found
        assert 'logra.py", line' not in words and 'train.py", line' not in words  # no traceback
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------
# Memory of several ranks, simulated: the code that runs, on fake tensors and a fake group
# ------------------------------------------------------------------------------------------------

# No GPU and no weights: FakeTensorMode gives every operation its shapes, a fake process group its
# collectives, and a dispatch mode adds up the storages that are alive.  The device is "cpu", which
# stands for the GPU: FSDP2 takes the same path on both.  The model as it is loaded lies in the
# host's memory and is not counted; nor is what a kernel allocates inside itself, a CUDA context,
# NCCL, fragmentation.

aten = torch.ops.aten
INDEXING = (aten.index.Tensor, aten.index_put.default, aten._index_put_impl_.default)


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that are alive, and their peak in each phase."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens, self.live, self.now, self.phase = tokens, {}, 0, "host"
        self.peaks, self.resize = {}, torch.UntypedStorage.resize_

    def enter(self, phase):
        self.phase = phase
        self.count(None, 0)

    def count(self, key, size):
        """The storage `key` has so many bytes from now on."""
        self.now += size - self.live.get(key, 0)
        self.live[key] = size
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.now)

    def freed(self, key):
        self.now -= self.live.pop(key)

    def resize_(self, storage, size):  # how FSDP2 frees and allocates what it gathers
        self.resize(storage, size)
        if storage._cdata in self.live:
            self.count(storage._cdata, size)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):  # it makes the operations on its own part
            return NotImplemented
        if func is aten._local_scalar_dense.default:  # a fake tensor has no value: say 1
            return 1.0 if args[0].is_floating_point() else 1
        if func is torch.ops._c10d_functional.wait_tensor.default:  # the same memory
            return args[0]
        if func in INDEXING and args[1][0] is not None and args[1][0].dtype == torch.bool:
            where = torch.zeros(self.tokens, dtype=torch.long)  # the generated positions [1, L]
            args = (args[0], [where] * args[1][0].dim(), *args[2:])
        if func is aten.repeat_interleave.Tensor:  # a number a layer -> a number an owned row
            kwargs = {"output_size": self.rows}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, FakeTensor):
                storage = tensor.untyped_storage()
                if (key := storage._cdata) not in self.live:
                    free = self.phase == "host" or func is aten._efficientzerotensor.default
                    self.count(key, 0 if free else storage.nbytes())
                    weakref.finalize(storage, self.freed, key)
        return out


def simulate(shape, world_size, method="logra", T=4096, rank=256):
    """{phase: peak GiB per rank} of a training step with two micro-batches of T tokens."""
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    mesh = init_device_mesh("cpu", (world_size,))  # looks at values, so not on fake tensors
    tracker = LiveBytes(T - 1)
    adam = sys.modules["torch.optim.adam"]  # whose step is foreach on a GPU
    try:
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            mock.patch.object(torch.UntypedStorage, "resize_", lambda s, n: tracker.resize_(s, n)),
            mock.patch.object(transformers.masking_utils, "is_tracing", lambda *_: False),
            mock.patch.object(adam, "_default_to_fused_or_foreach", lambda *_, **__: (False, True)),
            mock.patch.object(logra, "in_step", lambda batches: [(b, True) for b in batches]),
            mock.patch.object(logra, "check_same", lambda *_: None),
            mock.patch.object(logra, "init_device_mesh", lambda *_: mesh),
            mock.patch.object(torch.Tensor, "tolist", lambda t: [1.0] * t.numel()),
            tracker,
        ):
            config = transformers.Qwen2Config(**shape, max_position_embeddings=2 * T)
            model = transformers.Qwen2ForCausalLM(config).eval()
            tracker.enter("load")
            train.checkpoint_layers(model)
            logra.shard_model(model, torch.bfloat16, torch.bfloat16)
            sketches, layers = None, logra.find_targets(model)
            if method == "logra":
                sketches = logra.attach_sketches(model, rank)
                optimizer = logra.LoGRA(sketches)
                tracker.rows = sum(sketches.sizes)
            else:
                logra.freeze_all_but(model, layers)
                controls = {"adamw": train.DenseAdamW, "lora": train.LoRA}
                optimizer = controls[method](layers, *[rank] * (method == "lora"))
                tracker.enter("first")
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.grad = torch.zeros_like(parameter)
                optimizer.step()  # the moments exist, as from the second update on
            sample = logra.Sample([0], [0] * (T - 1), [0.0] * (T - 1), True, advantage=1.0)
            other = type(sample)(**vars(sample))
            for s in (sample, other):
                run_backward(tracker, model, s)
            tracker.enter("propose")
            optimizer.propose(2 * T)
            tracker.enter("probe")
            with logra.compute_dtype(model.device, "bfloat16"):
                _, before = logra.predict_kl(model, sketches, [sample, other])
            tracker.enter("step")
            factors = optimizer.step(1.0)
            tracker.enter("realised")
            with logra.compute_dtype(model.device, "bfloat16"):
                logra.realised_kl(model, [sample, other], before)
            del factors
            del tracker.peaks["host"]
            tracker.peaks.pop("first", None)
            return {phase: peak / 2**30 for phase, peak in tracker.peaks.items()}
    finally:
        dist.destroy_process_group()


def run_backward(tracker, model, sample):
    """logra.backward of one sample, with the phase told at each of its three parts."""
    tokens, back = logra.token_logprobs, torch.Tensor.backward

    def head(*args, **kwargs):
        tracker.enter("head")
        return tokens(*args, **kwargs)

    def backward(tensor, *args, **kwargs):
        tracker.enter("head" if tensor.dim() == 0 else "backward")
        return back(tensor, *args, **kwargs)

    config = settings(micro_batch=1, dtype="bfloat16")
    tracker.enter("forward")
    with (
        mock.patch.object(logra, "token_logprobs", head),
        mock.patch.object(torch.Tensor, "backward", backward),
    ):
        logra.backward(model, [sample], config, first=True)


def qwen2_shape(*numbers, tied=False, head_dim=None):
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "vocab_size")
    shape = dict(zip(names, numbers, strict=True)) | {"tie_word_embeddings": tied}
    return shape | ({"head_dim": head_dim} if head_dim else {})


SHAPES = {
    "1.5B": qwen2_shape(1536, 8960, 28, 12, 2, 151936, tied=True),
    "7B": qwen2_shape(3584, 18944, 28, 28, 4, 152064),
    "short": qwen2_shape(3584, 18944, 6, 28, 4, 152064),  # for the controls, in seconds
    "27B": qwen2_shape(5120, 17408, 64, 80, 8, 248320, head_dim=128),  # minutes: by hand
}


@functools.cache
def simulations():
    """{(shape, method): what simulate says of 4 ranks}, a process each, two at a time."""

    def run(name, method):
        argv = [sys.executable, __file__, "simulate", name, "4", method]
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
        return json.loads(done.stdout.splitlines()[-1])

    cases = [("7B", "logra"), ("1.5B", "logra"), ("short", "adamw"), ("short", "lora")]
    pool = ThreadPoolExecutor(2)
    return {case: pool.submit(run, *case) for case in cases}


def simulated(name, method):
    """Peak GiB of each phase, by the simulation."""
    return simulations()[name, method].result()


@pytest.mark.slow
@pytest.mark.parametrize("name, goal", [("1.5B", 3.6), ("7B", 11.2)])
def test_simulated_peak_of_a_step(name, goal):
    """GiB per rank on 4 ranks, 4096 tokens, rank 256, the KL probe included."""
    peaks = simulated(name, "logra")
    print(f"\n{name}: " + ", ".join(f"{phase} {gib:.2f}" for phase, gib in peaks.items()))
    assert peaks["load"] > 1  # the shards themselves
    assert max(peaks.values()) <= goal


# ------------------------------------------------------------------------------------------------
# The estimate of --estimate-memory
# ------------------------------------------------------------------------------------------------


def estimated(shape, tmp_path, capsys, flags):
    """The JSON that --estimate-memory prints of a Qwen2 shape."""
    transformers.Qwen2Config(**shape).to_json_file(tmp_path / "shape.json")
    argv = ["--estimate-memory", "--model", str(tmp_path / "shape.json"), "--micro-batch", "1"]
    assert train.main([*argv, *flags.split()]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("ranks, goal", [(4, 34), (8, 21.5)])
def test_estimate_needs_a_config_alone_and_a_second(tmp_path, capsys, monkeypatch, ranks, goal):
    """At 27B shape, where what stays between updates and what is sent follow from the shapes."""
    monkeypatch.chdir(tmp_path)  # where runs/ would be
    start = time.process_time()
    flags = f"--world-size {ranks} --max-length 4096"
    result = estimated(SHAPES["27B"], tmp_path, capsys, flags)
    assert time.process_time() - start < 1
    assert [p.name for p in tmp_path.iterdir()] == ["shape.json"]
    q, kv, hidden, inner = 80 * 128, 8 * 128, 5120, 17408
    d_outs = [q, kv, kv, hidden, inner, inner, hidden]  # q k v o gate up down
    d_ins = [hidden, hidden, hidden, q, hidden, hidden, inner]
    weights = 64 * sum(o * i for o, i in zip(d_outs, d_ins, strict=True))
    frozen = 2 * 2 * 248320 * hidden + 4 * (64 * (2 * hidden + q + 2 * kv) + hidden)  # biases too
    more = {
        "adamw": 8 * weights / ranks,
        "lora": 3 * 4 * 64 * 256 * (sum(d_outs) + sum(d_ins)),
        "logra": 64 * sum(d_outs) * 257 * 4 / ranks + 256 * (hidden + q + inner) * 4,
    }
    for method, figures in result.pop("methods").items():
        resident = ((4 * weights + frozen) / ranks + more[method]) / 2**30
        assert figures["resident_gib"] == pytest.approx(resident, rel=1e-6)
        assert resident < figures["peak_gib"] <= (goal if method == "logra" else 120)
    sent = {"factors": 64 * sum(d_outs) * 256 * 2, "full": weights * 4}
    settings = {"world_size": ranks, "max_length": 4096, "rank": 256}
    assert result == {**settings, "sync_bytes": sent}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, method",
    [("1.5B", "logra"), ("7B", "logra"), ("short", "adamw"), ("short", "lora")],
)
def test_estimate_is_the_simulated_peak(tmp_path, capsys, name, method):
    """Within 3% on 4 ranks, and the phase that binds is one that the simulation has at its peak."""
    peaks = simulated(name, method)
    flags = "--world-size 4 --max-length 4096 --rank 256"
    figures = estimated(SHAPES[name], tmp_path, capsys, flags)["methods"][method]
    print(f"\n{name} {method}: {figures}, simulated {max(peaks.values()):.3f}")
    assert figures["peak_gib"] == pytest.approx(max(peaks.values()), rel=0.03)
    assert peaks[figures["binds"].split()[0]] >= 0.98 * max(peaks.values())


def memory_of_an_update():
    """GiB of resident memory at the peak of an update of a 370 M model, float32, one rank, above
    what the interpreter has after an update of a tiny one; runs in its own process."""

    def update(model):
        train.checkpoint_layers(model)
        sketches = logra.attach_sketches(model, 256)
        optimizer = logra.LoGRA(sketches)
        sample = logra.Sample([0], [0] * 127, [0.0] * 127, True, advantage=1.0)
        logra.backward(model, [sample], settings(micro_batch=1, dtype="float32"), first=True)
        optimizer.propose(127)
        _, hidden = logra.predict_kl(model, sketches, [sample])
        factors = optimizer.step(1e-3)
        logra.realised_kl(model, [sample], hidden)
        del factors

    update(tiny_qwen2())  # for what is imported and loaded on the way
    with open("/proc/self/statm") as statm:
        before = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30
    with mock.patch.object(transformers.PreTrainedModel, "_init_weights", lambda *_: None):
        model = qwen2_of_size(24, 1024, 3584, 16, 4, 32_000)
    for parameter in model.parameters():
        parameter.data.fill_(0.01)  # memory does not depend on values
    train.peak_gib()  # a peak while loading is no part of it
    update(model)
    return train.peak_gib() - before


@pytest.mark.slow
def test_estimate_is_the_measured_peak_of_an_update(tmp_path, capsys):
    """Within 5%, where the C library gives freed memory back at once."""
    run = subprocess.run(
        [sys.executable, "-c", "import test_logra as t; print(t.memory_of_an_update())"],
        cwd=HERE,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    measured = float(run.stdout.split()[-1])
    shape = qwen2_shape(1024, 3584, 24, 16, 4, 32_000, tied=True)
    flags = "--max-length 128 --rank 256 --dtype float32 --probe-responses 1"
    figures = estimated(shape, tmp_path, capsys, flags)["methods"]["logra"]
    print(f"\n370 M: {figures}, measured {measured:.3f}")
    assert figures["peak_gib"] == pytest.approx(measured, rel=0.05)


if __name__ == "__main__":  # one of torchrun's ranks
    import faulthandler

    faulthandler.dump_traceback_later(150, exit=True)  # it never hangs
    mode, out, *argv = sys.argv[1:]
    if mode == "simulate":
        print(json.dumps(simulate(SHAPES[out], int(argv[0]), *argv[1:])))
        sys.exit()
    if mode == "bad":  # rank 0 is late, as it may be on a busy machine
        rank = int(os.environ["RANK"])
        time.sleep(2 if rank == 0 else 0)
        sys.exit(train.main(json.loads(argv[0])[rank]))
    number = os.environ["RANK"]  # a generation rank forgets it
    if mode in ("on_ranks", "families_on_ranks"):
        torch.distributed.init_process_group("gloo")
        result = globals()[mode]()
    else:
        with pytest.MonkeyPatch.context() as patch:
            result = train_and_read(json.loads(argv[0]), patch)
    Path(out).mkdir(exist_ok=True)
    torch.save(result, Path(out) / f"{number}.pt")
