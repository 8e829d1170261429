"""Optimizers of PyTorch over replicas: as one process with the whole batch."""

import contextlib
import copy
import gc
import io
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from launchpad_lite import replicas
from launchpad_lite.replicas._carrier import Carrier
from launchpad_lite.replicas._collectives import Collectives
from launchpad_lite.replicas._torch_optimizer import wrap
from launchpad_lite.replicas.errors import CollectiveMismatchError, ReplicaError, ReplicaLostError
from tests.engines import needs_torch
from tests.launchpad_lite.replicas import carriers
from tests.launchpad_lite.replicas.together import in_memory, returned, together
from tests.launchpad_lite.replicas.torch_replicas import run_replicas

with contextlib.suppress(ImportError):
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

pytestmark = needs_torch


def noted(collectives: Collectives) -> list[str]:
    """Returns a list of what is reduced in the background from now on."""
    labels: list[str] = []
    reduce_later = collectives.reduce_later

    def note(array: Any, op: Any, label: str) -> Any:
        labels.append(label)
        return reduce_later(array, op, label)

    collectives.reduce_later = note
    return labels


def network(seed: int = 0) -> "nn.Module":
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))
    return drawn(model, seed)


def drawn(model: Any, seed: int) -> Any:
    """Returns it with random parameters; the generator of PyTorch is shared by all threads."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.from_numpy(rng.uniform(-0.4, 0.4, each.shape)))
    return model


def batch(step: int, rows: int = 12) -> "tuple[torch.Tensor, torch.Tensor]":
    rng = np.random.default_rng(step)
    inputs = rng.standard_normal((rows, 5)).astype(np.float32)
    return torch.from_numpy(inputs), torch.from_numpy(np.sin(inputs.sum(1, keepdims=True)))


def loss_of(model: Any, step: int, rank: int = 0, size: int = 1) -> Any:
    inputs, targets = batch(step)
    rows = len(inputs) // size
    mine = slice(rank * rows, (rank + 1) * rows)
    return ((model(inputs[mine]) - targets[mine]) ** 2).mean()


def parameters_of(model: Any) -> "np.ndarray[Any, Any]":
    return np.concatenate([each.detach().numpy().ravel().copy() for each in model.parameters()])


def gradients_of(model: Any) -> list[Any]:
    gradients = [each.grad for each in model.parameters()]
    return [None if each is None else each.clone().numpy() for each in gradients]


def alone() -> Collectives:
    return Collectives(Carrier())


def train(
    collectives: Collectives, make: Callable[[Any], Any], steps: int = 100, **how: Any
) -> Any:
    model = network(collectives.rank)
    optimizer = wrap(make(model.parameters()), collectives, **how)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, collectives.rank, collectives.size).backward()
        optimizer.step()
    return parameters_of(model)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=0.01)


def lbfgs(parameters: Any) -> Any:
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def assert_same(replicas: list[Any]) -> None:
    for other in replicas[1:]:
        assert other.tobytes() == replicas[0].tobytes()


@pytest.mark.parametrize(
    ("size", "make", "how"),
    [
        (2, sgd, {}),
        (3, adam, {}),
        (4, sgd, {}),
        (2, sgd, {"bucket_bytes": 64}),
        (2, sgd, {"overlap": False}),
    ],
)
def test_replicas_are_one_process_with_the_whole_batch(size: int, make: Any, how: Any) -> None:
    together = run_replicas(size, lambda collectives: train(collectives, make, **how))
    assert_same(together)
    # Adam divides by roots of small means, which makes rounding errors larger.
    limits = {"rtol": 1e-3, "atol": 1e-4} if make is adam else {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(together[0], train(alone(), make), **limits)


def test_parameters_and_buffers_become_those_of_replica_0() -> None:
    def run(collectives: Collectives) -> Any:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model[1].running_mean.fill_(collectives.rank)
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        wrap(sgd(model[1].parameters()), collectives, model=model)
        return np.concatenate([parameters_of(model), model[1].running_mean.numpy()])

    together = run_replicas(3, run)
    assert_same(together)
    assert together[2][-2:].tolist() == [0, 0]


def test_gradients_after_a_backward_pass_are_means_in_the_memory_of_buckets() -> None:
    def run(collectives: Collectives) -> Any:
        model = network()
        wrap(sgd(model.parameters()), collectives)
        loss_of(model, 0, collectives.rank, collectives.size).backward()
        storages = {each.grad.untyped_storage().data_ptr() for each in model.parameters()}
        assert len(storages) == 1
        return gradients_of(model)

    whole = network()
    loss_of(whole, 0).backward()
    for gradients in run_replicas(2, run):
        for mine, expected in zip(gradients, gradients_of(whole), strict=True):
            np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "clear", ["zero_grad", "zeros", "model", "zeros of model", "by hand", "in place"]
)
@pytest.mark.parametrize("first", [True, False])
def test_all_ways_to_clear_gradients(clear: str, first: bool) -> None:
    def run(collectives: Collectives) -> Any:
        model = network()
        optimizer = wrap(sgd(model.parameters()), collectives)

        def cleared() -> None:
            if clear == "by hand":
                for parameter in model.parameters():
                    parameter.grad = None
            elif clear == "in place":
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.data.zero_()
            elif clear.endswith("model"):
                model.zero_grad(set_to_none=clear == "model")
            else:
                optimizer.zero_grad(set_to_none=clear == "zero_grad")

        for step in range(5):
            if first:
                cleared()
            loss_of(model, step, collectives.rank, collectives.size).backward()
            means = np.concatenate([each.ravel() for each in gradients_of(model)])
            optimizer.step()
            if not first:
                cleared()
        return means, parameters_of(model)

    gradients, together = zip(*run_replicas(2, run), strict=True)
    assert_same(gradients)
    assert_same(together)
    np.testing.assert_allclose(together[0], train(alone(), sgd, 5), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["every pass", "no_sync", "only no_sync", "no overlap"])
def test_gradients_of_several_backward_passes_add_up(how: str) -> None:
    def run(collectives: Collectives) -> Any:
        labels = noted(collectives)
        model = network()
        optimizer = wrap(sgd(model.parameters()), collectives, overlap=how != "no overlap")
        for step in range(5):
            optimizer.zero_grad()
            for part in range(3):
                paused = how == "only no_sync" or (how == "no_sync" and part < 2)
                with optimizer.no_sync() if paused else contextlib.nullcontext():
                    loss_of(model, 3 * step + part, collectives.rank, collectives.size).backward()
            optimizer.step()
        assert len(labels) == (15 if how == "every pass" else 5)
        return parameters_of(model)

    def run_alone() -> Any:
        model = network()
        optimizer = sgd(model.parameters())
        for step in range(5):
            optimizer.zero_grad()
            for part in range(3):
                loss_of(model, 3 * step + part).backward()
            optimizer.step()
        return parameters_of(model)

    together = run_replicas(2, run)
    assert_same(together)
    np.testing.assert_allclose(together[0], run_alone(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_parameter_without_gradient_counts_as_zero_and_none_stays_none(overlap: bool) -> None:
    def run(collectives: Collectives) -> Any:
        used, sometimes, never = (nn.Parameter(torch.ones(2)) for _ in range(3))
        optimizer = wrap(sgd([used, sometimes, never]), collectives, overlap=overlap)
        found = []
        for step in range(3):
            optimizer.zero_grad()
            loss = used.sum()
            if collectives.rank == step:  # in step 2 in no replica
                loss = loss + 4 * sometimes.sum()
            loss.backward()
            optimizer.synchronize()
            assert never.grad is None
            found.append(None if sometimes.grad is None else sometimes.grad.tolist())
            optimizer.step()
        return found

    assert run_replicas(2, run) == [[[2.0, 2.0], [2.0, 2.0], None]] * 2


def test_a_replica_whose_loss_reaches_no_parameter() -> None:
    def run(collectives: Collectives) -> Any:
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = wrap(torch.optim.SGD([parameter], lr=1.0), collectives)
        for step in range(4):
            optimizer.zero_grad()
            if collectives.rank == step % 2:
                parameter.sum().backward()
            optimizer.step()
        return parameter.tolist()

    assert run_replicas(2, run) == [[-2.0, -2.0]] * 2


def gan(collectives: Collectives, order: str = "clear first") -> Any:
    """Trains two networks, each with its optimizer; returns their parameters."""
    generator, critic = drawn(nn.Linear(5, 5), 1), network()
    optimizers = [
        wrap(sgd(critic.parameters()), collectives, label="critic"),
        wrap(sgd(generator.parameters()), collectives, label="generator"),
    ]
    rank, size = collectives.rank, collectives.size

    def real_and_fake(step: int) -> Any:
        inputs, _ = batch(step)
        mine = inputs[rank * 12 // size : (rank + 1) * 12 // size]
        return mine, generator(mine)

    for step in range(10):
        for which, optimizer in enumerate(optimizers):
            real, fake = real_and_fake(step)
            loss = critic(fake).mean() if which else critic(real).tanh().mean()
            loss = loss if which else loss - critic(fake.detach()).tanh().mean()
            if order == "clear first":
                optimizer.zero_grad()
            elif order == "clear all":
                for each in optimizers:
                    each.zero_grad()
            loss.backward()
            optimizer.step()
            if order == "clear after":
                for each in optimizers:
                    each.zero_grad()
    return np.concatenate([parameters_of(critic), parameters_of(generator)])


@pytest.mark.parametrize("order", ["clear first", "clear all", "clear after"])
def test_two_optimizers_alternate_as_in_a_gan(order: str) -> None:
    together = run_replicas(2, lambda collectives: gan(collectives, order))
    assert_same(together)
    np.testing.assert_allclose(together[0], gan(alone(), order), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shared", ["all", "some"])
def test_two_optimizers_of_the_same_parameters_share_buckets(shared: str) -> None:
    def run(collectives: Collectives) -> Any:
        labels = noted(collectives)
        model = network()
        parameters = list(model.parameters())
        one = wrap(sgd(parameters if shared == "all" else parameters[:4]), collectives)
        other = wrap(adam(parameters if shared == "all" else parameters[2:]), collectives)
        for step in range(6):
            optimizer = other if step % 2 else one
            optimizer.zero_grad()
            loss_of(model, step, collectives.rank, collectives.size).backward()
            optimizer.step()
            model.zero_grad()
        if collectives.size > 1:
            assert len(labels) == (6 if shared == "all" else 12)
        return parameters_of(model)

    together = run_replicas(2, run)
    assert_same(together)
    np.testing.assert_allclose(together[0], run(alone()), rtol=1e-4, atol=1e-5)


def test_lbfgs_makes_the_same_decisions_in_all_replicas() -> None:
    def run(collectives: Collectives) -> Any:
        model = network()
        optimizer = wrap(lbfgs(model.parameters()), collectives)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, 0, collectives.rank, collectives.size)
            loss.backward()
            return loss

        losses = [float(optimizer.step(closure)) for _ in range(5)]
        return np.append(parameters_of(model), losses)

    together = run_replicas(3, run)
    assert_same(together)
    np.testing.assert_allclose(together[0], run(alone()), rtol=1e-2, atol=1e-3)


def test_add_param_group_and_parameters_that_are_trained_later() -> None:
    def run(collectives: Collectives) -> Any:
        first, frozen, added = (nn.Parameter(torch.ones(2)) for _ in range(3))
        frozen.requires_grad_(False)
        optimizer = wrap(torch.optim.SGD([first, frozen], lr=1.0), collectives)
        factor = collectives.rank + 1.0
        (factor * first.sum()).backward()
        optimizer.step()
        frozen.requires_grad_(True)
        with torch.no_grad():
            added += collectives.rank
        optimizer.add_param_group({"params": [added], "lr": 0.5})
        for _ in range(2):
            optimizer.zero_grad()
            (factor * (first + frozen + added).sum()).backward()
            nn.utils.clip_grad_norm_([first, frozen, added], 1e9)
            assert frozen.grad.tolist() == [1.5, 1.5]
            optimizer.step()
        return [first.tolist()[0], frozen.tolist()[0], added.tolist()[0]]

    assert run_replicas(2, run) == [[-3.5, -2.0, -0.5]] * 2


def test_schedulers_state_and_copies_know_an_ordinary_optimizer() -> None:
    def run(collectives: Collectives) -> Any:
        model = network()
        optimizer = wrap(sgd(model.parameters()), collectives)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        loss_of(model, 0, collectives.rank, collectives.size).backward()
        optimizer.step()
        scheduler.step()
        assert type(optimizer) is torch.optim.SGD
        plain = sgd(network().parameters())
        plain.load_state_dict(optimizer.state_dict())
        assert plain.state_dict().keys() == optimizer.state_dict().keys()
        assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"] == 0.025
        assert copy.deepcopy(optimizer).param_groups[0]["lr"] == 0.025
        file = io.BytesIO()
        torch.save({"model": model, "optimizer": optimizer.state_dict()}, file)
        optimizer.load_state_dict(plain.state_dict())
        optimizer.zero_grad()
        loss_of(model, 1, collectives.rank, collectives.size).backward()
        optimizer.step()
        return parameters_of(model)

    assert_same(run_replicas(2, run))


def test_an_optimizer_that_nobody_keeps_works_as_long_as_its_parameters() -> None:
    def run(collectives: Collectives) -> Any:
        parameter = nn.Parameter(torch.zeros(1))
        wrap(sgd([parameter]), collectives)
        ((collectives.rank + 1.0) * parameter).sum().backward()
        mean = parameter.grad.item()
        gone = weakref.ref(next(iter(collectives.averages.values())))
        del parameter
        return mean, gone()

    assert run_replicas(2, run) == [(1.5, None)] * 2


@pytest.mark.parametrize("how", [{"bucket_bytes": 512}, {"every": 1}])
def test_what_an_optimizer_has_is_freed_with_it_and_its_model(how: Any) -> None:
    def run(carrier: Carrier) -> Any:
        collectives = Collectives(carrier)
        found = []
        for _ in range(4):
            train(collectives, sgd, 2, **how)
            collectives.all_gather(None, "all have dropped theirs")
            found.append(carriers.shared_memories())
            collectives.all_gather(None, "all have counted")
        assert not collectives.averages
        return max(found) - found[0]

    gc.disable()  # nothing of it waits for a collection
    try:
        with carriers.courier_carriers(carriers.one_machine)(2) as made:
            assert carriers.run(made, run) == [0, 0]
    finally:
        gc.enable()


@pytest.mark.parametrize("names", ["of the model", "of the optimizer", "of what is kept"])
def test_parameters_in_another_order_in_one_replica_are_an_error(names: str) -> None:
    def story(repl: replicas.Replicator) -> str:
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        named = list(model.named_parameters())
        if repl.replica_id == 1:
            named = named[2:] + named[:2]
        parameters = named if names == "of the optimizer" else [each for _, each in named]
        how = {"model": model} if names == "of the model" else {}

        def begin() -> None:
            optimizer = repl.wrap_optimizer(sgd(parameters), **how)
            repl.keep(everything=[model], optimizer=optimizer)

        with pytest.raises(CollectiveMismatchError) as error:
            begin()
        return str(error.value)

    texts = returned(together(in_memory(3), story))
    assert len(set(texts)) == 1
    assert "number 0 is a.weight torch.float32[2, 2] in replica 0, and b.weight torch" in texts[0]
    assert "float32[2, 2] in replica 1" in texts[0]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_mismatch_in_the_backward_pass_names_the_line_of_the_user(overlap: bool) -> None:
    def run(collectives: Collectives) -> str:
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = wrap(sgd([parameter]), collectives, overlap=overlap)
        with pytest.raises(CollectiveMismatchError) as error:
            trained(optimizer, parameter) if collectives.rank else collectives.all_gather(
                None, "elsewhere"
            )
        return str(error.value)

    def trained(optimizer: Any, parameter: Any) -> None:
        parameter.sum().backward()
        optimizer.step()

    line = trained.__code__.co_firstlineno + (1 if overlap else 2)
    for text in run_replicas(2, run):
        assert "replica 1: all_reduce(mean) of gradients of SGD, bucket 0" in text
        assert f"{__file__}:{line} in trained" in text


def test_other_parameters_that_are_trained_only_now_are_an_error() -> None:
    def run(collectives: Collectives) -> str:
        parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
        for each in parameters[1:]:
            each.requires_grad_(False)
        optimizer = wrap(sgd(parameters), collectives)
        parameters[1 + collectives.rank].requires_grad_(True)
        with pytest.raises(CollectiveMismatchError) as error:
            optimizer.synchronize()
        return str(error.value)

    text = "number 0 is parameter 1 in replica 0, and parameter 2 in replica 1"
    assert all(text in each for each in run_replicas(2, run))


@pytest.mark.parametrize("buffers", ["own", "broadcast"])
def test_statistics_of_batch_normalisation(buffers: Any) -> None:
    def run(collectives: Collectives) -> Any:
        model = nn.Sequential(nn.BatchNorm1d(1))
        model[0].running_var.fill_(collectives.rank)
        optimizer = wrap(sgd(model.parameters()), collectives, model=model, buffers=buffers)
        found = [model[0].running_var.item()]
        model(torch.tensor([[1.0], [2.0]]) + 10 * collectives.rank).sum().backward()
        optimizer.step()
        return [*found, round(model[0].running_mean.item(), 2), int(model[0].num_batches_tracked)]

    expected = [[0, 0.15, 1], [0, 1.15 if buffers == "own" else 0.15, 1]]
    assert run_replicas(2, run) == expected


@pytest.mark.parametrize("passes", [1, 3])
def test_a_gradient_that_is_infinite_in_one_replica_has_all_skip_the_step(passes: int) -> None:
    def run(collectives: Collectives) -> Any:
        model = network()
        optimizer = wrap(sgd(model.parameters()), collectives)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scales = []
        for step in range(4):
            optimizer.zero_grad()
            for part in range(passes):
                is_last = part == passes - 1
                with contextlib.nullcontext() if is_last else optimizer.no_sync():
                    loss = loss_of(model, step, collectives.rank, collectives.size)
                    if step == 1 and collectives.rank == 1 and part == 0:
                        loss = loss * float("inf")
                    scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return parameters_of(model), scales

    parameters, scales = zip(*run_replicas(2, run), strict=True)
    assert_same(parameters)
    assert np.isfinite(parameters[0]).all()
    assert scales == ([1024.0, 512.0, 512.0, 512.0],) * 2


def test_waiting_for_gradients_of_others_is_time_in_communication() -> None:
    waits = threading.Barrier(2)

    def train(collectives: Collectives) -> float:
        model = network()
        optimizer = wrap(sgd(model.parameters()), collectives)
        before = collectives.seconds
        waits.wait()
        if collectives.rank:
            time.sleep(0.1)
        loss_of(model, 0).backward()
        optimizer.step()
        return collectives.seconds - before

    assert run_replicas(2, train)[0] > 0.08


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_types_of_parameters(dtype: str) -> None:
    def run(collectives: Collectives) -> Any:
        parameters = [
            nn.Parameter(torch.zeros(3, dtype=getattr(torch, name)))
            for name in (dtype, "float32", dtype)
        ]
        optimizer = wrap(torch.optim.SGD(parameters, lr=1.0), collectives)
        for _ in range(2):
            optimizer.zero_grad()
            sum((collectives.rank + 1.0) * each.float().sum() for each in parameters[:2]).backward()
            optimizer.step()
        assert parameters[2].grad is None
        assert parameters[0].grad.dtype == parameters[0].dtype
        return [each.tolist()[0] for each in parameters]

    assert run_replicas(2, run) == [[-3.0, -3.0, 0.0]] * 2


def test_channels_last_and_transposed_parameters_keep_their_layout() -> None:
    def run(collectives: Collectives) -> Any:
        images = torch.arange(24.0).view(1, 2, 3, 4)
        parameters = [
            nn.Parameter(images.contiguous(memory_format=torch.channels_last)),
            nn.Parameter(torch.arange(6.0).view(2, 3).t()),
        ]
        wrap(sgd(parameters), collectives)
        sum((each**2).sum() for each in parameters).backward()
        for each in parameters:
            assert each.grad.stride() == each.stride()
        return [bool((each.grad == 2 * each).all()) for each in parameters]

    assert run_replicas(2, run) == [[True, True]] * 2


def test_what_cannot_be_wrapped() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="is wrapped already"):
        wrap(wrap(sgd([nn.Parameter(torch.ones(1))]), alone()), alone())
    with pytest.raises(ValueError, match="outer needs every="):
        wrap(sgd([parameter]), alone(), outer=sgd)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        wrap(sgd([parameter]), alone(), every=0)
    with pytest.raises(ValueError, match="'broadcast' with a model=, not 'broadcast'"):
        wrap(sgd([parameter]), alone(), buffers="broadcast")


def test_sparse_and_complex_gradients_are_errors() -> None:
    def run(collectives: Collectives) -> None:
        embedding = nn.Embedding(4, 2, sparse=True)
        wrap(torch.optim.SGD(embedding.parameters(), lr=1.0), collectives)
        with pytest.raises(TypeError, match="Embedding"):
            embedding(torch.tensor([1])).sum().backward()
        strange = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        with pytest.raises(TypeError, match="complex parameters"):
            wrap(torch.optim.SGD([strange], lr=1.0), collectives)

    run_replicas(2, run)


def checkpointed(collectives: Collectives, **how: Any) -> Any:
    layer = nn.Linear(3, 3, bias=False)
    nn.init.eye_(layer.weight)
    optimizer = wrap(torch.optim.SGD(layer.parameters(), lr=1.0), collectives, **how)
    inputs = torch.ones(1, 3, requires_grad=True)
    once = checkpoint(layer, inputs, use_reentrant=True)
    checkpoint(layer, once, use_reentrant=True).sum().backward()
    optimizer.step()
    return layer.weight.tolist()


@pytest.mark.parametrize("overlap", [True, False])
def test_reentrant_checkpoints(overlap: bool) -> None:
    def run(collectives: Collectives) -> Any:
        return checkpointed(collectives, overlap=overlap)

    assert run_replicas(2, run) == [checkpointed(alone())] * 2


def test_a_gradient_that_comes_twice_while_its_mean_is_taken_is_an_error() -> None:
    def run(collectives: Collectives) -> None:
        layer, head = nn.Linear(3, 3), nn.Linear(3, 1)
        wrap(sgd([*layer.parameters(), *head.parameters()]), collectives)
        once = checkpoint(layer, torch.ones(1, 3, requires_grad=True), use_reentrant=True)
        loss = head(checkpoint(layer, once, use_reentrant=True)).sum()
        with pytest.raises(ReplicaError, match="came twice in one backward pass"):
            loss.backward()

    run_replicas(2, run)


def test_a_lost_replica_raises_in_the_backward_pass_and_in_the_step() -> None:
    def run(collectives: Collectives) -> None:
        model = network()
        optimizer = wrap(sgd(model.parameters()), collectives)
        collectives.all_gather(None, "here")
        collectives.abort(ReplicaLostError("replica 1 is lost"))
        with pytest.raises(ReplicaLostError, match="replica 1 is lost"):
            loss_of(model, 0).backward()
        with pytest.raises(ReplicaLostError, match="replica 1 is lost"):
            optimizer.step()

    run_replicas(2, run)


# With an outer optimizer.


def reference_diloco(size: int, steps: int, every: int, outer_lr: float, momentum: float) -> Any:
    """Trains a linear model by DiLoCo, in numpy: SGD inside, Nesterov momentum outside."""
    shared, velocity = np.zeros(5), np.zeros(5)
    mine = [shared.copy() for _ in range(size)]
    for step in range(steps):
        for rank in range(size):
            inputs, targets = linear_batch(step, rank)
            gradient = 2 * inputs.T @ (inputs @ mine[rank] - targets) / len(inputs)
            mine[rank] -= 0.05 * gradient
        if (step + 1) % every == 0:
            difference = np.mean([shared - each for each in mine], axis=0)
            velocity = momentum * velocity + difference
            shared = shared - outer_lr * (difference + momentum * velocity)
            mine = [shared.copy() for _ in range(size)]
    return mine


def linear_batch(step: int, rank: int) -> Any:
    rng = np.random.default_rng([step, rank])
    inputs = rng.standard_normal((8, 5))
    return inputs, inputs @ np.arange(5.0)


def train_linear(collectives: Collectives, steps: int, restore_at: int = 0, **how: Any) -> Any:
    weights = nn.Parameter(torch.full((5,), float(collectives.rank), dtype=torch.float64))
    optimizer = wrap(torch.optim.SGD([weights], lr=0.05), collectives, **how)
    for step in range(steps):
        if step == restore_at > 0:
            saved = pickle.loads(pickle.dumps((weights.detach(), optimizer.state_dict())))
            weights = nn.Parameter(torch.zeros(5, dtype=torch.float64))
            optimizer = wrap(torch.optim.SGD([weights], lr=0.05), collectives, **how)
            with torch.no_grad():
                weights.copy_(saved[0])
            optimizer.load_state_dict(saved[1])
        inputs, targets = map(torch.from_numpy, linear_batch(step, collectives.rank))
        optimizer.zero_grad()
        ((inputs @ weights - targets) ** 2).mean().backward()
        optimizer.step()
    return weights.detach().numpy().copy()


def nesterov(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("steps", [30, 33])
@pytest.mark.parametrize("restore_at", [0, 12, 15])
@pytest.mark.parametrize("outer", [True, False])
def test_outer_steps_are_those_of_the_reference(steps: int, restore_at: int, outer: bool) -> None:
    how: Any = {"outer": nesterov} if outer else {}
    reference = reference_diloco(3, steps, 6, *((0.7, 0.9) if outer else (1.0, 0.0)))
    found = run_replicas(
        3, lambda collectives: train_linear(collectives, steps, restore_at, every=6, **how)
    )
    for mine, expected in zip(found, reference, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-9)
    if steps == 30:
        assert_same(found)


def test_synchronize_makes_the_outer_step_before_its_time() -> None:
    def run(collectives: Collectives) -> Any:
        weights = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        optimizer = wrap(torch.optim.SGD([weights], lr=1.0), collectives, every=10)
        ((collectives.rank + 1.0) * weights.sum()).backward()
        optimizer.step()
        optimizer.synchronize()
        optimizer.synchronize()  # nothing is left to do
        assert isinstance(optimizer.outer, torch.optim.SGD)
        with pytest.raises(ReplicaError, match="before wrap_optimizer"):
            optimizer.add_param_group({"params": []})
        return weights.tolist()

    assert run_replicas(2, run) == [[-1.5, -1.5]] * 2


def test_gradients_of_idle_replicas_do_not_count() -> None:
    def head(collectives: Collectives) -> Any:
        model = nn.ModuleList([drawn(nn.Linear(5, 1), seed) for seed in (1, 2)])
        wrap(sgd(model.parameters()), collectives)
        collectives.idle = [1]
        loss_of(model[collectives.rank % 2], 7, collectives.rank, 3).backward()
        return gradients_of(model)

    expected = drawn(nn.Linear(5, 1), 1)
    (sum(loss_of(expected, 7, rank, 3) for rank in (0, 2)) / 2).backward()
    for *used, unused_weight, unused_bias in run_replicas(3, head):
        for found, wanted in zip(used, gradients_of(expected), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-6)
        assert unused_weight is unused_bias is None
