"""The table of hosts that process 0 sends: which processes share one, in few bytes on any number of hosts."""

from hypothesis import given
from hypothesis import strategies as st

from jaxmnt.distributed.host_table import pack_hosts, unpack_hosts


@given(st.lists(st.sampled_from([f"node-{number}" for number in range(20)]), min_size=1, max_size=300))
def test_processes_that_share_a_host_still_do(hosts):
    unpacked = unpack_hosts(pack_hosts(hosts))
    assert sorted(unpacked) == list(range(len(hosts)))
    same = lambda names: [[a == b for b in names] for a in names]
    assert same(list(unpacked.values())) == same(hosts)
    if len(hosts) <= 256:
        assert list(unpacked.values()) == hosts


def test_the_table_of_a_large_run_is_short():
    one_each = [f"gke-cluster-pool-1-{number:08x}.internal" for number in range(10_000)]
    eight_each = [one_each[number // 8] for number in range(10_000)]
    assert len(pack_hosts(one_each)) < 200 and len(pack_hosts(eight_each)) < 300
