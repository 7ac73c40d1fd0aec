"""Process groups end with their meshes, on all ranks together, and engines without a mesh share one."""

import gc
import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from jobs import error_of
from pool import Pool, impatient
from torch import nn

import zeroshard as zs
from zeroshard.comm import mesh as meshes
from zeroshard.comm.mesh import mesh_of, part_of
from zeroshard.comm.process_groups import _GROUPS

COUNT = 6


SLACK = 6  # threads that come and go with what torch and gloo do meanwhile; a mesh has 9


def used() -> tuple[int, int]:
    """Open descriptors and threads of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def check_constant(seen: list[tuple[int, int]]) -> None:
    """The third engine finds the first gone, and from then on nothing grows; groups of earlier tests may still end."""
    descriptors = [each for each, _ in seen[2:]]
    assert descriptors == sorted(descriptors, reverse=True), seen
    assert max(threads for _, threads in seen[2:]) - seen[2][1] < SLACK, seen


def step(engine: zs.Engine, stages: int) -> float:
    batch = torch.ones(4, 4)
    return engine.train_step(batch).grad_norm if stages > 1 else train(engine, batch)


def train(engine: zs.Engine, batch: torch.Tensor) -> float:
    engine.backward(engine(batch).sum())
    return engine.step().grad_norm


def make_engines(mesh: zs.Mesh, stages: int, explicit: bool) -> Any:
    """Descriptors and threads after each of several engines, of which all but the last are gone by then."""
    seen, norms = [], []
    for _ in range(COUNT):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        engine = zs.Engine(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            zs.Plan(pipeline_parallel=stages, microbatches=stages, zero=0, timeout=20.0),
            mesh=mesh if explicit else None,
            example=torch.ones(2, 4),
            loss=lambda output, batch: output.sum(),
        )
        norms.append(step(engine, stages))
        seen.append(used())
    return seen, norms


def test_engines_without_a_mesh_share_one(pool: Pool) -> None:
    for stages in (1, 2):
        for seen, norms in pool.run(make_engines, 4, stages, False):
            assert len(set(norms)) == 1
            check_constant(seen)


def test_groups_of_stages_end_with_their_engine(pool: Pool) -> None:
    for seen, norms in pool.run(make_engines, 4, 2, True):
        assert len(set(norms)) == 1
        check_constant(seen)


def drop_unequally(mesh: zs.Mesh) -> list[bool]:
    """Whether the groups of a mesh are still there: while all ranks have it, while one has, and when it is gone."""
    everyone, device = list(range(4)), torch.device("cpu")
    mine: list[zs.Mesh] = [mesh_of(everyone, device, 20.0)]
    assert mine[0].lease is not None
    name, found = mine[0].lease.name, []
    for holders in (everyone, [2], []):
        if mesh.rank not in holders:
            mine.clear()
        other = mesh_of(everyone, device, 20.0)
        part = part_of(other, [[0, 1], [2, 3]], "halves")  # torch names its groups by those that there are
        assert part.ranks == 2
        found.append(name in _GROUPS)
    return found


def test_groups_end_when_no_rank_has_their_mesh(pool: Pool) -> None:
    assert pool.run(drop_unequally, 4) == [[True, True, False]] * 4


def part_after_groups_of_one(mesh: zs.Mesh) -> tuple[int, int]:
    """What torch names groups of some ranks by, after one rank has made more groups than the others, and a part."""
    world = dist.distributed_c10d._world
    if mesh.rank == 0:
        world.group_count += 3
        world.pg_names[object()] = "a group of this rank alone"
    part = part_of(mesh, [[0, 1, 2], [3]], "three and one")
    assert part.ranks in (1, 3)
    return world.group_count, len(world.pg_names)


def test_ranks_with_unequal_numbers_of_groups_name_the_next_alike(pool: Pool) -> None:
    assert len(set(pool.run(part_after_groups_of_one, 4))) == 1


def share_again(mesh: zs.Mesh) -> list[bool]:
    """The mesh that engines share, before and after an operation in it has failed on one rank."""
    first = meshes.shared_mesh(19.0)
    same = meshes.shared_mesh(19.0) is first
    assert first.lease is not None
    first.lease.broken = mesh.rank == 1
    other = meshes.shared_mesh(19.0)
    return [same, other is first, meshes.shared_mesh(19.0) is other]


def test_a_shared_mesh_in_which_one_rank_failed_is_made_anew(pool: Pool) -> None:
    assert pool.run(share_again, 4) == [[True, False, True]] * 4


def fail_and_go_on(mesh: zs.Mesh) -> tuple[str, float]:
    """An error in the shared mesh, and an engine after it."""
    with impatient():
        engine = zs.Engine(nn.Linear(4, 1), partial(torch.optim.SGD, lr=0.1), zs.Plan(timeout=18.0))
        told = error_of(lambda: engine.comm.agree(b"", "one" if mesh.rank else "other"))
    del engine
    engine = zs.Engine(nn.Linear(4, 1), partial(torch.optim.SGD, lr=0.1), zs.Plan(timeout=18.0))
    return told, train(engine, torch.ones(4, 4))


def test_an_engine_after_one_that_failed(pool: Pool) -> None:
    found = pool.run(fail_and_go_on, 4)
    assert all(told.startswith("CommError") for told, _ in found)
    assert len({norm for _, norm in found}) == 1
