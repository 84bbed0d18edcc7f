"""What the launcher takes from torch beside its public surface is still there, as it was when this was written."""

from __future__ import annotations

import inspect


def test_numa_binding_can_be_applied_to_a_process() -> None:
    from torch.numa import binding

    parameters = inspect.signature(binding._maybe_apply_numa_binding_to_current_process).parameters
    assert set(parameters) == {"gpu_index", "numa_options"}


def test_the_agent_starts_its_ranks_through_the_function_that_we_replace() -> None:
    from torch.distributed.elastic.agent.server import local_elastic_agent
    from torch.distributed.launcher import api

    assert "start_processes(" in inspect.getsource(local_elastic_agent.LocalElasticAgent._start_workers)
    assert "LocalElasticAgent(" in inspect.getsource(api.launch_agent)


def test_torchs_hook_for_exceptions_has_the_name_by_which_it_is_known() -> None:
    from torch.distributed import distributed_c10d

    assert "sys.excepthook = _distributed_excepthook" in inspect.getsource(distributed_c10d.init_process_group)


def test_a_rendezvous_keeps_its_first_store_where_it_is_forgotten() -> None:
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    source = inspect.getsource(dynamic_rendezvous.DynamicRendezvousHandler.next_rendezvous)
    assert "if self._bootstrap_store_info is None or" in source


def test_a_store_has_a_second_connection_for_the_beats() -> None:
    import torch.distributed as dist

    assert hasattr(dist.Store, "clone")


def test_the_flight_recorder_tells_groups_and_collectives_as_the_probe_reads_them() -> None:
    import sys

    import torch
    import torch.distributed as dist

    from instep.launch.probe import flight

    imported = "torch._inductor" in sys.modules
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert not flight.has_device_groups()
        (name,) = flight.read_groups()
        assert flight.read_groups() == {name: [0]}
        dist.all_reduce(torch.ones(3))
        entry = flight.read_entries()[-1]
        assert (entry["operation"], entry["group"], entry["done"]) == ("all_reduce", name, True)
        status = flight.read_status()
        assert status is not None and status[0] == status[1] == entry["sequence"]
        assert ("torch._inductor" in sys.modules) == imported  # the compiler would take seconds in a rank that hangs
    finally:
        dist.destroy_process_group()
