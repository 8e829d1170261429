"""A training whose replicas are killed, beside PyTorch's DistributedDataParallel."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import launchpad_lite as lp
from launchpad_lite import replicas
from tests.engines import needs_torch

STEPS, ROWS = 400, 32


def network() -> Any:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Tanh()
    return torch.nn.Sequential(*layers, torch.nn.Linear(32, 1))


def adam(model: Any) -> Any:
    import torch

    return torch.optim.Adam(model.parameters(), lr=0.01)


def batches(index: int, step: int = 0) -> Iterator[Any]:
    import torch

    while True:
        rng = np.random.default_rng([step, index])
        inputs = torch.from_numpy(rng.normal(size=(ROWS, 8)).astype(np.float32))
        yield inputs, torch.sin(inputs.sum(1, keepdim=True))
        step += 1


def loss_of(model: Any, batch: Any) -> Any:
    inputs, targets = batch
    return ((model(inputs) - targets) ** 2).mean()


def train_with_kills(repl: replicas.Replicator, folder: Path, kills: int) -> Any:
    model = network()
    optimizer = repl.wrap_optimizer(adam(model), model=model)
    repl.keep(model=model, optimizer=optimizer)
    rng = Random(0)
    steps = rng.sample(range(STEPS - 1), kills)
    ends = {step: (rng.randrange(2), rng.choice(["forward", "backward", "step"])) for step in steps}

    def end_before(place: str) -> None:
        mark = folder / f"killed{repl.step}"
        if ends.get(repl.step) == (repl.replica_id, place) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def step_fn(batch: Any) -> float:
        end_before("forward")
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        end_before("backward")
        loss.backward()
        end_before("step")
        optimizer.step()
        return float(loss.detach())

    for losses in repl.run(step_fn, batches, steps=STEPS):
        last = losses
    return sum(last) / len(last), [each.tolist() for each in model.parameters()]


def train_ddp(rank: int, folder: Path) -> None:
    import torch
    from torch import distributed

    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    model = torch.nn.parallel.DistributedDataParallel(network(), broadcast_buffers=False)
    optimizer = adam(model)
    for _, batch in zip(range(STEPS), batches(rank), strict=False):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
    last = loss.detach()
    distributed.all_reduce(last)
    torch.save(
        (float(last) / 2, [each.tolist() for each in model.parameters()]), folder / f"{rank}"
    )
    distributed.destroy_process_group()


@needs_torch
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kills", [pytest.param(4, marks=pytest.mark.slow), pytest.param(30, marks=pytest.mark.long)]
)
def test_kills_leave_the_weights_that_ddp_has(tmp_path: Path, kills: int) -> None:
    import torch

    torch.multiprocessing.spawn(train_ddp, (tmp_path,), nprocs=2)
    expected_loss, expected = torch.load(tmp_path / "0")
    results = replicas.MultiWorkerReplicator(2).launch(
        train_with_kills,
        tmp_path,
        kills,
        launch_options={
            "restart": lp.RestartPolicy(
                "on_failure", max_restarts=1000, backoff_s=0.05, window_s=1.0
            ),
            "checkpoints": {"replica": lp.Checkpoints(tmp_path / "checkpoints", period_s=0.1)},
        },
    )
    assert len(list(tmp_path.glob("killed*"))) == kills
    print(f"{kills} kills: loss {results[0][0]!r}; DistributedDataParallel: {expected_loss!r}")
    for loss, parameters in results:
        assert loss == pytest.approx(expected_loss, rel=1e-4)
        for mine, theirs in zip(parameters, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-5)
    assert results[0][1] == results[1][1]
