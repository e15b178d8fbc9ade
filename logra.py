"""LoGRA: reinforcement learning of language models with low-rank gradient sketches.

Adam needs three more matrices for each weight matrix W: its gradient and two moments.  LoGRA
(arXiv 2610.06647) never makes them.  It keeps a thin random projection of the gradient, and decides
by a predicted KL how far to step.  The whole of it, for one linear layer:

    Y   = X W^T                           the layer
    dW  = dY^T X                          its gradient, never formed
    A   = +-1/sqrt(r)                     random signs, new for each update; E[A^T A] = I
    S   = dW A^T = dY^T (X A^T)           the sketch: all that backward keeps
    S   = S / tokens                      the loss is a sum over tokens, divided once, here
    v_i = b2 v_i + (1 - b2) mean_j S_ij^2 RowAdam: one second moment for each row, b2 = .95
    D_i = S_i / sqrt(v_i)                 the direction, scaled back to the layer's own norm ||S||
    U   = D update_ratio ||W|| / ||D A||  the proposal; these two norms are over all layers
    z'  = d/da logits(W - a U A)          how the logits would move, at a = 0: one forward pass
    KL  = mean over tokens of Var_p(z' / T) / 2         predicted for a step of alpha = 1
    alpha = min(alpha_max, sqrt(budget / KL))           as far as the KL budget allows
    factor = bfloat16(alpha U)
    W   = W - factor A                    trainer and engine alike; only the factor is sent

    W [d_out, d_in] weight     X [N, d_in] input     Y [N, d_out] output
    A [r, d_in] projection     S, D, U, factor [d_out, r]                    v [d_out]
    z [n, V] logits of n generated tokens            p = softmax(z / T)      T temperature
    P prompts of a batch       G answers to each     r rank of the sketch
    dW dX dY gradients         z' X' Y' derivatives by a, along -U A (in code z_dot, X_dot, Y_dot)
    N all tokens of a micro-batch, n those that were generated, tokens: those that the loss counts

A step of the loop is one batch of answers; an update is one change of W, and its alpha the length.
The probe is the few answers of the batch on which the KL is predicted.

Why the sketch is right on average: a fresh A is independent of dW, so E[S A] = dW E[A^T A] = dW.
Each update moves W within the span of the r rows of A, and the next one has other rows.  What is
odd at first sight is explained where it stands: why the factor is rounded before anybody subtracts
it (section 1), why no momentum and only one division (section 3), why forward mode (section 5).

    sketches = attach_sketches(model, r=256)                    # what is trained, what is frozen
    optimizer = LoGRA(sketches, update_ratio=6e-5)
    control = KLControl(budget=2e-4)
    loss.backward()                                             # a SUM over tokens
    optimizer.propose(tokens)                                   # S -> U
    curve, _ = predict_kl(model, sketches, probe)               # KL of a step of 1 along U
    alpha = control.alpha_for(curve, optimizer.update)
    factors = optimizer.step(alpha)                             # W -= factor A, and a new A

Read sections 1 to 6 from top to bottom; on one rank that is all.  "Rank" alone is a process; the
rank of the sketch is r.  Section 7 is for many ranks.  The sections before it use names of it that
do nothing on one rank: world() is 1 and my_rank() 0; rank_sum, local, whole, own_rows, gather_rows,
own_prompts, all_prompts, own_state and whole_state return what they are given; rank_mean(x, n) is
x / n; apply_rule(rule, S, state, n) is rule(S, state); in_step(batches) pairs each with True;
together() and check_same() wait for nobody.
"""

import contextlib
import functools
import hashlib
import math
import os
import sys
import weakref
from bisect import bisect_left
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

# ------------------------------------------------------------------------------------------------
# 1  Projection: A follows from (seed, update, width), so it is never sent and never saved
# ------------------------------------------------------------------------------------------------

# Layers with inputs of one width share one A.  E[A^T A] = I is all that a layer's sketch needs to
# be unbiased, and it holds for each layer whoever else uses that A.  So a whole model needs two or
# three projections, not hundreds.


def stable_seed(*parts) -> int:
    """A 63-bit seed from anything printable: the same on every machine, rank and Python."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seeded(seed: int) -> torch.Generator:
    """A random generator on the CPU.  Those of GPUs give other numbers, and A must be the same in
    trainer and engine, wherever they run."""
    return torch.Generator().manual_seed(seed)


def make_projection(r: int, d_in: int, seed: int, kind="rademacher") -> torch.Tensor:
    """A [r, d_in] float32 with E[A^T A] = I: signs +-1/sqrt(r), the same on every machine; or
    "gaussian" N(0, 1/r), which CPUs of different kinds may round differently.

    "identity" is A = I [d_in, d_in] whatever r, so that S is the dense gradient: the control for
    what sketching costs.  Raises ValueError on another kind.
    """
    if kind == "identity":
        return torch.eye(d_in)
    if kind == "gaussian":
        return torch.randn(r, d_in, generator=seeded(seed)) * r**-0.5
    if kind != "rademacher":
        raise ValueError(f"projection must be rademacher, gaussian or identity, not {kind!r}")
    bits = torch.randint(0, 2, (r, d_in), generator=seeded(seed), dtype=torch.int8)
    return (2 * bits - 1).float() * r**-0.5


def draw_projections(widths, update, device, r, seed, kind, refresh) -> dict:
    """{d_in: A} of one update.  refresh: how many updates share an A; 0: it is never redrawn."""
    number = update // refresh if refresh else 0
    seeds = {d_in: stable_seed("projection", seed, number, d_in) for d_in in sorted({*widths})}
    return {d_in: make_projection(r, d_in, s, kind).to(device) for d_in, s in seeds.items()}


def subtract_factor(W: torch.Tensor, factor: torch.Tensor, A: torch.Tensor) -> None:
    """W <- W - factor A in place: what trainer and engine must do alike, to the bit.

    W [d_out, d_in] float32, factor [d_out, r] bfloat16, A [r, d_in].  The engine gets the factor in
    bfloat16.  If the trainer subtracted the unrounded one, the two policies would drift apart by a
    rounding error in every update; so both subtract the rounded one.
    """
    W.addmm_(factor.to(W.dtype), A.to(W.dtype), alpha=-1)


# ------------------------------------------------------------------------------------------------
# 2  Sketch: backward adds dY^T (X A^T) to S; weight.grad never exists
# ------------------------------------------------------------------------------------------------


class SketchLinear(torch.autograd.Function):
    """Y = X W^T + b whose backward adds dY^T XA, with XA = X A^T, to S instead of forming dY^T X.

    Forward keeps XA [N, r], not X [N, d_in].  S sums over micro-batches in its own dtype, float32.
    """

    @staticmethod
    def forward(ctx, X, W, bias, XA, S):
        ctx.save_for_backward(W, XA)
        ctx.S = S
        return F.linear(X, W, bias)  # [..., d_out]

    @staticmethod
    def backward(ctx, dY):
        W, XA = ctx.saved_tensors
        dY_rows, XA = (M.flatten(0, -2).to(ctx.S.dtype) for M in (dY, XA))  # [N, d_out], [N, r]
        if world() > 1:  # summed and split layer by layer: no rank ever has all rows of all layers
            ctx.S.add_(scatter_rows(dY_rows.T @ XA))
        else:
            ctx.S.addmm_(dY_rows.T, XA)
        del dY_rows, XA
        dX = dY @ W.to(dY.dtype) if ctx.needs_input_grad[0] else None
        return dX, None, None, None, None


def dual_linear(X, W, bias, A, U):
    """Y = X W^T + b and its derivative along the step, W(a) = W - a U A at a = 0:

        Y' = X' W^T - (X A^T) U^T

    U A is never formed.  X may be a dual tensor (a value with its derivative), and Y is one.
    """
    X, X_dot = forward_ad.unpack_dual(X)
    if X_dot is None:  # no trained layer stands before this one
        Y, Y_dot = F.linear(X, W), 0
    else:  # value and derivative share one product with W
        Y, Y_dot = F.linear(torch.stack([X, X_dot]), W).unbind(0)
    Y_dot = Y_dot - (torch.matmul(X, A.T.to(X.dtype)) @ U.T.to(Y.dtype)).to(Y.dtype)
    return forward_ad.make_dual(Y if bias is None else Y + bias.to(Y.dtype), Y_dot)


def decoder_layers(model) -> torch.nn.ModuleList:
    """The stack of decoder layers: the largest ModuleList.  Raises ValueError if there is none."""
    stacks = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    if not stacks:
        raise ValueError(f"{type(model).__name__} has no list of decoder layers")
    return max(stacks, key=lambda stack: sum(p.numel() for p in stack.parameters()))


def find_targets(model, targets=()) -> dict:
    """{path: nn.Linear} of the layers to train: every linear layer inside the decoder layers.

    targets: last parts of names that narrow them, such as ("q_proj", "v_proj").  Raises ValueError
    if a name matches nothing, or nothing is left.
    """
    inside = {m for m in decoder_layers(model).modules() if isinstance(m, torch.nn.Linear)}
    found = {path: module for path, module in model.named_modules() if module in inside}
    names = sorted({path.rpartition(".")[2] for path in found})
    if missing := sorted(set(targets) - set(names)):
        raise ValueError(f"no linear layer is called {', '.join(missing)}; there are {names}")
    found = {path: m for path, m in found.items() if path.rpartition(".")[2] in (targets or names)}
    if not found:
        raise ValueError(f"{type(model).__name__} has no nn.Linear in its decoder layers")
    return found


def freeze_all_but(model, layers: dict) -> str:
    """Only the weights of `layers` are trained, not even their biases.  Returns a line about it.
    They require a gradient, which stays None, so that autograd runs backward in every layer."""
    model.requires_grad_(False)
    for module in layers.values():
        module.weight.requires_grad_(True)
    trained = sum(module.weight.numel() for module in layers.values())
    frozen = [p.numel() for p in model.parameters() if not p.requires_grad]
    others = f"{len(frozen)} other tensors ({sum(frozen):,} weights and biases)"
    return f"{len(layers)} linear layers ({trained:,} weights) are trained; {others} are frozen"


class Sketches:
    """The projections and sketches of the target layers; they take the place of weight.grad.

    layers {path: nn.Linear}    what is trained
    A {d_in: [r, d_in]}         the projections of the current update
    S {path: [d_out, r]}        the sketches, until propose() makes U of them
    U {path: [d_out, r]}        the proposal, until step() takes it and S begins again at 0
    On many ranks the model is sharded first, and S and U have the rows of W that this rank owns.
    """

    def __init__(self, layers: dict, r: int, seed=0, kind="rademacher", refresh=1):
        if r < 1:
            raise ValueError(f"r must be at least 1, not {r}")
        for path, module in layers.items():
            if module.weight.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"{path} is {module.weight.dtype}: small steps need float32")
            if "forward" in vars(module):
                raise ValueError(f"{path} has a forward of its own; was it attached already?")
        self.layers, self.probing, self.device = layers, False, module.weight.device
        self.settings = {"r": r, "seed": seed, "kind": kind, "refresh": refresh}
        self.start_update(0)
        for path, module in layers.items():
            module.forward = functools.partial(self.forward, path, module)

    def start_update(self, update: int) -> None:
        """S = 0, and the projections of this update, from its number alone."""
        self.S, self.U, self.last = {}, {}, (lambda: None, 0, None)  # X is gone, and so is X A^T
        widths = [module.in_features for module in self.layers.values()]
        self.A = draw_projections(widths, update, self.device, **self.settings)
        for path, module in self.layers.items():
            W, r = local(module.weight), len(self.A[module.in_features])
            self.S[path] = W.new_zeros(len(W), r)

    def forward(self, path, module, X):
        """Value, or value and sketch, or value and derivative, by what is asked."""
        A, W, bias = self.A[module.in_features], module.weight, module.bias
        if self.probing:
            return dual_linear(X, W, bias, A, gather_rows(self.U[path], module.out_features))
        if not torch.is_grad_enabled():
            return F.linear(X, W, bias)
        if self.U:
            raise RuntimeError("no training pass between propose() and step(): S has become U")
        # q, k, v have one input, and so do gate and up: X A^T is made once for them.  A weak
        # reference lets X go when the model is done with it; _version tells a change in place.
        last_X, version, XA = self.last
        if last_X() is not X or version != X._version:
            XA = X.detach() @ A.T.to(X.dtype)  # [..., r]
            self.last = (weakref.ref(X), X._version, XA)
        return SketchLinear.apply(X, W, bias, XA, self.S[path])


def attach_sketches(model, r, targets=(), seed=0, kind="rademacher", refresh=1) -> Sketches:
    """Replace the weight gradients of the target layers by sketches; freeze all else, and say so.

    Of the modules only forward changes: state_dict() keys stay.  Raises ValueError as find_targets
    does, and if r < 1, a target is not in float32 or has a forward of its own already.
    """
    layers = find_targets(model, targets)
    sketches = Sketches(layers, r, seed, kind, refresh)
    summary = freeze_all_but(model, layers)
    if my_rank() == 0:
        print(f"r = {r}: {summary}", file=sys.stderr)
    return sketches


# ------------------------------------------------------------------------------------------------
# 3  Rules: from the sketch S of one layer to a direction D; LoGRA makes a step of it
# ------------------------------------------------------------------------------------------------

# A rule is a function of one layer's S [d_out, r], which it may overwrite, and of a dict that
# belongs to the layer, its state.  What it puts there is saved, and is there again at the next
# update; "d_in" is there from the start.  It returns D [d_out, r]; only the relative lengths of the
# layers' D matter, since propose() sets the common size.  On many ranks, too, it sees whole layers.
#
# Why v survives a new A and a first moment does not: S_ij = <dW_i, A_j> has mean square
# ||dW_i||^2 / r whatever A is, so a row's v speaks of its gradient.  A mean of S itself is a vector
# in the coordinates of A.  When A is redrawn, the coordinates mean something else.


def row_adam(S, state, beta2=0.95, eps=1e-8, keep_layer_norm=True):
    """The paper's rule: each row is divided by the root of its mean square.

        v_i <- b2 v_i + (1 - b2) mean_j S_ij^2
        s_i  = 1 / (sqrt(v_i) + eps mean_i sqrt(v_i))
        D_i  = s_i S_i,   then D <- D ||S||_F / ||D||_F   if keep_layer_norm

    Without keep_layer_norm a layer forgets the size of its gradient, as in Adam.  Adam's correction
    1 / (1 - b2^t) is one factor for all layers, and propose() sets the common size, so it is left
    out.  A row that never had a gradient stays where it is.
    """
    norms = torch.linalg.vector_norm(S, dim=1)  # ||S_i|| [d_out]
    v = state.setdefault("v", torch.zeros_like(norms))
    v.mul_(beta2).add_(norms.square(), alpha=(1 - beta2) / S.shape[1])
    root = v.sqrt()
    s = torch.where(root > 0, 1 / (root + eps * root.mean()), 0)
    if keep_layer_norm:
        s *= norms.norm() / (s * norms).norm().clamp_min(torch.finfo(S.dtype).tiny)  # ||S|| / ||D||
    return S.mul_(s[:, None])


def sketch_muon(S, state, steps=5):
    """About the polar factor of S: singular values above 2e-3 of ||S||_F become .68 to 1.21 (Muon,
    Jordan et al. 2024).  Times sqrt(max(1, d_out / d_in)).  No state.

        B = S / ||S||_F,   five times:  Q = B^T B,   M = 3.4445 I - 4.775 Q + 2.0315 Q^2,   B <- B M

    All M are polynomials of the first Q and commute with it, so the next Q is Q M^2: only r x r
    matrices are iterated, and B is multiplied once, by the product of all M.  In S's own precision:
    a Q rounded to bfloat16 has eigenvalues below zero, and they would explode.
    """
    Q = S.T @ S  # [r, r]
    identity = torch.eye(len(Q), dtype=S.dtype, device=S.device)
    norm = Q.trace().sqrt().clamp_min(torch.finfo(S.dtype).tiny ** 0.5)  # ||S||_F
    product = identity * (max(1, len(S) / state["d_in"]) ** 0.5 / norm)
    Q = Q / norm**2
    for step in range(steps):
        M = 3.4445 * identity - 4.775 * Q + 2.0315 * Q @ Q
        product = product @ M
        if step < steps - 1:  # there is a next one
            Q = Q @ M @ M
    return S @ product


def sketch_adam(S, state, beta1=0.9, beta2=0.95):
    """Adam on the entries of S, for an A that is kept (--refresh 50).  At a new A its moments are
    stale, as explained above; two thirds of m are gone after 1 / (1 - beta1) updates."""
    m = state.setdefault("m", torch.zeros_like(S))
    v = state.setdefault("v", torch.zeros_like(S))
    m.lerp_(S, 1 - beta1)
    v.mul_(beta2).addcmul_(S, S, value=1 - beta2)
    return torch.where(v > 0, m / v.sqrt(), 0)


def sketch_sgd(S, state):
    """The sketch itself."""
    return S


RULES = {f.__name__: f for f in (row_adam, sketch_muon, sketch_adam, sketch_sgd)}


def projected_norm_squared(D, AAT) -> torch.Tensor:
    """||D A||_F^2 = <D^T D, A A^T>: two r x r matrices in place of a d_out x d_in one.  Summed in
    float64: r^2 terms of both signs may end far below the largest of them."""
    return ((D.T @ D).double() * AAT.double()).sum().clamp_min(0)


def finite_norm(matrices, what: str) -> float:
    """||M||_F of all matrices of all ranks, row by row, then in float64: no large temporary.
    Raises FloatingPointError, naming `what`, unless it is finite."""
    rows = torch.cat([torch.linalg.vector_norm(M, dim=1) for M in matrices])
    norm = rank_sum(rows.double().square().sum()).sqrt().item()
    if not math.isfinite(norm):
        raise FloatingPointError(f"{what} is not finite")
    return norm


class LoGRA:
    """A rule on sketches, whose step length is left to the caller (arXiv 2610.06647).

    rule: a function as described above.
    update_ratio: ||U A|| / ||W|| over all layers, before alpha (dimensionless; the paper: 6e-5).
    Where the KL budget sets the step, alpha ~ 1 / ||U||, and the ratio cancels.  It matters where
    alpha_max binds, since no step is longer than alpha_max * update_ratio, and without KL control.
    """

    def __init__(self, sketches: Sketches, update_ratio=6e-5, rule=row_adam):
        self.sketches, self.layers = sketches, sketches.layers
        self.update_ratio, self.rule = update_ratio, rule
        self.state = {path: {"d_in": m.in_features} for path, m in self.layers.items()}
        self.update, self.sketch_norm = 0, 0.0
        check_same(sketches.A.values())

    @torch.no_grad()
    def propose(self, tokens: int) -> None:
        """S -> U.  The loss was a sum over tokens; here is the one division by their number.

        tokens: of the whole update, all micro-batches and ranks.  A mean of micro-batch means would
        give a token in a short batch more weight, and the result would depend on the cut.
        Raises FloatingPointError if the sketch is not finite (no weight has moved then), and
        RuntimeError if there is a U already.
        """
        S, D, D_squared = self.sketches.S, {}, []
        if self.sketches.U:
            raise RuntimeError("propose() twice: step() comes between")
        self.sketch_norm = finite_norm(S.values(), f"the sketch of update {self.update}") / tokens
        AAT = {d_in: A @ A.T for d_in, A in self.sketches.A.items()}  # [r, r] each
        for path, module in self.layers.items():
            S_l = S.pop(path).div_(tokens)  # one layer's
            D[path] = apply_rule(self.rule, S_l, self.state[path], module.out_features)
            D_squared.append(projected_norm_squared(D[path], AAT[module.in_features]))
        D_norm = rank_sum(torch.stack(D_squared).sum()).sqrt().item()
        if not math.isfinite(D_norm):
            raise FloatingPointError(f"the direction of update {self.update} is not finite")
        W = [local(module.weight) for module in self.layers.values()]
        W_norm = finite_norm(W, "the norm of the weights")
        size = self.update_ratio * W_norm / D_norm if D_norm else 0.0
        for path in self.layers:  # not in place: D may be what the rule keeps in its state
            self.sketches.U[path] = size * D.pop(path)

    @torch.no_grad()
    def step(self, alpha: float = 1.0) -> dict:
        """W <- W - factor A with factor = bfloat16(alpha U), then S = 0 and a new A.

        Returns {path: factor [d_out, r]}, whole on every rank.  Raises RuntimeError unless
        propose() came first.
        """
        sketches, factors = self.sketches, {}
        if not sketches.U:
            raise RuntimeError("step() before propose(): there is no U")
        for path, module in self.layers.items():
            factor = (alpha * sketches.U[path]).to(torch.bfloat16)
            subtract_factor(local(module.weight), factor, sketches.A[module.in_features])
            factors[path] = gather_rows(factor, module.out_features)
        self.update += 1
        sketches.start_update(self.update)
        return factors

    @torch.no_grad()
    def take_back(self, factors: dict, part: float) -> dict:
        """W <- W + part factor A, for the factors that step() has just returned.  Returns the new
        factors, bfloat16(-part factor), which belong to the same update."""
        widths, device = self.sketches.A, self.sketches.device  # step() has drawn the next A
        A = draw_projections(widths, self.update - 1, device, **self.sketches.settings)
        back = {path: (-part * f.float()).to(torch.bfloat16) for path, f in factors.items()}
        for path, module in self.layers.items():
            subtract_factor(local(module.weight), own_rows(back[path]), A[module.in_features])
        return back

    def state_dict(self) -> dict:
        """Tensors and plain numbers, whole, for any number of ranks.  All ranks must call."""
        rule = getattr(self.rule, "func", self.rule).__name__  # also of a functools.partial
        settings = {"rule": rule, **self.sketches.settings, "layers": [*self.layers]}
        state = {path: whole_state(self.state[path]) for path in self.layers}
        return {"update": self.update, "state": state, "settings": settings}

    def load_state_dict(self, saved: dict) -> None:
        """Raises ValueError if the state is of another rule, sketch (settings) or set of layers."""
        for key, value in self.state_dict()["settings"].items():
            if (was := saved["settings"].get(key)) != value:
                was, value = str(was)[:60], str(value)[:60]  # the layers are many
                raise ValueError(f"the checkpoint has {key} {was}, this run has {key} {value}")
        self.update = saved["update"]
        for path, module in self.layers.items():
            state = saved["state"][path]  # on the CPU, in the file
            state = {
                key: x.to(self.sketches.device, copy=True) if torch.is_tensor(x) else x
                for key, x in state.items()
            }
            self.state[path] = own_state(state, module.out_features)
        self.sketches.start_update(self.update)
        check_same(self.sketches.A.values())


# ------------------------------------------------------------------------------------------------
# 4  Objective: from rewards to advantages, from the log-probs of answers to a loss
# ------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    """One generated answer.  What has a default is filled in later."""

    prompt: list  # token ids
    completion: list  # token ids, the end-of-sequence token included
    logprobs: list  # of the completion, as the engine sampled it
    finished: bool  # ended by itself, not cut at max_new_tokens
    row: dict = field(default_factory=dict)  # the caller's: what the reward needs
    index: int = 0  # the caller's, of the prompt
    reward: float = 0.0
    advantage: float = 0.0
    old_logprobs: torch.Tensor | None = None  # the trainer's own, at the batch's first update


def group_advantages(rewards, state, divide_by_std=True):
    """Advantages [P, G] of the G answers to each of P prompts: (reward - mean) / std of the group
    (GRPO 2402.03300, 4.1), or without the std (Dr. GRPO 2503.20783).  Equal rewards get 0."""
    centred = rewards - rewards.mean(1, keepdim=True)
    std = rewards.std(1, correction=0, keepdim=True)
    alive = std > 1e-9 * rewards.abs().amax(1, keepdim=True)
    return torch.where(alive, centred / std if divide_by_std else centred, 0.0)


def running_mean_advantages(rewards, state, weight=0.1):
    """Advantages [P, G] = reward - baseline, where G may be 1 (the paper's).

    The baseline is a running mean of the steps before this one, so that it knows nothing of the
    answers it judges (a choice of ours).  The first step is judged by its own mean.
    """
    mean = rewards.mean().item()
    baseline = state.get("baseline", mean)
    state["baseline"] = baseline + weight * (mean - baseline)
    centred = rewards - baseline
    signal = centred.abs() > 1e-9 * max(abs(baseline), rewards.abs().max())  # above rounding
    return torch.where(signal, centred, 0.0)


def grpo_objective(logps, old_logps, engine_logps, advantages, clip_low=0.2, clip_high=0.28):
    """The loss SUMMED over all tokens of some answers.

    logps, old_logps, engine_logps: lists of one tensor [tokens] for each answer.  advantages: one
    number for each answer; one with advantage 0 must add 0, since the loop leaves it out.

    An objective of one's own (GSPO, CISPO) has the same arguments, and sees where answers end.

        ratio = exp(logp - old_logp)                       1 at the first update of a batch
        w     = min(exp(old_logp - engine_logp), 2)        the engine's policy is not quite ours
        loss  = -sum w min(ratio adv, clip(ratio, 1 - clip_low, 1 + clip_high) adv)

    Clipping with two bounds is DAPO's (2503.14476, 3.1); the sum over all tokens of the step, to
    be divided once by their number, its token-level loss (3.3).
    """
    logp, old, engine = (torch.cat(list(parts)) for parts in (logps, old_logps, engine_logps))
    lengths = torch.tensor([len(part) for part in logps], device=logp.device)
    adv = advantages.repeat_interleave(lengths)  # of its answer, for each token [n]
    ratio = (logp - old).exp()
    w = (old - engine).exp().clamp(max=2)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -(w * torch.minimum(ratio * adv, clipped * adv)).sum()


def compute_dtype(device, dtype: str):
    """A context: matrix products are made in `dtype`, weights stay float32.  Casts are not kept: a
    cache would hold a second copy of all weights."""
    low = dtype == "bfloat16"
    return torch.autocast(device.type, torch.bfloat16, low, cache_enabled=False)


def micro_batches(samples, size: int) -> list:
    """Lists of at most `size` samples, of like lengths so that little is padding."""
    ordered = sorted(samples, key=lambda s: len(s.prompt) + len(s.completion))
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]


def response_hidden(model, samples, device):
    """Final hidden states that predict the n generated tokens, [n, H], and those tokens, [n].

    Rows are padded on the right: a causal model then needs no mask.  What is prompt, answer or
    padding is known by position; no token's value decides what is in the loss.
    """
    rows = [torch.tensor(s.prompt + s.completion) for s in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)  # [B, L], B samples
    generated = torch.zeros_like(ids, dtype=torch.bool)
    for i, s in enumerate(samples):
        generated[i, len(s.prompt) : len(s.prompt) + len(s.completion)] = True
    # Not model.base_model(...): vLLM, where it uses transformers' own class, replaces that call
    output = torch.nn.Module.__call__(model.base_model, input_ids=ids, use_cache=False)
    hidden = output.last_hidden_state  # [B, L, H]
    return hidden[:, :-1][generated[:, 1:]], ids[generated]  # position t - 1 predicts token t


def policy_head(model):
    """The function hidden [n, H] -> logits [n, V], with the scale or cap that some families have.
    A sharded head is gathered here, and kept as long as the function is; all ranks must call."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    W, bias = whole(head.weight), None if head.bias is None else whole(head.bias)
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2

    def logits(h):
        z = F.linear(h.to(W.dtype), W, bias) * scale
        return torch.tanh(z / cap) * cap if cap else z

    logits.chunk = max(1, 2**24 // len(W))  # as many positions as make 64 MiB of float32 logits
    return logits


def token_logprobs(hidden, head, ids, temperature, chunk=512):
    """log p(ids) [n] under softmax(head(hidden) / T), hidden [n, H].  `chunk` positions at a time,
    made again in backward: no [n, V] matrix ever exists."""

    def logprobs(h, i):
        z = head(h).float() / temperature  # [chunk, V]
        return z.gather(1, i[:, None]).squeeze(1) - z.logsumexp(1)

    pieces = zip(hidden.split(chunk), ids.split(chunk), strict=True)
    again = functools.partial(checkpoint, logprobs, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([again(h, i) for h, i in pieces])


def backward(model, samples, objective, config, first: bool) -> list:
    """Add the gradient of the objective, a SUM over the samples' tokens, to S.

    At the first update of a batch the trainer's log-probs become the old ones of the ratio, and
    log p_engine - log p_trainer is returned, of the samples that KLControl.observe asks for.
    Training on answers of an older policy would begin here: old log-probs that are that policy's, a
    w that corrects for it, and no mismatch, which would count its age as an error of the engine.
    """
    device, differences = model.device, []
    for micro, real in in_step(micro_batches(samples, config.micro_batch)):
        lengths = [len(s.completion) for s in micro]
        with compute_dtype(device, config.dtype):
            hidden, ids = response_hidden(model, micro, device)  # [n, H], [n]
            leaf = hidden.detach().requires_grad_()  # the head's backward stops here
            head = policy_head(model)
            logp = token_logprobs(leaf, head, ids, config.temperature, head.chunk)  # [n]
        engine = [torch.tensor(s.logprobs, device=device) for s in micro]
        if first and real:
            for s, own, theirs in zip(micro, logp.detach().split(lengths), engine, strict=True):
                s.old_logprobs = own
                if s.finished and s.advantage:
                    differences.append(theirs - own)
        advantages = torch.tensor([s.advantage for s in micro], device=device)
        old = [s.old_logprobs for s in micro]
        with together():
            loss = objective(logp.split(lengths), old, engine, advantages)
        (loss * real).backward()  # a rank without batches repeats its last, which adds nothing
        del logp, head, loss  # so that the head and its logits are gone when the layers' begins
        hidden.backward(leaf.grad)
    return differences


# ------------------------------------------------------------------------------------------------
# 5  Predicted KL: how far the policy will move, before it moves
# ------------------------------------------------------------------------------------------------

# Why forward mode: one pass gives the derivative of all logits along one direction in all weights.
# Reverse mode gives that of one number along all directions, and would need a pass for each logit.


def blockwise_attention(module, query, key, value, mask, scaling, softcap=None, **_):
    """Softmax attention in plain operations: forward mode cannot go through fused kernels.

    query [B, heads, L, d], key and value [B, kv_heads, L, d], mask added to the scores, which exist
    for 128 queries at a time.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    blocks = []
    for start in range(0, query.shape[2], 128):
        scores = query[:, :, start : start + 128] @ key.transpose(2, 3) * scaling
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        scores = scores + mask[:, :, start : start + 128]  # [B, heads, 128, L]
        blocks.append(scores.float().softmax(-1).to(value.dtype) @ value)
    return torch.cat(blocks, 2).transpose(1, 2).contiguous(), None  # [B, L, heads, d]


@contextlib.contextmanager
def probe_mode(model, sketches=None):
    """Inside, the model attends by blockwise_attention and its target layers carry the derivative
    along -U A; outside, also after an error, all is as before."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("logra_probe", blockwise_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("logra_probe", eager_mask)
    before, experts = model.config._attn_implementation, model.config._experts_implementation
    try:
        model.set_attn_implementation("logra_probe")
        if experts:  # of a mixture: their grouped product has no forward mode either
            model.set_experts_implementation("eager")
        if sketches:
            sketches.probing = True
        yield
    finally:
        model.set_attn_implementation(before)
        if experts:
            model.set_experts_implementation(experts)
        if sketches:
            sketches.probing = False


def probe_states(model, probe, micro_batch, sketches=None) -> list:
    """Final hidden states [n, H] of the probe by probe_mode, one tensor a micro-batch."""
    with probe_mode(model, sketches):
        passes = in_step(micro_batches(probe, micro_batch))
        hidden = [(response_hidden(model, batch, model.device)[0], real) for batch, real in passes]
    return [h for h, real in hidden if real]


def phi(x):
    """e^x - 1 - x, without the cancellation near 0: a series where |x| < 0.1."""
    series = x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x / 720))))
    return torch.where(x.abs() < 0.1, series, torch.expm1(x) - x)


def predicted_kls(z, z_dot, temperature, alphas=None):
    """The predicted KL of steps of `alphas`, summed over positions; z and z' [n, V].

        u  = (z' - E_p z') / T
        KL = Var_p(z' / T) / 2 = E_p[u^2] / 2             alphas None: quadratic, for a step of 1
        KL = log(1 + sum_v p_v phi(a u_v))                linearised

    The second is the exact KL(p || softmax((z + a z') / T)): the softmax is kept whole, only the
    network is linearised.  It is log E_p[e^(a u)] = log(1 + E_p[phi(a u)]), since E_p[u] = 0.
    As a difference of two log-softmaxes it would be lost in rounding below 1e-6.
    """
    p, u = (z / temperature).softmax(-1), z_dot / temperature
    u = u - (p * u).sum(-1, keepdim=True)
    if not alphas:
        return (p * u.square()).sum().view(1) / 2
    kls = [(p * phi((a * u).clamp(max=80))).sum(-1).log1p().sum() for a in alphas]
    return torch.stack(kls)


def exact_kl(z, z_after, temperature):
    """KL(p || q) summed over positions, p = softmax(z / T) before a step, q after it; written with
    phi since sum_v (q_v - p_v) = 0: no term is negative."""
    log_p, log_q = (z / temperature).log_softmax(-1), (z_after / temperature).log_softmax(-1)
    return (log_p.exp() * phi((log_q - log_p).clamp(max=80))).sum()


def float_logits(head, h):
    """Logits in float32: one of size 8 moves by less than bfloat16 can tell."""
    with compute_dtype(h.device, "float32"):
        return head(h.float()).float()


@torch.no_grad()
def predict_kl(model, sketches, probe, temperature=1.0, alphas=None, micro_batch=1, chunk=None):
    """The KL that W - a U A would cause, from one forward-mode pass over all layers at once.

    probe: Samples.  alphas: None for the quadratic predictor, or steps for the linearised one.
    sketches: None (dense AdamW, LoRA) predicts nothing.
    Returns the curve (list of a, list of mean KL per generated token, in nats) and the probe's
    final hidden states, from which realised_kl tells later what came of it.
    Memory: `micro_batch` answers in the model, `chunk` positions in the head.
    """
    total = 0.0
    with forward_ad.dual_level():
        hidden = probe_states(model, probe, micro_batch, sketches)
        hidden_before = [forward_ad.unpack_dual(h).primal for h in hidden]
        if not sketches:
            return None, hidden_before
        head = policy_head(model)  # gathered when the layers are done
        for h in (part for states in hidden for part in states.split(chunk or head.chunk)):
            pair = forward_ad.unpack_dual(float_logits(head, h))  # z, z' [chunk, V]
            total = total + predicted_kls(*pair, temperature, alphas)
            del pair
    kls = rank_mean(total, sum(map(len, hidden)))
    return (list(alphas or [1.0]), kls), hidden_before


@torch.no_grad()
def realised_kl(model, probe, hidden_before, temperature=1.0, micro_batch=1, chunk=None) -> float:
    """KL(before || after), mean per generated token of the same probe, in probe_mode again.  The
    head is frozen, so logits before the step are made again from its hidden states."""
    hidden_after = probe_states(model, probe, micro_batch)
    head, total = policy_head(model), torch.zeros(1, dtype=torch.float64)
    for pair in zip(hidden_before, hidden_after, strict=True):
        for hs in zip(*(h.split(chunk or head.chunk) for h in pair), strict=True):
            total += exact_kl(*(float_logits(head, h) for h in hs), temperature).item()
    return rank_mean(total, sum(map(len, hidden_before)))[0]


def interpolate(x, xs, ys, slope):
    """y at x, linear in log x and log y between the points, y ~ x^slope beyond them."""
    i = bisect_left(xs, x)
    if 0 < i < len(xs):
        slope = math.log(ys[i] / ys[i - 1]) / math.log(xs[i] / xs[i - 1])
    i = max(i - 1, 0)
    return ys[i] * (x / xs[i]) ** slope


def kl_at(curve, alpha: float) -> float:
    """The predicted KL of a step of alpha; KL ~ alpha^2 beyond the points of the curve."""
    alphas, kls = curve
    return interpolate(alpha, alphas, kls, 2) if min(kls) > 0 and alpha > 0 else 0.0


def cosine(ends, update: int, updates: int) -> float:
    """From the first of two ends, at update 0, to the last, at update `updates` - 1 and after."""
    first, last = ends
    done = min(update / max(updates - 1, 1), 1.0)
    return last + (first - last) * (1 + math.cos(math.pi * done)) / 2


class KLControl:
    """The KL budget of each update, and the alpha that spends it (the paper's values).

    budget -> final_budget: cosine over `updates` updates, both ends included; constant after.
    alpha_max bounds every alpha but that of enabled=False, which is 1, and so it is where nothing
    would move.
    mismatch: an estimate of the KL between engine and trainer before any step, a running mean (the
    paper's .7 and .3); it is taken off the budget, down to one half.
    advantage_state: what the advantage function remembers, kept here to be saved with the mismatch.
    """

    def __init__(self, budget=2e-4, final_budget=2e-5, updates=300, alpha_max=3.0, enabled=True):
        self.ends, self.updates, self.alpha_max = (budget, final_budget), updates, alpha_max
        self.enabled, self.mismatch, self.advantage_state = enabled, 0.0, {}

    def budget(self, update: int) -> float:
        """The KL per token that update number `update` (from 0) may spend."""
        budget = cosine(self.ends, update, self.updates)
        return max(budget - self.mismatch, budget / 2)

    def observe(self, differences: list) -> None:
        """differences: log p_engine - log p_trainer of tokens of finished answers that are trained
        on, tensors of this rank.  The engine drew the tokens, so their mean estimates the KL."""
        total, count = sum(d.sum().item() for d in differences), sum(map(len, differences))
        mean = rank_mean(torch.tensor([total]), count)  # a CPU tensor on every rank
        if mean:
            self.mismatch = 0.7 * self.mismatch + 0.3 * max(0.0, mean[0])

    def alpha_for(self, curve, update: int) -> float:
        """alpha = min(alpha_max, the step at which the predicted KL is the budget).

        The quadratic predictor's curve is one point, and then this is sqrt(budget / KL).
        Raises FloatingPointError if a prediction is negative or not finite.
        """
        alphas, kls = curve
        if not all(0 <= kl < math.inf for kl in kls):
            raise FloatingPointError(f"the predicted KL of update {update} is {kls}")
        if not self.enabled or min(kls) == 0:  # without a KL nothing moves: any step will do
            return 1.0
        return min(self.alpha_max, interpolate(self.budget(update), kls, alphas, 1 / 2))

    def excess(self, realised: float, update: int) -> float:
        """The part of a step to take back, 0 to .9, once, by KL ~ alpha^2.
        Raises FloatingPointError if the realised KL is not finite."""
        if not realised < math.inf:
            raise FloatingPointError(f"the realised KL of update {update} is {realised}")
        above = realised > self.budget(update)
        return 1 - max(0.1, math.sqrt(self.budget(update) / realised)) if above else 0.0

    def grid(self) -> list:
        """Sixteen alphas for the linearised predictor, down to a thousandth of alpha_max."""
        return [self.alpha_max * 1024 ** (i / 15 - 1) for i in range(16)]


# ------------------------------------------------------------------------------------------------
# 6  Generation, sync and the loop
# ------------------------------------------------------------------------------------------------


class SketchSync:
    """What a vLLM worker learns of LoGRA: redraw A, subtract factor A.

    vLLM mixes this class into its worker.  Engines in bfloat16 keep a float32 master of the target
    weights on the host and round it: a step of 6e-5 is far below half a unit of a bfloat16 and
    would vanish if it were subtracted in place.  Autocast rounds the trainer's weights alike.
    """

    def sync_weights(self, weights, settings: dict, ranks: int) -> None:
        """Take the trainer's float32 weights, pairs (path, W).  ranks: how many hold their rows.
        Raises StopRun if a layer is not in this engine or has another shape."""
        self.logra_settings, self.logra_ranks, self.logra_layers = settings, ranks, {}
        modules = dict(self.get_model().named_modules())
        for path, W in weights:
            rows = engine_rows(self.get_model(), modules, path)
            if rows.shape != W.shape:
                raise StopRun(f"{path}: engine {list(rows.shape)}, trainer {list(W.shape)}")
            same = rows.dtype == W.dtype
            master = rows if same else W.detach().to("cpu", copy=True)
            self.logra_layers[path] = (rows, master)
            rows.copy_(W)

    def sync_factors(self, factors, update: int) -> None:
        """W <- W - factor A for pairs (path, factor), A redrawn from the number of the update; then
        round.  Raises StopRun, before anything is written, unless every target layer would be.
        """
        layers, factors = self.logra_layers, dict(factors)
        device = next((f.device for f in factors.values()), "cpu")  # where the trainer multiplies
        widths = (master.shape[1] for _, master in layers.values())
        A = draw_projections(widths, update, device, **self.logra_settings)
        wanted = {(path, (len(W), len(A[W.shape[1]]))) for path, (_, W) in layers.items()}
        if wrong := wanted ^ {(path, tuple(factor.shape)) for path, factor in factors.items()}:
            raise StopRun(f"factors and target layers differ: {sorted(wrong)}")
        for path, factor in factors.items():
            rows, master = layers[path]
            W = master.to(device)
            # In the blocks of rows that the trainer's ranks hold: a product of another shape may
            # round otherwise
            for blocks in zip(W.chunk(self.logra_ranks), factor.chunk(self.logra_ranks)):
                subtract_factor(*blocks, A[W.shape[1]])
            for copy in (master, rows):  # either may be W itself
                copy.copy_(W)

    def sync_read(self) -> dict:
        """{path: weights} as the engine computes with them."""
        return {path: rows.clone() for path, (rows, _) in self.logra_layers.items()}


def engine_rows(model, modules: dict, path: str) -> torch.Tensor:
    """The rows of vLLM's parameter for the layer `path`; q, k, v and gate, up are fused there.
    Raises StopRun if there is no such layer."""
    if path in modules:
        return modules[path].weight.data
    parent, _, leaf = path.rpartition(".")
    for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
        module = modules.get(f"{parent}.{fused}")
        if leaf in parts and module is not None:
            sizes, i = module.output_partition_sizes, parts.index(leaf)
            return module.weight.data.narrow(0, sum(sizes[:i]), sizes[i])
    raise StopRun(f"the engine has no layer {path}: its weights would not be updated")


class VLLMGenerator:
    """The policy in a vLLM engine in this process.  Token ids in, token ids out, never text.

    generate(prompts, seeds, ...) -> Samples, one for each prompt and seed
    load(weights)           the target weights whole, pairs (path, W); comes first
    sync(factors, update)   W -= factor A in the engine

    path: of a Hugging Face directory.  max_length: tokens of prompt and answer.  settings: those of
    the Sketches.  kv_gib: of the key-value cache.  alone: no trainer shares the GPU.
    """

    def __init__(self, path, eos_ids, max_length, settings, dtype="float32", kv_gib=1, alone=False):
        on_cpu = not torch.cuda.is_available()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # tensors pass by reference
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if on_cpu:  # enforce_eager below leaves nothing for the compiler but 12 s of start-up
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        import vllm
        import vllm.model_executor.layers.utils as layer_utils
        from vllm.model_executor.models import registry

        # The registry looks at the model class in a second interpreter, which costs seconds and
        # may meet a broken torchvision.  Here it looks for itself.
        registry._run_in_subprocess = lambda function: function()
        if on_cpu:  # vLLM's kernel packs the weights away, and writing to them changes nothing
            layer_utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: setattr(
                layer, "cpu_linear", F.linear
            )
        self.vllm, self.eos_ids, self.settings = vllm, list(eos_ids), settings
        # A generation rank is alone on its GPU and need not make room for a trainer
        self.can_sleep, self.asleep = not (on_cpu or alone), False
        self.llm = vllm.LLM(
            str(path),
            dtype=dtype,
            seed=0,
            max_model_len=max_length,
            max_num_seqs=256,
            max_num_batched_tokens=max(8192, max_length),
            enable_chunked_prefill=not on_cpu,  # on a CPU, seeded requests cannot be split
            enforce_eager=on_cpu,
            kv_cache_memory_bytes=int(kv_gib * 2**30),
            gpu_memory_utilization=0.01,  # no share of the GPU is claimed beyond what is used
            enable_sleep_mode=self.can_sleep,
            logprobs_mode="processed_logprobs",  # after the temperature: what was sampled from
            generation_config="vllm",  # not the model's: every sampling field is set below
            skip_tokenizer_init=True,
            use_tqdm_on_load=False,
            worker_extension_cls="logra.SketchSync",
            distributed_executor_backend="external_launcher" if world() > 1 else None,
        )

    def generate(self, prompts, seeds, max_new_tokens, temperature=1.0) -> list:
        """One Sample for each prompt (token ids) and seed; temperature 0 is greedy."""
        if not prompts:
            return []
        self.wake()
        fixed = dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty"), 0.0)
        fixed |= {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "temperature": temperature}
        fixed |= {"logprobs": 0, "flat_logprobs": True, "detokenize": False}
        fixed |= {"max_tokens": max_new_tokens, "stop_token_ids": self.eos_ids}
        params = [self.vllm.SamplingParams(seed=seed, **fixed) for seed in seeds]
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = [o.outputs[0] for o in self.llm.generate(requests, params, use_tqdm=False)]
        if self.can_sleep:  # level 1 keeps the weights, on the host; level 2 would lose them
            self.llm.sleep(level=1)
            self.asleep = True
        return [
            Sample(ids, list(o.token_ids), list(o.logprobs.logprobs), o.finish_reason == "stop")
            for ids, o in zip(prompts, outputs, strict=True)
        ]

    def wake(self) -> None:
        """Bring the weights to the GPU and forget all keys and values: those of other weights are
        wrong, and what was generated before must not matter, not even by a bit."""
        if self.asleep:
            self.llm.wake_up()
        self.asleep = False
        self.llm.reset_prefix_cache()

    def call(self, method: str, *args):
        """A method of SketchSync."""
        self.wake()
        return self.llm.collective_rpc(method, args=args)[0]

    def sync(self, factors: dict, update: int) -> None:
        self.call("sync_factors", factors, update)

    def load(self, weights, ranks=None) -> None:
        """Weights are gathered one at a time.  ranks: how many hold them (default: all)."""
        pairs = ((path, whole(W)) for path, W in weights)
        self.call("sync_weights", pairs, self.settings, ranks or world())


class HFGenerator:
    """The same methods on the trainer's own model, for machines without vLLM and as an oracle."""

    def __init__(self, model, eos_ids, dtype="float32"):
        self.model, self.eos_ids, self.dtype = model, list(eos_ids), dtype

    @torch.no_grad()
    def generate(self, prompts, seeds, max_new_tokens, temperature=1.0, rows=256) -> list:
        """As VLLMGenerator.generate, at most `rows` prompts at a time."""
        if len(prompts) > rows:
            cuts = [slice(i, i + rows) for i in range(0, len(prompts), rows)]
            options = (max_new_tokens, temperature, rows)
            return [s for cut in cuts for s in self.generate(prompts[cut], seeds[cut], *options)]
        from transformers import GenerationConfig

        device, width = self.model.device, max(map(len, prompts))
        # [B, L], padded on the left so that all rows grow at their end
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]).to(device)
        # One uniform number a token from the seed of its row: no row depends on the others
        draws = [torch.rand(max_new_tokens, generator=seeded(s), dtype=torch.double) for s in seeds]
        draws, logps = torch.stack(draws).to(device), []

        def choose(ids, z):  # a logits processor that leaves one token a row to choose from
            logp = (z.float() / (temperature or 1.0)).log_softmax(-1)  # [B, V]
            cumulative = logp.double().exp().cumsum(-1)
            at = draws[:, len(logps), None] * cumulative[:, -1:]
            token = torch.searchsorted(cumulative, at) if temperature else z.argmax(-1, True)
            logps.append(logp.gather(1, token))
            return torch.full_like(z, -math.inf).scatter(1, token, 0.0)

        settings = GenerationConfig(
            max_new_tokens=max_new_tokens, eos_token_id=self.eos_ids or None, pad_token_id=0
        )
        # What is not set here, as a penalty, generate() would take from the model's own settings
        own, self.model.generation_config = self.model.generation_config, settings
        try:
            with compute_dtype(device, self.dtype):
                out = self.model.generate(ids, attention_mask=mask, logits_processor=[choose])
        finally:
            self.model.generation_config = own
        samples = []
        for prompt, tokens, logp in zip(
            prompts, out[:, width:].tolist(), torch.cat(logps, 1).tolist(), strict=True
        ):
            ends = [i for i, token in enumerate(tokens, 1) if token in self.eos_ids]
            n = min(ends, default=len(tokens))
            samples.append(Sample(prompt, tokens[:n], logp[:n], bool(ends)))
        return samples

    def sync(self, *_) -> None:
        """Nothing to send: the weights are the trainer's."""

    load = sync


def rollout(generator, prompts, reward, config, step) -> list:
    """This rank's Samples of a step, scored: G answers to each of its prompts.

    Each answer has a seed of its own, from (seed, step, prompt, g): a run that starts again at this
    step draws the same answers, on any number of ranks.
    """
    asked = [(*prompt, g) for prompt in prompts for g in range(config.group_size)]
    seeds = [stable_seed("sample", config.seed, step, index, g) for index, _, _, g in asked]
    ids = [ids for _, ids, _, _ in asked]
    with together():
        samples = generator.generate(ids, seeds, config.max_new_tokens, config.temperature)
        for sample, (index, _, row, _) in zip(samples, asked, strict=True):
            sample.index, sample.row = index, row
            sample.reward = reward(sample)
    return samples


def judge(samples, advantage, state, config):
    """Give every sample its advantage.  Returns metrics, means over the answers of all ranks and
    their number; the tokens that the loss is to be divided by; how many answers have an advantage.

    A group whose advantages are all 0 is dead: it teaches nothing.  An answer that mask_truncated
    leaves out of the loss still counts in the mean of its group.
    """
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    rewards = rewards.view(-1, config.group_size)  # [P, G]
    advantages = own_prompts(advantage(all_prompts(rewards), state=state))
    covered = [s.finished or not config.mask_truncated for s in samples]  # by the loss
    for s, value, in_loss in zip(samples, advantages.flatten().tolist(), covered, strict=True):
        s.advantage = value * in_loss
    sums = {
        "reward": rewards.sum().item(),
        "solved": (rewards > 0).sum().item(),
        "dead_groups": (advantages == 0).all(1).sum().item() * config.group_size,  # in answers
        "length": sum(len(s.completion) for s in samples),
        "truncated": sum(not s.finished for s in samples),
        "answers": len(samples),
        "tokens": sum(len(s.completion) for s, in_loss in zip(samples, covered) if in_loss),
        "signals": sum(s.advantage != 0 for s in samples),
    }
    totals = rank_sum(torch.tensor([*sums.values()], dtype=torch.float64)).tolist()
    sums = dict(zip(sums, totals, strict=True))
    answers, tokens, signals = (sums.pop(name) for name in ("answers", "tokens", "signals"))
    metrics = {name: x / answers for name, x in sums.items()} | {"answers": answers}
    if config.denominator == "constant":  # Dr. GRPO (2503.20783)
        tokens = answers * config.max_new_tokens
    return metrics, tokens, signals


def grpo(
    model, generator, optimizer, control, draw, reward, advantage, objective, config, done=0, lap=id
):
    """Yield one dict of metrics after every update: a step is one batch, updated once or more.

    draw(step) -> [(index, token ids, row)], the prompts of a step; each rank takes its own.
    reward(sample) -> float.  advantage and objective: as those of section 4.  config: the fields of
    train.Config that are read here.  done: steps made before.  lap(name) ends a phase; id does
    nothing.

    Everything random follows from (seed, step, prompt, g) and the number of the update, so a run
    that starts again at a step with the same weights and optimizer is the same run.
    """
    sketches = optimizer.sketches  # None: a control without them
    weights = {path: module.weight for path, module in optimizer.layers.items()}
    alphas = control.grid() if config.kl_predictor == "linearised" else None
    probing = {"temperature": config.temperature, "micro_batch": config.micro_batch}
    compute = compute_dtype(model.device, config.dtype)  # autocast, as a decorator
    predict = compute(functools.partial(predict_kl, model, sketches, alphas=alphas, **probing))
    measure = compute(functools.partial(realised_kl, model, **probing))

    for step in range(done, config.steps):
        # 1  G answers to each prompt, scored
        samples = rollout(generator, own_prompts(draw(step)), reward, config, step)
        lap("generate")
        # 2  who beat the group
        metrics, tokens, signals = judge(samples, advantage, control.advantage_state, config)
        alive = [s for s in samples if s.advantage] or samples[:1]  # the others would add exactly 0
        probe = samples[:: config.group_size][: config.probe_responses]
        probe = [replace(s, completion=s.completion[:4096]) for s in probe]  # the paper's bound
        repeats = config.updates_per_batch if signals else 1

        for repeat in range(repeats):
            update, alpha, sent, curve, realised = optimizer.update, 0.0, [], None, None
            if signals:
                # 3  adds dY^T (X A^T) to S
                control.observe(backward(model, alive, objective, config, first=repeat == 0))
                lap("train")
                # 4  a direction U of size update_ratio
                optimizer.propose(tokens)
                lap("update")
                # 5  how far the KL budget lets it go
                check = config.kl_check_every and update % config.kl_check_every == 0
                check = check or config.verify_step
                if sketches or check:
                    curve, before = predict(probe)
                alpha = control.alpha_for(curve, update) if curve else 1.0
                lap("probe")
                # 6  W -= factor A, factor = alpha U rounded; a new A
                sent = [optimizer.step(alpha)]
                lap("update")
                if check:
                    realised = measure(probe, before)
                if config.verify_step and (part := control.excess(realised, update)):
                    sent.append(optimizer.take_back(sent[0], part))
                    alpha *= 1 - part
                    realised = measure(probe, before)
                lap("probe")
                # 7  send the factors and a number, not W
                if config.sync == "full":
                    sent = [weights]
                    generator.load(weights.items())
                else:
                    for factors in sent:
                        generator.sync(factors, update)
                lap("sync")

            yield metrics | {
                "step": step + 1,
                "update": optimizer.update,
                "kl_predicted": kl_at(curve, alpha) if curve else None,  # nats a token
                "kl_realised": realised,
                "alpha": alpha,
                "budget": control.budget(update),
                "mismatch": control.mismatch,
                "update_ratio": alpha * getattr(optimizer, "update_ratio", 0.0),
                "grad_sketch_norm": optimizer.sketch_norm if signals else 0.0,
                "sync_bytes": sum(x.nbytes for tensors in sent for x in tensors.values()),
                "wire_bytes": getattr(generator, "crossed", 0),  # to and from generation ranks
                "samples": samples,
                "last": repeat == repeats - 1,  # of this batch
            }
            generator.crossed = 0


# ------------------------------------------------------------------------------------------------
# 7  Many ranks: each holds some rows of every W
# ------------------------------------------------------------------------------------------------


class StopRun(Exception):
    """A reason to stop that all ranks raise together, so that none waits for another."""


def world() -> int:
    """The number of training ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def my_rank() -> int:
    """The number of this one, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def rank_sum(x: torch.Tensor) -> torch.Tensor:
    """x summed over all ranks, in place."""
    if world() > 1:
        dist.all_reduce(x)
    return x


def rank_mean(totals: torch.Tensor, count: int):
    """totals [k] / count, each summed over all ranks: a list of floats, None if count is 0."""
    sums = torch.cat([totals.double(), totals.new_tensor([count], dtype=torch.float64)])
    *sums, count = rank_sum(sums).tolist()
    return [total / count for total in sums] if count else None


def from_all_ranks(x) -> list:
    """[x of rank 0, x of rank 1, ...], for any x that can be pickled."""
    everything = [x] * world()
    if world() > 1:
        dist.all_gather_object(everything, x)
    return everything


def in_step(batches: list) -> list:
    """Pairs (batch, whether it is real), as many on every rank.  The ranks gather weights together,
    so one that has fewer batches repeats its last, which must then add nothing."""
    n = len(batches)
    return [(batches[min(i, n - 1)], i < n) for i in range(max(from_all_ranks(n)))]


def own_prompts(prompts):
    """Of the prompts of a step (or of anything with one entry a prompt) those of this rank."""
    if len(prompts) < world():
        raise StopRun(f"a step of {len(prompts)} prompts is too small for {world()} ranks")
    return prompts[my_rank() :: world()]


def all_prompts(rewards: torch.Tensor) -> torch.Tensor:
    """[P, G] of all prompts, in their order, from the rows of each rank's own prompts."""
    parts = from_all_ranks(rewards)
    everything = rewards.new_empty(sum(map(len, parts)), rewards.shape[1])
    for rank, part in enumerate(parts):
        everything[rank :: world()] = part
    return everything


@contextlib.contextmanager
def together():
    """An error inside on any rank is raised by all as StopRun, so that none waits for another; with
    one rank, as it is."""
    failure = None
    try:
        yield
    except Exception as error:
        if world() == 1:
            raise
        failure = error
    errors = from_all_ranks(failure and (str(failure) or repr(failure)))
    for rank, words in enumerate(errors):
        if words:
            raise StopRun(words if len({*errors}) == 1 else f"rank {rank}: {words}") from failure


def check_same(projections) -> None:
    """Raise StopRun unless all ranks have the same projections, to the bit."""
    digest = hashlib.blake2b(digest_size=8)
    for A in projections:
        digest.update(A.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    digests = from_all_ranks(digest.hexdigest())
    if len({*digests}) > 1:
        raise StopRun(f"projections differ between ranks: {digests}")


# Rows.  FSDP2 gives each rank ceil(d_out / ranks) rows of a matrix; the last ranks may have fewer,
# or none.  torch's DTensor knows how to split and gather them.


@functools.cache
def mesh():
    return init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (world(),))


def own_rows(x: torch.Tensor) -> torch.Tensor:
    """The rows of x [d_out, ...] that this rank keeps."""
    if world() == 1:
        return x
    return distribute_tensor(x, mesh(), [Shard(0)], src_data_rank=None).to_local()


def scatter_rows(S: torch.Tensor) -> torch.Tensor:
    """The own rows of S [d_out, r], summed over ranks."""
    return DTensor.from_local(S, mesh(), [Partial()]).redistribute(placements=[Shard(0)]).to_local()


def gather_rows(rows: torch.Tensor, d_out: int) -> torch.Tensor:
    """The whole [d_out, ...] from each rank's own rows; all ranks must call."""
    if world() == 1:
        return rows
    shape = torch.Size([d_out, *rows.shape[1:]])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows, mesh(), [Shard(0)], shape=shape, stride=stride).full_tensor()


def local(W: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a weight: of a sharded one its shard, of a plain one all."""
    return W.detach().to_local() if isinstance(W, DTensor) else W.detach()


def whole(W: torch.Tensor) -> torch.Tensor:
    """A weight gathered from all ranks; all must call."""
    return W.detach().full_tensor() if isinstance(W, DTensor) else W.detach()


def apply_rule(rule, rows: torch.Tensor, state: dict, d_out: int) -> torch.Tensor:
    """The own rows of D.  A rule sees a layer whole, on every rank, and need not know of ranks.
    Tensors of its state with one row for each output are split by rows meanwhile."""
    if world() == 1:
        return rule(rows, state)
    everything = whole_state(state)
    D = rule(gather_rows(rows, d_out), everything)
    state.clear()
    state.update(own_state(everything, d_out))
    return own_rows(D)


def own_state(state: dict, d_out: int) -> dict:
    def own(x):
        if world() == 1 or not torch.is_tensor(x) or x.shape[:1] != (d_out,):
            return x
        return distribute_tensor(x, mesh(), [Shard(0)], src_data_rank=None)

    return {key: own(x) for key, x in state.items()}


def whole_state(state: dict) -> dict:
    return {key: whole(x) if torch.is_tensor(x) else x for key, x in state.items()}


# Sharding.  A rank keeps its rows of every weight in float32; FSDP2 gathers a layer when its turn
# comes.


def gathered_embedding(module, dtype, ids):
    """[B, L, H] of ids [B, L] by the embedding's own forward (some scale it), its weight whole."""
    shard = module.weight
    module.weight = torch.nn.Parameter(whole(shard), requires_grad=False)
    try:
        return type(module).forward(module, ids).to(dtype)
    finally:
        module.weight = shard


def own_float32(module) -> None:
    """Copy the weights of a module, even float32 ones, out of the mapped file that they may lie in:
    a mapped tensor is not aligned, and the same product may round otherwise there."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):  # it is a shard already
            parameter.data = parameter.data.to(torch.float32, copy=True)


def shard_model(model, dtype, frozen_dtype=torch.float32) -> None:
    """FSDP2: this rank keeps its rows of every weight in float32 and computes in `dtype`.

    Embedding and head are frozen, so they are plain shards, in the dtype that the model's files
    have, made whole where they are used; FSDP would keep a second buffer for them.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head.weight is embedding.weight
    for module in (embedding,) if tied else (embedding, head):
        W = module.weight.detach().to(mesh().device_type, frozen_dtype)
        W = distribute_tensor(W, mesh(), [Shard(0)], src_data_rank=None)  # each cuts its own rows
        module.weight = torch.nn.Parameter(W, requires_grad=False)
    if tied:
        head.weight = embedding.weight
    embedding.forward = functools.partial(gathered_embedding, embedding, dtype)
    for module in (*decoder_layers(model), model.base_model):
        own_float32(module)  # a layer at a time: the whole model is never in this rank's memory
        fully_shard(module, mesh=mesh(), mp_policy=policy, ignored_params={embedding.weight})
        module.set_gradient_divide_factor(1.0)  # sums, as everywhere
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot average
