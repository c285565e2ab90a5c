"""What is waited out and what is not: only an outage mends itself."""

import pytest
from redis import exceptions as problems
from redis._parsers.base import BaseParser
from redis.exceptions import RedisClusterException

from tidemark.common.errors import Refused, Unavailable
from tidemark.sinks.redis.client import Remedies, explain_redis_error, is_about_stream

REMEDIES = Remedies(login="access", transport="transport", rights="rights")


def answered(text: str) -> Exception:
    """The error that redis-py makes of a server's answer."""
    error: Exception = BaseParser.parse_error(text)  # type: ignore[no-untyped-call]
    return error


OUTAGES = [
    problems.ConnectionError("Connection refused"),
    problems.TimeoutError("Timeout reading from socket"),
    answered("LOADING Redis is loading the dataset in memory"),
    answered("READONLY You can't write against a read only replica."),
    answered("CLUSTERDOWN The cluster is down"),
    answered("MASTERDOWN Link with MASTER is down"),
    answered("TRYAGAIN Multiple keys request during rehashing of slot"),
    answered("OOM command not allowed when used memory > 'maxmemory'."),
    answered("MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk."),
    answered("NOREPLICAS Not enough good replicas to write."),
    answered("BUSY Redis is busy running a script."),
    answered("ERR max number of clients reached"),
    RedisClusterException("Redis Cluster cannot be connected. Please provide at least one reachable node: refused"),
    RedisClusterException("All slots are not covered after query all startup_nodes. 3 of 16384 covered..."),
    problems.SlotNotCoveredError('Slot "3" is not covered by the cluster.'),
    problems.ClusterError("TTL exhausted."),
]
NO_OUTAGES = [
    RedisClusterException("EVALSHA - all keys must map to the same key slot"),
    RedisClusterException("Redis Cluster cannot be connected. ...: Cluster mode is not enabled on this node"),
    problems.CrossSlotTransactionError("Cannot watch or send commands on different slots"),
    answered("CROSSSLOT Keys in request don't hash to the same slot"),
    answered("ERR unknown command 'EVALSHA'"),
    answered("NOPERM this user has no permissions to run the 'hset' command"),
    answered("ERR ACL failure in script: User poor has no permissions to run the 'hset' command"),
    answered("WRONGTYPE Operation against a key holding the wrong kind of value"),
    problems.InvalidResponse("Protocol Error: b'HTTP/1.1 400 Bad Request'"),
]
OF_STREAM = [
    answered("WRONGTYPE Operation against a key holding the wrong kind of value"),
    answered("ERR The stream has exhausted the last possible ID, unable to add more items"),
    answered("ERR user_script:150: attempt to compare nil with number script: 12ab, on @user_script:150."),
    answered("ERR Error running script (call to f_12ab): @user_script:150: user_script:150: attempt to ..."),
]


@pytest.mark.parametrize("error", OUTAGES, ids=str)
def test_an_outage_is_waited_for(error: Exception) -> None:
    """It mends itself, or an operator mends it without us; no stream is to blame."""
    assert isinstance(explain_redis_error(error, "here", REMEDIES), Unavailable)
    assert not is_about_stream(error)


@pytest.mark.parametrize("error", NO_OUTAGES, ids=str)
def test_what_is_no_outage_is_not_waited_for(error: Exception) -> None:
    """It would come again at each attempt, for ever: a person has to look."""
    assert isinstance(explain_redis_error(error, "here", REMEDIES), Refused)


@pytest.mark.parametrize("error", OF_STREAM, ids=str)
def test_what_one_key_holds_is_the_fault_of_its_stream(error: Exception) -> None:
    """The others can be shown."""
    assert is_about_stream(error)


def test_what_a_stream_is_not_to_blame_for_is_not_laid_on_it() -> None:
    """Of those that are no outage only a key's content is its stream's."""
    assert [str(error) for error in NO_OUTAGES if is_about_stream(error)] == [str(OF_STREAM[0])]
