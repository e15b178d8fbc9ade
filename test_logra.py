"""Tests of logra.py and train.py.  Its first part, sections 1 to 6, is the second half of the
lesson: the equations of logra.py in its order, each beside a value found in another way
(autograd's dense gradients, an SVD, finite differences, float64 by hand), often beside the wrong
formula too.

    pytest                      everything but the benchmarks, real engines included
    pytest -m "not slow"        without an engine or a second process
    pytest -m benchmark -s      time and memory of a training step against AdamW
    pytest -m benchmark -s -k step    of these the table of methods, minutes

Faults that projects of this kind have had in public, and the tests (test_...) that would see them:

 1  EOS masked as pad == eos     loss_covers_the_generated_tokens
 2  tokens after any of the EOS  generation_stops_at_any_end_token, every_eos_id_ends_an_answer
 3  EOS in the prompt            generation_stops_at_any_end_token, loss_covers_the_generated_tokens
 4  BOS twice                    a_prompt_is_the_template_of_its_turns
 6  padding shifts log-probs     loss_covers_..., sketch_does_not_depend_on_micro_batches
 7  long prompts crash           long_prompts_are_left_out_and_counted
 8  truncated answers            first_update_is_the_policy_gradient, a_batch_without_signal_...
10  means of micro-batch means   sketch_does_not_depend_on_micro_batches
11  division by accumulation     sketch_does_not_depend_on_micro_batches
12  number of ranks matters      learning_does_not_depend_on_the_number_of_ranks
13  group std 0, or G = 1        equal_rewards_get_exactly_zero, running_mean_trains_...
14  groups by prompt text        group_advantages
17  empty batch divides 0 by 0   a_batch_without_signal_moves_nothing
18  log-probs without T          token_logprobs_..., generator_logprobs_..., engine_logprobs_...
19  raw log-probs, top-p         engine_logprobs_are_the_trainers, a_generation_config_changes_...
22  dropout in one pass          generator_logprobs_are_the_trainers
23  stale prefix cache           engine_logprobs_are_the_trainers
24  sleep level 2                not tested: level 1 alone is used
25  reload undoes an update      engine_logprobs_are_the_trainers, engine_weights_after_50_updates
27  unknown name swallowed       nothing_to_train_raises, every_target_layer_is_reached_or_it_raises
29  engine in another process    engine_weights_after_50_updates
30  seed ignored, or all alike   samples_do_not_depend_on_..., a_seed_decides_its_engine_sample
31  an engine is not started     the_engine_of_every_rank_has_the_trainers_weights
32  NaN on one rank: a hang      what_one_rank_finds_all_ranks_hear
33  norms of shards are local    learning_does_not_depend_on_the_number_of_ranks
35  frozen input, checkpointed   sketch_is_the_dense_gradient_..., sharded_checkpointed_layers_...
37  bfloat16 swallows updates    an_engine_follows_by_factors_alone, engine_weights_after_50_updates
38  moments of another basis     no_state_of_width_r_lives_between_updates
39  A depends on order, names    projection_follows_from_seed_update_and_width
40  r >= d_in, nothing trained   sketch_of_any_shape, nothing_to_train_raises
41  tangent lost, NaN            logit_tangent_is_..., nan_in_the_sketch_moves_no_weight
42  resume: off by one, RNG      state_dict_roundtrip_is_bitwise, resumed_run_is_the_same_run
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
    """{path: dW} of weighted_logp by autograd, on a model without sketches."""
    weights = [model.get_submodule(path).weight for path in layers]
    return dict(zip(layers, torch.autograd.grad(weighted_logp(model, samples), weights)))


def sketched(model, r=8, samples=None, update_ratio=1e-3, rule=logra.row_adam, **kw):
    """Sketches and optimizer; with samples, there is a U of their weighted_logp."""
    sketches = logra.attach_sketches(model, r, **kw)
    optimizer = logra.LoGRA(sketches, update_ratio, rule)
    if samples:
        (-weighted_logp(model, samples)).backward()
        optimizer.propose(sum(len(s.completion) for s in samples))
    return sketches, optimizer


def layers_of(sketches):
    """(path, W, A) of every target layer, copies in float64."""
    for path, module in sketches.layers.items():
        W, A = module.weight.detach(), sketches.A[module.in_features]
        yield path, W.to(torch.float64, copy=True), A.to(torch.float64, copy=True)


def rel(a, b):
    """||a - b|| / ||b||."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def norm_of(matrices):
    """||M|| of all matrices together."""
    return math.sqrt(sum(M.double().square().sum().item() for M in matrices))


def logits_along(model, plain, sketches, samples, a):
    """Logits [n, V] in float64 at the generated positions, with W - a U A in `plain`."""
    rows = []
    with torch.no_grad():
        for path, W, A in layers_of(sketches):
            plain.get_submodule(path).weight.copy_(W - a * sketches.U[path].double() @ A)
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


@pytest.mark.parametrize("kind, variance", [("rademacher", 0), ("gaussian", 2)])
@pytest.mark.parametrize("r", [4, 6])
def test_projection_is_the_identity_on_average(kind, variance, r):
    """E[A^T A] = I: every entry of a mean of 600 within 5 standard errors."""
    A = torch.stack([logra.make_projection(r, 12, seed, kind) for seed in range(600)]).double()
    error = (A.mT @ A).mean(0) - torch.eye(12)
    diagonal = torch.eye(12).bool()
    assert error[~diagonal].abs().max() < 5 * (1 / (r * 600)) ** 0.5  # Var(sum_k A_ki A_kj) = 1/r
    assert error[diagonal].abs().max() < 5 * (variance / (r * 600)) ** 0.5 + 1e-6


def test_sketch_times_projection_is_the_gradient_on_average():
    """E[S A] = dW: after n updates the mean is off by sqrt((d_in - 1) / (r n)) of ||dW||."""
    torch.manual_seed(0)
    layer, X, dY, n = torch.nn.Linear(10, 6), torch.randn(7, 10), torch.randn(7, 6), 400
    sketches, total = logra.Sketches({"x": layer}, r=4), 0
    for update in range(n):
        sketches.start_update(update)
        layer(X).backward(dY)
        total = total + sketches.S["x"] @ sketches.A[10]
    assert rel(total / n, dY.T @ X) == pytest.approx((9 / (4 * n)) ** 0.5, rel=0.2)


def test_projection_follows_from_seed_update_and_width():
    """Trainer and engine draw the same A, whatever layers each has and in whatever order."""

    def draw(widths=(9, 5), update=2, seed=3, refresh=1):
        return logra.draw_projections(widths, update, "cpu", 6, seed, "rademacher", refresh)

    A = draw()[9]
    assert torch.equal(draw(widths=[5, 9, 9])[9], A) and torch.equal(draw(widths=[9])[9], A)
    for other in (draw(update=3)[9], draw(seed=4)[9]):
        assert not torch.equal(other, A)
    assert not torch.equal(draw()[5].flatten(), A.flatten()[:30])  # nor is one a part of the other
    first, same, second = (draw(update=update, refresh=3)[9] for update in (3, 5, 6))
    assert torch.equal(first, same) and not torch.equal(first, second)
    assert torch.equal(draw(update=0, refresh=0)[9], draw(update=99, refresh=0)[9])  # kept for ever


# ------------------------------------------------------------------------------------------------
# 2  Sketch
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", ["rademacher", "gaussian", "identity"])
@pytest.mark.parametrize("make", [tiny_qwen2, tiny_llama], ids=["qwen2", "llama"])
def test_sketch_is_the_dense_gradient_times_the_projection(make, kind, checkpointed):
    """S = dW A^T in float64, and no dW exists, nor the gradient of anything else."""
    model, samples = make(dtype=torch.float64), answers([3, 5, 2])
    dW = dense_gradients(model, logra.find_targets(model), samples)
    if checkpointed:
        train.checkpoint_layers(model)
    sketches, _ = sketched(model, 8, kind=kind)
    weighted_logp(model, samples).backward()
    assert len(sketches.S) == 14
    for path, _, A in layers_of(sketches):
        assert rel(sketches.S[path], dW[path] @ A.T) < 1e-10
        assert kind != "identity" or rel(sketches.S[path], dW[path]) < 1e-10  # A = I
    assert all(p.grad is None for p in model.parameters())


def sketch_of(objective, micro_batch):
    """S of all layers in one vector, of nine answers of 1 to 9 tokens."""
    model = tiny_qwen2()
    sketches, _ = sketched(model)
    config = types.SimpleNamespace(micro_batch=micro_batch, temperature=1.0, dtype="float32")
    logra.backward(model, answers(range(1, 10)), objective, config, first=True)
    return torch.cat([*sketches.S.values()])


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_sketch_does_not_depend_on_micro_batches(micro_batch):
    """A sum over tokens, divided once by their number; a mean of means weighs them unequally."""

    def mean(logps, *others):
        return logra.grpo_objective(logps, *others) / sum(map(len, logps))

    whole = sketch_of(logra.grpo_objective, 9) / 45
    assert rel(sketch_of(logra.grpo_objective, micro_batch) / 45, whole) < 1e-5
    assert rel(sketch_of(mean, 9), whole) < 1e-5  # right where there is one micro-batch
    assert rel(sketch_of(mean, micro_batch) / (9 / micro_batch), whole) > 0.1  # wrong
    batches = logra.micro_batches(answers(range(1, 10)), micro_batch)
    assert [len(batch) for batch in batches] == [micro_batch] * (9 // micro_batch)


# ------------------------------------------------------------------------------------------------
# 3  Rules
# ------------------------------------------------------------------------------------------------


def row_adam64(S, v, t, beta2=0.95, eps=1e-8, keep_layer_norm=True):
    """RowAdam as Adam is written, with v_hat = v / (1 - b2^t), in float64: D and the new v."""
    v = beta2 * v + (1 - beta2) * (S**2).mean(1)
    root = (v / (1 - beta2**t)).sqrt()
    D = S / (root + eps * root.mean())[:, None]
    return (D * S.norm() / D.norm() if keep_layer_norm else D), v


@pytest.mark.parametrize(
    "options", [{}, {"keep_layer_norm": False}, {"beta2": 0.8}, {"eps": 1e-2}, {"eps": 1e9}]
)
def test_row_adam_is_its_formula(options):
    """Five updates.  Adam's correction is one factor for all layers, and cancels in U."""
    g, state, v = torch.Generator().manual_seed(0), {}, torch.zeros(7, dtype=torch.float64)
    for t in range(1, 6):
        S = torch.randn(7, 6, generator=g) * torch.logspace(-3, 1, 7)[:, None]
        S[2] = 0  # a row that never has a gradient stays where it is
        D = logra.row_adam(S.clone(), state, **options)
        expected, v = row_adam64(S.double(), v, t, **options)
        correction = 1 if options.get("keep_layer_norm", True) else (1 - 0.95**t) ** 0.5
        assert rel(correction * D, expected) < 1e-6 and rel(state["v"], v) < 1e-6
    assert options.get("eps") != 1e9 or rel(D, S) < 1e-6  # then all rows have one scale


def newton_schulz64(S):
    """Muon's five steps as published, on X itself and in float64."""
    X = S.double() / S.double().norm()
    for _ in range(5):
        Q = X.T @ X
        X = 3.4445 * X + X @ (-4.775 * Q + 2.0315 * Q @ Q)
    return X


@pytest.mark.parametrize(
    "d_out, d_in, size", [(40, 64, 1), (40, 10, 1), (7, 9, 1e-6), (12, 9, 1e6)]
)
def test_sketch_muon_is_about_the_polar_factor(d_out, d_in, size):
    """S = V1 sigma V2^T becomes V1 V2^T, its singular values within .68 to 1.21."""
    S = torch.randn(d_out, 12, generator=torch.Generator().manual_seed(0))
    S *= torch.logspace(0, -1, 12) * size
    D = logra.sketch_muon(S.clone(), {"d_in": d_in}).double() / max(1, d_out / d_in) ** 0.5
    V1, sigma, V2_T = torch.linalg.svd(S.double(), full_matrices=False)
    inside = V1.T @ D @ V2_T.T
    assert (inside - inside.diag().diag()).abs().max() < 1e-4  # the singular vectors stay
    assert (sigma > 2e-3 * sigma.norm()).all()
    assert 0.68 < inside.diag().min() and inside.diag().max() < 1.21
    assert rel(D, newton_schulz64(S)) < 1e-4  # not four steps, nor six


def test_sketch_adam_is_adam_on_the_entries():
    """Five updates of torch's own Adam at learning rate 1, but for its bias corrections."""
    torch.manual_seed(0)
    state, parameter = {}, torch.zeros(7, 4, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([parameter], lr=1.0, betas=(0.9, 0.95), eps=0)
    for t in range(1, 6):
        before, parameter.grad = parameter.detach().clone(), torch.randn(7, 4).double()
        D = logra.sketch_adam(parameter.grad.clone(), state)
        adam.step()
        correction = (1 - 0.95**t) ** 0.5 / (1 - 0.9**t)
        assert rel(correction * D, before - parameter.detach()) < 1e-9


def test_norm_of_the_step_by_two_gram_matrices():
    """||D A||^2 = <D^T D, A A^T>; ||D||^2, as if the rows of A were orthonormal, is another."""
    D = torch.randn(11, 6, generator=torch.Generator().manual_seed(0))
    A = logra.make_projection(6, 9, 1)
    explicit = (D.double() @ A.double()).square().sum().item()
    assert logra.projected_norm_squared(D, A @ A.T).item() == pytest.approx(explicit, rel=1e-6)
    assert abs(D.square().sum().item() / explicit - 1) > 0.02


DIRECTIONS = {  # D of S at the first update
    "row_adam": lambda S, d_in: row_adam64(S, torch.zeros(len(S)), 1)[0],
    "sketch_muon": lambda S, d_in: max(1, len(S) / d_in) ** 0.5 * newton_schulz64(S),
    "sketch_adam": lambda S, d_in: S.sign(),
    "sketch_sgd": lambda S, d_in: S,
}


@pytest.mark.parametrize("kind", ["rademacher", "identity"])
@pytest.mark.parametrize("rule", logra.RULES)
def test_proposal_has_the_size_of_update_ratio(rule, kind):
    """U = D update_ratio ||W|| / ||D A||, the norms over all layers, S the mean over tokens."""
    model, samples = tiny_qwen2(dtype=torch.float64), answers([9, 9])
    dW = dense_gradients(model, logra.find_targets(model), samples)
    sketches, optimizer = sketched(model, 8, samples, 1e-3, logra.RULES[rule], kind=kind)
    S = {path: -dW[path] @ A.T / 18 for path, _, A in layers_of(sketches)}
    D = {path: DIRECTIONS[rule](S[path], A.shape[1]) for path, _, A in layers_of(sketches)}
    W_norm = norm_of(W for _, W, _ in layers_of(sketches))
    DA_norm = norm_of(D[path] @ A for path, _, A in layers_of(sketches))
    for path, U in sketches.U.items():
        assert rel(U, D[path] * 1e-3 * W_norm / DA_norm) < 1e-6
    UA_norm = norm_of(sketches.U[path] @ A for path, _, A in layers_of(sketches))
    assert UA_norm / W_norm == pytest.approx(1e-3)
    assert optimizer.sketch_norm == pytest.approx(norm_of(S.values()))
    for path, state in optimizer.state.items():
        assert rule != "row_adam" or rel(state["v"], 0.05 * (S[path] ** 2).mean(1)) < 1e-6


def test_step_subtracts_the_rounded_factor_times_the_projection():
    """W <- W - factor A, factor = bfloat16(alpha U), which raises what the loss is minus of."""
    model, samples = tiny_qwen2(dtype=torch.float64), answers([4, 6])
    before = weighted_logp(model, samples)
    sketches, optimizer = sketched(model, 8, samples)
    layers, U = [*layers_of(sketches)], dict(sketches.U)
    factors = optimizer.step(0.7)
    for path, W, A in layers:
        step = sketches.layers[path].weight.detach() - W
        assert torch.equal(factors[path], (0.7 * U[path]).bfloat16())
        assert rel(step, -factors[path].double() @ A) < 1e-8
        assert 1e-3 < rel(step, -0.7 * U[path] @ A) < 4e-3  # wrong: not rounded
        assert not torch.equal(sketches.A[A.shape[1]], A)  # the next step has another
    assert optimizer.update == 1 and not sketches.U and norm_of(sketches.S.values()) == 0
    assert weighted_logp(model, samples) > before + 1e-4


def test_a_step_is_taken_back_along_its_own_projection():
    """By a second factor, bfloat16(-part factor), and the A of the step, not the next one."""
    model = tiny_qwen2(dtype=torch.float64)
    sketches, optimizer = sketched(model, 8, answers([4, 6]))
    layers = [*layers_of(sketches)]
    factors = optimizer.step(0.7)
    back = optimizer.take_back(factors, 0.3)
    for path, W, A in layers:
        assert torch.equal(back[path], (-0.3 * factors[path].float()).bfloat16())
        kept = factors[path].double() + back[path].double()
        assert rel(sketches.layers[path].weight.detach() - W, -kept @ A) < 1e-8


def test_no_state_of_width_r_lives_between_updates():
    """RowAdam keeps one number a row, which means the same at the next A."""
    sketches, optimizer = sketched(tiny_llama(), 13, answers([4]))
    optimizer.step()
    for path, module in sketches.layers.items():
        assert optimizer.state[path].keys() == {"d_in", "v"}
        assert optimizer.state[path]["v"].shape == (module.out_features,)


# ------------------------------------------------------------------------------------------------
# 4  Objective
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rewards, divide_by_std, expected",
    [
        ([[4, 0, 0, 0]], True, [[3**0.5] + [-(3**-0.5)] * 3]),  # std 3^.5; of n - 1 it were 2
        ([[4, 0, 0, 0]], False, [[3, -1, -1, -1]]),
        ([[1, 0], [1, 1]], True, [[1, -1], [0, 0]]),  # two groups, be their prompts the same
        ([[3.0], [0.1]], True, [[0], [0]]),
        ([[0.1, 0.1 + 1e-6]], True, [[-1, 1]]),  # small, but no rounding
    ],
    ids=["std", "centred", "position", "one answer", "close"],
)
def test_group_advantages(rewards, divide_by_std, expected):
    """(reward - mean) / std of the group, or without the std, worked by hand."""
    rewards = torch.tensor(rewards, dtype=torch.float64)
    found = logra.group_advantages(rewards, {}, divide_by_std)
    assert found.flatten().tolist() == pytest.approx(torch.tensor(expected).flatten().tolist())


def test_running_mean_judges_by_the_steps_before():
    """By hand: reward - b, then b <- 0.9 b + 0.1 mean; the first mean to begin with."""
    state = {}
    for rewards, expected, b in (
        ([1.0, 0.0, 0.0, 1.0], [0.5, -0.5, -0.5, 0.5], 0.5),
        ([1.0, 1.0, 1.0, 1.0], [0.5, 0.5, 0.5, 0.5], 0.55),
        ([-0.01, 1.0], [-0.56, 0.45], 0.5445),
    ):
        found = logra.running_mean_advantages(torch.tensor(rewards).double()[:, None], state)
        assert found.flatten().tolist() == pytest.approx(expected)
        assert state["baseline"] == pytest.approx(b)


# ratio, old - engine, advantage -> loss, d loss / d logp
OBJECTIVE = [
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


def test_grpo_objective_is_the_table():
    """-sum w min(ratio adv, clip(ratio) adv), w = min(exp(old - engine), 2), over all tokens."""
    answer = torch.tensor([0, 1, 1, 2, 3, 4, 4, 4, 5, 6, 7, 8, 9, 10, 11])  # of each token
    ratio, drift, adv, loss, slope = torch.tensor(OBJECTIVE, dtype=torch.float64).T
    old = [torch.full((n,), -1.5).double() for n in answer.bincount()]
    logps = [(x + r.log()).requires_grad_() for x, r in zip(old, ratio)]
    engine = [x - d for x, d in zip(old, drift)]
    found = logra.grpo_objective(logps, old, engine, adv)
    found.backward()
    assert found.item() == pytest.approx(loss[answer].sum().item())
    assert torch.cat([x.grad for x in logps]).tolist() == pytest.approx(slope[answer].tolist())


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
    expected = (z / 0.6).log_softmax(-1)[range(11), ids]
    (expected * weight.double()).sum().backward()
    assert (found - expected).abs().max() < 1e-5 and rel(hidden.grad, h.grad) < 1e-6
    assert (z.log_softmax(-1)[range(11), ids] - expected).abs().mean() > 0.1  # wrong


# ------------------------------------------------------------------------------------------------
# 5  Predicted KL
# ------------------------------------------------------------------------------------------------


def proposal(dtype=torch.float32, seed=0, update_ratio=2e-3):
    """A peaked model, a float64 twin without sketches, sketches with a U, optimizer, a probe."""
    model = tiny_qwen2(dtype=dtype, seed=seed, peak=12.0)
    plain = copy.deepcopy(model).double().requires_grad_(False)
    probe = logra.micro_batches(answers([7, 4, 9], seed), 9)[0]  # in the order of the probe's rows
    sketches, optimizer = sketched(model, 8, probe, update_ratio)
    return model, plain, sketches, optimizer, probe


def tangent_of_logits(model, sketches, samples):
    """z and z' [n, V] as predict_kl has them inside."""
    with torch.no_grad(), logra.probe_mode(model, sketches), forward_ad.dual_level():
        hidden, _ = logra.response_hidden(model, samples, model.device)
        return forward_ad.unpack_dual(logra.policy_head(model)(hidden))


def test_logit_tangent_is_the_finite_difference():
    """z' = d/da logits(W - a U A): a central difference through the model's own attention."""
    model, plain, sketches, _, probe = proposal(torch.float64)
    assert model.config._attn_implementation == plain.config._attn_implementation == "sdpa"
    z, z_dot = tangent_of_logits(model, sketches, probe)
    ahead, behind = (logits_along(model, plain, sketches, probe, a) for a in (0.1, -0.1))
    assert rel(z, logits_along(model, plain, sketches, probe, 0)) < 1e-6
    assert rel(z_dot, (ahead - behind) / 0.2) < 1e-3
    sketches.U["model.layers.0.self_attn.v_proj"].zero_()
    _, lost = tangent_of_logits(model, sketches, probe)
    assert rel(lost, z_dot) > 0.01  # wrong: the derivative of one layer is lost


@pytest.mark.parametrize("T", [1.0, 0.6])
def test_predicted_kl_is_the_curvature_of_the_exact_kl(T):
    """mean Var_p(z' / T) / 2 = (KL(h) + KL(-h)) / 2 h^2; without T it is another number."""
    model, plain, sketches, _, probe = proposal(torch.float64, update_ratio=1e-3)
    ([one], [kl]), _ = logra.predict_kl(model, sketches, probe, T)
    z, ahead, behind = (logits_along(model, plain, sketches, probe, a) for a in (0, 0.1, -0.1))
    curvature = (kl64(z, ahead, T) + kl64(z, behind, T)).mean().item() / (2 * 0.1**2)
    assert one == 1.0 and kl == pytest.approx(curvature, rel=3e-3)
    (_, [without_T]), _ = logra.predict_kl(model, sketches, probe, 1.0)
    assert T == 1 or abs(without_T / curvature - 1) > 0.2  # wrong


def policies():
    """Logits and their derivative at 50 positions, float32 [50, 64]."""
    g = torch.Generator().manual_seed(0)
    return 3 * torch.randn(50, 64, generator=g), torch.randn(50, 64, generator=g)


@pytest.mark.parametrize("T", [1.0, 0.7])
def test_linearised_kl_is_the_kl_of_the_linearised_policy(T):
    """KL(p || softmax((z + a z') / T)) at any a; the quadratic one is its limit at a = 0."""
    z, z_dot = policies()
    alphas = [1e-4, 1e-2, 0.3, 1.0, 5.0]
    found = logra.predicted_kls(z, z_dot, T, alphas).tolist()
    expected = [kl64(z, z.double() + a * z_dot.double(), T).sum().item() for a in alphas]
    assert found == pytest.approx(expected, rel=1e-4)
    quadratic = logra.predicted_kls(z, z_dot, T).item()
    assert quadratic * 1e-4**2 == pytest.approx(expected[0], rel=1e-3)
    assert abs(quadratic * 5**2 / expected[-1] - 1) > 0.1  # but not at a = 5
    assert logra.predicted_kls(z, z_dot, T, [1e4]).isfinite().all()


@pytest.mark.parametrize("a", [1e-4, 1.0])
def test_exact_kl_is_not_lost_in_rounding(a):
    """By phi also where sum p (log p - log q) in float32 is worthless; p is before the step."""
    z, z_dot = policies()
    z_after = z + a * z_dot
    expected = kl64(z, z_after, 0.7).sum().item()
    assert logra.exact_kl(z, z_after, 0.7).item() == pytest.approx(expected, rel=0.05)
    log_p, log_q = ((x / 0.7).log_softmax(-1) for x in (z, z_after))
    naive = (log_p.exp() * (log_p - log_q)).sum().item()
    assert a == 1 or abs(naive / expected - 1) > 0.5  # wrong


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("linearised, budget", [(False, 1e-5), (True, 1e-4)])
def test_step_spends_the_budget(linearised, budget, seed):
    """The KL is that predicted for alpha, the budget; within 3%, by two models in float64."""
    model, plain, sketches, optimizer, probe = proposal(seed=seed)
    control = logra.KLControl(budget, alpha_max=100.0)
    alphas = control.grid() if linearised else None
    curve, hidden = logra.predict_kl(model, sketches, probe, alphas=alphas)
    alpha = control.alpha_for(curve, 0)
    z, z_after = (logits_along(model, plain, sketches, probe, a) for a in (0, alpha))
    kl = kl64(z, z_after).mean().item()
    assert kl == pytest.approx(budget, rel=0.03)
    assert logra.kl_at(curve, alpha) == pytest.approx(budget)
    optimizer.step(alpha)
    assert logra.realised_kl(model, probe, hidden) == pytest.approx(kl, rel=0.01)


def test_budget_is_a_cosine_with_both_ends():
    """By hand at the ends, in the middle, at a third of the way (cos 60 degrees) and after."""
    control = logra.KLControl(budget=5.0, final_budget=1.0, updates=7)
    found = [control.budget(update) for update in (0, 2, 3, 6, 7, 999)]
    assert found == pytest.approx([5.0, 4.0, 3.0, 1.0, 1.0, 1.0])
    assert logra.KLControl(5.0, 1.0, updates=1).budget(0) == 5.0


def test_mismatch_is_an_average_taken_off_the_budget():
    """m <- 0.7 m + 0.3 max(0, mean over tokens); budget <- max(budget - m, budget / 2)."""
    control = logra.KLControl(2e-4, 2e-4)
    control.observe([torch.tensor([0.0, 0.0, 4e-4]), torch.tensor([0.0])])  # 1e-4 over 4 tokens
    assert control.mismatch == pytest.approx(0.3e-4)
    control.observe([torch.tensor([-5.0])])  # bounded before it is averaged
    control.observe([])  # nothing was seen
    assert control.mismatch == pytest.approx(0.21e-4)
    assert control.budget(0) == pytest.approx(2e-4 - 0.21e-4)
    control.observe([torch.tensor([1.0])])
    assert control.budget(0) == pytest.approx(1e-4)


# ------------------------------------------------------------------------------------------------
# 6  Generation and sync, without vLLM
# ------------------------------------------------------------------------------------------------

PROMPTS = [[5], [1, 2, 3], [9, 9], [4, 3, 2, 1, 0, 7], [1, 2, 3]]


@pytest.mark.parametrize("T", [0.7, 0.0])
def test_generator_logprobs_are_the_trainers(T):
    """At T = 0.7 the two agree within 1e-4, so no pass has dropout; T = 0 takes the largest."""
    model = tiny_qwen2(peak=12.0, attention_dropout=0.1)
    samples = logra.HFGenerator(model, [3]).generate(PROMPTS, range(5), 10, T)
    engine = torch.tensor([x for s in samples for x in s.logprobs])
    with torch.no_grad():
        hidden, ids = logra.response_hidden(model, samples, model.device)
        logp, without_T = (
            logra.token_logprobs(hidden, model.lm_head, ids, t) for t in (T or 1.0, 1.0)
        )
    assert (logp - engine).abs().max() < 1e-4
    if T:
        assert (without_T - engine).abs().mean() > 1e-2  # wrong
    else:
        assert torch.equal(model.lm_head(hidden).argmax(-1), ids)


def test_tokens_are_drawn_from_the_softmax():
    """Of 4096 first tokens, each one's part is p = softmax(z / T) within 5 standard errors."""
    model, n = tiny_qwen2(peak=12.0), 4096
    seeds = [logra.stable_seed("sample", i) for i in range(n)]
    samples = logra.HFGenerator(model, []).generate([[1, 2, 3]] * n, seeds, 1, temperature=0.7)
    part = torch.tensor([s.completion[0] for s in samples]).bincount(minlength=64) / n
    with torch.no_grad():
        z = model(torch.tensor([[1, 2, 3]])).logits[0, -1].double()
    p, without_T = (z / 0.7).softmax(-1), z.softmax(-1)
    error = 5 * (p * (1 - p) / n).sqrt() + 5 / n  # rare tokens come once or twice
    assert ((part - p).abs() < error).all() and not ((part - without_T).abs() < error).all()


@pytest.mark.parametrize("dtype, lost", [(torch.float32, 0.0), (torch.bfloat16, 0.9)])
def test_an_engine_follows_by_factors_alone(dtype, lost):
    """Its weights are the trainer's to the bit, rounded to its own dtype.  Of steps of 6e-5 that
    are subtracted from bfloat16 weights in place, nine tenths are lost."""
    model, engine, served = tiny_qwen2(), logra.SketchSync(), tiny_qwen2(seed=1, dtype=dtype)
    sketches, optimizer = sketched(model, update_ratio=6e-5)
    engine.get_model = lambda: served
    W = {path: module.weight.detach() for path, module in sketches.layers.items()}
    engine.sync_weights(W.items(), sketches.settings, ranks=1)
    path, start = "model.layers.0.mlp.up_proj", engine.sync_read()
    in_place = start[path].clone()
    for update in range(20):
        (-weighted_logp(model, answers([4, 6]))).backward()
        optimizer.propose(10)
        A, factors = sketches.A[64], optimizer.step()
        engine.sync_factors(factors, update)
        in_place -= (factors[path].float() @ A).to(dtype)
    read = engine.sync_read()
    assert all(torch.equal(read[name], w.to(dtype)) for name, w in W.items())
    moved, moved_in_place = (rel(x, start[path]) for x in (read[path], in_place))
    assert moved > 5e-5 and moved_in_place < (1.001 - lost) * moved


# ------------------------------------------------------------------------------------------------
# Behaviour of the parts
# ------------------------------------------------------------------------------------------------


def test_projection_never_changes_silently():
    """Golden: a run goes on with the A it had, whatever version of logra.py or torch made it."""
    assert logra.stable_seed("a", 1, "b") == 3159813902661208101
    signs = torch.tensor([[1, -1, 1, -1, 1], [1, 1, 1, -1, 1], [-1, 1, -1, 1, -1]])
    assert torch.equal(logra.make_projection(3, 5, 7), signs * 3**-0.5)
    A = logra.make_projection(1, 3, 7, "gaussian")[0]
    assert A.tolist() == pytest.approx([-0.146795, 0.786141, 0.946822], rel=1e-5)


@pytest.mark.parametrize("d_out, d_in", [(24, 8), (6, 24), (6, 6), (1, 6)])
@pytest.mark.parametrize("r", [1, 5, 40])
def test_sketch_of_any_shape(d_out, d_in, r):
    """Tall, wide, square and a single row, r below and above d_in: always S = dW A^T [d_out, r]."""
    torch.manual_seed(0)
    layer, X, dY = torch.nn.Linear(d_in, d_out), torch.randn(3, 7, d_in), torch.randn(3, 7, d_out)
    sketches = logra.Sketches({"x": layer}, r)
    layer(X).backward(dY)
    dW = torch.einsum("blo,bli->oi", dY, X)
    assert sketches.S["x"].shape == (d_out, r)
    assert rel(sketches.S["x"], dW @ sketches.A[d_in].T) < 1e-5


def test_layers_of_one_input_share_its_product_with_the_projection():
    """X A^T is made once for q and k, but again when X was changed in place."""
    q, k, X = torch.nn.Linear(9, 4), torch.nn.Linear(9, 4), torch.randn(3, 9)
    sketches = logra.Sketches({"q": q, "k": k}, 6)
    q(X)
    XA = sketches.last[2]
    k(X)
    assert sketches.last[2] is XA
    k(X.mul_(3)).sum().backward()
    assert rel(sketches.S["k"], torch.ones(4, 3) @ X @ sketches.A[9].T) < 1e-6


@pytest.mark.parametrize(
    "make, options, words",
    [
        (lambda: torch.nn.Linear(3, 3), {}, "no list of decoder layers"),
        (lambda: torch.nn.ModuleDict({"layers": torch.nn.ModuleList()}), {}, "no nn.Linear"),
        (tiny_llama, {"targets": ["q_proj", "Wq"]}, "called Wq"),
        (tiny_llama, {"r": 0}, "r must be at least 1"),
        (tiny_llama, {"kind": "sparse"}, "'sparse'"),
        (lambda: tiny_llama(dtype=torch.bfloat16), {}, "q_proj is torch.bfloat16"),
    ],
)
def test_nothing_to_train_raises(make, options, words):
    with pytest.raises(ValueError, match=words):
        logra.attach_sketches(make(), **{"r": 4, **options})


def test_targets_narrow_what_is_trained(capsys):
    """Weights of layers of those names have gradients, all else is frozen, counted and told."""
    model = tiny_qwen2()
    assert len(logra.find_targets(model)) == 14 and "lm_head" not in logra.find_targets(model)
    logra.attach_sketches(model, 4, ["q_proj", "down_proj"])
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    sizes = {"self_attn.q_proj": 64 * 64, "mlp.down_proj": 64 * 96}
    assert trained == {f"model.layers.{i}.{x}.weight": n for i in (0, 1) for x, n in sizes.items()}
    # of each layer o, k and v, gate and up, biases; then embedding and head, norms
    frozen = 2 * (64 * 64 + 2 * 32 * 64 + 2 * 64 * 96 + 64 + 32 + 32) + 2 * 64 * 64 + 5 * 64
    assert capsys.readouterr().err == (
        "r = 4: 4 linear layers (20,480 weights) are trained; 23 other tensors"
        f" ({frozen:,} weights and biases) are frozen\n"
    )
    with pytest.raises(ValueError, match="q_proj has a forward of its own"):
        logra.attach_sketches(model, 4)


@pytest.mark.parametrize("rule", logra.RULES)
def test_zero_sketch_proposes_nothing(rule):
    """S = 0: U = 0, W stays, and nothing is NaN."""
    model = tiny_llama()
    sketches, optimizer = sketched(model, rule=logra.RULES[rule])
    before = copy.deepcopy(model.state_dict())
    optimizer.propose(7)
    assert norm_of(sketches.U.values()) == 0
    optimizer.step()
    assert all(torch.equal(before[k], W) for k, W in model.state_dict().items())


@pytest.mark.parametrize("where", ["sketch", "direction"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_in_the_sketch_moves_no_weight(bad, where):
    """Nor one that a rule makes: FloatingPointError before any W is written."""
    model = tiny_llama()
    rule = logra.row_adam if where == "sketch" else lambda S, state: S + bad
    sketches, optimizer = sketched(model, rule=rule)
    before = copy.deepcopy(model.state_dict())
    if where == "sketch":
        sketches.S["model.layers.1.mlp.up_proj"][17, 3] = bad
    with pytest.raises(FloatingPointError, match=f"{where} of update 0"):
        optimizer.propose(4)
    assert all(torch.equal(before[k], W) for k, W in model.state_dict().items())
    if where == "sketch":
        assert all(state.keys() == {"d_in"} for state in optimizer.state.values())


def test_calls_out_of_order_are_refused():
    """S and U are never there together: backward, propose and step follow one another."""
    model = tiny_llama()
    _, optimizer = sketched(model)
    with pytest.raises(RuntimeError, match="no U"):
        optimizer.step()
    optimizer.propose(1)
    with pytest.raises(RuntimeError, match="twice"):
        optimizer.propose(1)
    with pytest.raises(RuntimeError, match="between"):
        weighted_logp(model, answers([4]))
    optimizer.step()
    weighted_logp(model, answers([4])).backward()  # training goes on


@pytest.mark.parametrize("rule", logra.RULES)
def test_state_dict_roundtrip_is_bitwise(rule):
    """Saved, loaded with weights_only=True: the next update is the same to the bit, A included."""
    model, samples, file = tiny_qwen2(), answers([4, 6]), io.BytesIO()
    _, optimizer = sketched(model, 8, samples, rule=logra.RULES[rule])
    optimizer.step()
    torch.save([optimizer.state_dict(), model.state_dict()], file)
    file.seek(0)
    state, weights = torch.load(file, weights_only=True)
    twin = tiny_qwen2(seed=1)
    twin.load_state_dict(weights)
    _, twin_optimizer = sketched(twin, rule=logra.RULES[rule])
    twin_optimizer.load_state_dict(state)
    for m, o in ((model, optimizer), (twin, twin_optimizer)):
        (-weighted_logp(m, samples)).backward()
        o.propose(10)
        o.step()
    assert all(torch.equal(W, model.state_dict()[k]) for k, W in twin.state_dict().items())
    assert torch.equal(twin_optimizer.sketches.A[64], optimizer.sketches.A[64])


@pytest.mark.parametrize(
    "change, word",
    [
        ({"r": 9}, "r"),
        ({"seed": 1}, "seed"),
        ({"kind": "gaussian"}, "kind"),
        ({"refresh": 2}, "refresh"),
        ({"targets": ["q_proj"]}, "layers"),
        ({"rule": logra.sketch_muon}, "rule"),
    ],
)
def test_state_of_another_run_is_refused(change, word):
    """ValueError that names what differs; nothing is taken over."""
    _, optimizer = sketched(tiny_llama(), 8, answers([4]))
    optimizer.step()
    _, other = sketched(tiny_llama(), **{"r": 8, **change})
    with pytest.raises(ValueError, match=f"the checkpoint has {word} "):
        other.load_state_dict(optimizer.state_dict())
    assert other.update == 0 and all(state.keys() == {"d_in"} for state in other.state.values())


@pytest.mark.parametrize("value", [0.1, -0.01, 1e-30, 1e30, 0.0])
@pytest.mark.parametrize("n", [1, 3, 7, 10])
def test_equal_rewards_get_exactly_zero(n, value):
    """Not NaN, nor what rounding makes of 0.1, whose mean is not exactly itself."""
    same = torch.full((1, n), value, dtype=torch.float64)
    for std in (True, False):
        assert (logra.group_advantages(same, {}, std) == 0).all()
    for state in ({}, {"baseline": value * (1 + 1e-15)}):
        assert (logra.running_mean_advantages(same.T, state) == 0).all()


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
            alone.append(out[0, len(s.prompt) - 1 : -1])
    assert target.tolist() == [5, 6, 9, 0, 9, 7]
    assert hidden.shape == (6, 64) and torch.allclose(hidden, torch.cat(alone), atol=1e-5)


@pytest.mark.parametrize("window", [None, 8])
def test_probe_attention_computes_what_the_model_does(window):
    """Logits inside the probe = logits outside: three blocks of queries, four heads of which two
    share keys and values, a sliding window."""
    kw = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    kw = {"num_attention_heads": 4, "num_key_value_heads": 2, **(kw if window else {})}
    model, ids = tiny_qwen2(peak=12.0, **kw), torch.arange(300)[None] % 61
    with torch.no_grad():
        outside = model(ids).logits
        with logra.probe_mode(model):
            inside = model(ids).logits
    assert (inside - outside).abs().max() < 1e-4


@pytest.mark.parametrize("alphas", [None, [0.01, 0.1, 1.0]])
def test_prediction_does_not_depend_on_batches_or_chunks(alphas):
    """Nor does the realised KL: means over tokens, with any padding; not means of means."""
    model, _, sketches, optimizer, probe = proposal()
    (_, kls), before = logra.predict_kl(model, sketches, probe, alphas=alphas)
    options = [{"micro_batch": m, "chunk": c} for m, c in ((3, 512), (2, 512), (1, 3), (3, 1))]
    found = [logra.predict_kl(model, sketches, probe, alphas=alphas, **o) for o in options]
    means = [logra.predict_kl(model, sketches, [s], alphas=alphas)[0][1][-1] for s in probe]
    assert abs(sum(means) / 3 / kls[-1] - 1) > 1e-2  # wrong
    optimizer.step()
    realised = logra.realised_kl(model, probe, before)
    for o, ((_, other), hidden) in zip(options, found):
        assert other == pytest.approx(kls, rel=1e-4)
        assert logra.realised_kl(model, probe, hidden, **o) == pytest.approx(realised, rel=1e-2)


def test_prediction_writes_nothing():
    """U, W and the attention stay as they were, also when the model raises inside."""
    model, _, sketches, _, probe = proposal()
    U, W = copy.deepcopy(sketches.U), copy.deepcopy(model.state_dict())
    seen = []
    model.model.norm.register_forward_hook(
        lambda *_: seen.append(model.config._attn_implementation) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        logra.predict_kl(model, sketches, probe)
    assert seen == ["logra_probe"] and model.config._attn_implementation == "sdpa"
    assert not sketches.probing and all(torch.equal(sketches.U[k], x) for k, x in U.items())
    assert all(torch.equal(W[k], x) for k, x in model.state_dict().items())


@pytest.mark.parametrize(
    "enabled, curve, alpha",
    [
        (True, ([1.0], [4e-4]), 0.5),
        (True, ([1.0], [1e-12]), 3.0),  # alpha_max
        (True, ([0.1, 3.0], [1e-9, 1e-8]), 3.0),
        (True, ([0.1, 1.0], [1e-6, 1e-2]), 0.1 * 10**0.5),  # a straight line on log paper
        (True, ([1.0, 2.0], [4e-4, 9e-4]), 0.5),  # KL ~ alpha^2 before the first point
        (True, ([1.0], [0.0]), 1.0),  # nothing moves, whatever alpha is
        (False, ([1.0], [4e-4]), 1.0),
    ],
)
def test_alpha_is_bounded(enabled, curve, alpha):
    control = logra.KLControl(1e-4, alpha_max=3.0, enabled=enabled)
    assert control.alpha_for(curve, 0) == pytest.approx(alpha)
    assert logra.kl_at(curve, 0.0) == logra.kl_at(([1.0], [0.0]), alpha) == 0


@pytest.mark.parametrize("bad", [-1e-9, math.nan, math.inf])
def test_odd_kls_are_refused(bad):
    with pytest.raises(FloatingPointError, match="predicted KL of update 5"):
        logra.KLControl().alpha_for(([0.1, 1.0], [1e-4, bad]), 5)
    if not bad < 0:
        with pytest.raises(FloatingPointError, match="realised KL of update 7"):
            logra.KLControl().excess(bad, 7)


def test_excess_brings_a_quadratic_kl_to_the_budget():
    """Keep sqrt(budget / realised), at least .1; take nothing back within the budget."""
    control = logra.KLControl(1e-3, 1e-3)
    for kl in (1.1e-3, 4e-3, 9e-2):
        assert kl * (1 - control.excess(kl, 0)) ** 2 == pytest.approx(1e-3)
    assert control.excess(1.0, 0) == pytest.approx(0.9)
    assert control.excess(1e-3, 0) == control.excess(0.0, 0) == 0
    control.mismatch = 1.0  # takes half of the budget
    assert control.excess(1e-3, 0) == pytest.approx(1 - 0.5**0.5)
    assert logra.KLControl(1e-3, enabled=False).excess(4e-3, 0) == pytest.approx(0.5)


def test_generation_stops_at_any_end_token():
    """A sample is the one without end tokens up to the first, which may be the last that there is
    room for.  Those in the prompts end nothing."""
    model, ends = tiny_qwen2(peak=12.0), [3, 9, 11, 20, 33, 47, 60]
    free = logra.HFGenerator(model, []).generate(PROMPTS, range(5), 12)
    cut = logra.HFGenerator(model, ends).generate(PROMPTS, range(5), 12)
    assert {s.finished for s in cut} == {True, False} and not any(s.finished for s in free)
    for i, (a, b) in enumerate(zip(free, cut)):
        n = next((i + 1 for i, x in enumerate(a.completion) if x in ends), 12)
        assert b.completion == a.completion[:n] and len(b.logprobs) == n
        assert b.finished == (a.completion[n - 1] in ends)
        [full] = logra.HFGenerator(model, ends).generate([PROMPTS[i]], [i], n)
        assert full.completion == b.completion and full.finished == b.finished


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


def test_dense_control_is_adamw_on_the_mean_gradient():
    """Two updates of Adam, without weight decay, on dW / tokens, in float64 by hand."""
    torch.manual_seed(0)
    model, X = torch.nn.ModuleList([torch.nn.Linear(4, 3)]).double(), torch.randn(5, 4).double()
    optimizer = train.DenseAdamW(logra.find_targets(model), (1e-2, 2e-3), 3)
    W = model[0].weight.detach().clone()
    m, v = torch.zeros_like(W), torch.zeros_like(W)
    for t, lr in ((1, 1e-2), (2, 6e-3)):  # halfway along the cosine
        dW = (2 * (X @ W.T + model[0].bias.detach())).T @ X / 5
        m, v = 0.9 * m + 0.1 * dW, 0.95 * v + 0.05 * dW**2
        W = W - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        model[0](X).square().sum().backward()
        model[0].bias.grad = None
        optimizer.propose(5)
        assert optimizer.sketch_norm == pytest.approx(dW.norm().item(), rel=1e-9)
        optimizer.step()
        assert rel(model[0].weight.detach(), W) < 1e-9


def test_lora_control_is_the_textbook_adapter():
    """Three updates of Y = X W_0^T + (X A^T) B^T by autograd and torch's AdamW: the same W."""
    torch.manual_seed(0)
    model, X = torch.nn.ModuleList([torch.nn.Linear(6, 5)]).double(), torch.randn(7, 6).double()
    layers, [layer], W_0 = logra.find_targets(model), model, model[0].weight.detach().clone()
    optimizer = train.LoRA(layers, 2, (1e-2, 1e-2))
    A, B = (p.detach().clone().requires_grad_() for p in optimizer.adapters["0"])
    adam = torch.optim.AdamW([A, B], 1e-2, (0.9, 0.95), weight_decay=0)
    assert (B == 0).all() and A.std() > 0
    for update in range(3):
        adam.zero_grad()
        ((X @ W_0.T + X @ A.T @ B.T + layer.bias.detach()).square().sum() / 7).backward()
        adam.step()
        layer(X).square().sum().backward()
        optimizer.propose(7)
        optimizer.step()
        assert layer.weight.grad is None and rel(layer.weight, W_0 + B @ A) < 1e-12
    assert rel(layer.weight, W_0) > 1e-4  # it moved
    twin = train.LoRA(layers, 2, (1e-2, 1e-2), seed=1)
    twin.load_state_dict(optimizer.state_dict())
    assert twin.update == 3
    assert all(map(torch.equal, twin.adapters["0"], optimizer.adapters["0"]))


# ------------------------------------------------------------------------------------------------
# 6  The loop, without vLLM
# ------------------------------------------------------------------------------------------------


def low_tokens(sample):
    """A toy reward: the part of tokens below 16."""
    return sum(token < 16 for token in sample.completion) / len(sample.completion)


def spread_of_tokens(sample):
    """A toy reward of which no two answers are likely to have the same."""
    return sum(token * (i + 1) for i, token in enumerate(sample.completion)) % 97 / 97


LAYERS = [
    f"model.layers.{i}.{name}"
    for i in (0, 1)
    for name in [f"self_attn.{x}_proj" for x in "qkvo"]
    + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
]
first_model = functools.partial(tiny_qwen2, peak=3.0)  # what loop() starts from


def draw_three(step):
    """Three prompts a step, two of them alike."""
    return [(i, [1 + i // 2] * (1 + i // 2), None) for i in range(3)]


def settings(**changes):
    """The defaults, but in float32, and the KL of every update is measured."""
    return train.Config(**{"dtype": "float32", "kl_check_every": 1} | changes)


def loop(
    steps,
    reward=low_tokens,
    advantage=logra.group_advantages,
    objective=logra.grpo_objective,
    rule="row_adam",
    ratio=3e-2,
    refresh=1,
    budget=3e-2,
    control=None,
    ends=(3, 40),
    resume=None,
    start=0,
    lap=id,
    **changes,
):
    """Run grpo on a fresh tiny model, or go on after another loop().  Returns the metrics, model,
    optimizer and control."""
    model = first_model()
    sketches = logra.attach_sketches(model, 8, refresh=refresh)
    optimizer = logra.LoGRA(sketches, ratio, logra.RULES[rule])
    control = control or logra.KLControl(budget, budget / 10, 20)
    if resume:
        _, old_model, old_optimizer, old = copy.deepcopy(resume)
        model.load_state_dict(old_model.state_dict())
        optimizer.load_state_dict(old_optimizer.state_dict())
        control.mismatch, control.advantage_state = old.mismatch, old.advantage_state
    sizes = {"steps": steps, "group_size": 4, "max_new_tokens": 5, "micro_batch": 5}
    config = settings(**sizes | changes)
    parts = (model, logra.HFGenerator(model, ends), optimizer, control, draw_three, reward)
    metrics = list(logra.grpo(*parts, advantage, objective, config, start, lap))
    return metrics, model, optimizer, control


def flat(model):
    """All weights that loop() trains, in one vector."""
    return torch.cat([model.get_submodule(path).weight.detach().flatten() for path in LAYERS])


def all_finite(metrics):
    return all(math.isfinite(x) for m in metrics for x in m.values() if isinstance(x, float))


@pytest.mark.parametrize("predictor", ["quadratic", "linearised"])
def test_reward_rises(predictor):
    """From one quarter to above two fifths in 25 steps of 24 answers, every one of them cut."""
    kw = {"kl_predictor": predictor, "group_size": 8, "ends": (), "budget": 0.1}
    metrics, _, _, control = loop(25, **kw)
    rewards = [m["reward"] for m in metrics]
    assert sum(rewards[:3]) / 3 < 0.33 and sum(rewards[-3:]) / 3 > 0.42
    assert [m["step"] for m in metrics] == [m["update"] for m in metrics] == list(range(1, 26))
    assert control.mismatch == 0 and all_finite(metrics)
    for m in metrics:
        assert m["truncated"] == 1 and 0 < m["alpha"] <= 3
        assert m["kl_predicted"] <= m["budget"] * 1.0001 and 0 < m["kl_realised"] < 10 * m["budget"]


@pytest.mark.parametrize("updates_per_batch", [1, 2])
def test_micro_batch_changes_no_weight(updates_per_batch):
    """It decides memory and speed: W after two steps is the same, up to a bfloat16 on the edge."""
    start, found = flat(first_model()), {}
    for size in (1, 5, 100):
        _, model, optimizer, _ = loop(2, micro_batch=size, updates_per_batch=updates_per_batch)
        assert optimizer.update == 2 * updates_per_batch
        found[size] = flat(model) - start
    assert found[100].norm() > 1e-3 * start.norm()  # something was learned
    assert rel(found[1], found[100]) < 2e-3 and rel(found[5], found[100]) < 2e-3


@pytest.mark.parametrize(
    "changes, divisor, wrong",
    [
        ({"reward": lambda s: s.index and spread_of_tokens(s)}, "all", "alive"),
        ({"mask_truncated": True}, "finished", "all"),
        ({"denominator": "constant"}, "constant", "all"),
    ],
    ids=["dead group", "masked", "constant"],
)
def test_first_update_is_the_policy_gradient(changes, divisor, wrong):
    """S = -sum adv dW A^T / tokens; a masked answer adds nothing, but counts in its group."""
    [m], *_ = loop(1, **{"reward": spread_of_tokens, "ends": range(40, 64)} | changes)
    samples = m["samples"]
    rewards = torch.tensor([s.reward for s in samples]).view(3, 4)
    expected = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, correction=0).view(3, 1)
    for s, value in zip(samples, expected.nan_to_num(0.0).flatten().tolist(), strict=True):
        covered = s.finished or divisor != "finished"
        assert s.advantage == pytest.approx(value * covered, abs=1e-5)
    sketches, _ = sketched(first_model())
    dW = dense_gradients(first_model(), sketches.layers, samples)
    S = [dW[path] @ sketches.A[layer.in_features].T for path, layer in sketches.layers.items()]
    norm = math.sqrt(sum(x.square().sum().item() for x in S))
    tokens = {"all": 0, "alive": 0, "finished": 0, "constant": 12 * 5}
    for s in samples:
        for name, counts in (("all", True), ("alive", s.advantage), ("finished", s.finished)):
            tokens[name] += len(s.completion) * bool(counts)
    assert m["grad_sketch_norm"] == pytest.approx(norm / tokens[divisor], rel=1e-3)
    assert abs(tokens[wrong] / tokens[divisor] - 1) > 0.1
    assert m["dead_groups"] == (1 / 3 if "reward" in changes else 0)
    assert m["answers"] == 12 and m["length"] == tokens["all"] / 12


TIMED = {"seconds": {}, "tokens_per_second": 0.0, "peak_gib": 0.0}  # what train adds to metrics


@pytest.mark.parametrize("masked", [False, True])
def test_a_batch_without_signal_moves_nothing(masked):
    """All rewards equal, or every answer cut and masked: one line a step, and no NaN."""
    changes = {"reward": lambda sample: 0.1, "ends": range(40, 64)}
    if masked:
        changes = {"reward": spread_of_tokens, "ends": (), "mask_truncated": True}
    metrics, model, optimizer, _ = loop(2, updates_per_batch=2, **changes)
    assert torch.equal(flat(model), flat(first_model())) and optimizer.update == 0
    assert not any("v" in state for state in optimizer.state.values())
    assert len(metrics) == 2 and all(m["last"] for m in metrics) and all_finite(metrics)
    for m in metrics:
        assert m["alpha"] == m["update_ratio"] == m["sync_bytes"] == m["update"] == 0
        assert m["kl_predicted"] is None and m["kl_realised"] is None
        assert m["dead_groups"] == (not masked)
        assert ("every answer is cut" in train.step_line(m | TIMED)) == masked


def test_running_mean_trains_on_one_answer_a_prompt():
    """G = 1: nothing is dead but for chance; the baseline is that of all steps before."""
    advantage = logra.running_mean_advantages
    metrics, model, _, control = loop(3, advantage=advantage, group_size=1)
    b = metrics[0]["reward"]
    for m in metrics:
        for s in m["samples"]:
            assert s.advantage == pytest.approx(s.reward - b)
        b += 0.1 * (m["reward"] - b)
    assert control.advantage_state == {"baseline": pytest.approx(b)}
    assert not torch.equal(flat(model), flat(first_model()))


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


def test_old_logprobs_are_those_of_the_first_update():
    """updates_per_batch=2: two lines a step; the ratio is 1 at the first, and then moves."""
    calls, phases = [], []

    def objective(logps, old_logps, *rest):
        calls.append((torch.cat(logps).detach(), torch.cat(old_logps)))
        return logra.grpo_objective(logps, old_logps, *rest)

    changes = {"updates_per_batch": 2, "micro_batch": 100, "lap": phases.append}
    metrics, *_ = loop(2, objective=objective, **changes)
    assert [(m["step"], m["update"]) for m in metrics] == [(1, 1), (1, 2), (2, 3), (2, 4)]
    assert [m["last"] for m in metrics] == [False, True] * 2
    for (logp, old), (logp_2, old_2) in (calls[:2], calls[2:]):
        assert torch.equal(logp, old) and torch.equal(old_2, old)
        assert (logp_2 - old_2).abs().max() > 1e-3
    update = ["train", "update", "probe", "update", "probe", "sync"]
    assert phases == ["generate", *update, *update] * 2  # what train.py times


@pytest.mark.parametrize(
    "kw",
    [
        {},
        {"updates_per_batch": 2},
        {"verify_step": True, "budget": 0.1},
        {"rule": "sketch_adam", "refresh": 3},
    ],
    ids=lambda kw: " ".join(kw) or "default",
)
def test_resumed_run_is_the_same_run(kw):
    """2 steps, and 2 more from the states = 4 steps: samples, metrics and W to the bit."""
    kw = {"kl_predictor": "linearised", **kw}
    whole, model, *_ = loop(4, **kw)
    half = loop(2, **kw)
    rest, resumed, *_ = loop(4, resume=half, start=2, **kw)
    assert torch.equal(flat(resumed), flat(model))
    for a, b in zip(whole, half[0] + rest, strict=True):
        of_a, of_b = a.pop("samples"), b.pop("samples")
        assert [s.completion for s in of_a] == [s.completion for s in of_b] and a == b
    _, other, *_ = loop(4, resume=half, start=1, **kw)  # off by one
    assert not torch.equal(flat(other), flat(model))


def test_everything_follows_from_the_seed():
    """Another seed or step, other samples; so it is within a group and for two equal prompts."""
    same = lambda sample: 0.0  # rewards, so that W stays
    batches = [m["samples"] for seed in (0, 1) for m in loop(2, same, seed=seed)[0]]
    batches = [[tuple(s.completion) for s in samples] for samples in batches]
    groups = [tuple(batch[i : i + 4]) for batch in batches for i in (0, 4, 8)]
    assert len({*groups}) == len(groups) == 12  # of two seeds, two steps and three prompts
    assert all(len({*group}) > 1 for group in groups)


def test_without_kl_control_the_step_is_one():
    """enabled=False, kl_check_every=0: alpha 1, ||factor A|| / ||W|| = update_ratio, no KL."""
    control = logra.KLControl(1e-9, enabled=False)
    [m], model, *_ = loop(1, ratio=1e-3, control=control, kl_check_every=0)
    assert m["alpha"] == 1.0 and m["kl_realised"] is None and m["update_ratio"] == 1e-3
    assert rel(flat(model), flat(first_model())) == pytest.approx(1e-3, rel=1e-2)


def test_verified_steps_stay_within_the_budget():
    """Where the prediction lets every second step go 1.5 times too far, that step is cut to the
    budget and the others are left alone; the metrics tell of the steps that stay."""

    class Optimistic(logra.KLControl):
        def alpha_for(self, curve, update):
            return super().alpha_for(curve, update) * (1.5 if update % 2 else 0.7)

    kw = {"ends": (), "kl_predictor": "linearised", "ratio": 1e-2}
    for verify in (False, True):
        control = Optimistic(2e-3, 2e-3, alpha_max=30.0)
        metrics, *_ = loop(6, control=control, verify_step=verify, **kw)
        for update, m in enumerate(metrics):
            low, high = (0.3, 0.7) if update % 2 == 0 else (0.8, 1.1) if verify else (1.5, 4)
            assert low < m["kl_realised"] / m["budget"] < high
            assert m["kl_predicted"] == pytest.approx(m["kl_realised"], rel=0.3)
            assert m["update_ratio"] == pytest.approx(1e-2 * m["alpha"])


def test_bfloat16_compute_trains_float32_weights(monkeypatch):
    """dtype=bfloat16: autocast in training and probe, W float32, realised KL near the budget."""
    autocast, forward = [], logra.response_hidden

    def recorded(*args):
        autocast.append(torch.is_autocast_enabled("cpu"))
        return forward(*args)

    monkeypatch.setattr(logra, "response_hidden", recorded)
    kw = {"ends": (), "kl_predictor": "linearised", "budget": 1e-2}
    metrics, model, *_ = loop(2, dtype="bfloat16", **kw)
    assert set(autocast) == {True}  # in every pass: a KL between two dtypes would be rounding
    for m in metrics:
        assert m["kl_realised"] == pytest.approx(m["kl_predicted"], rel=0.5)
        assert m["kl_predicted"] == pytest.approx(m["budget"]) and m["alpha"] < 3
    assert all(p.dtype == torch.float32 for p in model.parameters())


# ------------------------------------------------------------------------------------------------
# 6  A trainer and an engine of the same tiny model: one policy, the same weights
# ------------------------------------------------------------------------------------------------

EOS = (1, 7, 9)
sorting_rows = train.sorting_rows  # before the fixture small_task shortens it
SETTINGS = {"r": 8, "seed": 3, "kind": "rademacher", "refresh": 1}


def model_with_biases(kind):
    """A model with logits that are not flat; qwen2 has biases, and embedding and head are one."""
    shape = {"max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1}
    return tiny(kind.title(), initializer_range=0.2, tie_word_embeddings=kind == "qwen2", **shape)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """{name: directory}: qwen2, llama, and qwen2 with a generation config of its own."""
    root = tmp_path_factory.mktemp("models")
    for kind in ("qwen2", "llama"):
        model_with_biases(kind).save_pretrained(root / kind)
    shutil.copytree(root / "qwen2", root / "meddling")
    meddling = {"do_sample": True, "top_p": 0.1, "repetition_penalty": 2.0, "min_new_tokens": 5}
    meddling |= {"top_k": 3, "bos_token_id": 0, "eos_token_id": list(EOS)}
    (root / "meddling" / "generation_config.json").write_text(json.dumps(meddling))
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="session")
def engines(models):
    """engine(name, dtype): a VLLMGenerator, started once and shared."""

    @functools.cache
    def engine(name, dtype="float32"):
        return logra.VLLMGenerator(models[name], EOS, 384, SETTINGS, dtype, kv_gib=0.05)

    return engine


@pytest.fixture
def pair(models, engines):
    """pair(name, dtype, update_ratio): a fresh model with its optimizer, and an engine like it."""

    def make(name, dtype="float32", update_ratio=6e-5):
        load = transformers.AutoModelForCausalLM.from_pretrained
        model, generator = load(models[name], dtype=torch.float32).eval(), engines(name, dtype)
        optimizer = logra.LoGRA(logra.attach_sketches(model, 8, seed=3), update_ratio)
        generator.load(weights(optimizer).items())
        return model, optimizer, generator

    return make


def weights(optimizer):
    return {path: m.weight.detach() for path, m in optimizer.layers.items()}


def random_update(optimizer):
    """(factors, update) of a step along a random sketch."""
    update = optimizer.update
    for S in optimizer.sketches.S.values():
        S.normal_()
    optimizer.propose(1)
    return optimizer.step(), update


def prompts_of(*lengths):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(10, 64, (n,), generator=generator).tolist() for n in lengths]


def trainer_logprobs(model, samples, temperature=1.0):
    """log p of the generated tokens, as training has them."""
    hidden, ids = logra.response_hidden(model, samples, "cpu")
    return logra.token_logprobs(hidden, logra.policy_head(model), ids, temperature)


def engine_logprobs(samples):
    return torch.tensor([x for s in samples for x in s.logprobs])


def apart(x, y):
    return (x - y).abs().max().item()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_engine_logprobs_are_the_trainers(pair, name):
    """Both are log softmax(z / T) of the same weights, before and after updates: these stay, and
    the cache holds no keys and values of other weights (18, 23, 25)."""
    model, optimizer, generator = pair(name, update_ratio=3e-2)
    prompts = prompts_of(1, 4, 9, 300, 5, 2)  # the longest has three blocks
    for _ in range(4):
        samples, again = (generator.generate(prompts, range(6), 24, 0.7) for _ in range(2))
        assert again == samples
        engine = engine_logprobs(samples)
        assert apart(engine, trainer_logprobs(model, samples, 0.7)) < 1e-4
        assert apart(engine, trainer_logprobs(model, samples, 1.0)) > 0.1
        generator.sync(*random_update(optimizer))
        assert apart(engine, trainer_logprobs(model, samples, 0.7)) > 0.02  # it did move


def test_a_generation_config_changes_no_sample(models):
    """Nor a log-prob: transformers would apply what it finds in the model's own (19)."""
    prompts, found = prompts_of(*[4] * 8), []
    for name in ("qwen2", "meddling"):
        model = transformers.AutoModelForCausalLM.from_pretrained(models[name])
        found.append(logra.HFGenerator(model, EOS).generate(prompts, range(8), 16, 0.7))
    assert found[0] == found[1]
    assert model.generation_config.min_new_tokens == 5  # a checkpoint keeps it


@pytest.mark.slow
def test_every_eos_id_ends_an_answer(pair):
    """Whichever comes first, and the answer holds it; in a prompt they end nothing (2, 3)."""
    prompts = [[5, 9, 6], [9, 7, 1]] * 100
    samples = pair("llama")[2].generate(prompts, range(200), 24)
    assert [s.prompt for s in samples] == prompts
    for s in samples:
        assert not set(s.completion[:-1]) & set(EOS)
        assert s.finished == (s.completion[-1] in EOS)
        assert s.finished or len(s.completion) == 24
        assert len(s.logprobs) == len(s.completion)
    assert {s.completion[-1] for s in samples if s.finished} == set(EOS)
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
    assert completions(prompts, seeds[::-1]) == first[::-1]
    assert completions(prompts[:1], [7]) == [first[7]]
    assert completions(prompts, [s + 100 for s in seeds]) != first


@pytest.mark.slow
def test_vllm_and_hf_generators_are_greedy_alike(pair):
    """One interface, one answer, whatever the seed and the lengths of the prompts in the batch."""
    model, _, generator = pair("llama")
    prompts = prompts_of(3, 11, 1, 7, 20)
    a = generator.generate(prompts, range(5), 12, 0.0)
    b = logra.HFGenerator(model, EOS).generate(prompts, range(5, 10), 12, 0.0)
    assert [(s.completion, s.finished) for s in a] == [(s.completion, s.finished) for s in b]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_engine_weights_after_50_updates(pair, name, dtype):
    """To the bit, loaded after 3 that it did not see, a part of every fifth taken back; rounded
    once for a bfloat16 engine (37), by reference whatever the environment asks for (29)."""
    _, optimizer, generator = pair(name, dtype)
    first, dtype = generator.call("sync_read"), getattr(torch, dtype)
    for _ in range(3):
        random_update(optimizer)
    generator.load(weights(optimizer).items())
    loaded = generator.call("sync_read")
    assert all(torch.equal(loaded[path], W.to(dtype)) for path, W in weights(optimizer).items())
    for i in range(50):
        factors, update = random_update(optimizer)
        generator.sync(factors, update)
        if i % 5 == 0:
            generator.sync(optimizer.take_back(factors, 0.37), update)
    engine = generator.call("sync_read")
    assert engine.keys() == loaded.keys() and len(engine) == 14
    for path, W in weights(optimizer).items():
        assert torch.equal(engine[path], W.to(dtype)), path
        assert not torch.equal(loaded[path], first[path])
        assert not torch.equal(loaded[path], engine[path])
    assert type(generator.llm.llm_engine.engine_core).__name__ == "InprocClient"


def test_an_engine_multiplies_in_the_blocks_of_four_ranks():
    """The worker's arithmetic against each rank's rows, multiplied by themselves, to the bit: a
    product of one row, as the last rank has it, is rounded otherwise than one of five."""
    engine, linear = logra.SketchSync(), torch.nn.Linear(64, 5, bias=False)
    engine.get_model = lambda: torch.nn.ModuleDict({"x": linear})
    shards = [rows.clone() for rows in linear.weight.detach().chunk(4)]
    engine.sync_weights([("x", linear.weight.detach().clone())], SETTINGS, 4)
    for update in range(3):
        factor = torch.randn(5, 8).bfloat16()
        A = logra.draw_projections([64], update, "cpu", **SETTINGS)[64]
        for shard, rows in zip(shards, factor.chunk(4)):
            shard.addmm_(rows.float(), A, alpha=-1)
        engine.sync_factors({"x": factor}, update)
        assert torch.equal(linear.weight, torch.cat(shards))


@pytest.mark.slow
def test_every_target_layer_is_reached_or_it_raises(pair):
    """A factor too few, an unknown layer, another shape: StopRun, and nothing is written (27)."""
    _, optimizer, generator = pair("llama")
    before = generator.call("sync_read")
    factors, update = random_update(optimizer)
    k, W = "model.layers.1.self_attn.k_proj", weights(optimizer)
    for path, factor in ((k, factors[k][:-1]), ("layers.7.k_proj", factors[k])):
        with pytest.raises(logra.StopRun, match=f"differ: .*{path}"):
            generator.sync({**factors, path: factor}, update)
    del factors[k]
    with pytest.raises(logra.StopRun, match=f"differ: .*{k}"):
        generator.sync(factors, update)
    assert all(torch.equal(x, before[path]) for path, x in generator.call("sync_read").items())
    for path, rows in ((k, W[k][:-1]), (k.replace(".1.", ".7."), W[k]), (f"{k}k", W[k])):
        with pytest.raises(logra.StopRun, match=path):
            generator.load({**W, path: rows}.items())


# ------------------------------------------------------------------------------------------------
# Families: pytest -k "families and engine" -s prints a table of them
# ------------------------------------------------------------------------------------------------

WINDOW = {"head_dim": 32, "sliding_window": 8}
TIED = {"tie_word_embeddings": True}
GEMMA = {**WINDOW, **TIED, "query_pre_attn_scalar": 32}  # the window in some of the layers
MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.1}
FAMILIES = {
    "Qwen2": TIED,  # and Qwen2.5; biases on q, k, v
    "Qwen3": {"head_dim": 32, **TIED},  # norms of q and k
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": WINDOW,
    "Gemma2": {**GEMMA, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0},
    "Gemma3": GEMMA,  # norms of q and k
    "Phi3": {"sliding_window": 8},  # one layer for q, k, v and one for gate, up
    "Olmo2": {},  # norms of q and k, and norms after the layers
    "Glm4": {"head_dim": 32, "attention_bias": True},  # one layer for gate, up
    "SmolLM3": TIED,
    "Granite": {**MULTIPLIERS, "logits_scaling": 0.5},
    "Cohere": {**TIED, "logit_scale": 0.25, "use_qk_norm": True},
}
of_every_family = pytest.mark.parametrize("family", FAMILIES)


@functools.cache
def family_prototype(family):
    """Made once: an engine of some families leaves their class unfit to make another."""
    kw = {"bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.1}
    model = tiny(family, **kw | FAMILIES[family])
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


def advantages_of(samples):
    return torch.tensor([s.advantage for s in samples for _ in s.completion])


@of_every_family
def test_families_are_trained_as_what_they_compute(family):
    """Log-probs, S = dW A^T and the predicted KL are those of model(...).logits, in float64: caps,
    scales, windows, padding, whatever the family has.  So are the generator's log-probs."""
    model, samples = family_model(family, torch.float64), answers([7, 20, 9])
    plain, adv = copy.deepcopy(model), advantages_of(samples)
    sketches, optimizer = sketched(model)
    logp, expected = trainer_logprobs(model, samples), whole_model_logprobs(plain, samples)
    assert apart(logp, expected) < 1e-5
    (logp * adv).sum().backward()
    W = [plain.get_submodule(path).weight for path in sketches.layers]
    gradients = torch.autograd.grad((expected * adv).sum(), W)
    for path, dW in zip(sketches.layers, gradients, strict=True):
        assert rel(sketches.S[path], dW @ sketches.A[dW.shape[1]].double().T) < 1e-5, path

    optimizer.propose(36)
    ([_], [kl]), _ = logra.predict_kl(model, sketches, samples)
    z, ahead, behind = (logits_along(model, plain, sketches, samples, a) for a in (0, 0.1, -0.1))
    curvature = (kl64(z, ahead) + kl64(z, behind)).mean().item() / (2 * 0.1**2)
    assert kl == pytest.approx(curvature, rel=3e-3)

    model = family_model(family)
    drawn = logra.HFGenerator(model, EOS).generate(prompts_of(3, 11, 1), range(3), 16, 0.7)
    assert apart(engine_logprobs(drawn), whole_model_logprobs(model, drawn, 0.7)) < 1e-4


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
    generator = logra.VLLMGenerator(tmp_path, EOS, 128, SETTINGS, kv_gib=0.02)
    generator.load(weights(optimizer).items())
    for _ in range(5):
        generator.sync(*random_update(optimizer))
    read, W = generator.call("sync_read"), weights(optimizer)
    assert read.keys() == W.keys() and all(torch.equal(read[path], W[path]) for path in W)
    samples = generator.generate(prompts_of(1, 4, 9, 30, 5, 2), range(6), 24, 0.7)
    with torch.no_grad():
        difference = apart(engine_logprobs(samples), whole_model_logprobs(model, samples, 0.7))
        assert apart(trainer_logprobs(model, samples), whole_model_logprobs(model, samples)) < 1e-5
    assert difference < 2e-4
    names = sorted({path.rpartition(".")[2] for path in W})
    biases = sum(module.bias is not None for module in optimizer.layers.values())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    served = generator.llm.apply_model(lambda module: type(module).__name__)[0]
    family_table.append(
        [family, f"{len(W)}: {', '.join(names)}", biases, "yes" if tied else "no"]
        + [f"vLLM, {served}", f"{difference:.1e}", f"{time.perf_counter() - start:.1f}"]
    )


def families_on_ranks():
    """{family: log-probs of this rank's samples, predicted KL, weights after a large step}."""
    samples, results = answers([7, 20, 9, 4]), {}
    for family in FAMILIES:
        model = family_model(family)
        if logra.world() > 1:
            train.checkpoint_layers(model)
            logra.shard_model(model, torch.float32)
        sketches, optimizer = sketched(model, update_ratio=0.1)
        own = samples[logra.my_rank() :: logra.world()]
        logp = trainer_logprobs(model, own)
        (logp * advantages_of(own)).sum().backward()
        optimizer.propose(40)
        _, [kl] = logra.predict_kl(model, sketches, own)[0]
        optimizer.step()
        results[family] = logp.detach(), kl, gathered(sketches.layers)
    return results


@pytest.mark.slow
def test_families_on_two_ranks_are_those_of_one(tmp_path):
    """Sharded, scaled embeddings, tied or not: the same log-probs, KL and step."""
    process, one = torchrun(2, __file__, "families_on_ranks", tmp_path / "2"), families_on_ranks()
    words = said(process)
    assert process.returncode == 0, words
    both = [torch.load(tmp_path / "2" / f"{rank}.pt") for rank in (0, 1)]
    for family, (logp, kl, W) in one.items():
        parts = logp.split([7, 20, 9, 4])
        for rank, (own_logp, own_kl, own_W) in enumerate(results[family] for results in both):
            assert apart(own_logp, torch.cat(parts[rank::2])) < 1e-5, family
            assert own_kl == pytest.approx(kl, rel=1e-3), family
            for path in W:
                assert rel(own_W[path], W[path]) < 1e-4, (family, path)


def other(kind, **changes):
    """A tiny model of any class of transformers."""
    shape = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2} | changes
    model_class = getattr(transformers, kind)
    return model_class(model_class.config_class(**shape))


def saved_model(directory, model, **more):
    """A directory of the model and a tokenizer, `more` added to its config."""
    model.save_pretrained(directory)
    tokenizer_with_bos().save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | more))
    return directory


EXPERTS = {"num_local_experts": 4, "moe_intermediate_size": 32, "head_dim": 32}
T5 = {"d_model": 64, "d_kv": 32, "num_heads": 2}
FP8 = {"quantization_config": {"quant_method": "fp8"}}
# What its config has besides, and words of the sentence that answers it
REFUSED = {
    "MixtralForCausalLM": (EXPERTS, "--targets gate_up_proj"),  # most weights are in its experts
    "GPT2LMHeadModel": ({}, "--targets nn.Linear"),  # its layers are Conv1D
    "MambaForCausalLM": ({}, "--model dt_proj --targets"),  # it uses the weight without the layer
    "BloomForCausalLM": ({}, "--model Bloom predicted"),  # no forward mode
    "T5ForConditionalGeneration": (T5, "--model T5Config"),
    "LlamaForCausalLM": (FP8, "--model quantised"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_families_that_cannot_be_trained_are_refused(kind, lab, tmp_path, capsys):
    """One sentence names what is in the way, and nothing is written."""
    changes, words = REFUSED[kind]
    saved_model(tmp_path / "model", other(kind, **changes))
    argv = f"--engine hf --model {tmp_path}/model --data {{lab}}/good.jsonl --out {tmp_path}/run"
    assert main(lab, f"{argv} --rank 4 --max-prompt-tokens 16 --max-new-tokens 8") == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err and not (tmp_path / "run").exists()
    assert err.splitlines()[-1].startswith("error: ")
    assert all(word in err.splitlines()[-1] for word in words.split()), err


def test_families_with_adapters_or_split_weights_are_refused(tmp_path):
    """Adapters in the directory, or attached by peft; tensor-parallel weights."""
    directory = saved_model(tmp_path, tiny_llama())
    (directory / "adapter_config.json").write_text("{}")
    with pytest.raises(train.UserError, match="adapters"):
        train.load_model(str(directory), "--model")
    for name, words in (("peft_config", "adapters"), ("_tp_size", "tensor")):
        model = tiny_llama()
        setattr(model, name, 2)
        with pytest.raises(train.UserError, match=words):
            train.check_targets(model, logra.find_targets(model), settings())


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
    sight = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    sight |= {"num_attention_heads": 1, "image_size": 28, "patch_size": 14}
    parts = {"text_config": family_model("Gemma3").config, "vision_config": sight}
    tokens = {"boi_token_index": 61, "image_token_index": 62, "eoi_token_index": 63}
    config = transformers.Gemma3Config(**parts, **tokens, mm_tokens_per_image=4)
    saved_model(tmp_path, transformers.Gemma3ForConditionalGeneration(config))
    model, _, _ = train.load_model(str(tmp_path), "--model")
    layers = logra.find_targets(model)
    assert len(layers) == 14 and all("language_model.layers" in path for path in layers)
    train.check_model(model, layers, [5, 6, 7, 8])


def test_families_of_experts_train_what_is_named():
    """The probe passes through a mixture narrowed to its attention, but not GPT-OSS's sinks."""
    model = other("MixtralForCausalLM", **EXPERTS)
    layers = logra.find_targets(model, ["q_proj", "o_proj"])
    train.check_model(model, layers, [5, 6, 7, 8])
    model = other("GptOssForCausalLM", **EXPERTS)
    with pytest.raises(train.UserError, match="GptOssForCausalLM has an attention"):
        train.check_model(model, logra.find_targets(model, ["q_proj"]), [5, 6, 7, 8])


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
    user, picture = {"role": "user", "content": "two"}, [{"type": "image", "url": "cat.png"}]
    told = [user, {"role": "assistant", "content": "2"}]
    for name, *rows in [
        ("good", *(row(p, str(i)) for i, p in enumerate(("a cat", "ten dogs", "four")))),
        ("blank", "", "   ", ""),
        ("noprompt", row(), {"answer": "4"}),
        ("noanswer", row(), "", {"prompt": "two"}),
        ("true", row(), row(answer=True)),
        ("infinite", row(), '{"prompt": "two", "answer": 1e999}'),
        ("notjson", row(), row(), '{"prompt": "two", '),
        ("notobject", row(), '["two", "four"]'),
        ("deep", row(), '{"prompt": ' + "[" * 100_000),
        ("half", row(), row("\ud800")),
        ("words", row(), row("two", "none at all")),
        ("chat", row([user])),
        ("turn", row(), row([{"role": "user"}])),
        ("picture", row(), row([{"role": "user", "content": picture}])),
        ("ended", row(), {"messages": told, "answer": "2"}),
    ]:
        jsonl(lab / f"{name}.jsonl", *rows)
    (lab / "binary.jsonl").write_bytes(b"\xff\xfe\x00\x80")
    (lab / "reward.py").write_text(REWARD)
    for name, template in (("strict", STRICT), ("deaf", DEAF), ("small", None)):
        tokenizer = tokenizer_with_bos()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(lab / name)
        model_with_biases("llama").save_pretrained(lab / name)
    small = transformers.AutoModelForCausalLM.from_pretrained(lab / "small")
    small.resize_token_embeddings(8)
    small.save_pretrained(lab / "small")
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

# A command line, and words of the one sentence that answers it
BAD_INPUT = """
--model no/such --data {lab}/good.jsonl -> --model no/such
--model {lab}/empty --data {lab}/good.jsonl -> --model empty
--model {lab}/llama -> --model --data
--data {lab}/good.jsonl -> --data --model
--eval-data {lab}/good.jsonl -> --eval-data --model
MODEL --data {lab}/nowhere.jsonl -> nowhere.jsonl
MODEL --data {lab}/binary.jsonl -> binary.jsonl
MODEL --data {lab}/blank.jsonl -> blank.jsonl rows
MODEL --data {lab}/noprompt.jsonl -> noprompt.jsonl:2 prompt
MODEL --data {lab}/noanswer.jsonl -> noanswer.jsonl:3 answer
MODEL --data {lab}/true.jsonl -> true.jsonl:2 finite
MODEL --data {lab}/infinite.jsonl -> infinite.jsonl:2 finite
MODEL --data {lab}/notjson.jsonl -> notjson.jsonl:3 JSON
MODEL --data {lab}/notobject.jsonl -> notobject.jsonl:2 object
MODEL --data {lab}/deep.jsonl -> deep.jsonl:2 JSON
MODEL --data {lab}/half.jsonl -> half.jsonl:2 tokenizer
MODEL --data {lab}/words.jsonl -> words.jsonl:2 number
MODEL --data {lab}/chat.jsonl -> chat.jsonl:1 template
MODEL --data {lab}/turn.jsonl -> turn.jsonl:2 content
MODEL --data {lab}/picture.jsonl -> picture.jsonl:2 content text
MODEL --data {lab}/ended.jsonl -> ended.jsonl:2 assistant
DATA --eval-data {lab}/noanswer.jsonl -> noanswer.jsonl:3 answer
DATA --template-kwargs {a -> --template-kwargs JSON
DATA --template-kwargs [1] -> --template-kwargs object
DATA --template-kwargs {"thinking":false} -> --template-kwargs thinking
DATA --model {lab}/deaf --template-kwargs {"message":1} -> --template-kwargs message
DATA --model {lab}/strict --system hush -> --system template supported
DATA --model {lab}/deaf --system hush -> --system template out
DATA --model {lab}/small -> --model 8 good.jsonl:1
DATA --max-prompt-tokens 1 -> --data --max-prompt-tokens 3
DATA --max-new-tokens 4000 -> --max-new-tokens 4016 512
DATA --eval-only -> --eval-only --eval-data
--rank 0 -> --rank 0 1
--rank 193 -> --rank 193 192
--engine hf --rank 17 --model {lab}/nowhere/model --data {lab}/good.jsonl -> --model nowhere hub
--optimizer adamw --rule sketch_sgd -> --rule --optimizer adamw
--rule nosuch -> --rule nosuch row_adam
--objective nosuch -> --objective nosuch grpo
--objective {lab}/reward.py:nosuch -> --objective reward.py:nosuch
--seed -1 -> --seed -1
--update-ratio inf -> --update-ratio inf
--temperature 0 -> --temperature 0
--eval-temperature nan -> --eval-temperature nan
--clip-low 1 -> --clip-low 1
--group-size 1 -> --group-size 2 running_mean
--advantage critic -> --advantage running_mean
--denominator groups -> --denominator constant
--optimizer galore -> --optimizer galore sketch_muon
--optimizer lora --verify-step -> --verify-step --optimizer lora
--optimizer lora --no-keep-layer-norm -> --no-keep-layer-norm lora
--engine hf --targets q_proj nonsense -> --targets nonsense o_proj
--top-p 0.9 -> --top-p
--update-rat 1e-3 -> --update-rat
train -> train
--steps many -> --steps many
--rank 1.5 -> --rank 1.5
--resume -> --resume
--reward nosuch -> --reward nosuch
--out {lab}/done -> --out done --resume
--out {lab}/good.jsonl -> --out good.jsonl
--engine hf --out {lab}/good.jsonl/run -> good.jsonl
--resume {lab}/nowhere -> nowhere
--resume {lab}/empty -> empty config.json
--resume {lab}/done --steps 2 -> --steps 2 4
--resume {lab}/done --out {lab}/new -> --resume --out
--resume {lab}/done --rank 5 -> --rank 16 5
--resume {lab}/done --optimizer sketch_muon -> --optimizer muon
--resume {lab}/done --seed 9 -> --seed 0 9
--resume {lab}/done --model {lab}/llama -> --model llama
--resume {lab}/done --targets q_proj -> --targets q_proj
--resume {lab}/torn-state -> step-4/trainer.pt
--resume {lab}/torn-model -> torn-model/step-4
--resume {lab}/torn-config -> torn-config/config.json
--resume {lab}/bare-config -> bare-config/config.json
--eval-only -> --eval-only --resume
--eval-only --resume {lab}/unsaved -> unsaved checkpoint
--eval-only --resume {lab}/done/step-3 -> step-3/config.json
--eval-only --resume {lab}/torn-state/step-4 -> step-4/trainer.pt
--eval-only --resume {lab}/done --out {lab}/done -> --out done exists
--world-size 4 -> --world-size --estimate-memory torchrun
--estimate-memory -> --estimate-memory --model
--estimate-memory --model {lab}/nowhere -> {lab}/nowhere
--estimate-memory --model {lab}/notjson.jsonl -> notjson.jsonl
--estimate-memory --model {lab}/bare-config -> bare-config/config.json
--estimate-memory --model {lab}/llama --targets nonsense -> llama/config.json --targets o_proj
--estimate-memory --model {lab}/gpt2.json -> gpt2.json Linear
--estimate-memory --model {lab}/t5.json -> t5.json CausalLM
--estimate-memory --model {lab}/fp8.json -> fp8.json quantised
"""


def snapshot(root):
    """Everything below a directory: what is there, how long, and when it was written."""
    stats = ((p, p.stat()) for p in sorted(root.rglob("*")) if "__pycache__" not in str(p))
    return [(str(p), s.st_size if p.is_file() else 0, s.st_mtime_ns) for p, s in stats]


@pytest.mark.parametrize("case", BAD_INPUT.strip().split("\n"))
def test_bad_input_is_answered_by_one_sentence(case, lab, tmp_path, monkeypatch, capsys):
    """Exit code 2, the flag, file or row at fault is named, and nothing is written."""
    for name, text in (("DATA", DATA), ("MODEL", MODEL), ("{lab}", str(lab))):
        case = case.replace(name, text)
    argv, words = case.split(" -> ")
    monkeypatch.chdir(tmp_path)  # where runs/ would be
    before = snapshot(lab)
    assert train.main(argv.split()) == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    (sentence,) = errors(err)
    assert sentence == err.splitlines()[-1]
    assert all(word in sentence for word in words.split()), sentence
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
    records[-1] |= {"greedy": 0.75, "eval_interval": [0.7, 0.9]}
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"config": train.dataclasses.asdict(config)}))
    jsonl(path / "metrics.jsonl", *records)
    return str(path)


def test_the_state_of_a_run_on_a_gpu_is_read_without_one(tmp_path):
    """Moments and adapters are saved from where they are; each rank reads them into the host."""
    parts = ("step", "mismatch", "advantage", "prompts", "optimizer", "weights")
    with mock.patch("torch.serialization.location_tag", lambda storage: "cuda:0"):
        torch.save(dict.fromkeys(parts, torch.ones(3)), tmp_path / "trainer.pt")
    assert train.load_state(tmp_path)["optimizer"].tolist() == [1, 1, 1]


def summarized(capsys, *paths):
    """What --summarize prints: the JSON object, and the lines before it."""
    assert train.main(["--summarize", *map(str, paths)]) == 0
    out, err = capsys.readouterr()
    *lines, last = out.splitlines()
    assert not err
    return json.loads(last), lines


def test_summary_of_runs_is_that_of_hand_made_ones(tmp_path, capsys):
    """Mean and sd (n - 1) of a group, what a run took, who collapsed, and how groups are named."""
    paths = [
        made_run(tmp_path / "a", 4, (0.2, 0.9, 0.8)),
        made_run(tmp_path / "b", 4, (0.1, 0.8, 0.39), optimizer="adamw", lr=3e-4),
        made_run(tmp_path / "c", 5, (0.3, 0.9, 0.5)),
        made_run(tmp_path / "d", 6, (0.1, 0.3, 0.5)),
    ]
    found, lines = summarized(capsys, *paths)
    assert [run["out"] for run in found["runs"]] == paths
    first = {"optimizer": "row_adam", "seed": 4, "steps": 2, "accuracy_before": 0.2}
    first |= {"accuracy": 0.8, "greedy": 0.75, "collapsed": False, "seconds": 5.5, "peak_gib": 3.0}
    assert found["runs"][0] == {"out": paths[0], **first}
    words = f"{paths[1]} adamw 4 2 0.100 0.390 0.750 yes 5.500 3.000"
    assert words.split() in [line.split() for line in lines]
    a, b = found["groups"]  # a: .8, .5, .5, so the variance is (.2^2 + .1^2 + .1^2) / 2
    assert (a["group"], b["group"]) == ("optimizer=row_adam lr=1e-06", "optimizer=adamw lr=0.0003")
    assert (a["n"], a["seeds"], a["collapsed"]) == (3, [4, 5, 6], 0)
    assert [a["mean"], a["sd"], a["mean_then"]] == pytest.approx([0.6, 0.03**0.5, 0.6])
    assert [b[key] for key in ("n", "mean", "sd", "collapsed")] == [1, 0.39, None, 1]
    assert b["eval_accuracy"] == [[0, 0.1], [1, 0.8], [2, 0.39]]
    assert a["kl"] == {"updates": 0} and not any("realised KL" in line for line in lines)
    plots = [line[6:] for line in lines if "|" in line]
    assert len(plots) == 20 and plots[8] == "b" * 60  # the reward, .1; the later on top
    # Accuracy a: .2, .7, .6 in the mean.  b: .1, .8, .39; between the evaluations a straight line
    assert plots[10 + 2].strip() == "b" * len(plots[12].strip()) and plots[10 + 1] == ""
    assert plots[10 + 8][0] == "b" and plots[10 + 7][0] == "a" and plots[10 + 3].endswith("a")


def test_summary_tells_accuracy_at_equal_seconds_and_kl_over_prediction(tmp_path, capsys):
    """By hand: an update of 2.5 s, which ends at 0 (no dash), against one of 5; ratios .5, 1, 2."""
    quick, kl = made_run(tmp_path / "quick", scores=(0.2, 0.0)), tmp_path / "kl"
    made_run(kl, scores=(0.1, 0.5, 0.9, 0.9))
    records = [{"step": i, "seconds": {"train": 2.0}, "peak_gib": 1.0} for i in range(4)]
    for record, p, realised in zip(records, (2, 3, 2, 1), (1, 3, 4, None), strict=True):
        record |= {"update": 1, "kl_predicted": p, "kl_realised": realised, "budget": 2.0}
    jsonl(kl / "metrics.jsonl", *records)
    slow = Path(made_run(tmp_path / "slow", scores=(0.1, 0.9), lr=1.0), "metrics.jsonl")
    slow.write_text(slow.read_text().replace('"train": 0.5', '"train": 3.0'))  # 5 s: half is done
    found, lines = summarized(capsys, quick, kl, tmp_path / "slow")
    quick, kl, slow = found["groups"]
    assert quick["mean"] == quick["mean_then"] == 0 and quick["collapsed"] == 1
    assert kl["mean_then"] is None and slow["mean_then"] == pytest.approx(0.5)
    wanted = {"updates": 3, "median": 1.0, "5%": 0.55, "95%": 1.9, "worst": 2.0}
    assert kl["kl"] == pytest.approx(wanted | {"within": 1 / 3, "largest": 2.0})
    row = "b 3 1.000 0.550 1.900 2.000 0.333 2.000"
    assert row in [" ".join(line.split()) for line in lines]


def test_runs_without_held_out_rows_are_summarized_by_reward(tmp_path, capsys):
    """No accuracy, nobody known to have collapsed, one curve; a reward below 0 is in its place."""
    updates = [
        {"step": i, "update": i, "reward": -3.0, "seconds": {}, "peak_gib": 1} for i in (1, 2)
    ]
    jsonl(Path(made_run(tmp_path / "run"), "metrics.jsonl"), *updates)
    found, lines = summarized(capsys, tmp_path / "run")
    assert {found["runs"][0][k] for k in ("accuracy_before", "accuracy", "collapsed")} == {None}
    assert found["groups"][0]["group"] == "all runs" and found["groups"][0]["mean"] is None
    assert [line[6:] for line in lines if "|" in line] == [""] * 9 + ["a" * 60]


def test_runs_that_are_not_finished_are_named_and_left_out(tmp_path, capsys):
    """One sentence each on stderr; exit code 0 as long as one run is left, else 2."""
    good = made_run(tmp_path / "good")
    lines = Path(good, "metrics.jsonl").read_text().splitlines(keepends=True)
    bad = {
        "torn": ("metrics.jsonl", "".join(lines)[:-9]),
        "short": ("metrics.jsonl", "".join(lines[:3])),  # killed in step 2
        "late": ("metrics.jsonl", "".join(lines[:4])),  # before it was evaluated
        "empty": ("metrics.jsonl", ""),
        "broken": ("metrics.jsonl", "{\n"),
        "foreign": ("config.json", '{"config": {"colour": 1}}'),
    }
    for name, (file, text) in bad.items():
        Path(made_run(tmp_path / name), file).write_text(text)
    paths = [str(tmp_path / name) for name in (*bad, "gone")]
    assert train.main(["--summarize", *paths, good]) == 0
    out, err = capsys.readouterr()
    assert [run["out"] for run in json.loads(out.splitlines()[-1])["runs"]] == [good]
    assert all(path in line for path, line in zip(paths, err.splitlines(), strict=True))
    assert err.count("is not finished: step 1 of 2") == 3
    assert train.main(["--summarize", *paths]) == 2
    out, err = capsys.readouterr()
    assert not out and err.splitlines()[len(paths)].startswith("error: --summarize: no finished")


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


def test_rows_of_any_shape_are_read(tmp_path):
    """Only a newline ends a row; blank lines, CRLF and a byte order mark are none; all names."""
    chat, long = [{"role": "user", "content": "двa 🐈"}], "a\u2028b\x85c\u2029" * 20_000
    rows = [{"messages": chat}, {"prompt": None, "question": "q"}, {"prompt": long}]
    rows += [{"prompt": "p", "messages": chat, "question": "q"}]
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({**r, "answer": 1.5}, ensure_ascii=False) for r in rows]
    path.write_bytes(("\ufeff" + "\r\n\r\n".join(lines)).encode())
    found = train.read_rows(str(path))
    assert [where for where, _ in found] == [f"{path}:{i}" for i in (1, 3, 5, 7)]
    assert [r["prompt"] for _, r in found] == [chat, "q", long, "p"]


def test_long_prompts_are_left_out_and_counted(capsys):
    """What is kept is whole: nothing is cut (7)."""
    tokenizer = tokenizer_with_bos()
    rows = [("at", row(p)) for p in ("a cat", "a cat sat on a mat . " * 9, "four", "ten dogs " * 9)]
    kept = train.load_examples(rows, tokenizer, 8, "--data")
    assert [example.row["prompt"] for example in kept] == ["a cat", "four"]
    assert [example.ids for example in kept] == [tokenizer.encode(p) for p in ("a cat", "four")]
    assert "--data: 2 of 4" in "".join(capsys.readouterr())


def test_a_prompt_is_the_template_of_its_turns():
    """--system goes before what has no system turn of its own, and --template-kwargs reach the
    template; without one there is a blank line between.  All begin with one <s> (4)."""
    tokenizer = tokenizer_with_bos()
    plain = functools.partial(tokenizer.encode, add_special_tokens=False)
    ids = train.encode(tokenizer, "a cat", "at", "ten dogs")
    assert ids == tokenizer.encode("ten dogs\n\na cat") == [0, *plain("ten dogs a cat")]
    assert train.encode(tokenizer, "<s>ten dogs\n\na cat", "at") == ids
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
    """Those of the generation config, the model's own and the tokenizer's, if they exist (2)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(models["meddling"])
    tokenizer = tokenizer_with_bos()
    assert train.end_tokens(model, tokenizer) == [1, 7, 9]
    tokenizer.eos_token, model.config.eos_token_id = "<unk>", 8
    assert train.end_tokens(model, tokenizer) == [1, 2, 7, 8, 9]
    model.generation_config.eos_token_id = [-1, 99_999]
    assert train.end_tokens(model, tokenizer) == [2, 8]


def test_every_epoch_has_every_row_once_in_an_order_of_its_own():
    """The order follows from the seed and the epoch; the third step is in two epochs."""
    rows = [train.Example([i], {}, "at") for i in range(50)]

    def drawn(seed):
        draw = functools.partial(
            train.draw_prompts, rows, train.Config(seed=seed, prompts_per_step=20)
        )
        return [ids[0] for step in range(5) for _, ids, _ in draw(step)]

    first, second, other = drawn(0)[:50], drawn(0)[50:], drawn(1)[:50]
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


def moments(state):
    """{what: tensor} of an optimizer's state_dict()."""
    found = {f"{p}.{key}": x for p, of_one in state["state"].items() for key, x in of_one.items()}
    return {name: x for name, x in found.items() if torch.is_tensor(x)}


def assert_same_tensors(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def assert_same_run(a, b, step):
    """Two runs have one journal, and at the end the same weights, rounded or not, and state."""
    assert journal(a, evaluations=True) == journal(b, evaluations=True)
    a, b = (run / f"step-{step}" for run in (a, b))
    assert_same_tensors(tensors(a), tensors(b))
    a, b = train.load_state(a), train.load_state(b)
    assert_same_tensors(a["weights"], b["weights"])
    assert_same_tensors(moments(a["optimizer"]), moments(b["optimizer"]))
    assert a["optimizer"]["update"] == b["optimizer"]["update"]
    assert (a["mismatch"], a["advantage"]) == (b["mismatch"], b["advantage"])


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
    load = transformers.AutoModelForCausalLM.from_pretrained
    before, after = (load(run / f"step-{n}").state_dict() for n in (0, 4))
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert len(changed) == 14 and all(name.endswith("proj.weight") for name in changed)
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
    """trainer.pt of four steps at once, and of 2 steps and 2 more, which are the same run; and the
    journal."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert main(lab, f"{argv} --steps 4 --out {whole}") == 0
    assert main(lab, f"{argv} --steps 2 --out {halves}") == 0
    assert main(lab, f"--resume {halves} --steps 4") == 0
    assert_same_run(whole, halves, 4)
    return *(train.load_state(run / "step-4") for run in (whole, halves)), journal(whole)


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_two_steps_and_two_more_are_four(lab, tmp_path, name):
    """Resume is exact; a tied bfloat16 model stays one, with float32 masters in trainer.pt (42)."""
    state, _, lines = whole_and_halves(lab, tmp_path, f"{TRAIN} --model {{lab}}/{name}")
    assert all(line["alpha"] > 0 for line in lines) and state["optimizer"]["update"] == 4
    assert len(moments(state["optimizer"])) == 14
    assert bool(state["weights"]) == (name == "qwen2")
    before, after = tensors(lab / name), tensors(tmp_path / "whole" / "step-4")
    assert before.keys() == after.keys()
    assert {W.dtype for W in after.values()} == {W.dtype for W in before.values()}
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    for path, W in state["weights"].items():  # from the export alone it would go on from elsewhere
        rounded = after[f"{path}.weight"]
        assert W.dtype == torch.float32 and rounded.dtype == torch.bfloat16
        assert torch.equal(W.bfloat16(), rounded) and not torch.equal(W, rounded.float())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "step-4")
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == ("lm_head.weight" not in after) == (name == "qwen2")
    assert model.dtype == before["model.embed_tokens.weight"].dtype


def test_a_run_of_one_seed_is_one_run(lab, tmp_path):
    """Same seed, same metrics and weights; another seed, another run (30)."""
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert main(lab, f"{TRAIN} --steps 2 --seed {seed} --out {tmp_path}/{name}") == 0
    assert_same_run(tmp_path / "a", tmp_path / "b", 2)
    assert journal(tmp_path / "a") != journal(tmp_path / "c")


@pytest.mark.parametrize("left", ["everything", "step-0", "half"])
def test_a_resumed_run_repeats_and_loses_nothing(lab, tmp_path, left):
    """One that is finished, one that stopped before its first save, and what a kill left half
    written: neither a checkpoint under another name nor half a line of the journal counts."""
    run = tmp_path / "run"
    shutil.copytree(lab / "done", run)
    if left == "everything":
        shutil.rmtree(run / "step-0")  # is not made again
    elif left == "step-0":
        shutil.rmtree(run / "step-2")
        shutil.rmtree(run / "step-4")
    else:
        (run / "step-4").rename(run / ".step-4.partial")
        (run / ".step-4.partial" / "trainer.pt").unlink()
        with open(run / "metrics.jsonl", "a") as file:
            file.write('{"step": 5, "rew')
    before = snapshot(run / "step-4") if left == "everything" else []
    assert main(lab, f"--resume {run}") == 0
    assert_same_run(run, lab / "done", 4)
    assert (run / "samples.jsonl").read_text() == (lab / "done" / "samples.jsonl").read_text()
    assert not list(run.glob(".step-*"))
    if left == "everything":
        assert snapshot(run / "step-4") == before and not (run / "step-0").exists()


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


# ------------------------------------------------------------------------------------------------
# Rewards
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer, number",
    [(18, 18), (1e22, 10**22), ("7 <<3+4=7>>\n#### 18", 18), ("so 5 \\boxed{7}", 7), ("5%", 5)]
    + [(x, None) for x in ("3\\sqrt{2}", "(3, 4)", "3+2i", "5 or 7", "1 1/2", "- 18", 10**101)],
)
def test_the_number_of_an_answer(answer, number):
    """What marks nothing is read as strictly as a box: completions would be paid for a part."""
    assert train.wanted_number({"answer": answer}) == number


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


def test_a_state_that_is_not_whole_is_refused(tmp_path):
    """One sentence that names the file and what it lacks, not a KeyError."""
    torch.save({"step": 1, "weights": {}}, tmp_path / "trainer.pt")
    with pytest.raises(train.UserError, match="trainer.pt cannot be read: it has no advantage"):
        train.load_state(tmp_path)


def test_other_prompts_are_not_resumed_on(lab, tmp_path, capsys):
    """The same path with another row would be another run from the next step on."""
    shutil.copy(lab / "good.jsonl", tmp_path / "rows.jsonl")
    argv = f"{DATA} --data {tmp_path}/rows.jsonl --steps 1 --rank 8 --prompts-per-step 2"
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
    argv = f"{argv} --prompts-per-step 2 --group-size 2 --save-every 1 --eval-every 2 --rank 8"
    assert main(lab, f"{argv} --out {tmp_path}/run") == 2
    assert [r["step"] for r in journal(tmp_path / "run", evaluations=True)] == [0, 1, 2]
    (tmp_path / "fails").unlink()
    assert main(lab, f"--resume {tmp_path}/run") == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    made = [r for r in map(json.loads, lines) if "eval_accuracy" in r]
    assert [r["step"] for r in made] == [0, 2] and "greedy" in made[1]


# fmt: off
NUMBERS = [  # what a text says, and the number it ends with
    ("The answer is 18.", 18), ("First 1. Then 2.", 2), ("none", None), ("007", 7), ("1, 2, 3", 3),
    ("1,234,567.5", "1234567.5"), ("12,34", None), ("1,2345", None), ("1234,567", None),
    ("1.234.567", None), (".5", "1/2"), ("so...5", None), ("3/4.", "3/4"), ("1/0", None),
    ("12/10/2020", None),
    (r"-\frac{3}{4}", "-3/4"), (r"$\dfrac{-3}{4}$", "-3/4"), (r"3\frac{1}{2}", None),
    (r"\frac{1}{2}3", 3), ("1.5e-3", "3/2000"), ("1e9999", None), ("10^3", None), ("2*3", None),
    ("3:30", None), ("−5", -5), ("x=-5", -5), ("- 5", 5), ("10-5", 5), ("40%-50%", 50), ("--5", 5),
    ("£1,234.50", "1234.5"), ("-$5", -5), (r"-\$5", -5), ("$-5", -5), (r"50\%", 50), ("18km/h", 18),
    (r"18\text{ cm}^2", 18), ("18 cm^{2}", 18), ("18 m2", 18), ("x2", None), ("km/2", None),
    ("**Answer: 5.**", 5), ("1{,}234", None), ("１８", None), ("答案是-18", -18), ("so 18\n\nDone", 18),
    (r"so $\boxed{\$18}$ of 20.", 18), (r"\boxed{\text{18 cm}^2}", 18), (r"\boxed{x = 5}", 5),
    (r"\boxed{1} then \boxed{-2}", -2), (r"\boxed{\boxed{5}}", 5), (r"5 \boxed{none}", None),
    (r"\boxed{2 + 3}", None), (r"\boxed{\sqrt{3}}", None), (r"\boxed{5^x}", None),
    (r"\boxed{- 18}", None), (r"\boxed{-(18)}", None), ("#### $1,234 each\n5 and 6", 1234),
    ("#### - 18", None), ("#### 18 (of 20)", None), ("#### Step 2\nso 18", 18),
    ("#### 18\n\\boxed{19}", 19), ("\\boxed{19}\n#### 18", 18),
]
# fmt: on


@pytest.mark.parametrize("text, number", NUMBERS, ids=range(len(NUMBERS)))
def test_the_number_of_a_text(text, number):
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


MINE = """
from __future__ import annotations
from dataclasses import dataclass
seen = []
@dataclass
class Seen:
    ids: list
def both(completion, row, *, token_ids, finish_reason):
    assert completion == "a cat"
    seen.append(row["more"])
    row["more"] = "changed"
    return {"stop": 1, "length": 2}[finish_reason] + 10 * len(Seen(token_ids).ids)
def one(completion, row, finish_reason="none", other=0.5):
    return {"stop": 1, "length": 2}[finish_reason] + other
def other(completion, row):
    return len(seen)
"""


def sampled(ids=(), finished=True, **more):
    """A sample of row 7 of a file."""
    return logra.Sample([1], ids, [], finished, row=train.Example([1], row(**more), "rows.jsonl:7"))


def test_a_reward_gets_what_it_asks_for_by_name(tmp_path):
    """token_ids and finish_reason, each alone or both, are the sample's own, and the row is a copy.
    Files may be called alike, and the functions of a file share what is global in it."""
    tokenizer = tokenizer_with_bos()
    ids, (first, second) = tokenizer.encode("a cat"), (tmp_path / "a", tmp_path / "b")
    for directory in (first, second):
        directory.mkdir()
        (directory / "mine.py").write_text(MINE)
    rewards = {name: train.load_reward(f"{first}/mine.py:{name}") for name in ("both", "one")}
    for finished in (True, False):
        sample = sampled(ids, finished, more="as it was")
        for name, more in (("both", 10 * len(ids)), ("one", 0.5)):
            found = train.score(rewards[name], tokenizer, 9, sample)
            assert found == (1 if finished else 2) + more
        assert sample.row.row["more"] == "as it was"
    for directory, calls in ((first, 2), (second, 0)):
        assert train.load_reward(f"{directory}/mine.py:other")("", {}) == calls


@pytest.mark.parametrize(
    "source, words",
    [
        ("def f(a, S, state): 0", "TypeError"),
        ("def f(S): 0", "TypeError"),
        ("def f(S, state, *, speed): 0", "TypeError.*speed"),
        ("def f(state, S): 0", r"called as f\(S, state\)"),
        ("def f(gradient, S): 0", r"called as f\(S, state\)"),
        ("f = 3", "f is not a function"),
        ("def g(S, state): 0", "no attribute 'f'"),
        ("def f(S, state:", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(tmp_path, source, words):
    """One sentence, with the flag and the function."""
    (tmp_path / "mine.py").write_text(source + "\n")
    with pytest.raises(train.UserError, match=f"^--rule .*/mine.py:f cannot be loaded: .*{words}"):
        train.load_function("--rule", f"{tmp_path}/mine.py:f", {}, ("S", "state"), ("bias",))


@pytest.mark.parametrize("name", ["f", "mine.py:f", "mine.txt:f"])
def test_a_function_that_is_not_there_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text("def f(S, state): 0\n")
    with pytest.raises(train.UserError, match=f"--rule {name}: not a, b, and no file.py:function"):
        train.load_function("--rule", name, {"a": len, "b": abs}, ("S", "state"))


def test_math_verify_gets_the_answer_first_and_no_time_limit(monkeypatch):
    """Its own limits would end ours; what takes too long earns nothing, and stops no run."""
    asked = []

    def parse(text, parsing_timeout):
        assert parsing_timeout is None
        return [text]

    def verify(gold, found, timeout_seconds):
        asked.append((gold, found, timeout_seconds))
        time.sleep(9 * (found == [""]))
        return gold == found

    package = types.SimpleNamespace(parse=parse, verify=verify, __spec__="installed")
    monkeypatch.setitem(sys.modules, "math_verify", package)
    reward = train.load_reward("math_verify")
    assert reward(r"\boxed{3\sqrt{2}}", row(answer=r"3\sqrt{2}")) == 1
    assert reward("so 18", row(answer="so #### 18")) == 0
    assert asked[0] == ([r"\boxed{3\sqrt{2}}"], [r"\boxed{3\sqrt{2}}"], None)
    assert asked[1] == (["so #### 18"], ["so 18"], None)
    start = time.monotonic()
    assert train.score(reward, tokenizer_with_bos(), 0.1, sampled()) == 0
    assert time.monotonic() - start < 3


def test_math_verify_that_is_not_installed_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(train.UserError, match="--reward math_verify .*pip install math-verify"):
        train.load_reward("math_verify")


def test_a_reward_that_takes_too_long_or_exits_is_stopped():
    """Even one that catches every Exception; the next call has its time again."""
    before = signal.getsignal(signal.SIGALRM)

    def endless(completion, row):
        end = time.monotonic() + 5
        while time.monotonic() < end:
            try:
                time.sleep(0.01)
            except Exception:  # noqa: BLE001, S112
                continue
        return 0.0

    start, tokenizer = time.monotonic(), tokenizer_with_bos()
    for _ in range(2):
        with pytest.raises(train.UserError, match="--reward-seconds 0.1.*rows.jsonl:7"):
            train.score(endless, tokenizer, 0.1, sampled())
    assert time.monotonic() - start < 3
    with pytest.raises(train.UserError, match="SystemExit.*rows.jsonl:7"):
        train.score(lambda completion, row: sys.exit(0), tokenizer, 60, sampled())
    assert train.score(lambda completion, row: 2, tokenizer, 60, sampled()) == 2
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert signal.getsignal(signal.SIGALRM) == before


@pytest.mark.parametrize(
    "answer, words", [("bad", "KeyError"), ("nan", "nan"), ("slow", "--reward-seconds")]
)
def test_a_reward_that_fails_stops_the_run_and_names_the_row(lab, tmp_path, capsys, answer, words):
    """Exit code 2; the steps before it are saved and the run can go on."""
    bad = train.shuffled(3, "order", 0, 0)[2]  # the row of step 3
    rows = [row(p, answer if i == bad else "1") for i, p in enumerate(("a cat", "ten", "four"))]
    jsonl(tmp_path / "rows.jsonl", *rows)
    run = tmp_path / "run"
    argv = f"{TRAIN} --prompts-per-step 1 --data {tmp_path}/rows.jsonl --steps 4 --save-every 100"
    argv += " --reward-seconds 0.2"
    assert main(lab, f"{argv} --out {run}") == 2
    out, err = capsys.readouterr()
    (sentence,) = errors(err)
    assert "Traceback" not in out + err
    assert all(word in sentence for word in (words, f"rows.jsonl:{bad + 1}", "step-2")), sentence
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


class Dice:
    """A generator of answers [seed % 7], which notes what it was asked."""

    def __init__(self):
        self.asked = []

    def generate(self, prompts, seeds, max_new_tokens, temperature):
        self.asked += [(seed, temperature) for seed in seeds]
        return [logra.Sample(p, [s % 7], [-1.0], True) for p, s in zip(prompts, seeds, strict=True)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("rows, k", [(7, 4), (2, 1), (1, 3)])
def test_every_row_is_evaluated_once_on_any_number_of_ranks(monkeypatch, ranks, rows, k):
    """What the ranks add up: each row with its samples, none twice, drawn by row and sample; the
    paper's penalty of -0.01 is a wrong answer."""
    seeds = [[logra.stable_seed("eval", 0, i, j) for j in range(k)] for i in range(rows)]
    right = torch.tensor(seeds) % 7 < 2
    share, passed = right.double().mean().item(), right.any(1).double().mean().item()
    examples = [train.Example([i], {}, "at") for i in range(rows)]
    reward = lambda s: 1.0 if s.completion[0] < 2 else -0.01
    dice, sums = Dice(), torch.zeros(3, dtype=torch.float64)
    monkeypatch.setattr(logra, "world", lambda: ranks)
    monkeypatch.setattr(logra, "together", contextlib.nullcontext)
    monkeypatch.setattr(logra, "rank_sum", sums.add_)  # so that the last rank has the whole
    for rank in range(ranks):
        monkeypatch.setattr(logra, "my_rank", lambda rank=rank: rank)
        found, samples = train.evaluate(dice, examples, reward, train.Config(eval_samples=k), 0.7)
        assert all(s.reward == reward(s) for s in samples)
    assert (found["rows"], found["samples_per_row"]) == (rows, k)
    assert (found["mean_at_k"], found["pass_at_k"]) == pytest.approx((share, passed))
    assert found["interval"] == pytest.approx(train.wilson(share, rows))
    assert sorted(dice.asked) == sorted((seed, 0.7) for row in seeds for seed in row)


@pytest.mark.parametrize("reward, interval", [(0.1, True), (1.0, True), (1.1, False)])
def test_rewards_above_one_have_no_interval(reward, interval):
    """And fractions are as exact as float64."""
    examples = [train.Example([i], {}, "at") for i in range(50)]
    found, _ = train.evaluate(Dice(), examples, lambda s: reward, train.Config(), 0.7)
    assert found["mean_at_k"] == pytest.approx(reward, rel=1e-14)
    assert found["interval"] == (pytest.approx(train.wilson(reward, 50)) if interval else None)


def test_eval_only_answers_and_writes_nothing(lab, tmp_path, monkeypatch, capsys):
    """Of a run, of one of its checkpoints (what that run measured there), and of a model."""
    monkeypatch.chdir(tmp_path)
    before = snapshot(lab)

    def answer(argv):
        assert main(lab, f"--eval-only {argv}") == 0
        *_, line, found = capsys.readouterr().out.splitlines()
        return json.loads(found), line

    measured = [r for r in journal(lab / "done", evaluations=True) if "eval_rows" in r]
    for where, record in zip(("step-0", "step-2", "."), measured, strict=True):
        found, line = answer(f"--resume {{lab}}/done/{where}")
        assert found["mean_at_k"] == record["eval_accuracy"] and found["rows"] == 6
        assert line.startswith(f"step {record['step']} | held-out accuracy")
    argv = f"{MODEL} --eval-data {{lab}}/good.jsonl --eval-samples 4 --reward exact"
    found, line = answer(argv)
    assert list(found) == ["rows", "samples_per_row", "mean_at_k", "pass_at_k", "interval"]
    assert (found["rows"], found["samples_per_row"]) == (3, 4) and "pass@4" in line
    assert not list(tmp_path.iterdir())
    assert answer(f"{argv} --out {tmp_path}/out") == (found, line) and snapshot(lab) == before
    [record] = journal(tmp_path / "out", evaluations=True)
    names = ("eval_rows", "eval_samples", "eval_accuracy", "eval_pass_at_k", "eval_interval")
    assert [record[name] for name in names] == list(found.values())
    assert (tmp_path / "out" / "samples.jsonl").exists()


def test_eval_only_sees_the_weights_that_rounding_would_lose(lab, tmp_path, monkeypatch):
    """A checkpoint in bfloat16 is evaluated with the float32 weights of trainer.pt."""
    assert main(lab, f"{TRAIN} --model {{lab}}/qwen2 --steps 2 --out {tmp_path}/run") == 0
    masters, seen = train.load_state(tmp_path / "run" / "step-2")["weights"], {}
    generate = logra.HFGenerator.generate

    def noted(self, *args):
        seen.update({path: self.model.get_submodule(path).weight.clone() for path in masters})
        return generate(self, *args)

    monkeypatch.setattr(logra.HFGenerator, "generate", noted)
    assert main(lab, f"--eval-only --resume {tmp_path}/run --eval-data {{lab}}/good.jsonl") == 0
    assert_same_tensors(seen, masters)


def test_accuracies_have_their_interval_on_screen_and_in_the_journal(lab, tmp_path, capsys):
    """Before and after: sampled, pass@k and greedy."""
    (tmp_path / "mine.py").write_text("def f(text, row):\n    return text.count('=') / 9\n")
    argv = f"{SMALL} --reward {tmp_path}/mine.py:f --eval-samples 2 --steps 2 --out {tmp_path}/run"
    assert main(lab, argv) == 0
    out = capsys.readouterr().out
    records = [r for r in journal(tmp_path / "run", evaluations=True) if "eval_rows" in r]
    assert [r["step"] for r in records] == [0, 2]
    for r in records:
        shares = [r[name] for name in ("eval_accuracy", "eval_pass_at_k", "greedy")]
        assert len({*shares}) == 3
        intervals = [train.wilson(share, 6) for share in shares]
        assert [r["eval_interval"], r["greedy_interval"]] == intervals[::2]
        texts = (f"{p:.3f} [{low:.3f}, {high:.3f}]" for p, (low, high) in zip(shares, intervals))
        line = "step {} | held-out accuracy {} | pass@2 {} | greedy {}".format(r["step"], *texts)
        assert line in out


def test_last_screen_pairs_the_same_prompt_before_and_after(tmp_path, capsys):
    """The first evaluation's answers and the last one's, and both accuracies."""
    run = Path(made_run(tmp_path / "run", scores=(0.2, 0.9, 0.8)))
    answers = [(step, prompt, f"{prompt}{step}") for step in (0, 1, 2) for prompt in "pq"]
    keys = ("step", "prompt", "completion")
    jsonl(run / "samples.jsonl", *(dict(zip(keys, answer, strict=True)) for answer in answers))
    (run / "step-2").mkdir()
    train.report(run, {"start": 1.0, "train": 2.5})
    lines = capsys.readouterr().out.splitlines()
    assert "held-out accuracy 0.200 -> 0.800 [0.700, 0.900]" in lines
    assert lines[-4:-1] == [
        "held-out prompt 'p': before 'p0', after 'p2'",
        "held-out prompt 'q': before 'q0', after 'q2'",
        "seconds: start 1.0, train 2.5",
    ]
    assert "greedy            0.250 -> 0.750" in lines and lines[-1] == f"saved in {run}/step-2"


@pytest.mark.parametrize(
    "argv",
    ["--advantage running_mean --group-size 1", "--denominator constant", "--mask-truncated"],
)
def test_the_objectives_run_and_resume(lab, tmp_path, argv):
    """2 steps and 2 more are 4, to the bit: the running mean is in the checkpoint."""
    *states, lines = whole_and_halves(lab, tmp_path, f"{TRAIN} --max-new-tokens 40 {argv}")
    assert any(line["alpha"] > 0 for line in lines)
    a, b = (state["advantage"] for state in states)
    assert a == b and ("baseline" in a) == ("running_mean" in argv)


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
    started, updates = [], []

    class Watched(logra.VLLMGenerator):
        def __init__(self, *args):
            super().__init__(*args)
            started.append(self)

        def sync(self, factors, update):
            updates.append(update)
            super().sync(factors, update)

    monkeypatch.setattr(logra, "VLLMGenerator", Watched)
    argv = f"{SMALL} --engine vllm --steps 4 --kv-gib 0.05 {flags}"
    assert main(lab, f"{argv} --out {tmp_path}/run") == 0
    engine = started[0].call("sync_read")
    first, last = (tensors(tmp_path / "run" / f"step-{n}") for n in (0, 4))
    dtype = torch.bfloat16 if "bfloat16" in flags else torch.float32
    assert len(engine) == 14 and len(started) == 1
    for path, W in engine.items():
        assert torch.equal(W, last[f"{path}.weight"].to(dtype))
        assert not torch.equal(W, first[f"{path}.weight"].to(dtype))
    factors = not any(flag in flags for flag in ("full", "adamw", "lora"))
    sent = sum(2 * 16 * len(W) if factors else 4 * W.numel() for W in engine.values())
    times = 1 + ("verify" in flags)  # what is taken back is a second factor of each update
    assert updates == sorted([*range(4)] * times if factors else [])
    assert [line["sync_bytes"] for line in journal(tmp_path / "run")] == [sent * times] * 4
    assert all(line["kl_realised"] > 0 for line in journal(tmp_path / "run"))


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
    assert_same_run(tmp_path / "run", tmp_path / "whole", 4)


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
def test_a_killed_run_resumes_to_the_same_bits(lab, tmp_path):
    """SIGKILL, resume, Ctrl-C, resume: metrics and weights are those of an undisturbed run (42)."""
    argv = f"{TRAIN} --engine vllm --kv-gib 0.05 --eval-data {{lab}}/good.jsonl --eval-every 5"
    argv = f"{argv} --steps 40".format(lab=lab).split()
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert train.main([*argv, "--out", str(whole)]) == 0

    killed = launch(*argv, "--out", run)
    wait_for_step(run, 3, killed)
    killed.kill()
    killed.communicate()
    assert not (run / "step-40").exists()

    interrupted = launch("--resume", run)
    wait_for_step(run, 12, interrupted)
    interrupted.send_signal(signal.SIGINT)
    _, err = interrupted.communicate(timeout=300)
    assert interrupted.returncode == 130 and not (run / "step-40").exists()
    assert "Traceback" not in err and err.count("interrupted") == 1
    last = [line for line in err.splitlines() if line.strip()][-1]
    assert last.startswith("interrupted") and f"--resume {run}" in last

    assert train.main(["--resume", str(run)]) == 0
    assert_same_run(run, whole, 40)
    assert (run / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()


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
# The README: its scripts run, its flags and functions exist
# ------------------------------------------------------------------------------------------------


README = (HERE / "README.md").read_text()


def script(name):
    """Write the Python block of the README that begins with this file's name, and run it."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (text,) = (block for block in blocks if block.startswith(f"# {name}"))
    Path(name).write_text(text)
    return types.SimpleNamespace(**runpy.run_path(name))


def test_flags_and_functions_of_the_readme_exist():
    """What was renamed or has moved would lead astray."""
    ours = {train.dashed(f.name) for f in train.dataclasses.fields(train.Config)}
    ours |= {"--no" + name.removeprefix("-") for name in ours} | {"--help"}
    others = {"--nproc-per-node", "--extra-index-url"}
    found = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert len(found) > 30 and found <= ours | others, found - ours - others
    files = re.findall(r"\]\(([^#:)]+)\)", README)
    assert files and all((HERE / file).exists() for file in files), files
    loop = README.split("```python\n")[1].split("```")[0]
    code = "\n".join(line.split("#")[0] for line in loop.splitlines())
    places = {"optimizer": logra.LoGRA, "control": logra.KLControl}
    places |= {"generator": logra.VLLMGenerator, "": logra}
    called = re.findall(r"(?:(\w+)\.)?(\w+)\(", code)
    called = [(owner, name) for owner, name in called if name not in ("range", "draw")]
    assert len(called) == 8
    for owner, name in called:
        assert hasattr(places[owner], name), (owner, name)


def test_functions_of_the_readme_are_what_they_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    score, mine = script("my.py").score, script("mine.py")
    assert [score(text, {"answer": "6 * 3 #### 18"}) for text in ("it is 18", "17")] == [1.0, 0.0]
    rewards = torch.tensor([[1.0, 0, 0, 1], [3, 0, 0, 0]], dtype=torch.float64)
    others = (rewards.sum(1, keepdim=True) - rewards) / 3
    assert apart(mine.rloo(rewards), rewards - others) < 1e-12
    S, state = torch.randn(5, 3), {}
    assert apart(mine.row_adagrad(S, state), S / S.square().mean(1).sqrt()[:, None]) < 1e-6
    D = mine.row_adagrad(2 * S, state)
    assert apart(D, 2 * S / (5 * S.square().mean(1)).sqrt()[:, None]) < 1e-6
    old = [torch.zeros(2), torch.zeros(3)]
    far = [torch.tensor([0.1, 0.3]), torch.tensor([2.0, 0.0, 0.0])]
    advantages = torch.tensor([1.0, -2.0])
    gspo = -2 * (1 + 4e-4) + 2 * 3 * math.exp(2 / 3)
    assert mine.gspo(far, old, old, advantages).item() == pytest.approx(gspo)
    cispo = -(0.1 * math.exp(0.1) + 0.3 * math.exp(0.3)) + 2 * 2 * 5
    assert mine.cispo(far, old, old, advantages).item() == pytest.approx(cispo)


@pytest.mark.parametrize("objective", ["gspo", "cispo"])
def test_functions_of_the_readme_train_and_resume(lab, tmp_path, monkeypatch, objective):
    """Weights move, and what the rule keeps is in the checkpoint."""
    monkeypatch.chdir(tmp_path)
    script("mine.py")
    argv = f"{TRAIN} --rule mine.py:row_adagrad --objective mine.py:{objective}"
    argv += " --advantage mine.py:rloo --updates-per-batch 2"
    state, _, lines = whole_and_halves(lab, tmp_path, argv)
    assert len(lines) > 4 and any(line["alpha"] > 0 for line in lines)
    assert len(moments(state["optimizer"])) == 14


# A flag, the body of a function f of one's own, and words of the sentence that answers it
BAD_FUNCTIONS = """
--rule (S, state) return S[:, :1] -> shape [64, 1] [64, 8]
--rule (S, state) return None -> None
--rule (S, state) return S / 0 -> finite
--rule (S, state) state["v"] + S -> KeyError
--rule (S) return S -> argument
--objective (logps, old_logps, engine_logps, advantages) return 0.5 -> 0.5 tensor
--objective (logps, old_logps, engine_logps, advantages) return logps[0] -> shape []
--objective (logps, old_logps, engine_logps, advantages) return advantages.sum() -> logps
--objective (logps, old_logps, engine_logps, advantages) return logps[0].sum() / 0 -> finite
--objective (old_logps, logps, engine_logps, advantages) return 1 -> called
--advantage (rewards) return rewards.mean(1) -> shape [2, 4]
--advantage (rewards, state) return rewards * float("nan") -> finite
--advantage (rewards) raise ValueError("no luck") -> luck
--advantage () return 1 -> argument
"""


@pytest.mark.parametrize("case", BAD_FUNCTIONS.strip().split("\n"))
def test_a_bad_function_is_answered_by_one_sentence(case, lab, tmp_path, capsys):
    """With its flag and its name; no checkpoint is made of half a step."""
    definition, words = case.split(" -> ")
    flag, _, definition = definition.partition(" ")
    head, _, body = definition.partition(") ")
    (tmp_path / "mine.py").write_text(f"def f{head}):\n    {body}\n")
    argv = f"{TRAIN} --steps 2 --out {tmp_path}/run {flag} {tmp_path}/mine.py:f"
    assert main(lab, argv) == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    (sentence,) = errors(err)
    assert all(word in sentence for word in (flag, "mine.py:f", *words.split())), sentence
    assert not [*tmp_path.glob("run/step-*")]


def test_a_reward_that_fails_before_the_first_step_leaves_nothing(lab, tmp_path, capsys):
    """The same command may be given again."""
    (tmp_path / "mine.py").write_text("def f(completion, row):\n    return 1 / 0\n")
    argv = f"{TRAIN} --eval-data {{lab}}/good.jsonl --out {tmp_path}/run --steps 1"
    assert main(lab, f"{argv} --reward {tmp_path}/mine.py:f") == 2
    assert "good.jsonl" in errors(capsys.readouterr().err)[0]
    assert not (tmp_path / "run").exists()
    assert main(lab, argv) == 0


def test_flags_that_a_control_does_not_use_are_named(capsys):
    train.parse(["--optimizer", "adamw", "--rank", "8", "--no-kl-control", "--lr", "1e-4"])
    assert "--optimizer adamw does not use --rank, --kl-control" in capsys.readouterr().err
    train.parse(["--optimizer", "lora", "--rank", "8"])
    assert "not use" not in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------
# Benchmarks: pytest -m benchmark -s
# ------------------------------------------------------------------------------------------------


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = "bfloat16" if DEVICE.type == "cuda" else "float32"  # of matrix products
RANKED = ("row_adam", "sketch_muon", "lora", "lora_merged")
BENCHMARKED = [("adamw_foreach", None), ("adamw_fused", None)]  # and the r of the others
BENCHMARKED += itertools.product(RANKED, (64, 256))


def qwen2_shape(layers, hidden, inner, heads, kv_heads, vocabulary, tied=True, **kw):
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    names += ("num_key_value_heads", "vocab_size", "tie_word_embeddings")
    numbers = (layers, hidden, inner, heads, kv_heads, vocabulary, tied)
    return dict(zip(names, numbers, strict=True), max_position_embeddings=8192, **kw)


SHAPES = {
    "tiny": qwen2_shape(1, 256, 512, 4, 2, 64),
    "layer": qwen2_shape(1, 1536, 8960, 12, 2, 1000),  # of the 1.5B: 46.8 M weights are trained
    "370M": qwen2_shape(24, 1024, 3584, 16, 4, 32_000),
    "1.5B": qwen2_shape(28, 1536, 8960, 12, 2, 151936),
    "7B": qwen2_shape(28, 3584, 18944, 28, 4, 152064, tied=False),
    "short": qwen2_shape(6, 3584, 18944, 28, 4, 152064, tied=False),  # 7B, simulated in seconds
    "27B": qwen2_shape(64, 5120, 17408, 80, 8, 248320, tied=False, head_dim=128),
}


def qwen2_of_shape(name):
    return tiny_qwen2(**SHAPES[name]).to(DEVICE)


def elsewhere(*calls):
    """What calls of functions of this file return, each in a process of its own, two at a time."""
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory is given back at once

    def run(call):
        code = f"import json, test_logra as t; print(json.dumps(t.{call}))"
        argv, pipe = [sys.executable, "-c", code], subprocess.PIPE
        done = subprocess.run(argv, cwd=HERE, env=env, stdout=pipe, check=True, timeout=900)
        return json.loads(done.stdout.splitlines()[-1])

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, calls))


def training_step(model, method, r, tokens):
    """A function: one update by a rule on sketches, by LoRA or by AdamW on the same weights.

    lora is the textbook's; lora_merged also puts B A into W, as train.LoRA does for the engine."""
    layers, samples = logra.find_targets(model), answers([tokens - 1], prompt=(1, 1))
    logra.freeze_all_but(model, layers)
    if method in ("row_adam", "sketch_muon"):
        optimizer = logra.LoGRA(logra.attach_sketches(model, r), rule=logra.RULES[method])
    elif r:
        optimizer = train.LoRA(layers, r)
    else:
        kind, trained = method.removeprefix("adamw_"), [m.weight for m in layers.values()]
        optimizer = torch.optim.AdamW(trained, 1e-6, weight_decay=0, **{kind: True})

    def step():
        config = settings(micro_batch=1, dtype=DTYPE)
        logra.backward(model, samples, logra.grpo_objective, config, first=True)
        if r:
            optimizer.propose(tokens - 1)
        if method == "lora":
            train.DenseAdamW.step(optimizer)
        else:
            optimizer.step()
        if "adamw" in method:
            optimizer.zero_grad()

    return step


def peak_above_model(method, r, tokens, shape):
    """GiB that one step takes above the model: resident memory, or CUDA's."""
    model = qwen2_of_shape(shape)
    train.peak_gib()
    before = train.peak_gib()
    training_step(model, method, r, tokens)()
    return train.peak_gib() - before


def seconds_of(acts, rounds=9):
    """{name: median seconds} of functions, the first two rounds left out; they are called in turn,
    so that what else the machine does falls on all alike."""
    times = {name: [] for name in acts}
    for _ in range(rounds):
        for name, act in acts.items():
            start = time.perf_counter()
            act()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds[2:]) for name, seconds in times.items()}


def floor_ratio(layers, method, r, N):
    """Operations that a step cannot do without, over the 6 N P of one with dense gradients."""
    if r is None:
        return 1.0
    modules = layers.values()
    P, d_out = sum(m.weight.numel() for m in modules), sum(m.out_features for m in modules)
    if "lora" in method:  # X A^T and its B^T, the backward of both; B A taken off W and put back
        d_in = sum(m.in_features for m in modules)
        own = 2 * N * r * (2 * d_in + 3 * d_out) + 4 * r * P * (method == "lora_merged")
    else:  # X A^T, one for q, k, v and gate, up; dY^T (X A^T); factor A; D^T D, A A^T of a width
        same = ("k_proj", "v_proj", "up_proj")
        inputs = sum(m.in_features for path, m in layers.items() if not path.endswith(same))
        widths = sum({m.in_features for m in modules})
        own = 2 * N * r * (inputs + d_out) + 2 * r * P + 2 * r * r * (widths + d_out)
    if method == "sketch_muon":  # S^T S, S M and eighteen products of r x r
        own += 4 * r * r * d_out + 36 * r**3 * len(layers)
    return (4 * N * P + own) / (6 * N * P)


@pytest.mark.parametrize("method", BENCHMARKED[2:], ids=str)
def test_floor_is_what_a_step_computes(method):
    """The products that torch counts, beyond those of dense AdamW, are the floor's: none is made
    twice that could be shared."""
    N, operations = 64, []
    in_place = {torch.ops.aten.addmm_: lambda _, X, Y, **kw: 2 * X[0] * X[1] * Y[1]}
    for one in (BENCHMARKED[0], method):
        model = qwen2_of_shape("tiny")
        step = training_step(model, *one, N)
        step()  # what only the first one does
        with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
            step()
        operations.append(counter.get_total_flops())
    layers = logra.find_targets(model)
    dense = 6 * N * sum(module.weight.numel() for module in layers.values())
    counted = 1 + (operations[1] - operations[0]) / dense
    assert floor_ratio(layers, *method, N) == pytest.approx(counted, rel=1e-9)


def forwards_of_a_probe(tokens=512):
    """Seconds of the KL probe, r = 256, over those of a plain forward of its tokens."""
    model, probe = qwen2_of_shape("layer"), answers([tokens - 1], prompt=(1, 1))
    sketches = logra.attach_sketches(model, 256)
    sketches.U = {path: torch.randn_like(S) * 1e-3 for path, S in sketches.S.items()}

    def forward():
        logra.policy_head(model)(logra.response_hidden(model, probe, DEVICE)[0])

    acts = {"probe": lambda: logra.predict_kl(model, sketches, probe), "forward": forward}
    with torch.no_grad(), logra.compute_dtype(DEVICE, DTYPE):
        seconds = seconds_of(acts)
    return seconds["probe"] / seconds["forward"]


def seconds_of_a_synchronisation(directory):
    """Of a vLLM engine in bfloat16, r = 256: by factors, and by the weights whole."""
    model = qwen2_of_shape("layer")
    model.to(torch.bfloat16).save_pretrained(directory)
    optimizer = logra.LoGRA(logra.attach_sketches(model.float(), 256))
    options = (optimizer.sketches.settings, "bfloat16", 0.1)
    engine, W = logra.VLLMGenerator(directory, [0], 64, *options), weights(optimizer)
    engine.load(W.items())
    sent = random_update(optimizer)
    acts = {"factors": lambda: engine.sync(*sent), "full": lambda: engine.load(W.items())}
    return seconds_of(acts, rounds=5)


@pytest.mark.slow
@pytest.mark.benchmark
def test_benchmark_of_a_step(tmp_path):
    """Time, memory and floor of a step by every method: a table; the probe, the synchronisation."""
    layers, rows = logra.find_targets(qwen2_of_shape("layer")), []
    for tokens, rounds in ((512, 9), (1024, 6)):
        gib = elsewhere(*(f"peak_above_model{(*m, tokens, 'layer')}" for m in BENCHMARKED))
        gib = dict(zip(BENCHMARKED, gib, strict=True))
        steps = {m: training_step(qwen2_of_shape("layer"), *m, tokens) for m in BENCHMARKED}
        seconds = seconds_of(steps, rounds)
        for method in BENCHMARKED:
            row = {"method": method[0], "r": method[1], "tokens": tokens}
            row["time/AdamW"] = seconds[method] / seconds[BENCHMARKED[0]]
            row["over floor"] = row["time/AdamW"] / floor_ratio(layers, *method, tokens)
            row["memory/AdamW"] = gib[method] / gib[BENCHMARKED[0]]
            rows.append(row)
    print(f"\n{train.table(rows)}\n\nKL probe: {forwards_of_a_probe():.2f} forwards of its tokens")
    print(f"seconds of a synchronisation: {seconds_of_a_synchronisation(tmp_path)}")
    print(f"on {DEVICE}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
    # Times are for the eye: on a busy machine they differ by a half
    assert all(row["memory/AdamW"] < 0.5 for row in rows if row["method"] == "row_adam")


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


def results_of(ranks, mode, out, *argv):
    """What each rank has seen; it must end well and say nothing of torch's."""
    process = torchrun(ranks, __file__, mode, out, *argv)
    words = said(process)
    assert process.returncode == 0 and "You are using a Backend" not in words, words
    return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def errors(text):
    """The sentences meant for the user."""
    return [line for line in text.splitlines() if line.startswith("error:")]


SKETCHED = {"sketch": logra.row_adam, "muon": logra.sketch_muon, "adam": logra.sketch_adam}
METHODS = (*SKETCHED, "dense", "lora")
ROUNDING = {"muon": 10, "adam": 10}  # small singular values, or entries, are enlarged with theirs
UNEVEN = functools.partial(tiny_qwen2, intermediate_size=97)  # no number of ranks divides 97


def recorded():
    """Seven samples of 1 to 9 tokens.  Two teach nothing: on three ranks all that rank 1 has."""
    samples, g = answers([3, 9, 1, 5, 2, 7, 4], seed=3), torch.Generator().manual_seed(0)
    for s in samples:
        s.logprobs = (3 * torch.rand(len(s.completion), generator=g) - 5.5).tolist()
    samples[1].advantage = samples[4].advantage = 0.0
    return samples


def sharded(method, weights=None, state=None, dtype="float32"):
    """A model on all ranks, checkpointed if there are several, and its optimizer."""
    model = UNEVEN()
    layers = logra.find_targets(model)
    for path, W in (weights or {}).items():
        layers[path].weight.data.copy_(W)
    if method not in SKETCHED:
        logra.freeze_all_but(model, layers if method == "dense" else {})
    if logra.world() > 1:
        train.checkpoint_layers(model)
        logra.shard_model(model, getattr(torch, dtype))
    if method in SKETCHED:
        sketches = logra.attach_sketches(model, 16, refresh=2 if method == "adam" else 1)
        optimizer = logra.LoGRA(sketches, 1e-2, rule=SKETCHED[method])
    elif method == "dense":
        optimizer = train.DenseAdamW(layers, (1e-3, 1e-3))
    else:
        optimizer = train.LoRA(layers, 16, (1e-3, 1e-3))
    if state:
        optimizer.load_state_dict(copy.deepcopy(state))
    return model, optimizer, layers


def add_own(model, first=True, dtype="float32"):
    """backward() on this rank's samples, as grpo calls it."""
    own = recorded()[logra.my_rank() :: logra.world()]
    alive = [s for s in own if s.advantage] or own[:1]
    config = settings(micro_batch=1, dtype=dtype)
    for s in own if not first else ():
        s.old_logprobs = torch.tensor(s.logprobs) - 0.1
    return logra.backward(model, alive, logra.grpo_objective, config, first)


def gathered(layers):
    return {path: logra.whole(module.weight).clone() for path, module in layers.items()}


def update_on_ranks(model, optimizer, first, seen):
    """One update with its KL; what is to be the same on all ranks goes into seen."""
    own = recorded()[logra.my_rank() :: logra.world()]
    control = logra.KLControl()
    control.observe(add_own(model, first))  # some ranks have nothing to tell
    if optimizer.sketches:
        assert all(p.grad is None for p in model.parameters())
    optimizer.propose(31)
    curve, before = logra.predict_kl(model, optimizer.sketches, own)
    seen["factors"] = optimizer.step(1.0)
    realised = logra.realised_kl(model, own, before)
    predicted = curve[1][0] if curve else 0.0
    seen["numbers"] += [control.mismatch, optimizer.sketch_norm, predicted, realised]


def method_on_ranks(method):
    """Three updates, the last once more from what a checkpoint would hold, and one with a NaN."""
    seen = {"numbers": []}
    model, optimizer, layers = sharded(method)
    for first in (True, False, True):  # of its batch
        saved = gathered(layers), copy.deepcopy(optimizer.state_dict())
        update_on_ranks(model, optimizer, first, seen)
    seen |= {"W": gathered(layers), "saved": saved}
    model, optimizer, layers = sharded(method, *saved)
    update_on_ranks(model, optimizer, True, {"numbers": []})
    seen["W again"] = gathered(layers)

    seen["state"] = copy.deepcopy(moments(optimizer.state_dict()))
    add_own(model)
    if logra.my_rank() == logra.world() - 1:  # not a number, on the last rank alone
        if method in SKETCHED:
            optimizer.sketches.S[LAYERS[3]][0, 3] = math.nan
        else:
            W = layers[LAYERS[0]].weight if method == "dense" else optimizer.adapters[LAYERS[0]][1]
            logra.local(W.grad)[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="update 3 is not finite"):
        optimizer.propose(31)
    assert_same_tensors(gathered(layers), seen["W again"])
    assert_same_tensors(moments(optimizer.state_dict()), seen["state"])
    return seen


def rows_on_ranks(d_out):
    """Rows of [d_out, 3] by each function that knows of them, and by FSDP2."""
    W = torch.arange(d_out * 3.0).view(d_out, 3)
    linear = torch.nn.Linear(3, d_out, bias=False)
    linear.weight.data.copy_(W)
    fsdp = logra.fully_shard(linear, mesh=logra.mesh()).weight.to_local().detach()
    state = {"d_in": 3, "v": W[:, 0].clone(), "cube": W[:, :, None] + torch.arange(2), "t": 7}
    state |= {"number": torch.tensor(5.0), "other": torch.ones(d_out + 1, 3)}
    own = logra.own_state(state, d_out)
    seen = {"FSDP2": fsdp, "own": logra.own_rows(W), "W": W, "state": state}
    seen["scattered"] = logra.scatter_rows(W * (logra.my_rank() + 1))
    seen["gathered"] = logra.gather_rows(fsdp, d_out)
    seen["whole state"] = logra.whole_state(own)
    seen["kept"] = {key: len(logra.local(own[key])) for key in ("v", "cube", "other")}

    def rule(S, state):  # row i of D depends on the last row of S
        state["cube"] = state["cube"] + S[:, :, None]
        state["t"] += 1
        state["new"] = S.sum(1)
        return S.flip(0)

    seen["D"] = logra.apply_rule(rule, fsdp, own, d_out)
    seen["after"] = logra.whole_state(own)
    return seen


def stops_on_ranks():
    """What each rank hears of trouble that is not its own, or of all."""
    rank, ranks = logra.my_rank(), logra.world()

    def fails_on(first):
        with logra.together():
            if rank >= first:
                raise KeyError("nothing there")

    def words(function, *args):
        with pytest.raises(logra.StopRun) as caught:
            function(*args)
        return str(caught.value)

    logra.check_same([torch.ones(2, 3)])
    differing = [torch.ones(2, 3), torch.ones(2) + (rank == 1)]
    stops = [words(fails_on, ranks - 1), words(fails_on, 0)]
    stops += [words(logra.own_prompts, range(ranks - 1)), words(logra.check_same, differing)]
    rewards = torch.arange(10.0).view(5, 2)
    assert logra.all_prompts(logra.own_prompts(rewards)).equal(rewards)
    batches = logra.in_step([*"abc"[: rank + 1]])
    assert batches == [("abc"[min(i, rank)], i <= rank) for i in range(ranks)]
    return stops


def on_ranks():
    """Everything that the tests below compare, as this rank has it."""
    result = {method: method_on_ranks(method) for method in METHODS}
    model, optimizer, layers = sharded("sketch", dtype="bfloat16")
    add_own(model, dtype="bfloat16")
    S = optimizer.sketches.S
    result["S"] = {p: logra.gather_rows(S[p], layers[p].out_features).clone() for p in LAYERS}
    if logra.world() > 1:
        result["rows"] = {d_out: rows_on_ranks(d_out) for d_out in (1, 2, 7, 8)}
        result["stops"] = stops_on_ranks()
    return result


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """{1, 2, 3: what on_ranks() gave, rank by rank}."""
    out = tmp_path_factory.mktemp("ranks")
    return {1: [on_ranks()]} | {n: results_of(n, "on_ranks", out / str(n)) for n in (2, 3)}


def moved(W):
    """One vector of all dW."""
    model = UNEVEN()
    return torch.cat([(W[p] - model.get_submodule(p).weight.detach()).flatten() for p in LAYERS])


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_learning_does_not_depend_on_the_number_of_ranks(ranks, method):
    """Three updates on 2 and 3 ranks are those of one, which dense gradients have tested: weights,
    mismatch, ||S|| and KL, one number on all ranks.  Means of means would differ (12, 33)."""
    one, bound = ranks[1][0][method], 1e-4 * ROUNDING.get(method, 1)
    assert one["numbers"][0] > 0.01 and one["numbers"][4] == 0  # mismatch: not told twice
    for n in (2, 3):
        first, *others = [result[method] for result in ranks[n]]
        assert rel(moved(first["W"]), moved(one["W"])) < bound
        assert first["numbers"] == pytest.approx(one["numbers"], rel=bound)
        for other in others:
            assert other["numbers"] == first["numbers"]
            assert_same_tensors(first["W"], other["W"])
            if method in SKETCHED:  # each engine is sent the whole factor
                assert_same_tensors(first["factors"], other["factors"])


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
def test_rows_are_split_and_gathered_as_fsdp_does(ranks, n):
    """Shards uneven and empty; a rule sees a layer and its state whole (35)."""
    for d_out in (1, 2, 7, 8):
        parts = [result["rows"][d_out] for result in ranks[n]]
        W, state = parts[0]["W"], parts[0]["state"]
        assert torch.cat([part["own"] for part in parts]).equal(W)
        assert torch.cat([part["D"] for part in parts]).equal(W.flip(0))
        after = state | {"cube": state["cube"] + W[:, :, None], "t": 8, "new": W.sum(1)}
        for part in parts:
            assert part["own"].equal(part["FSDP2"]) and part["gathered"].equal(W)
            assert part["scattered"].equal(part["own"] * sum(range(1, n + 1)))
            rows = len(part["FSDP2"])
            assert part["kept"] == {"v": rows, "cube": rows, "other": d_out + 1}
            for found, wanted in ((part["whole state"], state), (part["after"], after)):
                assert found.keys() == wanted.keys()
                assert all(torch.equal(*map(torch.as_tensor, (found[k], wanted[k]))) for k in found)
    sizes = {d: [len(result["rows"][d]["FSDP2"]) for result in ranks[3]] for d in (1, 2, 7, 8)}
    assert sizes == {1: [1, 0, 0], 2: [1, 1, 0], 7: [3, 3, 1], 8: [3, 3, 2]}


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
def test_what_one_rank_finds_all_ranks_hear(ranks, n):
    """StopRun in the same words on all of them (32)."""
    for result in ranks[n]:
        one, all_alike, few, differ = result["stops"]
        assert one == f"rank {n - 1}: 'nothing there'" and all_alike == "'nothing there'"
        assert few == f"a step of {n - 1} prompts is too small for {n} ranks"
        assert differ.startswith("projections differ between ranks")


@pytest.mark.slow
def test_sharded_checkpointed_layers_have_the_same_sketch(ranks):
    """Frozen embedding, FSDP2 and recomputation in bfloat16: S as without (35)."""
    for n in (2, 3):
        a, b = (ranks[k][0]["S"] for k in (n, 1))
        for path in LAYERS:
            assert 0 < b[path].norm() and rel(a[path], b[path]) < 2e-2, path


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_state_fits_any_number_of_ranks(ranks, method):
    """Saved after two updates of n ranks: the third is the same to the bit, and near on one.  A
    NaN on the last rank has stopped all, with W and state as they were (32, 41)."""
    tensors_of = {"sketch": 14, "muon": 0, "adam": 28, "dense": 42, "lora": 84}
    for n in (1, 2, 3):
        seen = ranks[n][0][method]
        assert_same_tensors(seen["W again"], seen["W"])
        model, optimizer, layers = sharded(method, *seen["saved"])
        saved, state = (moments(s) for s in (seen["saved"][1], optimizer.state_dict()))
        assert_same_tensors(state, saved)
        assert len(saved) == tensors_of[method] and all(x.norm() > 0 for x in saved.values())
        add_own(model)
        optimizer.propose(31)
        optimizer.step(1.0)
        assert rel(moved(gathered(layers)), moved(seen["W"])) < 1e-4 * ROUNDING.get(method, 1)


def train_and_read(runs, patch):
    """train.main() on each of {name: argv}: exit code, what a resumed run was given back, what was
    generated, and the engine's weights; a rank without an engine has none."""
    engines, calls, results, restored = [], [], {}, {}
    rows, warm_up = train.sorting_rows, train.warm_up
    # The built-in task without its long warm-up, as in small_task
    patch.setattr(train, "sorting_rows", lambda seed: [part[:2000] for part in rows(seed)])
    patch.setattr(train, "warm_up", lambda *args: warm_up(*args, batches=2))

    def watch(owner, name, note):
        def watched(*args, **kwargs):
            result = function(*args, **kwargs)
            note(result, *args)
            return result

        function = getattr(owner, name)
        patch.setattr(owner, name, watched)

    def note_call(samples, generator, prompts, seeds, *_):
        calls.append([*zip(prompts, seeds, samples, strict=True)])

    def note_state(step, state, path, optimizer, control):
        restored["W"] = gathered(optimizer.layers)
        restored["optimizer"] = copy.deepcopy(optimizer.state_dict())

    watch(logra.VLLMGenerator, "__init__", lambda _, engine, *args: engines.append(engine))
    watch(logra.VLLMGenerator, "generate", note_call)
    watch(logra.HFGenerator, "generate", note_call)
    watch(train, "restore", note_state)
    for name, argv in runs.items():
        code = train.main(argv)
        engine = engines[-1].call("sync_read") if engines else None
        results[name] = {"code": code, "engine": engine, "calls": [*calls], "restored": restored}
        calls.clear()
    return results


STEPS = 12
REWARD_OF_A_ROW = """
def f(completion, row):
    if {fails} and row["answer"] == "fails":
        raise KeyError("nothing there")
    return len(completion) % 5 + len(set(completion)) / 7
"""


@pytest.fixture(scope="session")
def two_ranks(lab, tmp_path_factory):
    """An undisturbed run on two ranks, tied bfloat16 weights and float32 compute, and after it, in
    the same processes, the built-in task in bfloat16 and an evaluation of the first."""
    out = tmp_path_factory.mktemp("two")
    fails = train.shuffled(40, "order", 0, 0)[2 * 3 + 1]  # in step 3 at place 1, which is rank 1's
    prompts = ("a cat", "ten dogs", "a cat", "two and two are four", "a cat")
    rows = (row(prompts[i % 5], "fails" if i == fails else "1") for i in range(40))
    jsonl(out / "rows.jsonl", *rows)
    argv = f"--model {lab}/qwen2 --data {out}/rows.jsonl --eval-data {out}/rows.jsonl --eval-rows 1"
    argv += f" --reward {out}/fine.py:f --max-prompt-tokens 16 --max-new-tokens 8 --kv-gib 0.05"
    argv += " --prompts-per-step 3 --group-size 4 --probe-responses 2 --micro-batch 1 --rank 8"
    argv += " --kl-budget 1e-2 --update-ratio 1e-3 --kl-check-every 2 --save-every 2"
    argv += f" --eval-every 5 --steps {STEPS}"
    (out / "fine.py").write_text(REWARD_OF_A_ROW.format(fails=False))
    built_in = f"--reward {out}/fine.py:f --dtype bfloat16 --steps 4 --prompts-per-step 5"
    built_in += " --eval-rows 3 --kv-gib 0.05"
    (out / "cat.py").write_text("def f(completion, row):\n    return 'a' in completion\n")
    evaluation = f"--eval-only --resume {out}/float32 --eval-rows 0 --eval-samples 4"
    evaluation += f" --reward {out}/cat.py:f --out"
    runs = {
        "float32": f"{argv} --out {out}/float32".split(),
        "bfloat16": f"{built_in} --out {out}/bfloat16".split(),
        "evaluated": f"{evaluation} {out}/evaluated".split(),
    }
    results = results_of(2, "train", out, json.dumps(runs))
    facts = {"argv": argv, "evaluation": evaluation, "row": fails + 1}
    return types.SimpleNamespace(out=out, results=results, **facts)


def trained(checkpoint):
    """{path: float32 weights} of a checkpoint's target layers."""
    masters, exported = train.load_state(checkpoint)["weights"], tensors(checkpoint)
    found = masters or {path: exported[f"{path}.weight"] for path in LAYERS}
    assert {W.dtype for W in found.values()} == {torch.float32}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype, steps", [("float32", STEPS), ("bfloat16", 4)])
def test_the_engine_of_every_rank_has_the_trainers_weights(two_ranks, dtype, steps):
    """Two ranks end with round(W), bit by bit, in both engines, and W has moved (37)."""
    run = two_ranks.out / dtype
    W, before = trained(run / f"step-{steps}"), tensors(min(run.glob("step-?")))
    for result in two_ranks.results:
        assert result[dtype]["code"] == 0 and result[dtype]["engine"].keys() == W.keys()
        for path, engine in result[dtype]["engine"].items():
            assert engine.dtype == getattr(torch, dtype)
            assert torch.equal(engine, W[path].to(engine.dtype)), path
            assert not torch.equal(engine, before[f"{path}.weight"].to(engine.dtype)), path
    assert json.loads((run / "config.json").read_text())["world_size"] == 2
    assert [line["step"] for line in journal(run)] == list(range(1, steps + 1))


def rollouts(two_ranks):
    """[(rank 0's, rank 1's)] of each step: lists of (prompt, seed, sample)."""
    calls = [  # of training: 2 prompts of 4 answers on rank 0, 1 prompt on rank 1
        [call for call in result["float32"]["calls"] if len(call) == n]
        for result, n in zip(two_ranks.results, (8, 4), strict=True)
    ]
    assert len(calls[0]) == STEPS
    return [*zip(*calls, strict=True)]


@pytest.mark.slow
def test_ranks_sample_different_answers_to_an_equal_prompt(two_ranks):
    """No seed is used by both ranks in a step, and equal prompts get other answers (30)."""
    alike = []
    for a, b in rollouts(two_ranks):
        assert len({seed for _, seed, _ in (*a, *b)}) == 12
        for (prompt, _, one), (other_prompt, _, other) in itertools.product(a, b):
            if prompt == other_prompt:
                alike.append(one.completion == other.completion)
    assert len(alike) > 100 and sum(alike) < 0.1 * len(alike)


def shortened(two_ranks, run):
    """A copy of the run of two ranks, without its last two steps."""
    shutil.copytree(two_ranks.out / "float32", run)
    shutil.rmtree(run / f"step-{STEPS}")
    return f"--resume {run} --eval-every 100", train.load_state(run / f"step-{STEPS - 2}")


def assert_goes_on(two_ranks, state, trainers, generator):
    """W, v and the counter are restored to the bit, and the same is asked with the same seeds."""
    for restored in (trainer["restored"] for trainer in trainers):
        assert_same_tensors(restored["W"], state["weights"])
        assert_same_tensors(moments(restored["optimizer"]), moments(state["optimizer"]))
        assert restored["optimizer"]["update"] == state["optimizer"]["update"] == STEPS - 2
    calls = [call for call in generator["calls"] if len(call) == 12]
    for call, (a, b) in zip(calls, rollouts(two_ranks)[-2:], strict=True):
        now, before = (sorted((ids, seed) for ids, seed, _ in part) for part in (call, a + b))
        assert now == before


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_with_one(two_ranks, tmp_path, monkeypatch):
    argv, state = shortened(two_ranks, tmp_path / "run")
    result = train_and_read({"run": f"{argv} --engine hf".split()}, monkeypatch)["run"]
    assert result["code"] == 0
    assert_goes_on(two_ranks, state, [result], result)
    exported = tensors(tmp_path / "run" / f"step-{STEPS - 2}")
    assert "lm_head.weight" not in exported
    for path, W in state["weights"].items():
        assert torch.equal(exported[f"{path}.weight"], W.bfloat16())


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_with_three_and_an_engine_apart(two_ranks, tmp_path):
    """As on one rank, and the engine ends with the weights of the trainers."""
    argv, state = shortened(two_ranks, tmp_path / "run")
    argv = json.dumps({"run": f"{argv} --generation-ranks 1".split()})
    results = results_of(4, "train", tmp_path / "ranks", argv)
    *trainers, generator = [result["run"] for result in results]
    assert_goes_on(two_ranks, state, trainers, generator)
    W = trained(tmp_path / "run" / f"step-{STEPS}")
    for path, engine in generator["engine"].items():
        assert torch.equal(engine, W[path]) and not torch.equal(engine, state["weights"][path])


@pytest.mark.slow
def test_a_generation_rank_changes_nothing(lab, tmp_path):
    """One rank trains and one generates: the run of one rank, to the bit, also in its engine."""
    one, two = tmp_path / "one", tmp_path / "two"
    argv = f"{SMALL} --engine vllm --dtype bfloat16 --steps 4 --kv-gib 0.05 --out"
    assert main(lab, f"{argv} {one}") == 0
    argv = f"{argv} {two} --generation-ranks 1".format(lab=lab).split()
    results = results_of(2, "train", tmp_path / "ranks", json.dumps({"run": argv}))
    trainer, generator = [result["run"] for result in results]
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
def test_eval_only_is_the_same_on_one_rank_and_on_two(two_ranks, tmp_path):
    """40 rows, 4 samples each, drawn by row and sample: the same mean reward and pass@k."""
    assert train.main(f"{two_ranks.evaluation} {tmp_path}/one".split()) == 0
    runs = tmp_path / "one", two_ranks.out / "evaluated"
    [one], [two] = (journal(run, evaluations=True) for run in runs)
    assert one == two and one["eval_rows"] == 40 and one["eval_samples"] == 4
    assert 0 < one["eval_accuracy"] < one["eval_pass_at_k"] <= 1


@pytest.mark.slow
def test_functions_of_the_readme_on_two_ranks_resume_to_the_same_bits(tmp_path, monkeypatch):
    """A rule, an objective and an advantage from a file, with vLLM; the rule's state is split."""
    monkeypatch.chdir(tmp_path)
    script("mine.py")
    argv = "--rule mine.py:row_adagrad --objective mine.py:gspo --advantage mine.py:rloo"
    argv += " --updates-per-batch 2 --prompts-per-step 5 --eval-rows 3 --eval-every 2"
    argv += " --kv-gib 0.05 --reward fine.py:f"
    Path("fine.py").write_text(REWARD_OF_A_ROW.format(fails=False))
    runs = {
        "whole": f"{argv} --steps 4 --out whole".split(),
        "half": f"{argv} --steps 2 --out halves".split(),
        "rest": ["--resume", "halves", "--steps", "4"],
    }
    process = torchrun(2, __file__, "train", tmp_path / "results", json.dumps(runs))
    words = said(process)
    assert process.returncode == 0, words
    ends = [tmp_path / run / "step-4" for run in ("whole", "halves")]
    assert_same_tensors(*map(tensors, ends))
    v, again = (moments(train.load_state(end)["optimizer"]) for end in ends)
    assert len(v) == 14 and all(x.any() for x in v.values())
    assert_same_tensors(v, again)


def rank_of(process, rank):
    """The process id of one of torchrun's ranks."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    environments = {c: Path(f"/proc/{c}/environ").read_text().split("\0") for c in children}
    (mine,) = (c for c, variables in environments.items() if f"RANK={rank}" in variables)
    return int(mine)


@pytest.mark.slow
def test_two_ranks_that_fail_and_are_killed_resume_to_the_same_bits(two_ranks, tmp_path):
    """A reward that raises on rank 1, then SIGKILL of rank 1: each ends the run within a minute
    and leaves a whole checkpoint; resumed, the run is the undisturbed one (42)."""
    run, whole = tmp_path / "run", two_ranks.out / "float32"
    reward = tmp_path / "mine.py"
    reward.write_text(REWARD_OF_A_ROW.format(fails=True))
    argv = f"{two_ranks.argv} --reward {reward}:f --save-every 100 --out {run}".split()
    failing = torchrun(2, train.__file__, *argv)
    words = said(failing)
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
    assert_same_run(run, whole, STEPS)


class Engine:
    """An engine apart that answers a prompt p, seed s with [p, s] and keeps what it is sent; it
    fails at what its fault names, once it has taken one tensor of several."""

    fault = ""

    def __init__(self, *options):
        self.options, self.asked, self.sent = options, [], []
        if options == ("bad",):
            raise train.UserError("the engine does not start")

    def generate(self, prompts, seeds, *options):
        if self.fault == "generate":
            raise AssertionError  # without a word
        self.asked.append((prompts, seeds, *options))
        return [
            logra.Sample(p, [*p, seed], [-0.5] * (len(p) + 1), seed % 2 == 0)
            for p, seed in zip(prompts, seeds, strict=True)
        ]

    def sync(self, factors, update):
        self.sent.append((dict(factors), update))

    def load(self, pairs, ranks):
        if self.fault:
            path, _ = next(pairs)
            raise SystemExit if self.fault == "die" else ValueError(f"{path} is not there")
        self.sent.append((dict(pairs), ranks))


@pytest.fixture
def apart_from(monkeypatch):
    """start(*options): a RemoteGenerator here and its two engines, in threads; and the wire.

    There is a default group, as where several ranks train: torch's errors are others then.
    """
    store, engines, threads = dist.HashStore(), [], []
    if own_group := not dist.is_initialized():  # vLLM makes one too
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def wire(rank):
        return dist.ProcessGroupGloo(store, rank, 3, datetime.timedelta(seconds=3))

    def engine(*options):
        engines.append(Engine(*options))
        return engines[-1]

    def serve(rank):
        with contextlib.suppress(SystemExit):
            train.serve(wire(rank), engine)

    def start(*options):
        for n in (1, 2):
            threads.append(threading.Thread(target=serve, args=(n,)))
            threads[-1].start()
        return train.RemoteGenerator(wire(0), *options), engines

    yield start
    for thread in threads:
        thread.join(20)  # no word for three seconds, and they are done
    if own_group:
        dist.destroy_process_group()
    assert not any(thread.is_alive() for thread in threads)


def test_generation_ranks_share_the_prompts_and_hear_every_update(apart_from):
    """One training rank, two that generate: order kept, tensors to the bit."""
    remote, engines = apart_from("directory", [1, 2])
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
    remote.sync(factors, 41)
    assert 34 < remote.crossed - before < 2000  # 17 numbers of 2 bytes
    loaded = {"a": torch.randn(5, 4, generator=g), "b": torch.ones(2, 3).bfloat16()}
    remote.load(loaded.items())  # bfloat16: of a model as it is stored, for --eval-only
    remote.call("stop")
    assert sorted(len(engine.asked[0][0]) for engine in engines) == [2, 3]
    for engine in engines:
        assert engine.options == ("directory", [1, 2])
        assert engine.asked[0][2:] == (7, 0.6) and engine.asked[2][2:] == (7, 1.0)
        (seen, update), (weights, ranks) = engine.sent
        assert_same_tensors(seen, factors)
        assert (update, ranks) == (41, 1)
        assert_same_tensors(weights, loaded)


def test_an_engine_that_fails_is_heard_by_the_training_ranks(apart_from):
    """As StopRun that names the rank and the reason; the wire is in order after it, and a
    generation rank whose training ranks are silent ends without a word."""
    remote, engines = apart_from("good")
    weights = {name: torch.full((64, 64), i).float() for i, name in enumerate("abc")}
    for fault, words in (("generate", "AssertionError()"), ("load", "a is not there")):
        engines[1].fault = fault
        with pytest.raises(logra.StopRun, match=r"rank [12]: ") as caught:
            if fault == "load":
                remote.load(weights.items())
            remote.generate([[1], [2]], [5, 6], 7)
        assert words in str(caught.value)
        engines[1].fault = ""
        assert [s.completion for s in remote.generate([[1], [2]], [5, 6], 7)] == [[1, 5], [2, 6]]
    remote.load(weights.items())
    for engine in engines:
        assert_same_tensors(engine.sent[-1][0], weights)
    with pytest.raises(logra.StopRun, match="rank 1: the engine does not start"):
        train.RemoteGenerator(remote.wire, "bad")


@pytest.mark.parametrize("size", [1, 1000])
def test_an_engine_that_dies_stops_the_run(apart_from, size):
    """While weights cross, or when they have: StopRun, not torch's error, and no wait."""
    remote, engines = apart_from("good")
    engines[1].fault, start = "die", time.perf_counter()
    with pytest.raises(logra.StopRun, match="another rank is gone"):
        remote.load({name: torch.ones(size, size) for name in "abcd"}.items())
    assert time.perf_counter() - start < 2
    with pytest.raises(logra.StopRun, match="another rank is gone"):
        remote.generate([[1]], [5], 7)


@pytest.mark.parametrize(
    "argv, words",
    [
        ("--prompts-per-step 1", "--prompts-per-step 1 2 ranks"),
        ("--engine hf", "--engine hf"),
        ("--generation-ranks 2", "--generation-ranks 2 no rank"),
    ],
)
def test_flags_that_do_not_fit_two_ranks_are_refused(tmp_path, monkeypatch, capsys, argv, words):
    monkeypatch.chdir(tmp_path)
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("TORCHELASTIC_RUN_ID", "none")):
        monkeypatch.setenv(name, value)
    assert train.main(argv.split()) == 2
    (sentence,) = errors(capsys.readouterr().err)
    assert all(word in sentence for word in words.split()), sentence
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_bad_input_to_ranks_is_answered_by_one_sentence(tmp_path):
    """Once, whichever rank is first to find it, also if only one does; no directory is made."""
    cases = {  # argv of both ranks, what rank 1 alone has on top, and words of the answer
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
        assert all(word in found[0] for word in cases[name][2].split()), found
        assert 'logra.py", line' not in words and 'train.py", line' not in words  # no traceback
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------
# Memory: --estimate-memory against a simulation of several ranks and a real step on one
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
        self.tokens, self.live, self.now, self.resize = tokens, {}, 0, torch.UntypedStorage.resize_
        self.peaks = {}
        self.enter("host")

    def enter(self, phase):
        self.phase, self.peaks[phase] = phase, self.now

    def count(self, key, size):
        """The storage `key` has so many bytes from now on."""
        self.now += size - self.live.get(key, 0)
        self.live[key] = size
        self.peaks[self.phase] = max(self.peaks[self.phase], self.now)

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
        if func is aten.repeat_interleave.Tensor:  # a number an answer -> a number a token
            kwargs = {"output_size": self.tokens}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, FakeTensor):
                storage = tensor.untyped_storage()
                if (key := storage._cdata) not in self.live:
                    free = self.phase == "host" or func is aten._efficientzerotensor.default
                    self.count(key, 0 if free else storage.nbytes())
                    weakref.finalize(storage, self.freed, key)
        return out


def simulate(shape, method, T=4096, r=256):
    """{phase: peak GiB of one of 4 ranks} in an update of two micro-batches of T tokens."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (4,))  # looks at values, so not on fake tensors
    tracker, samples = LiveBytes(T - 1), answers([T - 1] * 2, prompt=(1, 1))
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(torch.UntypedStorage, "resize_", lambda s, n: tracker.resize_(s, n)),
        mock.patch.object(transformers.masking_utils, "is_tracing", lambda *_: False),
        # Adam is foreach on a GPU
        mock.patch("torch.optim.adam._default_to_fused_or_foreach", lambda *_, **__: (False, True)),
        mock.patch.object(logra, "in_step", lambda batches: [(b, True) for b in batches]),
        mock.patch.object(logra, "check_same", lambda *_: None),
        mock.patch.object(logra, "together", contextlib.nullcontext),
        mock.patch.object(logra, "init_device_mesh", lambda *_: mesh),
        mock.patch.object(torch.Tensor, "tolist", lambda t: [1.0] * t.numel()),
        tracker,
    ):
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPES[shape])).eval()
        tracker.enter("load")
        train.checkpoint_layers(model)
        logra.shard_model(model, torch.bfloat16, torch.bfloat16)
        sketches, layers = None, logra.find_targets(model)
        if method == "logra":
            sketches = logra.attach_sketches(model, r)
            optimizer = logra.LoGRA(sketches)
        else:
            logra.freeze_all_but(model, layers)
            optimizer = train.LoRA(layers, r) if method == "lora" else train.DenseAdamW(layers)
            tracker.enter("first step")  # its peak is of DTensor's first look at whole shapes
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()  # the moments exist, as from the second update on
        config = settings(micro_batch=1, dtype="bfloat16")
        compute = logra.compute_dtype(model.device, config.dtype)
        tracker.enter("backward")
        logra.backward(model, samples, logra.grpo_objective, config, first=True)
        optimizer.propose(2 * T)
        tracker.enter("probe")
        with compute:
            _, before = logra.predict_kl(model, sketches, samples[:1])
        tracker.enter("step")
        factors = optimizer.step(1.0)
        tracker.enter("realised KL")
        with compute:
            logra.realised_kl(model, samples[:1], before)
        del factors  # held until here
    phases = ("load", "backward", "probe", "step", "realised KL")
    return {phase: tracker.peaks[phase] / 2**30 for phase in phases}


def estimated(shape, tmp_path, capsys, flags):
    """The JSON that --estimate-memory prints of a shape."""
    transformers.Qwen2Config(**SHAPES[shape]).to_json_file(tmp_path / "shape.json")
    argv = ["--estimate-memory", "--model", str(tmp_path / "shape.json"), "--micro-batch", "1"]
    assert train.main([*argv, *flags.split()]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("ranks, goal", [(4, 34), (8, 21.5)])
def test_estimate_needs_a_config_alone_and_a_second(tmp_path, capsys, monkeypatch, ranks, goal):
    """At 27B shape, where what stays between updates and what is sent follow from the shapes."""
    monkeypatch.chdir(tmp_path)  # where runs/ would be
    start = time.process_time()
    result = estimated("27B", tmp_path, capsys, f"--world-size {ranks} --max-length 4096")
    assert time.process_time() - start < 1
    assert [p.name for p in tmp_path.iterdir()] == ["shape.json"]
    q, kv, hidden, inner = 80 * 128, 8 * 128, 5120, 17408
    d_out = [q, kv, kv, hidden, inner, inner, hidden]  # q k v o gate up down
    d_in = [hidden, hidden, hidden, q, hidden, hidden, inner]
    weights = 64 * sum(map(operator.mul, d_out, d_in))
    norms_and_biases = 64 * (2 * hidden + q + 2 * kv) + hidden
    sharded = 4 * (weights + norms_and_biases) + 2 * 2 * 248320 * hidden  # embedding, head: 2 bytes
    sharded += 4 * 64 * sum(d_out) * 257  # S and v
    gib = result.pop("methods")["logra"]
    resident = (sharded / ranks + 4 * 256 * (hidden + q + inner)) / 2**30
    assert gib["resident"] == pytest.approx(resident, rel=1e-6)
    assert resident < gib["peak"] <= goal
    sent = {"factors": 64 * sum(d_out) * 256 * 2, "full": weights * 4}
    assert result == {"world_size": ranks, "max_length": 4096, "rank": 256, "sync_bytes": sent}


@pytest.mark.slow
def test_estimate_is_the_simulated_peak(tmp_path, capsys):
    """Within 5% on 4 ranks, and it names a phase that the simulation has at its peak."""
    cases = [("7B", "logra"), ("1.5B", "logra"), ("short", "adamw"), ("short", "lora")]
    for case, peaks in zip(cases, elsewhere(*(f"simulate{case}" for case in cases)), strict=True):
        flags = "--world-size 4 --max-length 4096 --probe-responses 1"
        gib = estimated(case[0], tmp_path, capsys, flags)["methods"][case[1]]
        print(f"\n{case}: estimated {gib['peak']:.3f}, simulated {peaks}")
        assert gib["peak"] == pytest.approx(max(peaks.values()), rel=0.05)
        phase = gib["phase of the peak"].replace("head", "backward")
        assert peaks[phase] >= 0.98 * max(peaks.values())


@pytest.mark.slow
def test_estimate_is_the_measured_peak_of_a_step(tmp_path, capsys):
    """Within 5% on one rank without checkpointing; and above the model LoGRA needs at most .35 of
    what AdamW needs."""
    cases = {"adamw": ("adamw_foreach", None), "logra": ("row_adam", 256)}
    calls = [f"peak_above_model{(*case, 512, '370M')}" for case in cases.values()]
    measured = dict(zip(cases, elsewhere(*calls), strict=True))
    flags = "--max-length 512 --dtype float32 --no-checkpointing --probe-responses 1"
    estimates = estimated("370M", tmp_path, capsys, flags)["methods"]
    print(f"\n370M: above the model {measured}, estimated {estimates}")
    for method, above in measured.items():
        gib = estimates[method]
        model = gib["layers, float32"] + gib["embedding and head"]
        assert gib["peak"] == pytest.approx(model + above, rel=0.05)
    assert measured["logra"] <= 0.35 * measured["adamw"]


if __name__ == "__main__":  # one of torchrun's ranks
    import faulthandler

    faulthandler.dump_traceback_later(150, exit=True)  # it never hangs
    mode, out, *argv = sys.argv[1:]
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
