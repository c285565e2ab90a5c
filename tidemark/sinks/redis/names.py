"""The names in Redis: a stream's keys and its channel, and the keys of all. Nobody else builds or reads them.

What belongs to one stream shares a hash tag, so that a Cluster keeps it together. The tag is the stream's name, in
which a `}` would end it: there `{` is written `{<` and `}` is written `{>`. A name without braces is its own tag.
"""

STREAMS = "tidemark:streams"
SENTINEL = "tidemark:sentinel"


def tag(name: str) -> str:
    """The hash tag of `name`, with the braces around it. No two names have the same."""
    return "{" + name.replace("{", "{<").replace("}", "{>") + "}"


def key(stream: str, name: str) -> str:
    return f"{beside_keys(stream)}:{name}"


def beside_keys(stream: str) -> str:
    """What all keys of the stream begin with, and the channel too."""
    return f"tidemark:{tag(stream)}"


def in_database(channel: str, database: int) -> str:
    """The name of a channel for clients of one database of Redis, whose channels belong to the server as a whole."""
    return f"{channel}{database_suffix(database)}"


def database_suffix(database: int) -> str:
    return f"/{database}" if database else ""


def channel(stream: str, database: int = 0) -> str:
    return in_database(beside_keys(stream), database)


def channels(database: int = 0) -> str:
    """The pattern that the channels of all streams match, and nothing else of ours."""
    return in_database("tidemark:{*}", database)


def lines_channel(server: str, database: int = 0) -> str:
    """Where sidecars of the line protocol that call themselves `server` pass commands on to each other."""
    return in_database(f"tidemark:lines:{server}", database)


def stream_of(channel: str) -> str:
    """The stream of a channel that matches `channels`."""
    return channel.removeprefix("tidemark:{").rpartition("}")[0].replace("{>", "}").replace("{<", "{")
